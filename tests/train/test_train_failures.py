"""What a stage says when something is wrong with its machines: hangs, memory, slow ranks."""

import json
import resource
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException
from train.draft_jobs import draft_job, draft_plan
from train.small_jobs import ignore_report, make_job, make_model, make_plan, spawn

from mars_ray.config.train import ClusterConfig, TrainJob
from mars_ray.errors import MemoryShortError
from mars_ray.model.create import preset_config
from mars_ray.model.shape import shape_of, shape_of_config
from mars_ray.train.loop import StageOutcome
from mars_ray.train.memory import RowSize, check_memory, estimate
from mars_ray.train.metrics import RankTimer
from mars_ray.train.plan import StagePlan
from mars_ray.train.ranks import Ranks, stacks
from mars_ray.train.worker import train_stage


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "initial")


def plan_of(model: Path, output_dir: Path, **sections) -> StagePlan:
    return make_plan(make_job(model, output_dir, **sections), model)


def hang_on_one_rank(plan: StagePlan, slowest: Path) -> None:
    """Rank 1 is slow, and never comes back from what it does after a checkpoint."""
    ranks = Ranks.current(torch.device("cpu"))
    timer = RankTimer(ranks)
    with timer.measure():
        time.sleep(0.3 if ranks.rank == 1 else 0.1)
    slowest.with_suffix(f".{ranks.rank}").write_text(json.dumps(timer.slowest()))

    def wait_for_ever(directory: Path, metrics: dict[str, float]) -> None:
        if ranks.rank == 1:
            time.sleep(1000)

    train_stage(plan, ranks, None, wait_for_ever)


