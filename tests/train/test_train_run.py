"""A job from its configuration to exported models, without Ray: whose directory it is, where it
stops, what it says of a model, and no room for it."""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from ray import cloudpickle
from train.small_jobs import make_job, make_model, make_plan, records

from mars_ray.config.train import TrainJob
from mars_ray.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MarsError,
    MemoryShortError,
    TrainingError,
)
from mars_ray.model.directory import CARD_FILE
from mars_ray.train import on_ray, run
from mars_ray.train.loop import StageOutcome
from mars_ray.train.plan import StagePlan
from mars_ray.train.ranks import Ranks
from mars_ray.train.run import run_training
from mars_ray.train.worker import resume_stage, unpacked

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "initial")


def short_job(model: Path, output_dir: Path, **sections) -> TrainJob:
    """Four steps a stage."""
    job = make_job(model, output_dir, **sections).model_dump()
    for stage in job["stages"].values():
        stage["steps"] = 4
    return TrainJob.model_validate(job)


class FitHere(threading.Thread):
    """In place of Ray: one rank, in this process."""

    at_the_end = staticmethod(lambda: None)  # of the first stage, while the last step is saved

    def __init__(self, plan: StagePlan) -> None:
        super().__init__(daemon=True)
        self._plan = plan
        self.outcome: StageOutcome | MarsError | None = None
        self.error = None

    def run(self) -> None:
        self.outcome = resume_stage(self._plan, ALONE, self._report)

    def _report(self, directory: Path, metrics: dict[str, float]) -> None:
        if metrics["step"] == 4 and self._plan.stage == "ar":
            self.at_the_end()


@pytest.fixture
def without_ray(monkeypatch):
    monkeypatch.setattr(on_ray, "_Fit", FitHere)
    monkeypatch.setattr(on_ray.ray, "cluster_resources", lambda: {"CPU": 8.0})


@pytest.mark.usefixtures("without_ray")
def test_ctrl_c_in_the_last_moments_of_a_stage_is_heard(model, tmp_path, monkeypatch):
    """Guards hours of a stage that nobody wants any more: the one before had no step to stop at."""
    job = short_job(model, tmp_path / "run")
    plan = make_plan(job, model, "ar")
    asked = []

    def ask() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not plan.stop_file.exists():
            pass
        asked.append(True)

    monkeypatch.setattr(FitHere, "at_the_end", staticmethod(ask))
    with pytest.raises(TrainingError, match="stopped before stage 'mars'; run the same command"):
        run_training(job)
    assert asked
    assert (tmp_path / "run" / "models" / "ar" / "training.json").exists()
    assert not (tmp_path / "run" / "stages" / "mars").exists()
    assert list(run_training(job).models) == ["ar", "mars"]


@pytest.mark.usefixtures("without_ray")
def test_a_best_model_has_its_own_metrics(model, tmp_path):
    """Guards a summary with the last checkpoint's metrics beside the weights of another."""
    # Highest loss, so that it is not the last one.
    settings = {"every_steps": 1, "keep": 1, "best": {"mode": "max", "export": True}}
    result = run_training(short_job(model, tmp_path / "run", checkpoint=settings))
    plan = make_plan(short_job(model, tmp_path / "run"), model)
    evaluated = {line["step"]: line["loss"] for line in records(plan, "eval")}
    best = max(evaluated, key=lambda step: evaluated[step])
    assert best != 4
    assert (result.steps["mars"], result.metrics["mars"]["eval_loss"]) == (best, evaluated[best])


def test_a_start_that_trained_nothing_claims_nothing(model, tmp_path, monkeypatch):
    """Guards the advice of an error, which was refused: it makes another job of it; and half a
    minute of starting a cluster for data that cannot be used."""
    connected = []
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"question": "2 + 2?", "answer": "4"}) + "\n") * 8)

    def go(response: str, **data) -> None:
        columns = {"prompt": "question", "response": response}
        train = {"type": "files", "paths": [str(rows)], "columns": columns}
        table = {"max_length": 128, "train": train} | data
        job = make_job(model, tmp_path / "run", data=table)
        run_training(job, lambda: connected.append(response))

    def refuse(plan: StagePlan) -> StageOutcome:
        raise MemoryShortError("lower data.max_length")

    monkeypatch.setattr(run, "fit_stage", refuse)
    with pytest.raises(DataError):
        go("reply")
    with pytest.raises(MemoryShortError):
        go("answer")
    with pytest.raises(MemoryShortError):
        go("answer", max_length=64)
    assert connected == ["answer", "answer"]


