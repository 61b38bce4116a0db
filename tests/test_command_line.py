"""What the command line does before and after the work of its commands."""

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from told import looks_like_a_model
from typer.testing import CliRunner, Result

from mars_ray import cli
from mars_ray.cli import app
from mars_ray.cluster.connection import Connection
from mars_ray.cluster.machine import ask_for_token
from mars_ray.errors import ConfigError
from mars_ray.evaluate import bench as bench_module
from mars_ray.files import replaced


@pytest.mark.parametrize("command", ["serve", "update"])
@pytest.mark.parametrize(
    "target", ["s3://bucket/models/mars", "file:///models/mars.toml", "runs/demo", "org/name"]
)
def test_a_checkpoint_arrives_as_it_was_typed(command: str, target: str, resolved):
    """Guards a URI that goes through a path, which leaves one of its slashes."""
    assert resolved([command, target])["checkpoint"] == target


def test_what_everybody_sets_has_a_flag(resolved):
    """By vLLM's names where it has one; a key behind it wins."""
    flags = ["--port", "8001", "--adapter", "a dir", "--max-model-len", "512", "--gpus", "0.5"]
    flags += ["--served-model-name", "x", "--replicas", "2", "--dtype", "float32", "--keys", "k"]
    flags += ["--max-num-seqs", "3"]
    job = resolved(["serve", "m", *flags, "port=8002"])
    expected = {"draft_adapter": "a dir", "max_context": 512, "dtype": "float32", "max_batch": 3}
    assert {name: job["engine"][name] for name in expected} == expected
    kept = ("port", "model_name", "replicas", "gpus_per_replica", "keys_file")
    assert [job[name] for name in kept] == [8002, "x", 2, 0.5, "k"]
    flags = ["--engine", "vllm", "--tensor-parallel-size", "2", "--host", "0.0.0.0"]
    job = resolved(["serve", "m", *flags])
    assert (job["engine"]["type"], job["engine"]["tensor_parallel_size"]) == ("vllm", 2)
    assert job["host"] == "0.0.0.0"


