"""The loop on one rank, in this process: it learns, resumes to the bit, stops, and refuses NaN."""

import json
import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from train.small_jobs import (
    losses,
    make_job,
    make_model,
    make_plan,
    records,
    run_alone,
    try_alone,
)
from transformers import AutoModelForCausalLM

from mars_ray.config.train import TrainJob, evaluated_metrics
from mars_ray.errors import CheckpointError, NonFiniteLossError, TrainingError
from mars_ray.model.directory import read_card
from mars_ray.model.load import load_tokenizer
from mars_ray.train import loop
from mars_ray.train.checkpoint import directory_of
from mars_ray.train.loop import StageOutcome
from mars_ray.train.ranks import Ranks
from mars_ray.train.run import run_training
from mars_ray.train.worker import train_stage


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "initial")


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    """A MARS stage of 20 steps without interruption: (plan, outcome)."""
    plan = make_plan(make_job(model, tmp_path_factory.mktemp("straight")), model)
    return plan, run_alone(plan)


def changed(job: TrainJob, stage: str = "mars", **changes) -> TrainJob:
    """The job with fields of one stage replaced."""
    content = job.model_dump()
    content["stages"][stage] |= changes
    return TrainJob.model_validate(content)


def test_both_objectives_learn(model, tmp_path, straight):
    """Guards the sign and scale of everything: the loss must fall in 20 steps."""
    ar = make_plan(make_job(model, tmp_path), model, "ar")
    assert run_alone(ar).finished
    for plan in (ar, straight[0]):
        curve = losses(plan)
        assert len(curve) == 20
        assert sum(curve[-5:]) < 0.9 * sum(curve[:5])


def test_resumed_equals_uninterrupted_to_the_bit(model, tmp_path, straight):
    """Guards optimizer, schedule, loader position and masks on resume: any of them lost moves the
    curve."""
    plan, outcome = straight
    again = make_plan(make_job(model, tmp_path), model)
    resumed = run_alone(again, directory_of(plan.run_dir, 10))
    assert losses(again) == losses(plan)[10:]
    assert resumed.metrics["eval_loss"] == outcome.metrics["eval_loss"]
    mine, theirs = (load_file(o.checkpoint / "model/model.safetensors") for o in (resumed, outcome))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_checkpoint_between_two_log_lines_does_not_show(model, tmp_path, straight):
    """Guards the running mean: at step 12 it must cover steps 9 to 12, not 11 and 12."""
    job = make_job(model, tmp_path, log_every_steps=4)
    plan = make_plan(job, model)
    run_alone(plan)
    before = {line["step"]: line["loss"] for line in records(plan)}
    run_alone(plan, directory_of(plan.run_dir, 10))
    after = {line["step"]: line["loss"] for line in records(plan)}
    assert list(after) == [4, 8, 12, 16, 20]
    assert after == before
    assert after[12] == pytest.approx(sum(losses(straight[0])[8:12]) / 4)


def test_evaluation_reports_acceptance_and_expected_tokens(straight):
    """Guards the teacher-forced estimate: survivals fall with depth, T/F is one plus their sum."""
    metrics = straight[1].metrics
    shares = [metrics[f"eval_acceptance_{depth}"] for depth in (1, 2, 3, 4)]
    assert shares == sorted(shares, reverse=True)
    assert metrics["eval_tokens_per_forward"] == pytest.approx(1 + sum(shares))
    expected = metrics["eval_noisy_ce"] + 2.0 * metrics["eval_clean_ce"]
    assert metrics["eval_loss"] == pytest.approx(expected)
    assert [line["step"] for line in records(straight[0], "eval")] == [20]
    # By which jobs are checked before they start.
    known = evaluated_metrics(straight[0].job.stages[straight[0].stage].objective)
    assert {name for name in metrics if name.startswith("eval_")} == set(known)


def test_evaluations_come_at_their_steps_and_do_not_disturb(model, tmp_path, straight):
    """Guards evaluation against touching training: no draw, no gradient, no batch may be lost."""
    job = changed(make_job(model, tmp_path), eval_every_steps=8)
    plan = make_plan(job, model)
    run_alone(plan)
    assert [line["step"] for line in records(plan, "eval")] == [8, 16, 20]
    assert losses(plan) == losses(straight[0])


def test_the_exported_model_is_an_ordinary_one_with_its_depth(straight):
    """Guards the checkpoint's model directory: plain transformers must load it."""
    directory = straight[1].checkpoint / "model"
    assert read_card(directory).block_size == 4
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.config.vocab_size == len(load_tokenizer(directory))


def test_the_ar_stage_keeps_the_trained_depth(model, tmp_path):
    """Guards the card: fine-tuning a MARS model with the AR objective must not forget its depth."""
    trained = tmp_path / "trained"
    shutil.copytree(model, trained)
    card = json.loads((trained / "mars.json").read_text())
    (trained / "mars.json").write_text(json.dumps(card | {"block_size": 8}))
    job = changed(make_job(trained, tmp_path / "out"), "ar", steps=1)
    outcome = run_alone(make_plan(job, trained, "ar"))
    assert read_card(outcome.checkpoint / "model").block_size == 8