@pytest.mark.slow
def test_a_hang_ends_with_the_stacks_of_all_ranks(model, tmp_path):
    """Guards a cluster that waits for one process all night, with nothing to tell which.

    Also: the slow rank is named, by all ranks alike.
    """
    plan = plan_of(model, tmp_path, cluster={"workers": 2, "step_timeout_s": 3})
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        spawn(hang_on_one_rank, 2, plan, tmp_path / "slowest")
    waiting, hanging = (plan.stacks_dir / f"rank_{rank}.txt" for rank in (0, 1))
    assert "in sum" in waiting.read_text()
    assert "in wait_for_ever" in hanging.read_text()
    said = stacks(plan.stacks_dir)
    assert "step 11 took more than 3 s" in said
    assert f"{waiting}, {hanging}" in said
    assert stacks(tmp_path) == ""
    found = [json.loads((tmp_path / f"slowest.{rank}").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    assert found[0]["slowest_rank"] == 1
    assert found[0]["slowest_over_median"] == pytest.approx(0.3 / 0.2, rel=0.2)


def train_in_little_memory(plan: StagePlan, said: Path) -> None:
    """Half a gigabyte besides what the process has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), resource.RLIM_INFINITY))
    try:
        train_stage(plan, Ranks.current(torch.device("cpu")), None, ignore_report)
    except MemoryShortError as error:
        said.write_text(str(error))


def test_running_out_of_memory_says_what_to_lower(model, tmp_path):
    """Guards a bare allocator message. Activations of 1,000 rows at once take about a gigabyte."""
    job = make_job(model, tmp_path).model_dump()
    job["data"]["train"]["count"] = 1000
    job["cluster"]["memory_check"] = False
    job["stages"]["mars"]["global_batch_size"] = 1000
    plan = make_plan(TrainJob.model_validate(job), model)
    spawn(train_in_little_memory, 1, plan, tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert "stage 'mars' ran out of memory" in said
    assert "lower micro_batch_size, set gradient_checkpointing=true, use engine" in said


def test_a_job_that_cannot_fit_is_refused_before_it_starts():
    """Guards an hour of waiting for a cluster that ends in the first step."""
    shape = shape_of_config(preset_config("qwen2.5-7b", 152_064))
    stages = {"ar": {"objective": {"type": "ar"}, "steps": 1, "global_batch_size": 64}}
    stages["ar"]["optimizer"] = {"learning_rate": 1e-4}
    job = TrainJob.model_validate(
        {
            "name": "large",
            "output_dir": "run",
            "model": {"type": "preset", "preset": "qwen2.5-7b"},
            "data": {"train": {"type": "corpus", "count": 8}},
            "stages": stages,
        }
    )
    alone = Ranks.current(torch.device("cpu"))
    with pytest.raises(MemoryShortError, match=r"needs about \d+.*lower micro_batch_size.*lora"):
        check_memory(shape, job, job.stages["ar"], RowSize(512, 300), alone)
    off = job.model_copy(update={"cluster": ClusterConfig(memory_check=False)})
    check_memory(shape, off, off.stages["ar"], RowSize(512, 300), alone)
    needs = estimate(shape, off, off.stages["ar"], RowSize(512, 300), 1, on_cuda=False)
    # 7.6e9 parameters: float32 weights, gradients and moments, and a copy in bfloat16.
    states = [needs.parts[part] for part in ("weights", "gradients", "optimizer")]
    assert sum(states) == pytest.approx(18 * 7.616e9, rel=1e-3)


def measure_peak(plan: StagePlan, small: StagePlan, result: Path) -> None:
    """Of a stage, over what the process holds after a small one."""
    train_stage(small, Ranks.current(torch.device("cpu")), None, ignore_report)
    before = _memory("VmRSS")
    outcome = train_stage(plan, Ranks.current(torch.device("cpu")), None, ignore_report)
    assert isinstance(outcome, StageOutcome), outcome
    result.write_text(str(_memory("VmHWM") - before))


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.parametrize(
    ("gradient_checkpointing", "anchored"),
    [(False, False), pytest.param(True, False, marks=pytest.mark.long), (True, True)],
)
def test_the_estimate_is_near_the_measured_peak(gradient_checkpointing, anchored, model, tmp_path):
    """Guards the arithmetic: at most 1.7 times what a process really took, and not below 0.8."""
    small = plan_of(model, tmp_path / "small")
    model = make_model(tmp_path / "model", hidden_size=256, intermediate_size=1024, layers=8)
    job = make_job(model, tmp_path / "large").model_dump()
    job["gradient_checkpointing"] = gradient_checkpointing
    job["data"] |= {"packing": True, "max_length": 256, "eval": None}
    job["data"]["train"]["count"] = 200
    job["stages"]["mars"] |= {"steps": 2, "global_batch_size": 8}
    if anchored:
        job["data"]["own"] = job["data"]["train"]
        job["stages"]["mars"]["objective"]["anchor_weight"] = 1.0
    plan = make_plan(TrainJob.model_validate(job), model)
    spawn(measure_peak, 1, plan, small, tmp_path / "peak")
    measured = int((tmp_path / "peak").read_text())
    row = RowSize.of(plan.train, plan.job.data)
    needs = estimate(shape_of(model), plan.job, plan.config, row, 1, on_cuda=False)
    print(needs.text(), measured)
    assert 0.8 < needs.device / measured < 1.7


@pytest.mark.parametrize(
    "gradient_checkpointing", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_the_estimate_of_a_draft_stage_is_near_too(gradient_checkpointing, tmp_path):
    """Guards an arithmetic of its own: a frozen model, and rows that alone go backward."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "layers": 8}
    model = make_model(tmp_path / "model", **sizes)
    small = draft_plan(model, tmp_path / "small", stage={"steps": 1})
    job = draft_job(model, tmp_path / "large", stage={"steps": 2, "global_batch_size": 8})
    content = job.model_dump() | {"gradient_checkpointing": gradient_checkpointing}
    content["data"] |= {"packing": True, "max_length": 256, "eval": None}
    content["data"]["train"]["count"] = 200
    plan = make_plan(TrainJob.model_validate(content), model, "draft")
    spawn(measure_peak, 1, plan, small, tmp_path / "peak")
    measured = int((tmp_path / "peak").read_text())
    row = RowSize.of(plan.train, plan.job.data)
    needs = estimate(shape_of(model), plan.job, plan.config, row, 1, on_cuda=False)
    print(needs.text(), measured)
    assert 0.8 < needs.device / measured < 1.7
