"""The sweep's own record: a line for each event of a trial, in order.

    {"event": "start",  "trial": id, "time": ..., "values": {...}}
    {"event": "score",  "trial": id, "time": ..., "step": 60, "score": 3.1, "metrics": {...}}
    {"event": "error",  "trial": id, "time": ..., "error": "..."}
    {"event": "end",    "trial": id, "time": ..., "status": "finished" | "stopped" | "failed"}

Times are seconds since 1970. Only the driver writes; an incomplete last line of a killed driver is
cut off.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mars_ray.files import append, read_journal

Status = Literal["running", "finished", "stopped", "failed"]
LEDGER_FILE = "trials.jsonl"


@dataclass(slots=True)
class TrialRecord:
    """The ledger's facts about a trial."""

    trial: str
    values: dict[str, Any]  # its settings by key of the space; under PBT the latest
    scores: list[tuple[int, float]] = field(default_factory=list)  # (step, score)
    metrics: dict[str, float] = field(default_factory=dict)  # from its last evaluation
    status: Status = "running"
    errors: list[str] = field(default_factory=list)
    model: str | None = None  # relative to the sweep's directory, once finished

    @property
    def steps(self) -> int:
        """Optimizer steps at its last evaluation."""
        return self.scores[-1][0] if self.scores else 0

    @property
    def score(self) -> float:
        return self.scores[-1][1] if self.scores else float("-inf")


class Ledger:
    """Appends events to a file and holds the records that result from them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[str, TrialRecord] = {}
        for event in read_journal(path):
            self._take(event)

    def append(self, event: str, trial: str, **fields: Any) -> None:
        """Write an event; it is on disk when this returns."""
        record = {"event": event, "trial": trial, "time": round(time.time(), 1), **fields}
        append(self.path, record)
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        name = record["trial"]
        trial = self.trials.setdefault(name, TrialRecord(name, {}))
        match record["event"]:
            case "start":
                trial.values = record["values"]
                trial.status = "running"
            case "score":
                # A trial that resumes from its checkpoint may report a step again.
                trial.scores = [s for s in trial.scores if s[0] < record["step"]]
                trial.scores.append((record["step"], record["score"]))
                trial.metrics = record["metrics"]
            case "error":
                trial.errors.append(record["error"])
            case "end":
                trial.status = record["status"]
                trial.model = record.get("model")


def ended(path: Path) -> int:
    """Number of trials that have ended. Only reads the file, so any process may call it."""
    events = read_journal(path, mend=False)
    return len({event["trial"] for event in events if event["event"] == "end"})
