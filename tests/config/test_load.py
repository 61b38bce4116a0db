"""Job files, overrides and what their errors say."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from reference_pages import configuration

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.inputs import PretrainedModel
from mars_ray.config.load import JOB_KINDS, load_job, parse_job, read_toml
from mars_ray.config.scaling import ScalingConfig
from mars_ray.config.train import BestCheckpoint, MarsObjective, TrainJob
from mars_ray.errors import ConfigError
from mars_ray.simulator.config import KINDS

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.toml"))


def train_table() -> dict:
    return {
        "kind": "train",
        "name": "t",
        "output_dir": "runs/t",
        "model": {"type": "preset", "preset": "tiny"},
        "data": {"train": {"type": "corpus", "count": 10}},
        "stages": {
            "mars": {
                "objective": {"type": "mars"},
                "optimizer": {"learning_rate": 1e-3},
                "steps": 10,
                "global_batch_size": 4,
            }
        },
    }


def refusal(*overrides: str, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_job(train_table() | changes, source="job.toml", overrides=overrides)
    return str(caught.value)


def test_every_job_file_is_a_complete_run():
    """Guards a renamed field that a shipped job still uses."""
    assert len(JOBS) >= 6
    for path in JOBS:
        job = load_job(path, kinds=JOB_KINDS | KINDS)
        assert type(job).model_validate_json(job.model_dump_json()) == job


def test_overrides_are_toml_or_strings():
    """Guards numbers arriving as strings and strings needing shell-hostile quotes."""
    job = parse_job(
        train_table(),
        source="x",
        overrides=[
            "stages.mars.steps=7",
            "stages.mars.objective.block_size={type='constant', size=8}",
            "output_dir=runs/other",
            "data.packing=true",
        ],
    )
    assert isinstance(job, TrainJob)
    stage = job.stages["mars"]
    assert stage.steps == 7
    assert isinstance(stage.objective, MarsObjective)
    assert stage.objective.max_block_size == 8
    assert job.output_dir == "runs/other"
    assert job.data.packing is True


def test_unknown_keys_name_file_key_and_nearest():
    """Also inside a dict of stages and behind the tag of a union, which no user wrote as a key."""
    message = refusal("stages.mars.optimizer.learnin_rate=1")
    assert message == (
        "override 'stages.mars.optimizer.learnin_rate=1': unknown key "
        "'stages.mars.optimizer.learnin_rate'; did you mean 'stages.mars.optimizer.learning_rate'?"
    )
    message = refusal("stages.mars.objective.grids=zero")
    assert "'stages.mars.objective.grids'; did you mean 'stages.mars.objective.grid'?" in message
    message = refusal('data.train={type="files", paths=["a"], path="x"}')
    assert "'data.train.path'; did you mean 'data.train.paths'?" in message
    assert "'outputdir'; did you mean 'output_dir'?" in refusal("outputdir=x")
    assert "known here: " in refusal("data.train.zzz=1")


def test_keys_of_another_section_and_names_of_vllm_are_understood():
    """Guards suggestions of what merely looks alike: `model_name` for `max_model_len`."""
    table = {"kind": "serve", "checkpoint": "m"}
    for key, meant in {
        "draft_adapter": "engine.draft_adapter",
        "max_model_len": "engine.max_context",
        "tensor_parallel_size": "engine.tensor_parallel_size",
        "served_model_name": "model_name",
        "new_tokens": "limits.new_tokens",
    }.items():
        with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{meant}'"):
            parse_job(dict(table), source="job.toml", overrides=[f"{key}=1"])


def test_a_slip_in_a_key_of_another_section_is_understood():
    """Guards a list of all keys for a letter that is missing."""
    with pytest.raises(ConfigError, match=r"did you mean 'engine\.max_batch'"):
        parse_job({"kind": "serve", "checkpoint": "m", "max_batc": 3}, source="job.toml")
    with pytest.raises(ConfigError, match=r"'adapt\.minuts'; did you mean 'adapt\.minutes'"):
        load_job(ROOT / "jobs" / "demo.toml", ["adapt.minuts=3"])


def test_what_set_a_key_is_named():
    """Guards the name of a file that does not have the key; a long override is cut."""
    message = refusal("seed=-1", stages={})
    assert "override 'seed=-1': seed: " in message
    assert "job.toml: stages: " in message
    long = f"model={{type='preset', preset='{'x' * 80}'}}"
    assert f"override {long[:60] + '...'!r}: model.preset: " in refusal(long)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("replicas=0", "replicas: Input should be greater than or equal to 1, or 'auto'"),
        ("default_mode={type='a'}", "default_mode.type: Input should be one of 'exact', "),
        ("default_quality=turbo", "'turbo' is none of lossless, balanced, fast"),
        ("engine=3", "engine: Input should be a table"),
        ("allowed_origins=3", "allowed_origins: Input should be a list: 'allowed_origins=[...]'"),
    ],
)
def test_values_are_refused_in_one_line_without_names_of_types(override, said):
    """Guards "Input tag 'a' found using 'type'", and a line for each member of a union."""
    with pytest.raises(ConfigError) as caught:
        parse_job({"kind": "serve", "checkpoint": "m"}, source="job.toml", overrides=[override])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_member_of_a_union_is_no_key():
    """Guards 'model.preset.x', which nobody can write, and an empty list of what is known."""
    message = refusal("model.vocab_sizee=3")
    assert message.endswith("unknown key 'model.vocab_sizee'; did you mean 'model.vocab_size'?")
    assert "'model.preset=tinny': model.preset: " in refusal("model.preset=tinny")
    message = refusal("stages.mars.objective.ar_weight={start=1, ende=2}")
    assert "did you mean 'stages.mars.objective.ar_weight.end'?" in message
    assert "LinearWeight" not in message
    assert ": stages.mars.objective.ar_weight: " in refusal("stages.mars.objective.ar_weight=-1")


def test_a_number_that_is_meant_as_text_is_to_be_quoted():
    """Names and commits may look like numbers or dates, and a shell takes quotes away."""
    assert refusal("name=123").endswith("""; quote it: 'name="123"'""")
    assert "2024-05-01" in refusal("name=2024-05-01")
    assert "quote" not in refusal("name=[1]")
    assert isinstance(parse_job(train_table(), source="x", overrides=['name="123"']), TrainJob)


CURRICULUM = "{type='curriculum', steps=[{progress=0, size=2}, {progress=1.0, size=16}]}"


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "seed=36893488147419103232",
        "output_dir=",
        "model={type='pretrained', path=''}",
        "cluster.step_timeout_s=1e18",
        "stages.mars.optimizer.betas=[0.9, 1.0]",
        "stages.mars.optimizer.betas=[-1, 0.9]",
        "stages.mars.objective.depth_weights=[0, 0, 0, 0, 1]",
        f"stages.mars.objective.block_size={CURRICULUM}",
    ],
)
def test_what_would_fail_in_a_worker_is_refused_here(override):
    """Guards three restarts of the workers, or depths that are never trained."""
    assert f": {override.split('=')[0].rpartition('.')[0]}" in refusal(override)


def test_a_model_may_lie_below_home(monkeypatch):
    """As output_dir and data may; `~` was taken for a directory of that name."""
    monkeypatch.setenv("HOME", "/home/ann")
    job = parse_job(
        train_table(), source="x", overrides=["model={type='pretrained', path='~/models/a'}"]
    )
    assert isinstance(job, TrainJob)
    assert isinstance(job.model, PretrainedModel)
    assert job.model.path == "/home/ann/models/a"


@pytest.mark.parametrize("destination", ["s3:/bucket/models/mars", "file:/models/mars"])
def test_a_uri_of_one_slash_is_refused(destination):
    """Guards an export to ./s3:/bucket, told as one to the bucket."""
    table = {"kind": "export", "checkpoint": "a"}
    with pytest.raises(ConfigError, match="one slash where a URI has two"):
        parse_job(table | {"destination": destination}, source="x")
    for good in ("s3://bucket/models/mars", "models/mars", "/models/s3:/mars"):
        parse_job(table | {"destination": good}, source="x")


def test_the_reference_shows_a_sections_own_defaults():
    """Guards the class's defaults in place of the field's: 512 tokens where 4,000 are sent."""
    assert (
        "`{'prompt_mean': 4000.0, 'output_mean': 1000.0, 'cv': 0.0}`, else see" in configuration()
    )


def test_other_errors_name_the_key():
    """Missing keys, wrong values, conditions between fields."""
    table = train_table()
    del table["name"]
    with pytest.raises(ConfigError, match="missing key 'name'"):
        parse_job(table, source="job.toml")
    assert "stages.mars.steps: " in refusal("stages.mars.steps=0")
    assert "either steps, or epochs or minutes" in refusal("stages.mars.epochs=1")
    assert "4 does not divide by 3 workers" in refusal("cluster.workers=3")
    assert "'nonsense'" in refusal(kind="nonsense")
    assert "not ['train']" in refusal("kind=['train']")


@pytest.mark.parametrize(
    ("path", "override"),
    [
        ("simulate-demo", "cold_starts_s=[-5]"),
        ("simulate-demo", "seeds=[-1]"),
        ("simulate-demo", "traces={ramp={type='ramp', rates_rps=[2, -4]}}"),
        ("bench-demo", "batch_sizes=[0]"),
    ],
)
def test_numbers_in_a_list_have_bounds_too(path, override):
    """Guards what would fail after hours, or be taken for another number in silence."""
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        load_job(f"jobs/{path}.toml", [override], JOB_KINDS | KINDS)


def test_settings_of_a_cluster_that_contradict_each_other():
    """Guards settings without an effect, and a bucket taken for a directory of that name."""
    elastic = parse_job(
        train_table(), source="x", overrides=["cluster.workers=3", "cluster.min_workers=1"]
    )
    assert isinstance(elastic, TrainJob)
    assert "must be below workers 1" in refusal("cluster.min_workers=1")
    assert "no effect without min_workers" in refusal("cluster.resize_check_s=5")
    assert "goes to checkpoint.storage_path" in refusal("output_dir=s3://bucket/run")
    assert "checkpoint.storage_path: " in refusal("checkpoint.storage_path=/mnt/runs")
    assert "checkpoint.best needs data.eval" in refusal("checkpoint.best={}")
    zero_2 = "engine={type='deepspeed', zero_stage=2, offload='all'}"
    assert "needs zero_stage 3" in refusal(zero_2)


def test_the_best_is_told_by_a_metric_of_every_stage():
    """Guards a typo, or a metric of the second stage, that ends a run at its first checkpoint."""
    tables = train_table()["stages"]
    both = {"ar": tables["mars"] | {"objective": {"type": "ar"}}} | tables
    evaluated = "data.eval={type='corpus', count=4}"
    speed = "checkpoint.best={metric='eval_tokens_per_forward'}"
    assert "is not among what stages.ar evaluates" in refusal(evaluated, speed, stages=both)
    message = refusal(evaluated, "checkpoint.best={metric='eval_acceptance_5'}")
    assert message.endswith("eval_acceptance_3, eval_acceptance_4")
    parse_job(train_table(), source="x", overrides=[evaluated, speed])
    loss = "checkpoint.best={metric='eval_clean_ce'}"
    parse_job(train_table() | {"stages": both}, source="x", overrides=[evaluated, loss])


@pytest.mark.parametrize(
    ("settings", "highest"),
    [
        ({}, False),
        ({"metric": "eval_noisy_ce"}, False),
        ({"metric": "eval_tokens_per_forward"}, True),
        ({"metric": "eval_acceptance_2"}, True),
        ({"metric": "eval_acceptance_2", "mode": "min"}, False),
        ({"metric": "eval_loss", "mode": "max"}, True),
    ],
)
def test_the_best_of_a_metric_is_what_is_better(settings, highest):
    """Guards a run that keeps, and exports, its slowest model."""
    assert BestCheckpoint.model_validate(settings).wants_highest is highest


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("evaluate.modes=[{type='verified'}]", "evaluate.modes"),
        ("evaluate.modes=[{type='verified', window=4}, {type='confidence'}]", "evaluate.modes"),
        ("serve.keys_file=keys.toml", "serve.keys_file"),
    ],
)
def test_a_demo_that_cannot_end_is_refused(override, key):
    """Guards a traceback after ten minutes, in the place of the result."""
    with pytest.raises(ConfigError, match=key):
        load_job(ROOT / "jobs" / "demo-tiny.toml", [override])


def test_a_demo_of_one_stage_is_refused():
    """It compares the last two."""
    table = read_toml(ROOT / "jobs" / "demo-tiny.toml")
    del table["train"]["stages"]["ar"]
    with pytest.raises(ConfigError, match=r"train\.stages"):
        parse_job(table, source="demo.toml")


def test_modes_of_a_sweep_differ(monkeypatch):
    """Guards a refusal after all trials have been trained."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=r"objectives\.modes: holds .* twice"):
        load_job("jobs/tune-demo.toml", ["objectives.modes=['verified', 'verified']"])