@pytest.mark.usefixtures("without_ray")
def test_a_run_goes_on_in_another_directory_with_the_same_files(model, tmp_path, monkeypatch):
    """A submitted job finds the files that travel with it in another directory at each start.
    Guards a run that cannot be resumed by the command that began it, and one that goes on with
    other conversations under the same names."""
    rows = [{"prompt": f"{i} + 1?", "response": str(i + 1)} for i in range(8)]

    def go(where: str, first: str = "1", **changes) -> None:
        rows[0]["response"] = first
        (tmp_path / where).mkdir()
        monkeypatch.chdir(tmp_path / where)
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("model").symlink_to(model)
        train = {"type": "files", "paths": ["rows.jsonl"]}
        data = {"max_length": 64, "train": train}
        run_training(short_job(Path("model"), tmp_path / "run", data=data, **changes))

    go("one")
    shutil.rmtree(tmp_path / "run" / "models")
    go("two")
    assert len(list((tmp_path / "run").glob("models/*/training.json"))) == 2
    shutil.rmtree(tmp_path / "run" / "models")
    with pytest.raises(CheckpointError, match="trained on other conversations"):
        go("three", first="2")
    with pytest.raises(TrainingError, match="another job, with another seed"):
        go("four", seed=5)


def test_a_model_to_start_from_is_made_anew_until_something_is_trained(
    model, tmp_path, monkeypatch
):
    """Guards a tokenizer of broken data, and another model's weights, in a run that went on."""

    def refuse(plan: StagePlan) -> StageOutcome:
        raise MemoryShortError("too large")

    def start(**changes) -> Path:
        job = make_job(model, tmp_path / "run").model_dump() | changes
        with pytest.raises(MemoryShortError):
            run_training(TrainJob.model_validate(job))
        return tmp_path / "run" / "initial"

    monkeypatch.setattr(run, "fit_stage", refuse)
    marked = start() / "marked"
    marked.touch()
    # Another try at the same is no reason to copy a large model again.
    assert (start() / "marked").exists()
    assert not (start(seed=5) / "marked").exists()
    preset = {"type": "preset", "preset": "tiny", "vocab_size": 300}
    start(model=preset)
    marked.touch()
    # A killed start's half.
    half = tmp_path / "run" / ".initial-abc"
    half.mkdir()
    assert (start(model=preset) / CARD_FILE).exists()
    assert not marked.exists()
    assert not half.exists()


@pytest.mark.usefixtures("without_ray")
def test_no_room_for_a_model_is_an_error_of_ours(model, tmp_path, monkeypatch):
    """Guards a traceback where hours of training ended well; the same command exports later."""
    job = short_job(model, tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(
        FitHere,
        "at_the_end",
        staticmethod(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))),
    )
    try:
        with pytest.raises(TrainingError, match=r"models/ar could not be written: .*Free space"):
            run_training(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "run" / "models" / "ar").exists()
    assert list(run_training(job).models) == ["ar", "mars"]


def test_a_node_that_does_not_see_the_cache_is_named(model, tmp_path):
    """Guards a bare FileNotFoundError out of Ray, wherever it unpickles."""
    plan = make_plan(make_job(model, tmp_path), model)
    pickled = pickle.dumps(plan)
    assert unpacked(pickled, ALONE).data == plan.data
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(TrainingError, match=r"rank 0 on .*data\.cache_dir must be on storage"):
        unpacked(pickled, ALONE)


def test_rays_controller_imports_nothing_of_ours():
    """Guards seconds of CPU at the start of every stage: by reference, the controller would import
    transformers and the model's code to read the callback."""
    code = (
        "import sys; from ray import cloudpickle; cloudpickle.load(sys.stdin.buffer); "
        "sys.exit(any(name.startswith(('mars_ray', 'transformers')) for name in sys.modules))"
    )
    pickled = cloudpickle.dumps(on_ray._failure_printer())
    assert subprocess.run([sys.executable, "-c", code], input=pickled, check=False).returncode == 0


def test_a_long_step_may_wait_in_a_collective(model, tmp_path, monkeypatch):
    """Guards `step_timeout_s` above Ray's half hour, after which torch would end the group."""
    made = {}
    monkeypatch.setattr(on_ray, "_Trainer", lambda *_, **settings: made.update(settings))
    plan = make_plan(make_job(model, tmp_path, cluster={"step_timeout_s": 7199.5}), model)
    on_ray._trainer(plan)
    assert made["torch_config"].timeout_s == 7260


def test_conversations_longer_than_the_window_are_refused(tmp_path):
    """Training lets each row see all before it. Guards a Mistral model that learns from states
    which it never has."""
    model = make_model(tmp_path / "model")
    path = model / "config.json"
    windowed = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | windowed))
    with pytest.raises(ConfigError, match=r"set data\.max_length=16"):
        make_plan(make_job(model, tmp_path / "run"), model)
