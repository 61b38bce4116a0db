"""Small sweeps of a small model."""

from pathlib import Path
from typing import Any

from mars_ray.config.load import parse_job
from mars_ray.config.tune import TuneJob


def make_table(model: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """A sweep of four trials with twelve steps each; `changes` replace top-level keys."""
    stage = {
        "objective": {"type": "mars"},
        "steps": 12,
        "global_batch_size": 4,
        "eval_every_steps": 3,
        "eval_rows": 6,
        "optimizer": {"learning_rate": 5e-3},
    }
    train = {
        "kind": "train",
        "name": "small",
        "output_dir": str(output_dir / "best"),
        "precision": "float32",
        "log_every_steps": 3,
        "model": {"type": "pretrained", "path": str(model)},
        "data": {
            "max_length": 128,
            "train": {"type": "corpus", "count": 64},
            "eval": {"type": "corpus", "split": "test", "count": 6},
        },
        "stages": {"mars": stage},
        "cluster": {"cpus_per_worker": 1, "threads_per_worker": 1},
        "checkpoint": {"every_steps": 3},
    }
    table = {
        "kind": "tune",
        "output_dir": str(output_dir),
        "trials": 4,
        "scheduler": {"type": "asha", "grace_steps": 3, "reduction": 2},
        "space": {
            "optimizer.learning_rate": {"type": "log_uniform", "low": 1e-4, "high": 1e-2},
            "objective.block_size": {
                "type": "choice",
                "values": [
                    {"type": "constant", "size": 2},
                    {"type": "mixed", "sizes": [2, 4], "weights": [1.0, 1.0]},
                ],
            },
        },
        "objectives": {
            "task": {"type": "corpus", "count": 4},
            "max_new_tokens": 8,
            "modes": [{"type": "verified", "threshold": t} for t in (1.0, 0.5)],
            "engine": {"max_batch": 4, "max_context": 160, "threads": 1},
        },
        "train": train,
    }
    return table | changes


def make_sweep(model: Path, output_dir: Path, **changes: Any) -> TuneJob:
    """The same, as a job."""
    job = parse_job(make_table(model, output_dir, **changes), source="test")
    assert isinstance(job, TuneJob)
    return job