def test_the_stop_file_ends_in_a_checkpoint_that_goes_on(model, tmp_path, straight):
    """Guards Ctrl-C: no step may be lost or done twice."""
    plan = make_plan(make_job(model, tmp_path), model)
    plan.run_dir.mkdir(parents=True)

    def stop(directory, metrics):
        plan.stop_file.touch()

    alone = Ranks.current(torch.device("cpu"))
    outcome = train_stage(plan, alone, None, stop)
    # Asked for after the checkpoint of step 10, seen in the next step.
    assert isinstance(outcome, StageOutcome)
    assert not outcome.finished
    assert outcome.step == 11
    plan.stop_file.unlink()
    assert run_alone(plan, outcome.checkpoint).finished
    assert losses(plan) == losses(straight[0])


def test_resuming_a_finished_stage_does_nothing(straight):
    """Guards a crash between the last checkpoint and the export: nothing may be trained twice."""
    plan, outcome = straight
    again = run_alone(plan, outcome.checkpoint)
    assert again.finished
    assert again.metrics == outcome.metrics


def test_nan_names_the_step_and_the_conversations(model, tmp_path):
    """Guards silent NaN training. One token's embedding is NaN, so the batch is at fault that first
    holds it; every batch of 4 does, hence the first step."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    token = load_tokenizer(broken).encode("####")[-1]
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    error = try_alone(make_plan(make_job(broken, tmp_path / "out"), broken))
    assert isinstance(error, NonFiniteLossError)
    assert "step 1:" in str(error)
    # Guards a learning rate that is blamed for what was NaN before.
    assert f"The weight model.embed_tokens.weight of {broken} is not either" in str(error)
    assert "learning rate" not in str(error)
    indices = str(error).split("conversations ")[1].split(".")[0].split(", ")
    assert len({int(index) for index in indices}) == 4


def test_another_jobs_checkpoint_is_refused(model, tmp_path, straight):
    """Guards resuming with other settings: the curve would be neither job's."""
    plan = make_plan(make_job(model, tmp_path, seed=5), model)
    error = try_alone(plan, directory_of(straight[0].run_dir, 10))
    assert isinstance(error, CheckpointError)
    assert "another job" in str(error)


def test_a_checkpoint_of_other_conversations_is_refused(model, tmp_path):
    """Guards going on at the old place of other data; fewer workers' memory is no such change."""
    source = tmp_path / "rows.jsonl"
    table = {"max_length": 128, "train": {"type": "files", "paths": [str(source)]}}
    job = changed(make_job(model, tmp_path / "out", data=table), "mars", steps=2)
    _write_rows(source, "4")
    run_alone(make_plan(job, model))
    saved = directory_of(make_plan(job, model).run_dir, 2)
    again = make_plan(changed(job, "mars", micro_batch_size=1), model)
    assert run_alone(again, saved).step == 2
    _write_rows(source, "4, which is all that there is to say")
    error = try_alone(make_plan(job, model), saved)
    assert isinstance(error, CheckpointError)
    assert "was trained on other conversations" in str(error)


def _write_rows(path: Path, answer: str) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
    path.write_text((json.dumps({"messages": messages}) + "\n") * 8)


def test_an_output_directory_of_another_job_is_refused(model, tmp_path):
    """Guards a run directory against being overwritten by a changed job file."""
    job = make_job(model, tmp_path / "out")
    _record(job)
    other = changed(job, "mars", steps=21)
    with pytest.raises(TrainingError, match=r"another stages\.mars\.steps\."):
        run_training(other)


def test_stages_in_another_order_are_another_job(model, tmp_path):
    """Guards a stage that would go on from a model which was made after it."""
    content = make_job(model, tmp_path / "out").model_dump(mode="json")
    stage = content["stages"]["mars"]
    _record(TrainJob.model_validate(content | {"stages": {"a": stage, "b": stage}}))
    turned = TrainJob.model_validate(content | {"stages": {"b": stage, "a": stage}})
    with pytest.raises(TrainingError, match="another order of stages"):
        run_training(turned)


def test_a_damaged_record_of_a_run_is_no_other_version(model, tmp_path):
    """Guards "not a job of this version" where the file was cut short."""
    job = make_job(model, tmp_path / "out")
    _record(job)
    record = Path(job.output_dir) / "job.json"
    record.write_text(record.read_text()[:-9])
    with pytest.raises(
        TrainingError, match=r"job\.json, which says what the run is of, is damaged"
    ):
        run_training(job)
    record.write_text('{"job": {"name": "a"}}')
    with pytest.raises(TrainingError, match="not a job of this version"):
        run_training(job)


