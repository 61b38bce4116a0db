"""Where checkpoints go: kept by age and by metric, copied to a store, restored, and no room."""

import contextlib
import resource
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from model.small_s3 import bucket
from train.small_jobs import (
    ignore_report,
    losses,
    make_job,
    make_model,
    make_plan,
    records,
    run_alone,
)

from mars_ray.config.train import CheckpointConfig
from mars_ray.errors import CheckpointError, ConfigError, TrainingError
from mars_ray.train import checkpoint
from mars_ray.train.checkpoint import CheckpointStore, best_checkpoint, fetch_copies, kept
from mars_ray.train.loop import StageOutcome
from mars_ray.train.plan import StagePlan, known_hashes
from mars_ray.train.ranks import Ranks
from mars_ray.train.run import run_training
from mars_ray.train.worker import resume_stage, train_stage


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "initial")


@pytest.fixture
def credentials(monkeypatch):
    """Of nobody; and no look at what a cloud machine's own service would say."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def fetch(plan: StagePlan) -> None:
    fetch_copies(plan.run_dir, plan.job.checkpoint, plan.stage, known_hashes(plan.job))


def plan_of(model: Path, output_dir: Path, **settings) -> StagePlan:
    """Twenty steps with a checkpoint every five."""
    settings = {"every_steps": 5} | settings
    return make_plan(make_job(model, output_dir, checkpoint=settings), model)


def steps_in(directory: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.complete(directory)]


def test_the_last_and_the_best_are_kept():
    """Guards the only good checkpoint of a run that got worse; of equals the later one stays."""
    scores = {10: 0.5, 20: 0.2, 30: 0.2, 40: 0.9, 50: None}
    one = CheckpointConfig.model_validate({"keep": 1})
    best = CheckpointConfig.model_validate({"keep": 1, "best": {"keep": 1}})
    two_highest = CheckpointConfig.model_validate({"keep": 2, "best": {"keep": 2, "mode": "max"}})
    assert kept(scores, one) == {50}
    assert kept(scores, best) == {30, 50}
    assert kept(scores, two_highest) == {10, 40, 50}
    assert kept({}, best) == set()
    accepted = {"keep": 1, "best": {"metric": "eval_tokens_per_forward"}}
    assert kept(scores, CheckpointConfig.model_validate(accepted)) == {40, 50}


def test_a_run_keeps_its_best_and_evaluates_what_it_keeps(model, tmp_path):
    """Guards a metric of an older evaluation counting for a newer checkpoint."""
    # Highest loss, so that it is not the last one.
    plan = plan_of(model, tmp_path, keep=1, best={"mode": "max"})
    run_alone(plan)
    evaluated = {line["step"]: line["loss"] for line in records(plan, "eval")}
    assert list(evaluated) == [5, 10, 15, 20]
    worst = max(evaluated, key=lambda step: evaluated[step])
    assert steps_in(plan.run_dir) == sorted({worst, 20})
    assert best_checkpoint(plan.run_dir, plan.job.checkpoint).name == f"step_{worst:08d}"


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_lost_run_directory_is_restored_from_the_store(kind, model, tmp_path, credentials):
    """Guards the copies: complete, as many as are kept here, and good to go on from to the bit."""
    stored = tmp_path / "stored"
    stored.mkdir()
    with bucket(stored) as (options, _):
        uri = f"s3://bucket/runs{options}" if kind == "s3" else f"file://{stored}/runs"
        plan = plan_of(model, tmp_path / "run", keep=2, storage_path=uri)
        run_alone(plan)
        expected = losses(plan)
        store = CheckpointStore(uri, "mars")
        assert store.steps() == {15, 20}
        assert store.metric(20, "loss") == pytest.approx(expected[-1])
        # The machine dies after step 15.
        store.delete(20)
        assert store.steps() == {15}
        shutil.rmtree(plan.run_dir)
        fetch(plan)
        newest = checkpoint.newest(plan.run_dir)
        assert newest is not None
        assert newest.name == "step_00000015"
        run_alone(plan, newest)
        assert losses(plan) == expected[15:]
        assert store.steps() == {15, 20}


def test_the_best_comes_back_as_well_as_the_newest(model, tmp_path):
    """Guards a run that loses its machine against exporting the best of what came after."""
    uri = f"file://{tmp_path}/runs"
    # Highest loss, so that it is not the last one.
    plan = plan_of(model, tmp_path / "run", keep=1, best={"mode": "max"}, storage_path=uri)
    run_alone(plan)
    before = steps_in(plan.run_dir)
    assert len(before) == 2
    shutil.rmtree(plan.run_dir)
    fetch(plan)
    assert steps_in(plan.run_dir) == before
    assert checkpoint.step_of(best_checkpoint(plan.run_dir, plan.job.checkpoint)) == before[0]


def test_copies_of_another_job_are_not_fetched(model, tmp_path):
    """Guards a circle: what was fetched would be refused, and its deletion would fetch it again."""
    uri = f"file://{tmp_path}/runs"
    run_alone(plan_of(model, tmp_path / "run", storage_path=uri))
    job = make_job(model, tmp_path / "other", seed=1, checkpoint={"storage_path": uri})
    other = make_plan(job, model)
    with pytest.raises(
        CheckpointError, match=r"storage_path file:.* another job's .* name another"
    ):
        fetch(other)
    assert checkpoint.newest(other.run_dir) is None


def test_an_unreachable_store_is_an_error_before_the_start(model, tmp_path, credentials):
    """Guards hours of training whose copies were never made."""
    with bucket(tmp_path) as (options, _):
        uri = f"s3://bucket/runs{options}"
    plan = plan_of(model, tmp_path / "run", storage_path=uri)
    with pytest.raises(CheckpointError, match=r"cannot list s3://bucket/runs/mars: .*Mend"):
        fetch(plan)


def test_a_store_that_goes_away_costs_no_training(model, tmp_path, monkeypatch):
    """Guards a run against its store: it ends with everything here, and says what is missing."""
    monkeypatch.setattr(checkpoint, "_LAST_PAUSES_S", (0.01,))
    stored = tmp_path / "stored"
    plan = plan_of(model, tmp_path / "run", storage_path=f"file://{stored}")

    def lose_the_store(directory: Path, metrics: dict[str, float]) -> None:
        while metrics["step"] == 5 and not stored.is_file():
            shutil.rmtree(stored, ignore_errors=True)
            # A copy under way may have made it anew.
            with contextlib.suppress(IsADirectoryError):
                stored.write_text("not mounted")

    error = train_stage(plan, Ranks.current(torch.device("cpu")), None, lose_the_store)
    assert isinstance(error, CheckpointError)
    assert "cannot copy step_00000020 to file://" in str(error)
    assert steps_in(plan.run_dir) == [15, 20]
    assert len(losses(plan)) == 20
    # Once it is back, the same command brings there what it lacks.
    stored.unlink()
    run_alone(plan, checkpoint.newest(plan.run_dir))
    assert CheckpointStore(f"file://{stored}", "mars").steps() == {15, 20}


def test_a_copy_that_failed_once_is_made_later(model, tmp_path, monkeypatch):
    """Guards the best checkpoint, which is not the newest any more when the store is back."""
    uri, upload = f"file://{tmp_path}/stored", CheckpointStore.upload
    # Highest loss, so that it is not the last one.
    plan = plan_of(model, tmp_path / "run", keep=1, best={"mode": "max"}, storage_path=uri)
    failed = []

    def fail_once(store: CheckpointStore, directory: Path) -> None:
        if not failed:
            failed.append(directory)
            raise CheckpointError("the store is away")
        upload(store, directory)

    def wait(directory: Path, metrics: dict[str, float]) -> None:
        while not failed:
            time.sleep(0.01)

    monkeypatch.setattr(CheckpointStore, "upload", fail_once)
    outcome = train_stage(plan, Ranks.current(torch.device("cpu")), None, wait)
    assert isinstance(outcome, StageOutcome), outcome
    best = best_checkpoint(plan.run_dir, plan.job.checkpoint)
    assert failed == [best]
    stored = CheckpointStore(uri, "mars").steps()
    assert stored == set(steps_in(plan.run_dir)) == {checkpoint.step_of(best), 20}


def test_the_last_copy_is_tried_again_when_nothing_comes_after_it(model, tmp_path, monkeypatch):
    """Guards a run whose store refuses once, at the end (ray#47939)."""
    uri, upload = f"file://{tmp_path}/stored", CheckpointStore.upload
    plan = plan_of(model, tmp_path / "run", keep=1, storage_path=uri)
    refused = []

    def refuse_once(store: CheckpointStore, directory: Path) -> None:
        if checkpoint.step_of(directory) == 20 and not refused:
            refused.append(directory)
            raise CheckpointError("503 Slow Down")
        upload(store, directory)

    monkeypatch.setattr(checkpoint, "_LAST_PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(CheckpointStore, "upload", refuse_once)
    outcome = train_stage(plan, Ranks.current(torch.device("cpu")), None, ignore_report)
    assert isinstance(outcome, StageOutcome), outcome
    assert refused
    assert CheckpointStore(uri, "mars").steps() == {20}


def test_a_run_that_starts_again_does_not_end_for_its_store(model, tmp_path, capfd):
    """Guards workers that are started anew while the store is away: they go on, and the copies are
    made once it is back."""
    stored = tmp_path / "stored"
    store = CheckpointStore(f"file://{stored}", "mars")
    plan = plan_of(model, tmp_path / "run", keep=1, storage_path=f"file://{stored}")

    def stop(directory: Path, metrics: dict[str, float]) -> None:
        if metrics["step"] == 10:
            # The thread is done once the copy before is gone, too.
            while store.steps() != {10} or len(list((stored / "mars").iterdir())) > 1:
                time.sleep(0.01)
            raise KeyboardInterrupt

    alone = Ranks.current(torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        train_stage(plan, alone, None, stop)
    shutil.rmtree(stored)
    stored.write_text("not mounted")

    def mount(directory: Path, metrics: dict[str, float]) -> None:
        if stored.is_file():
            stored.unlink()

    outcome = train_stage(plan, alone, checkpoint.newest(plan.run_dir), mount)
    assert isinstance(outcome, StageOutcome), outcome
    assert store.steps() == {20}
    assert "checkpoint.storage_path: cannot" in capfd.readouterr().out


def test_training_does_not_wait_for_a_slow_store(model, tmp_path, monkeypatch):
    """Guards a healthy run against the watchdog: with 7B a copy can take longer than a step may."""
    uri, upload = f"file://{tmp_path}/stored", CheckpointStore.upload
    plan = plan_of(model, tmp_path / "run", keep=2, storage_path=uri)
    copied, trained = [], threading.Event()

    def wait_for_training(store: CheckpointStore, directory: Path) -> None:
        copied.append(checkpoint.step_of(directory))
        assert trained.wait(20), "training waits for the store"
        upload(store, directory)

    def note(directory: Path, metrics: dict[str, float]) -> None:
        while not copied:
            time.sleep(0.01)
        if metrics["step"] == 20:
            # The one that is being copied is there still.
            assert steps_in(plan.run_dir) == [5, 15, 20]
            trained.set()

    monkeypatch.setattr(CheckpointStore, "upload", wait_for_training)
    outcome = train_stage(plan, Ranks.current(torch.device("cpu")), None, note)
    assert isinstance(outcome, StageOutcome), outcome
    assert copied == [5, 20, 15]
    assert CheckpointStore(uri, "mars").steps() == {15, 20}
    assert steps_in(plan.run_dir) == [15, 20]


def test_a_full_disk_leaves_the_last_checkpoint_to_go_on_from(model, tmp_path):
    """Guards a half-written checkpoint that would be taken for a whole one, and the ones before.

    The system refuses to make this process's files longer, from the second checkpoint on.
    """
    plan = plan_of(model, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(directory: Path, metrics: dict[str, float]) -> None:
        if metrics["step"] == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))

    try:
        error = train_stage(plan, Ranks.current(torch.device("cpu")), None, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(error, CheckpointError)
    assert "step_00000015 could not be written: rank 0 on" in str(error)
    assert "The last one, step_00000010, is untouched. Free space" in str(error)
    assert [path.name for path in sorted(plan.run_dir.glob("step_*"))] == [
        "step_00000005",
        "step_00000010",
    ]
    first = losses(plan)
    run_alone(plan, checkpoint.newest(plan.run_dir))
    assert losses(plan)[:15] == first


def test_a_node_that_does_not_see_the_run_directory_is_named(model, tmp_path):
    """Guards nodes that each write to a disk of their own; and what a worker resumes by itself."""
    plan, alone = plan_of(model, tmp_path), Ranks.current(torch.device("cpu"))
    error = resume_stage(plan, alone, ignore_report)
    assert isinstance(error, TrainingError)
    assert f"{socket.gethostname()} does not see {plan.run_dir}" in str(error)
    plan.run_dir.mkdir(parents=True)
    for _ in range(2):
        outcome = resume_stage(plan, alone, ignore_report)
        assert isinstance(outcome, StageOutcome)
        assert outcome.finished
    assert [record["step"] for record in records(plan, "start")] == [0, 20]


def test_a_run_directory_that_cannot_be_made_is_an_error_of_ours(model, tmp_path):
    """Guards an unreachable storage path: a file stands where the directory should be."""
    (tmp_path / "run").write_text("no directory")
    with pytest.raises(ConfigError, match=r"cannot be used.*Mend or mount"):
        run_training(make_job(model, tmp_path / "run"))
