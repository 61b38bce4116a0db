"""Two ranks as real processes with gloo: plain torch and ZeRO give one rank's loss curve."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train.small_jobs import (
    ignore_report,
    losses,
    make_job,
    make_model,
    make_plan,
    records,
    run_alone,
    spawn,
)

from mars_ray.config.train import TrainJob
from mars_ray.data.loader import LoaderState
from mars_ray.errors import CheckpointError, MarsError
from mars_ray.model.load import load_model
from mars_ray.train.checkpoint import TrainState, directory_of, read_rank_state, write
from mars_ray.train.deepspeed import loading_in_parts, zero_settings
from mars_ray.train.plan import StagePlan
from mars_ray.train.ranks import Ranks
from mars_ray.train.worker import train_stage

STEPS = 20
STATE = TrainState(1, 20, 0.0, 2, "job", LoaderState(0, 1), {}, "data", 0)


def train_all(plans: list[tuple[StagePlan, Path | None]], results: Path) -> None:
    """Stages one after another on the ranks of one group: imports are paid for once."""
    ranks = Ranks.current(torch.device("cpu"))
    outcomes = [train_stage(plan, ranks, resume, ignore_report) for plan, resume in plans]
    if ranks.is_main:
        found = [str(o) if isinstance(o, MarsError) else o.step for o in outcomes]
        results.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "initial")


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory):
    plan = make_plan(make_job(model, tmp_path_factory.mktemp("one")), model)
    run_alone(plan)
    return plan


def write_nothing(directory: Path, wrote: Path) -> None:
    """Rank 0 cannot begin: its directory lies below a file."""
    ranks = Ranks.current(torch.device("cpu"))
    error = None
    try:
        write(directory, ranks, STATE, {}, lambda _: (wrote / str(ranks.rank)).touch())
    except CheckpointError as caught:
        error = str(caught)
    (wrote / f"error-{ranks.rank}").write_text(str(error))


def test_no_rank_writes_a_model_when_one_cannot_begin(tmp_path):
    """Guards a hang: under ZeRO-3 writing is a collective, and one rank is not in it."""
    (tmp_path / "file").touch()
    (tmp_path / "wrote").mkdir()
    spawn(write_nothing, 2, tmp_path / "file" / "step_00000001", tmp_path / "wrote")
    assert sorted(p.name for p in (tmp_path / "wrote").iterdir()) == ["error-0", "error-1"]
    for path in (tmp_path / "wrote").iterdir():
        assert "could not be written" in path.read_text()


def resume_apart(plan: StagePlan, wrote: Path) -> None:
    """Rank 1's file system does not show the checkpoint yet."""
    ranks = Ranks.current(torch.device("cpu"))
    resume_from = directory_of(plan.run_dir, 10) if ranks.is_main else wrote / "step_00000010"
    outcome = train_stage(plan, ranks, resume_from, ignore_report)
    (wrote / str(ranks.rank)).write_text(str(outcome))


def test_what_one_rank_does_not_see_is_told_on_all(one_rank, tmp_path):
    """Guards half an hour in a collective that the other rank has left."""
    spawn(resume_apart, 2, one_rank, tmp_path)
    for rank in "01":
        assert "rank 1 on" in (tmp_path / rank).read_text()
        assert "is no complete checkpoint" in (tmp_path / rank).read_text()


def two_ranks(model: Path, output_dir: Path, **sections) -> StagePlan:
    """Micro-batches of one row, so that each rank accumulates two."""
    job = make_job(model, output_dir, **sections).model_dump()
    job["cluster"]["workers"] = 2
    job["stages"]["mars"]["micro_batch_size"] = 1
    return make_plan(type(make_job(model, output_dir)).model_validate(job), model)