def test_anchored_rows_need_whole_weights():
    """Guards workers that wait for each other: one whose rows have no anchored one stays away."""
    anchored = [
        "data.own={type='corpus', count=4}",
        "stages.mars.objective.anchor_weight=1.0",
        "cluster.workers=2",
    ]
    message = refusal("engine={type='deepspeed', zero_stage=3}", *anchored)
    assert "anchor_weight does not work with engine.zero_stage 3" in message


def test_unusable_files_and_overrides(tmp_path):
    """Each says what is wrong instead of a traceback."""
    with pytest.raises(ConfigError, match="no such job file"):
        load_job(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"a directory; name a job file, JOB\.toml"):
        load_job(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("kind = ")
    with pytest.raises(ConfigError, match="not valid TOML: "):
        load_job(broken)
    assert "write it as key.subkey=value" in refusal("steps")
    assert "'name' is a value, not a table" in refusal("name.x=1")


def test_a_job_is_frozen_and_survives_json():
    """The resolved JSON is stored with every checkpoint and has to mean the same job."""
    job = load_job(next(path for path in JOBS if path.name == "evaluate-gsm8k.toml"))
    assert isinstance(job, EvaluateJob)
    assert EvaluateJob.model_validate_json(job.model_dump_json()) == job
    with pytest.raises(ValueError, match="frozen"):
        job.max_new_tokens = 1


def test_config_imports_neither_torch_nor_ray():
    """A fresh process: the command line reads jobs before it pays for either."""
    code = "import sys, mars_ray.config.load; print({'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_help_is_quick():
    """In processor time, so that a busy machine does not fail it; the best of three processes."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "mars_ray", "--help"], capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 1.0


@pytest.mark.parametrize("key", sorted(ScalingConfig.gone))
def test_a_key_of_an_earlier_release_says_what_has_taken_its_place(key):
    """Guards an operator who is told of a slip of the pen."""
    assert key not in ScalingConfig.model_fields
    table = {"kind": "serve", "checkpoint": "m", "scaling": {key: 1}}
    with pytest.raises(ConfigError, match=rf"unknown key 'scaling\.{key}'; it is gone: .{{20}}"):
        parse_job(table, source="job.toml")
