"""The jobs of an adaptation: what each worker gets, and what is refused before they begin."""

from pathlib import Path
from typing import Any

import pytest
import ray

from mars_ray.adapt.jobs import Devices, Places, Split, check_jobs, train_job
from mars_ray.adapt.run import devices
from mars_ray.config.adapt import AdaptJob
from mars_ray.config.load import parse_job
from mars_ray.errors import ConfigError
from mars_ray.train.plan import identity

CPUS = Devices(2, 4.0, 0.0, 1, 8.0, "float32")
GPU = Devices(1, 8.0, 1.0, 1, 8.0, "bfloat16")


def job(*overrides: str) -> AdaptJob:
    table: dict[str, Any] = {"kind": "adapt", "name": "x", "model": "m"}
    made = parse_job(table, source="x", overrides=overrides)
    assert isinstance(made, AdaptJob)
    return made


@pytest.mark.parametrize(
    ("override", "found", "said"),
    [
        ("answers.max_new_tokens=640", CPUS, "leaves no room for a prompt"),
        ('answers.engine.device="cpu"', GPU, "has no effect with engine.device"),
        ('recipe.checkpoint.best.metric="eval_clean_ce"', CPUS, "is not among what"),
        ("measure.max_new_tokens=1024", CPUS, "leaves no room for a prompt"),
    ],
)
def test_what_a_later_job_refuses_is_told_before_the_first(tmp_path, override, found, said):
    """Guards a traceback after hours of answers and training."""
    places = Places(tmp_path)
    check_jobs(job(), Path("m"), places, found)
    with pytest.raises(ConfigError, match=said):
        check_jobs(job(override), Path("m"), places, found)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_workers_have_the_cpus_that_there_are(tmp_path, workers):
    """Guards a training that waits for ever for CPUs that no node has."""
    parts = Split(Path("a"), Path("b"), 10, 5, 0)
    asked = job(f"recipe.workers={workers}")
    cluster = train_job(asked, Path("m"), Places(tmp_path), parts, CPUS, None).cluster
    assert cluster.workers == workers
    assert workers * cluster.cpus_per_worker <= 8
    # Two nodes of five each: two workers of three CPUs are too many for one of them.
    several = Devices(2, 5.0, 0.0, 2, 5.0, "float32")
    each = train_job(asked, Path("m"), Places(tmp_path), parts, several, None).cluster
    assert -(-workers // 2) * each.cpus_per_worker <= 5


@pytest.mark.parametrize(("found", "workers"), [(1, 1), (3, 2), (4, 4), (6, 4)])
def test_a_training_goes_on_with_other_nodes(tmp_path, found, workers):
    """Guards an adaptation that a cluster of another size, or of other CPUs, refuses to resume."""
    parts = Split(Path("a"), Path("b"), 10, 5, 0)
    first, now = (Devices(n, 4.0, 0.0, n, 4.0, p) for n, p in ((4, "float32"), (found, "bfloat16")))
    begun = train_job(job(), Path("m"), Places(tmp_path), parts, first, None)
    resumed = train_job(job(), Path("m"), Places(tmp_path), parts, now, None, begun)
    assert identity(resumed) == identity(begun)
    assert resumed.cluster.workers == workers


@pytest.mark.parametrize(
    ("nodes", "workers", "each"),
    [
        ([{"CPU": 32, "GPU": 8}], 8, 4),
        ([{}, {"CPU": 32, "GPU": 8}], 8, 4),
        ([{"CPU": 0}, {"CPU": 32, "GPU": 8}, {"CPU": 16, "GPU": 8}], 16, 2),
        ([{"CPU": 64}, {"CPU": 4, "GPU": 8}], 8, 1),
    ],
)
def test_a_head_without_gpus_takes_no_part_in_their_share(monkeypatch, nodes, workers, each):
    """Its CPUs stand beside no GPU. Guards eight workers that asked for all CPUs each."""
    rows = [{"Alive": True, "NodeID": str(n), "Resources": own} for n, own in enumerate(nodes)]
    monkeypatch.setattr(ray, "nodes", lambda: rows)
    found = devices()
    assert (found.workers, found.cpus_per_worker, found.gpus_per_worker) == (workers, each, 1)


def test_nothing_is_guessed_where_no_worker_has_started(monkeypatch):
    """Guards CPUs for work that GPUs would come for, on a cluster that begins with its head."""
    head = {"Alive": True, "NodeID": "a", "Resources": {"memory": 8e9}}
    monkeypatch.setattr(ray, "nodes", lambda: [head])
    with pytest.raises(ConfigError, match=r"no worker has started yet: start one by `ray job sub"):
        devices()