@pytest.mark.slow
def test_two_ranks_equal_one(model, one_rank, tmp_path):
    """Guards the global division: a mean per rank, or DDP's average, would move the curve.

    Also: a checkpoint of two ranks resumes on two to the bit, and NaN is found on both at once.
    """
    plan, resumed = two_ranks(model, tmp_path / "a"), two_ranks(model, tmp_path / "b")
    diverging = two_ranks(model, tmp_path / "c")
    content = diverging.job.model_dump()
    content["stages"]["mars"]["optimizer"] |= {"learning_rate": 1e30, "warmup_share": 0}
    diverging = make_plan(type(diverging.job).model_validate(content), model)
    halfway = directory_of(plan.run_dir, 10)
    todo = [(plan, None), (resumed, halfway), (diverging, None)]
    spawn(train_all, 2, todo, tmp_path / "results.json")
    _check_three_ranks(plan, model, tmp_path)
    first, second, message = json.loads((tmp_path / "results.json").read_text())
    assert (first, second) == (STEPS, STEPS)
    assert losses(plan) == pytest.approx(losses(one_rank), rel=1e-5)
    one, two = (records(p, "eval")[-1] for p in (one_rank, plan))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["tokens_per_forward"] == pytest.approx(one["tokens_per_forward"])
    assert losses(resumed) == losses(plan)[10:]
    assert len(message.split("conversations ")[1].split(".")[0].split(", ")) == 4


def _check_three_ranks(plan: StagePlan, model: Path, directory: Path) -> None:
    """Four rows on three ranks, from two ranks' checkpoint: the middle one has more to do."""
    content = plan.job.model_dump()
    content["cluster"] |= {"workers": 3, "min_workers": 2}
    content["output_dir"] = str(directory / "three")
    three = make_plan(type(plan.job).model_validate(content), model)
    todo = [(three, directory_of(plan.run_dir, 10))]
    spawn(train_all, 3, todo, directory / "three.json")
    assert losses(three) == pytest.approx(losses(plan)[10:], rel=1e-4)


@pytest.mark.slow
def test_zero_stages_equal_plain_torch(model, one_rank, tmp_path):
    """Guards DeepSpeed's own averaging and accumulation, which the engine must cancel; and its
    state, which must resume to the bit."""
    todo: list[tuple[StagePlan, Path | None]] = []
    for stage, offload in ((1, "none"), (2, "optimizer"), (3, "all")):
        engine = {"type": "deepspeed", "zero_stage": stage, "offload": offload}
        plan = two_ranks(model, tmp_path / f"zero{stage}", engine=engine)
        resumed = two_ranks(model, tmp_path / f"resumed{stage}", engine=engine)
        todo += [(plan, None), (resumed, directory_of(plan.run_dir, 10))]
    rounded = _tiny_steps_in_bfloat16(model, tmp_path)
    spawn(train_all, 2, [*todo, (rounded, None)], tmp_path / "results.json")
    _check_masters_move(rounded, model)
    _check_one_rank_resumes(todo, tmp_path)
    assert len(losses(one_rank)) == STEPS
    for (plan, _), (resumed, _) in zip(todo[::2], todo[1::2], strict=True):
        assert losses(plan) == pytest.approx(losses(one_rank), abs=1e-4)
        evaluated, expected = (records(p, "eval")[-1]["loss"] for p in (plan, one_rank))
        assert evaluated == pytest.approx(expected, abs=1e-4)
        assert losses(resumed) == losses(plan)[10:]
        # The consolidated weights are whole, and one rank's.
        mine, expected = (load_file(_last_model(p)) for p in (plan, one_rank))
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-3)


def load_in_parts(plan: StagePlan, broken: list[StagePlan], wrote: Path) -> None:
    """What this rank holds after loading, and what it meets with weights that do not fit."""
    ranks = Ranks.current(torch.device("cpu"))
    with loading_in_parts(zero_settings(plan, ranks), ranks):
        # Any: what DeepSpeed adds to them is not torch's.
        parameters: list[Any] = list(load_model(plan.start_model, dtype=torch.float32).parameters())
    loaded = {
        "whole": sum(parameter.numel() for parameter in parameters),
        "part": sum(parameter.ds_tensor.numel() for parameter in parameters),
        "types": sorted({str(parameter.ds_tensor.dtype) for parameter in parameters}),
        "after": sum(p.numel() for p in load_model(plan.start_model, dtype=None).parameters()),
        "errors": [str(train_stage(each, ranks, None, ignore_report)) for each in broken],
    }
    (wrote / f"{ranks.rank}.json").write_text(json.dumps(loaded))