def test_a_model_may_stand_where_a_job_does(resolved):
    """Guards a job file that is needed for one path."""
    job = resolved(["generate", "m/One", "--prompts", "a.txt", "--prompts", "b.txt", "mode=exact"])
    assert (job["checkpoint"], job["output"]) == ("m/One", "runs/answers/one.jsonl")
    assert [source["paths"] for source in job["prompts"]] == [["a.txt", "b.txt"]]
    assert resolved(["generate", "m", "--prompts", "a.txt", "--output", "x.jsonl"])["output"] == (
        "x.jsonl"
    )
    assert resolved(["generate", "jobs/generate-demo.toml", "max_new_tokens=8"])["prompts"]
    job = resolved(["train", "m/One", "--data", "a.jsonl", "stages.mars.epochs=1"])
    assert (job["model"]["path"], job["output_dir"]) == ("m/One", "runs/train-one")
    assert [stage["epochs"] for stage in job["stages"].values()] == [5, 1]
    job = resolved(["export", "m", "s3://bucket/m?a=b", "revision=c"])
    assert (job["checkpoint"], job["destination"]) == ("m", "s3://bucket/m?a=b")
    assert resolved(["demo", "adapt.service.port=8001"])["adapt"]["service"]["port"] == 8001
    job = resolved(["export", "m", "destination=x", "revision=c"])
    assert (job["destination"], job["revision"]) == ("x", "c")
    assert resolved(["export", "jobs/export-demo.toml", "/some/where"])["destination"] == (
        "/some/where"
    )
    job = resolved(["train", "m", "--data", "a.jsonl", "stages.ar.steps=7"])
    assert [stage["steps"] for stage in job["stages"].values()] == [7, None]
    job = resolved(["export", "jobs/export-demo.toml", "destination=x", "model_cache=y"])
    assert (job["destination"], job["model_cache"]) == ("x", "y")
    for words, said in (
        (["generate", "m"], "--prompts"),
        (["generate", "jobs/generate-demo.toml", "--output", "x.jsonl"], "output="),
        (["train", "m"], "--data"),
        (["train", "jobs/demo-tiny.toml", "--data", "a.jsonl"], "data.train.paths="),
        (["export", "m"], "destination"),
        (["serve", "m", "--tensor-parallel-size", "2"], r"engine\.type=vllm has it"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolved(words)


def test_the_help_of_overrides_holds_for_every_command():
    """Guards `For example seed=1`, which most jobs refuse."""
    runner = CliRunner()
    for command in (["train"], ["serve"], ["update"], ["export"], ["bench"]):
        said = " ".join(runner.invoke(app, [*command, "--help"]).output.replace("│", " ").split())
        assert "KEY: of the job, or SECTION.KEY." in said
        if command[0] in ("serve", "update"):
            assert "Directory, hub name or URI; or a job." in said


def test_a_service_may_be_a_job_file(resolved):
    assert resolved(["serve", "jobs/serve-demo.toml"])["checkpoint"] == "runs/demo/models/mars"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory that a benchmark takes for a model."""
    return str(looks_like_a_model(tmp_path / "model"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Benchmarks that are done at once, and how often."""
    calls: list[str] = []

    def bench(*_: object) -> dict[str, float]:
        calls.append("done")
        return {"tokens_per_s": 1.5}

    monkeypatch.setattr(bench_module, "run_bench", bench)
    return calls


def told_of(model: str, output: Path) -> Result:
    words = ["bench", model, "--output", str(output)]
    return CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_result_that_cannot_be_written_is_told_before_the_measurement(
    measured: list[str], model: str, tmp_path: Path
):
    """Guards an hour of a GPU whose result is nowhere."""
    below_a_file = tmp_path / "file"
    below_a_file.touch()
    for output in (tmp_path, below_a_file / "result.json"):
        with pytest.raises(ConfigError, match=f"cannot write {output}: .*--output"):
            CliRunner().invoke(
                app, ["bench", model, "--output", str(output)], catch_exceptions=False
            )
    assert not measured


def test_a_result_is_written_and_printed(measured: list[str], model: str, tmp_path: Path):
    """In a directory that is made."""
    output = tmp_path / "new" / "result.json"
    done = CliRunner().invoke(
        app, ["bench", model, "--output", str(output)], catch_exceptions=False
    )
    assert json.loads(output.read_text()) == json.loads(done.output) == {"tokens_per_s": 1.5}


def test_a_result_is_printed_also_if_the_disk_is_full(
    measured: list[str], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was measured is then somewhere."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    done = CliRunner().invoke(app, ["bench", model, "--output", str(tmp_path / "result.json")])
    assert json.loads(done.output) == {"tokens_per_s": 1.5}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a user whose files everybody may read, as on many shared machines."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def write_token(**_: object) -> None:
    """As Ray does it for a cluster that it starts."""
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or not path.read_text():
        path.write_text("secret")


def test_a_clusters_token_is_for_its_owner(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards a cluster that runs code for every account of the machine."""
    monkeypatch.setattr(ray, "init", write_token)
    token = home / ".ray" / "auth_token"
    Connection().open()
    assert "RAY_AUTH_MODE" not in os.environ, "Ray, imported here, has read it already"
    assert token.read_text() == "secret"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    token.chmod(0o644)
    Connection().open()
    assert token.read_text() == "secret"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_a_token_is_asked_for_before_ray_is_imported(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Not every release of Ray has one by default. Later it would be too late: a command that set
    it then had a cluster whose first client was refused."""
    monkeypatch.delitem(sys.modules, "ray")
    ask_for_token()
    assert os.environ.pop("RAY_AUTH_MODE") == "token"


def test_who_joins_a_cluster_makes_no_token(home: Path, monkeypatch: pytest.MonkeyPatch):
    """It is the cluster's to have one."""
    monkeypatch.setattr(ray, "init", lambda **_: None)
    Connection("auto").__enter__()
    assert not (home / ".ray").exists()
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_cluster_of_its_own_starts_when_it_is_needed(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards half a minute before a bad row of data is told; one that is named is asked at once,
    because its address may be wrong."""
    called: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: called.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: called.append("shutdown"))
    with Connection() as cluster:
        assert not called
    assert not called
    with Connection() as cluster:
        cluster.open()
        cluster.open()
    assert called == ["local", "shutdown"]
    called.clear()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with Connection():
        assert called == ["10.0.0.1:6379"]


def test_an_address_that_is_none_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards a traceback out of Ray."""
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(ConfigError, match=r"answers at 'nonsense'.*RAY_ADDRESS=HOST"):
        Connection("auto").__enter__()


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys):
    """Guards a traceback beside vLLM, where the package is installed without its dependencies."""

    def lacking() -> None:
        raise ModuleNotFoundError("No module named 'tomli_w'", name="tomli_w")

    monkeypatch.setattr(cli, "app", lacking)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "no tomli_w here: install mars-ray with its dependencies" in capsys.readouterr().err


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Guards a traceback after hours, and the name of the file, which the system leaves out."""

    def full() -> None:
        with replaced(tmp_path / "results.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cli, "app", full)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = (
        f"No space left on device: '{tmp_path}/results.json'. Free space, then run the same again"
    )
    assert said in capsys.readouterr().err


WITHOUT_NUMBA = """
import importlib
import sys
from pathlib import Path

sys.modules["numba"] = None
from mars_ray import cli

root = Path(cli.__file__).parent
for path in sorted(root.rglob("*.py")):
    name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
    if not name.endswith("__") and not name.startswith(("mars_ray.simulator.", "mars_ray.advise.")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # vLLM lives in an environment of its own, and so does what is made for it.
            assert error.name.partition(".")[0] == "vllm" and "vllm" in name, name
assert not any(name.startswith("mars_ray.simulator") for name in sys.modules)
sys.argv = ["mars-ray", "simulate", "jobs/simulate-demo.toml"]
cli.main()
"""


@pytest.mark.long
def test_only_simulate_needs_numba():
    """Guards a service that cannot start without the simulator's compiler, and a traceback in place
    of the name of what has to be installed."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("mars-ray: ConfigError: ")
    assert "pip install numba" in done.stderr