def _record(job: TrainJob) -> None:
    """As if the job had run to its first checkpoint."""
    saved = directory_of(Path(job.output_dir) / "stages" / next(iter(job.stages)), 10)
    saved.mkdir(parents=True)
    (saved / "manifest.json").touch()
    content = {"job": job.model_dump(mode="json")}
    (Path(job.output_dir) / "job.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "sections",
    [
        {"gradient_checkpointing": True},
        {"data": {"max_length": 128, "packing": False, "train": {"type": "corpus", "count": 64}}},
    ],
    ids=["gradient checkpointing", "no evaluation"],
)
def test_settings_that_must_not_change_the_loss(sections, model, tmp_path, straight):
    """Guards recomputation and evaluation against changing what is trained."""
    job = changed(make_job(model, tmp_path, **sections), steps=20)
    plan = make_plan(job, model)
    run_alone(plan)
    assert losses(plan)[:5] == pytest.approx(losses(straight[0])[:5], rel=1e-5)


@pytest.mark.parametrize("changes", [{"micro_batch_size": 1}, {"layout": "paper"}])
def test_micro_batches_and_layouts_give_the_same_curve(changes, model, tmp_path, straight):
    """Guards the global division, and the paper's layout against the compact one."""
    job = make_job(model, tmp_path)
    if "layout" in changes:
        changes = {"objective": {"type": "mars"} | changes}
    plan = make_plan(changed(job, **changes), model)
    run_alone(plan)
    assert losses(plan) == pytest.approx(losses(straight[0]), rel=1e-4)


def test_bfloat16_stays_close_to_float32(model, tmp_path, straight):
    """Guards autocast over float32 weights: updates rounded to bfloat16 would stall."""
    plan = make_plan(make_job(model, tmp_path, precision="bfloat16"), model)
    outcome = run_alone(plan)
    assert losses(plan) == pytest.approx(losses(straight[0]), rel=0.02)
    weights = load_file(outcome.checkpoint / "model/model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_packed_rows_train(model, tmp_path):
    """Guards packing end to end: several conversations in one row, and a falling loss."""
    job = make_job(model, tmp_path)
    data = job.data.model_dump() | {"packing": True, "max_length": 256}
    job = changed(job.model_copy(update={"data": job.data.model_validate(data)}))
    plan = make_plan(changed(job, global_batch_size=2), model)
    assert run_alone(plan).finished
    assert losses(plan)[-1] < losses(plan)[0]


def test_a_stage_of_minutes_sets_its_length_by_its_first_steps(model, tmp_path):
    """Guards a budget that nobody keeps: the rate has to come down within it, and a run that goes
    on keeps the length that was set. 0.05 minutes are some dozens of these steps."""
    job = make_job(model, tmp_path)
    job = changed(job, steps=None, minutes=0.05)
    outcome = run_alone(make_plan(job, model))
    assert outcome.finished
    assert outcome.total_steps >= 10
    assert outcome.seconds < 60
    lengths = records(make_plan(job, model), "length")
    assert [length["step"] for length in lengths] == [10 * 2**n for n in range(len(lengths))]
    assert lengths[-1]["total_steps"] == outcome.total_steps
    last = records(make_plan(job, model))[-1]
    assert last["step"] == outcome.total_steps
    assert last["lr"] < 5e-3 / 2
    again = run_alone(make_plan(job, model), outcome.checkpoint)
    assert (again.step, again.total_steps) == (outcome.step, outcome.total_steps)


def test_a_stage_that_is_resumed_early_keeps_its_minutes(model, tmp_path, monkeypatch):
    """Guards four times the minutes after a stop amid the steps that are timed. The clock is looked
    at a few times a step, and goes on by a second each time."""
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=count().__next__))
    job = make_job(model, tmp_path, checkpoint={"every_steps": 9, "keep": 99}, log_every_steps=99)
    plan = make_plan(changed(job, steps=None, minutes=2.0), model)
    whole = run_alone(plan)
    again = run_alone(plan, directory_of(plan.run_dir, 9))
    assert 20 < whole.total_steps < 130
    assert again.total_steps == pytest.approx(whole.total_steps, rel=0.25)


@pytest.mark.parametrize("epochs", [3.0, 0.2])
def test_minutes_that_outlast_the_epochs_end_with_them(model, tmp_path, epochs):
    """Guards a long budget on few rows, 314 steps on nine answers; and fewer steps than are timed,
    which were ten, and ten more after each resume."""
    job = changed(make_job(model, tmp_path), steps=None, minutes=60.0, epochs=epochs)
    plan = make_plan(job, model)
    outcome = run_alone(plan)
    once = changed(make_job(model, tmp_path / "once"), steps=None, epochs=epochs)
    assert outcome.finished
    assert outcome.total_steps == run_alone(make_plan(once, model)).total_steps
    assert run_alone(plan, outcome.checkpoint).total_steps == outcome.total_steps