@pytest.mark.slow
def test_under_zero_3_no_rank_ever_holds_a_whole_model(model, tmp_path):
    """Guards a worker of a large model that runs out of memory before its part is cut.

    Only rank 0 reads weights, so what is wrong with them must reach the others.
    """
    engine = {"type": "deepspeed", "zero_stage": 3}
    plan = two_ranks(model, tmp_path / "run", engine=engine, precision="bfloat16")
    broken = []
    for name in ("model.norm.weight", "model.layers.9.mlp.up_proj.weight"):
        other = shutil.copytree(model, tmp_path / name)
        weights = load_file(other / "model.safetensors")
        save_file(weights | {name: torch.ones(3)}, other / "model.safetensors", {"format": "pt"})
        broken.append(two_ranks(other, tmp_path / f"of {name}", engine=engine))
    spawn(load_in_parts, 2, plan, broken, tmp_path)
    total = sum(parameter.numel() for parameter in load_model(model, dtype=None).parameters())
    for rank in (0, 1):
        loaded = json.loads((tmp_path / f"{rank}.json").read_text())
        assert loaded["whole"] == 0
        assert total / 2 <= loaded["part"] < 0.51 * total
        assert loaded["types"] == ["torch.bfloat16"]
        assert loaded["after"] == total
        shape, unknown = loaded["errors"]
        assert "model.norm.weight" in shape
        assert "unexpected keys model.layers.9.mlp.up_proj.weight" in unknown


@pytest.mark.long
def test_adapters_under_zero_3_equal_those_of_one_rank(model, tmp_path):
    """They come after the model was cut into parts, and go into its whole weights."""
    todo: list[tuple[StagePlan, Path | None]] = []
    for name in ("a", "b"):
        job = two_ranks(
            model, tmp_path / name, engine={"type": "deepspeed", "zero_stage": 3}
        ).job.model_dump()
        job["stages"]["mars"]["lora"] = {"rank": 4, "alpha": 8}
        todo.append((make_plan(TrainJob.model_validate(job), model), None))
    (first, _), (second, _) = todo
    todo[1] = (second, directory_of(first.run_dir, 10))
    spawn(train_all, 2, todo, tmp_path / "results.json")
    content = first.job.model_dump()
    content["cluster"]["workers"] = 1
    content["output_dir"], content["engine"] = str(tmp_path / "one"), {"type": "torch"}
    alone = make_plan(TrainJob.model_validate(content), model)
    run_alone(alone)
    assert losses(first) == pytest.approx(losses(alone), abs=1e-4)
    assert losses(second) == losses(first)[10:]
    mine, expected = (load_file(_last_model(plan)) for plan in (first, alone))
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-3)


def _tiny_steps_in_bfloat16(model: Path, directory: Path) -> StagePlan:
    engine = {"type": "deepspeed", "zero_stage": 2}
    plan = two_ranks(model, directory / "rounded", engine=engine, precision="bfloat16")
    content = plan.job.model_dump()
    content["stages"]["mars"]["optimizer"] |= {"learning_rate": 1e-7, "warmup_share": 0}
    return make_plan(type(plan.job).model_validate(content), model)


def _check_masters_move(plan: StagePlan, model: Path) -> None:
    """Steps far below bfloat16's resolution add up in float32 weights, which the run keeps."""
    name = "model.layers.0.mlp.up_proj.weight"
    start = load_file(model / "model.safetensors")[name]
    shares = [read_rank_state(directory_of(plan.run_dir, STEPS), rank) for rank in (0, 1)]
    states = {key: value for share in shares for key, value in share["optimizer"].items()}
    master = states[f"model.{name}"]["master"]
    moved = (master - start.bfloat16().float()).abs()
    assert master.dtype == torch.float32
    assert 1e-7 < moved.mean() < 2e-6
    weights = load_file(_last_model(plan))[name].float()
    assert (weights == start.bfloat16().float()).float().mean() > 0.95


def _check_one_rank_resumes(todo, directory: Path) -> None:
    """What two ranks have written goes on with one, at another stage and without offload."""
    alone: list[tuple[StagePlan, Path | None]] = []
    for before, (plan, _) in enumerate(todo[::2], start=1):
        content = plan.job.model_dump()
        content["cluster"]["workers"] = 1
        content["engine"] = {"type": "deepspeed", "zero_stage": before % 3 + 1}
        content["output_dir"] = str(directory / f"alone{before}")
        job = type(plan.job).model_validate(content)
        alone.append((make_plan(job, plan.start_model), directory_of(plan.run_dir, 10)))
    spawn(train_all, 1, alone, directory / "alone.json")
    for (plan, _), (resumed, _) in zip(todo[::2], alone, strict=True):
        assert losses(resumed) == pytest.approx(losses(plan)[10:], abs=1e-4)


def _last_model(plan: StagePlan) -> Path:
    return directory_of(plan.run_dir, STEPS) / "model" / "model.safetensors"
