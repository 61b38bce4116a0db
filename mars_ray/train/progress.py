"""Progress on the driver's terminal, read from the metrics file that rank 0 writes.

On a terminal it is a bar. Otherwise it is a plain line per logged step, with a line of progress in
between if steps take long.
"""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from mars_ray.progress import Bars
from mars_ray.train.metrics import MetricsReader


class StageProgress:
    """Shows a stage; use as a context manager and call `update` now and then."""

    def __init__(self, stage: str, reader: MetricsReader) -> None:
        self._stage = stage
        self._reader = reader
        self._total_steps = 0
        self._console = Console(stderr=True)
        self._bars = Bars(
            self._console,
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._task = self._bars.add_task(f"{stage}: starting workers", total=None, text="")

    def __enter__(self) -> "StageProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._bars.stop()

    def say(self, message: str) -> None:
        """Print a separate line, above the bar."""
        self._bars.say(f"{self._stage}: {message}")

    def update(self) -> None:
        """Show the lines logged since the last call."""
        for record in self._reader.new():
            self._show(record)

    def _show(self, record: dict[str, Any]) -> None:
        step, kind = record["step"], record["kind"]
        self._total_steps = record.get("total_steps", self._total_steps)
        if kind == "start":
            self._bars.update(self._task, description=self._stage)
            if step:
                self.say(
                    f"resumed at step {step} of {self._total_steps}, {record['workers']} workers"
                )
        text = _text(record)
        self._bars.update(self._task, completed=step, total=self._total_steps)
        if kind == "eval":
            self.say(f"step {step}, held out: {text}")
        elif self._console.is_terminal:
            self._bars.update(self._task, text=text)
        elif kind == "train":
            self.say(f"step {step}/{self._total_steps}: {text}")


_SHOWN = {
    "loss": "loss {:.4f}",
    "clean_ce": "clean {:.4f}",
    "noisy_ce": "noisy {:.4f}",
    "head_loss": "head {:.4f}",
    "row_loss": "rows {:.4f}",
    "tokens_per_forward": "expected T/F {:.2f}",
    "lr": "lr {:.2e}",
    "tokens_per_s": "{:.0f} tok/s",
    "mask_tokens_per_s": "{:.0f} masks/s",
    "flops_utilisation": "MFU {:.1%}",
    "padding_share": "padding {:.1%}",
    "slowest_over_median": "slowest rank {:.2f}x",
}


def _text(record: dict[str, Any]) -> str:
    return "  ".join(form.format(record[name]) for name, form in _SHOWN.items() if name in record)
