"""The search space against the real configuration."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.search.variant_generator import generate_variants
from rich.console import Console
from tune.sweeps import make_sweep, make_table

from mars_ray.config.evaluate import Gsm8kTask
from mars_ray.config.load import parse_job, read_toml
from mars_ray.config.train import MarsObjective, MixedBlockSize
from mars_ray.config.tune import TuneJob
from mars_ray.errors import ConfigError, DataError, TrainingError
from mars_ray.tune.search import check_space, domains, draw, trial_job, values_at
from mars_ray.tune.sweep import _claim, absolute, run_trials, trials_at_once
from mars_ray.tune.trial import job_of

NOWHERE = Path("nowhere")
SIZES = {"type": "choice", "values": [{"type": "constant", "size": size} for size in (2, 4)]}


def with_space(**space: Any) -> TuneJob:
    keys = {key.replace("__", "."): value for key, value in space.items()}
    return make_sweep(NOWHERE, NOWHERE, space=keys)


def test_a_point_becomes_the_job_with_its_settings():
    """Guards a choice of tables: what searchers draw is an index."""
    job = make_sweep(NOWHERE, NOWHERE)
    values = values_at(job, {"optimizer.learning_rate": 2e-3, "objective.block_size": 1})
    stage = trial_job(job, values).stages["mars"]
    assert stage.optimizer.learning_rate == 2e-3
    assert isinstance(stage.objective, MarsObjective)
    assert stage.objective.block_size == MixedBlockSize(sizes=(2, 4), weights=(1.0, 1.0))


def test_a_grid_is_every_combination_once():
    """Guards a sweep that leaves out the setting that others are compared with."""
    shares = {"type": "choice", "values": [0.5, 0.75, 1.0]}
    space = {"objective.block_size": SIZES, "objective.noisy_share": shares}
    job = make_sweep(NOWHERE, NOWHERE, searcher="grid", trials=None, space=space)
    assert job.trial_count == 6
    found = [json.dumps(values_at(job, point)) for _, point in generate_variants(domains(job))]
    assert len(found) == len(set(found)) == 6
    # A point that is no job is refused before any trial, wherever in the grid it lies.
    shares["values"].append(1.5)
    with pytest.raises(ConfigError, match="noisy_share"):
        check_space(make_sweep(NOWHERE, NOWHERE, searcher="grid", trials=None, space=space))


def test_trials_of_equal_minutes():
    """Other schedules' steps cost more; early stopping compares by steps."""
    table = make_table(NOWHERE, NOWHERE, scheduler={"type": "none"})
    stage = table["train"]["stages"]["mars"]
    stage["minutes"] = stage.pop("steps") / 60
    job = parse_job(table, source="test")
    assert isinstance(job, TuneJob)
    assert job.stage.minutes == 0.2
    table["scheduler"] = {"type": "asha", "grace_steps": 3}
    with pytest.raises(ConfigError, match="asha needs steps"):
        parse_job(table, source="test")


def test_drawn_points_lie_in_the_space():
    """Guards off-by-one ends of integer ranges, by 300 draws of three values each."""
    low_high = {"low": 2, "high": 4}
    job = with_space(
        objective__block_size__size={"type": "int_range", **low_high},
        objective__ar_weight={"type": "uniform", **low_high},
    )
    generator = np.random.default_rng(0)
    points = [values_at(job, draw(job, generator)) for _ in range(300)]
    assert {point["objective.block_size.size"] for point in points} == {2, 3, 4}
    assert all(2 <= point["objective.ar_weight"] <= 4 for point in points)


