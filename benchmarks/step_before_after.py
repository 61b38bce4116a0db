"""What an engine's step costs in two checkouts, in turn.

    git worktree add ../before 4c74c46
    python benchmarks/step_before_after.py ../before . models/smollm2 OUTPUT.json \
        --adapter adapters/smollm2

Each checkout has a process for each dtype, which waits while the others work. A round times every
shape in each of them, first in the one and the next time first in the other. A step is what lies
between a plan and its tokens, proposals and confidences: scheduling and window control are left
out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mars_ray
from mars_ray.config.decode import EngineConfig
from mars_ray.decode.loading import load_engine
from mars_ray.decode.warm_up import StepTimer
from mars_ray.provenance import provenance

strategies = import_module("mars_ray.decode.strategies")
if not hasattr(strategies, "Plan"):  # an older checkout
    strategies = import_module("mars_ray.decode.strategies.base")

# Steps of one measurement, behind one that is not counted.
STEPS = 5
MAX_CONTEXT, MAX_BATCH, STEP_TOKENS = 1100, 16, 512


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of sequences that are alike."""

    sequences: int
    context: int  # tokens in the cache
    pending: int = 1  # tokens that it forwards: the last one, or a prompt's
    drafts: int = 0
    masks: int = 0  # behind all drafts

    def __str__(self) -> str:
        if self.pending > 1:
            return f"a prompt of {self.pending}"
        rows = 1 + self.drafts + self.masks
        shown = f"{rows} rows, {self.masks} of them masks" if self.masks else "one row"
        return f"{self.sequences} x {shown}, context {self.context}"


SHAPES = (
    *(Shape(1, context) for context in (64, 1000)),
    *(Shape(1, context, drafts=1, masks=2) for context in (64, 1000)),
    *(Shape(1, context, drafts=4, masks=4) for context in (64, 1000)),
    *(Shape(sequences, 64) for sequences in (8, 16)),
    *(Shape(1, 0, pending=tokens) for tokens in (64, 512)),
)


def main() -> None:
    """Measure, print a line for each shape, write the result."""
    parser = argparse.ArgumentParser(description="Times steps of two checkouts in turn.")
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--adapter", type=Path, help="a draft adapter, so that masks are its own")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    keys = [(dtype, side) for dtype in asked.dtypes for side in ("before", "after")]
    with ExitStack() as stack:
        timers = {
            (dtype, side): stack.enter_context(running(getattr(asked, side), dtype, asked))
            for dtype, side in keys
        }
        sides = {side: timers[asked.dtypes[0], side].about for side in ("before", "after")}
        seconds = measure(timers, asked.rounds)
    shapes = [summary(key, seconds) for key in dict.fromkeys((k[0], k[2]) for k in seconds)]
    for own in shapes:
        print(
            f"{own['dtype']:9} {own['shape']:42} {1e3 * own['before_s']:8.2f} ms "
            f"{1e3 * own['after_s']:8.2f} ms {own['ratio']:6.2f} "
            f"({own['least']:.2f}-{own['most']:.2f})"
        )
    result = {
        "checkpoint": asked.checkpoint.name,
        "adapter": asked.adapter and asked.adapter.name,
        "threads": asked.threads,
        "rounds": asked.rounds,
        "shapes": shapes,
        "sides": sides,
        "provenance": provenance(),
    }
    asked.output.write_text(json.dumps(result, indent=1) + "\n")


class Timer:
    """The other end of a process that times steps."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.about = self._receive()

    def seconds(self, shape: int) -> float:
        """Median seconds of a shape's step, by its number."""
        assert self._process.stdin
        self._process.stdin.write(f"{shape}\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a process that times steps has ended; what it said is above")
        return json.loads(line)


@contextmanager
def running(checkout: Path, dtype: str, asked: argparse.Namespace) -> Iterator[Timer]:
    """This script as a process with a checkout's package, for as long as it is needed."""
    settings = {
        "checkout": str(checkout.resolve()),
        "checkpoint": str(asked.checkpoint),
        "dtype": dtype,
        "threads": asked.threads,
        "draft_adapter": asked.adapter and str(asked.adapter),
    }
    own = {"PYTHONPATH": settings["checkout"], "OMP_NUM_THREADS": str(asked.threads)}
    program = f"import sys; sys.path.insert(1, {str(Path(__file__).parent)!r}); "
    program += f"import {Path(__file__).stem} as own; own.serve({settings!r})"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | own,
    )
    try:
        yield Timer(process)
    finally:
        process.kill()
        process.wait()


def serve(settings: dict[str, Any]) -> None:
    """Answer numbers of shapes with seconds."""
    checkout, package = settings["checkout"], Path(mars_ray.__file__).resolve()
    assert package.is_relative_to(checkout), f"{package} is not of {checkout}"
    own = ("dtype", "threads", "draft_adapter")
    config = EngineConfig(
        max_batch=MAX_BATCH,
        max_context=MAX_CONTEXT,
        max_step_tokens=STEP_TOKENS,
        prefix_cache=False,
        device="cpu",
        **{key: settings[key] for key in own},
    )
    engine, _ = load_engine(settings["checkpoint"], config)
    timer = StepTimer(engine._backend, engine.card, engine.config)
    about = {"attention": engine.info.attention, "provenance": provenance()}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        shape = SHAPES[int(line)]
        times = [step_seconds(timer, shape) for _ in range(1 + STEPS)]
        print(statistics.median(times[1:]), flush=True)


def step_seconds(timer: StepTimer, shape: Shape) -> float:
    """Seconds of one step. A prompt's last token is read, as one row is."""
    groups = (strategies.MaskGroup(shape.drafts, shape.masks),) if shape.masks else ()
    plan = strategies.Plan([0] * shape.drafts, groups, ("ratio",) if shape.drafts else ())
    return timer.seconds(timer._work([(shape.context, shape.pending, plan)] * shape.sequences))


def measure(
    timers: dict[tuple[str, str], Timer], rounds: int
) -> dict[tuple[str, str, Shape], list[float]]:
    """Seconds by dtype, side and shape, a number for each round; one round warms up."""
    seconds = {(*key, shape): [] for key in timers for shape in SHAPES}
    for round_ in range(1 + rounds):
        for number, shape in enumerate(SHAPES):
            # Neither is always the one behind the other.
            for key in list(timers)[:: -1 if round_ % 2 else 1]:
                taken = timers[key].seconds(number)
                seconds[*key, shape] += [taken] * bool(round_)
    return seconds


def summary(
    key: tuple[str, Shape], seconds: dict[tuple[str, str, Shape], list[float]]
) -> dict[str, Any]:
    """Medians, and how many times faster the second is: median, least and most of the rounds."""
    dtype, shape = key
    before, after = seconds[dtype, "before", shape], seconds[dtype, "after", shape]
    ratios = [one / other for one, other in zip(before, after, strict=True)]
    return {
        "dtype": dtype,
        "shape": str(shape),
        "before_s": statistics.median(before),
        "after_s": statistics.median(after),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


if __name__ == "__main__":
    main()