@pytest.mark.parametrize(
    ("space", "names"),
    [
        ({"objective__noisy_sahre": {"type": "uniform", "low": 0, "high": 1}}, "noisy_share"),
        ({"objective__noisy_share": {"type": "uniform", "low": 0.5, "high": 1.5}}, "noisy_share"),
        ({"objective__grid": {"type": "choice", "values": ["zero", "somewhere"]}}, "grid"),
        ({"objective__grid__size": {"type": "int_range", "low": 1, "high": 4}}, "grid"),
    ],
)
def test_a_space_beyond_the_configuration_is_refused_before_anything_starts(
    space: dict[str, Any], names: str
):
    """Guards a sweep whose trials fail one by one after an hour."""
    with pytest.raises(ConfigError, match=names):
        check_space(with_space(**space))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": {"steps": {"type": "int_range", "low": 1, "high": 4}}}, "begin with"),
        ({"scheduler": {"type": "asha", "grace_steps": 10}}, "grace_steps 10 is never reached"),
        ({"trials": None}, "give trials"),
        ({"searcher": "grid"}, r"space\.optimizer\.learning_rate: searcher grid wants a choice"),
        ({"searcher": "grid", "space": {"objective.grid": SIZES}}, "not with searcher grid"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_sweep(NOWHERE, NOWHERE, **change)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ({"type": "confidence", "window": 16}, "asks for 16 masks, more than block size"),
        ({"type": "verified", "branches": 8, "groups": 60}, "lower branches or groups"),
    ],
)
def test_a_mode_that_no_trial_can_decode_in_is_refused_before_any_is_trained(
    mode: dict[str, Any], message: str
):
    table = copy.deepcopy(make_table(NOWHERE, NOWHERE))
    table["objectives"]["modes"] = [mode]
    with pytest.raises(ConfigError, match=message):
        check_space(parse_job(table, source="test"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None, "epochs": 1}, "steps"),
        ({"objective": {"type": "ar"}}, "mars"),
        ({"eval_every_steps": None}, "eval_every_steps"),
    ],
)
def test_a_stage_that_cannot_be_compared_is_refused(change: dict[str, Any], message: str):
    """Guards early stopping of trials that never report."""
    table = copy.deepcopy(make_table(NOWHERE, NOWHERE))
    stage = table["train"]["stages"]["mars"] | change
    table["train"]["stages"]["mars"] = {k: v for k, v in stage.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        parse_job(table, source="test")


def test_the_training_job_may_be_a_file(tmp_path: Path):
    """And overrides reach into it."""
    table = make_table(NOWHERE, NOWHERE)
    path = Path(__file__).parents[2] / "jobs" / "train-gsm8k.toml"
    table["train"] = str(path)
    overrides = ["train.stages.mars.eval_every_steps=50"]
    job = parse_job(table, source="test", overrides=overrides)
    assert isinstance(job, TuneJob)
    assert job.stage.eval_every_steps == 50
    assert job.train.name == read_toml(path)["name"]


def test_another_training_job_may_be_named_on_the_command_line():
    """Overrides behind it reach into that one, others are replaced by it."""
    path = Path(__file__).parents[2] / "jobs" / "train-gsm8k.toml"
    overrides = ["train.name=lost", f"train={path}", "train.stages.mars.eval_every_steps=50"]
    job = parse_job(make_table(NOWHERE, NOWHERE), source="test", overrides=overrides)
    assert isinstance(job, TuneJob)
    assert job.train.name == read_toml(path)["name"]
    assert job.stage.eval_every_steps == 50


def test_generation_that_would_be_refused_is_refused_before_any_trial(tmp_path: Path):
    """Guards a sweep that is lost when all its trials have ended: by default an engine takes steps
    of 512 rows, and a model of block size 24 asks for more."""
    space = {
        "objective.block_size": {"type": "choice", "values": [{"type": "constant", "size": 24}]}
    }
    table = make_table(NOWHERE, tmp_path / "sweep", space=space)
    table["objectives"]["modes"] = [{"type": "verified", "groups": 65}]
    large = parse_job(table, source="test")
    assert isinstance(large, TuneJob)
    with pytest.raises(ConfigError, match=r"max_step_tokens 512 is too small: .* of 625 rows"):
        check_space(large)
    larger = parse_job(table, source="test", overrides=["objectives.engine.max_step_tokens=625"])
    assert isinstance(larger, TuneJob)
    check_space(larger)
    with pytest.raises(ConfigError, match="objectives: max_new_tokens 160 leaves no room"):
        parse_job(table, source="test", overrides=["objectives.max_new_tokens=160"])
    misspelt = {"type": "gsm8k", "path": str(tmp_path / "tset.jsonl")}
    table = make_table(NOWHERE, tmp_path / "sweep")
    table["objectives"]["task"] = misspelt
    job = parse_job(table, source="test")
    assert isinstance(job, TuneJob)
    with pytest.raises(DataError, match=r"tset\.jsonl: no such file"):
        run_trials(job, Console(quiet=True))
    assert not (tmp_path / "sweep").exists()


def test_what_decides_no_trial_may_be_mended_later(tmp_path: Path):
    """Guards all that was trained, lost because of a setting of what comes after it."""
    table = make_table(NOWHERE, tmp_path / "sweep")

    def claim(*overrides: str) -> None:
        job = parse_job(table, source="test", overrides=overrides)
        assert isinstance(job, TuneJob)
        _claim(absolute(job), job)

    claim()
    claim("objectives.engine.max_step_tokens=1024", "objectives.max_survivors=1")
    written = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["job"]
    assert written["objectives"]["engine"]["max_step_tokens"] == 1024
    with pytest.raises(TrainingError, match=r"with another objectives\.clean_ce_weight, trials\."):
        claim("objectives.clean_ce_weight=1", "trials=3")


def test_a_sweep_goes_on_in_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards a submitted sweep: its data travel with it, into another directory at each start."""

    def go(where: str, path: str) -> None:
        (tmp_path / where).mkdir()
        monkeypatch.chdir(tmp_path / where)
        table = make_table(NOWHERE, tmp_path / "sweep")
        table["train"]["data"]["train"] = {"type": "files", "paths": [path]}
        job = parse_job(table, source="test")
        assert isinstance(job, TuneJob)
        _claim(absolute(job), job)

    go("one", "rows.jsonl")
    go("two", "rows.jsonl")
    go("three", str(tmp_path / "two" / "rows.jsonl"))
    with pytest.raises(TrainingError, match="holds another sweep, with another train"):
        go("four", "rows.jsonl")


def test_trials_keep_their_copies_apart():
    """Guards a trial against another's checkpoint, which it would go on from and be refused by."""
    table = make_table(NOWHERE, NOWHERE)
    table["train"]["checkpoint"]["storage_path"] = "s3://bucket/runs?region=eu"
    job = parse_job(table, source="test")
    assert isinstance(job, TuneJob)
    values = values_at(job, {"optimizer.learning_rate": 2e-3, "objective.block_size": 1})
    one, other = (job_of(job, trial, values).checkpoint.storage_path for trial in ("a", "b"))
    assert one is not None
    assert other == one.replace("/trials/a/", "/trials/b/")
    assert one.startswith("s3://bucket/runs/trials/a/")
    assert one.endswith("?region=eu")


def test_a_sweep_does_not_depend_on_where_it_is_asked_for():
    """Guards problems that are looked for in a worker's directory, once all trials have ended."""
    table = make_table(NOWHERE, NOWHERE)
    table["objectives"]["task"] = {"type": "gsm8k", "path": "data/test.jsonl"}
    job = parse_job(table, source="test")
    assert isinstance(job, TuneJob)
    task = absolute(job).objectives.task
    assert isinstance(task, Gsm8kTask)
    assert Path(task.path) == Path.cwd() / "data/test.jsonl"


def test_a_sweep_may_ask_for_more_than_is_there():
    """Guards one trial at a time, for good, on a cluster that grows when it is asked."""
    space = {"type": "uniform", "low": 0.5, "high": 1.0}
    job = with_space(objective__noisy_share=space).model_copy(update={"trials": 6})
    there = {"CPU": float(job.train.cluster.workers * job.train.cluster.cpus_per_worker)}
    assert trials_at_once(job, {}) == trials_at_once(job, there) == 1
    many = {"CPU": 64.0, "GPU": 2.0 * job.train.cluster.workers}
    assert trials_at_once(job, many) == 2, "a GPU for each worker, where there are any"
    assert trials_at_once(job.model_copy(update={"max_concurrent": 4}), there) == 4
    assert trials_at_once(job.model_copy(update={"max_concurrent": 8}), there) == 6
