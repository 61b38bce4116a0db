"""Every command looks at its inputs before torch and Ray are imported, and in a dry run."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import tomli_w
from huggingface_hub import constants
from told import looks_like_a_model, told
from typer.testing import CliRunner

from mars_ray import inputs
from mars_ray.cli import app
from mars_ray.config.base import Config
from mars_ray.config.load import JOB_KINDS, load_job, parse_job
from mars_ray.config.scaling import AdviseJob
from mars_ray.errors import MarsError
from mars_ray.inputs import _mark, check_inputs
from mars_ray.simulator.config import KINDS

ALL_KINDS = JOB_KINDS | KINDS | {"advise": AdviseJob}
MODEL = "jobs/models/7b-verified.json"
OPTIMIZER = {"learning_rate": 1e-3}
STAGE = {"objective": {"type": "ar"}, "steps": 1, "global_batch_size": 1, "optimizer": OPTIMIZER}
DRAFT = {"objective": {"type": "draft"}, "adapter": {}, "optimizer": OPTIMIZER}
DRAFT |= {"steps": 1, "global_batch_size": 1}
CORPUS = {"type": "corpus", "count": 1}

# Texts that name nothing on this machine, or what it makes only where it is used.
PLAIN = {
    "name",
    "model_name",
    "revision",
    "subset",
    "split",
    "columns",
    "pattern",
    "function",
    "system",
    "question",
    "metric",
    "quantization",
    "default_quality",
    "environment",
    "allowed_origins",
    "host",
    # `preflight` of serve looks at these two.
    "request_log",
    "py_executable",
    # Each node has its own; an export's is marked.
    "model_cache",
    # A place elsewhere.
    "storage_path",
    "destination",
    # Asked for when the package is.
    "shipped",
}


def texts(kind: Any, seen: set[Any]) -> Iterator[tuple[type[Config], str, Any]]:
    """All fields of a section and those below it that hold texts."""
    if isinstance(kind, type) and issubclass(kind, Config):
        if kind in seen:
            return
        seen.add(kind)
        for name, field in kind.model_fields.items():
            annotation = Annotated[field.annotation, None, *field.metadata]
            if holds_text(field.annotation):
                yield kind, name, annotation
            yield from texts(field.annotation, seen)
    else:
        for part in get_args(kind):
            yield from texts(part, seen)


def holds_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return False
    if get_origin(annotation) in (Annotated, Union, UnionType, tuple):
        return any(map(holds_text, get_args(annotation)))
    if get_origin(annotation) is dict:
        return holds_text(get_args(annotation)[1])
    return annotation is str


def test_every_text_of_a_job_is_marked_or_names_nothing():
    """Guards a new field that names a file, of which a command says only when it is used that it
    is not there."""
    seen: set[Any] = set()
    found = [each for kind in ALL_KINDS.values() for each in texts(kind, seen)]
    marked = {name for _, name, annotation in found if _mark(annotation)}
    unknown = {f"{kind.__name__}.{name}" for kind, name, a in found if not _mark(a)}
    assert not {each for each in unknown if each.partition(".")[2] not in PLAIN}
    assert {name for _, name, _ in found} - marked <= PLAIN
    assert {"checkpoint", "paths", "draft_adapter", "output_dir", "start_from"} <= marked


def jobs(model: str, adapter: str) -> dict[str, dict[str, Any]]:
    """A job of every kind whose inputs are there."""
    train = {"kind": "train", "name": "a", "output_dir": "runs/a", "stages": {"ar": STAGE}}
    train |= {"model": {"type": "pretrained", "path": model}, "data": {"train": CORPUS}}
    evaluate = {"kind": "evaluate", "checkpoint": model, "task": {"type": "corpus"}}
    evaluate |= {"engine": {"draft_adapter": adapter}}
    mars = STAGE | {"objective": {"type": "mars", "block_size": {"type": "constant", "size": 4}}}
    data = {"train": CORPUS, "eval": CORPUS}
    adapt = {"kind": "adapt", "name": "a", "model": model}
    slo = {"ttft_s": 1}
    return {
        "train": train,
        "tune": {
            "kind": "tune",
            "output_dir": "runs/tune",
            "train": train | {"data": data, "stages": {"mars": mars}},
            "space": {"optimizer.learning_rate": {"type": "uniform", "low": 0.1, "high": 0.2}},
            "trials": 1,
            "objectives": {"task": {"type": "corpus"}},
        },
        "evaluate": evaluate,
        "generate": {
            "kind": "generate",
            "checkpoint": model,
            "prompts": CORPUS,
            "output": "runs/own.jsonl",
        },
        "adapt": adapt,
        "demo": {
            "kind": "demo",
            "adapt": adapt | {"service": {"port": 0}, "measure": {"engine": {"dtype": "float32"}}},
            "prompts": "jobs/demo-prompts.jsonl",
            "question": "Why?",
        },
        "bench": {"kind": "bench", "checkpoint": model, "engine": {"draft_adapter": adapter}},
        "export": {"kind": "export", "checkpoint": model, "destination": "runs/exported"},
        "serve": {"kind": "serve", "checkpoint": model, "port": 20017},
        "simulate": {
            "kind": "simulate",
            "name": "a",
            "service_model": MODEL,
            "traces": {"sine": {"type": "sine"}},
            "slos": {"short": slo},
        },
        "advise": {"kind": "advise", "source": "http://127.0.0.1:9090", "service_model": MODEL},
    }


FILES = {"type": "files", "paths": ["nowhere/*.jsonl"]}
BAD = {"type": "files", "paths": ["bad.jsonl"]}
NO_GRADE = {"type": "function", "function": "nomod:f"}
HUB = {"type": "files", "paths": ["notes.md"]}
# Of a job that is right: what is changed, and what is said. Everything is relative to a directory
# that has a model, an adapter, an empty directory, a file notes.md, rows of which none can be used,
# and a model that was cut short.
WRONG = [
    ("train", {"data.train": FILES}, "data.train.paths.0: no such file: nowhere/*.jsonl"),
    ("train", {"data.eval": FILES}, "data.eval.paths.0: no such file"),
    ("train", {"data.train": HUB}, "notes.md has none of the known endings"),
    ("train", {"model.path": "nowhere"}, "model.path: there is no directory nowhere"),
    ("train", {"model.path": "empty"}, "empty has no config.json"),
    ("train", {"model.path": "cut"}, "is damaged or was cut short"),
    ("train", {"output_dir": "notes.md/run"}, "output_dir: notes.md/run cannot be made"),
    ("train", {"data.cache_dir": "notes.md/c"}, "data.cache_dir: "),
    (
        "train",
        {"stages": {"d": DRAFT | {"adapter": {"start_from": "empty"}}}},
        "stages.d.adapter.start_from: empty is no draft adapter",
    ),
    ("tune", {"train.data.eval": FILES}, "train.data.eval.paths.0: no such file"),
    ("tune", {"objectives.task": {"type": "gsm8k", "path": "no.jsonl"}}, "no such file: no.jsonl"),
    ("tune", {"objectives.engine.draft_adapter": "nowhere"}, "objectives.engine.draft_adapter: "),
    ("evaluate", {"checkpoint": "nowhere"}, "checkpoint: there is no directory nowhere"),
    ("evaluate", {"checkpoint": "org/name"}, "checkpoint: there is no directory org/name"),
    ("evaluate", {"task": {"type": "prompts", "kinds": {"a": FILES}}}, "task.kinds.a.paths.0: "),
    ("evaluate", {"task": FILES}, "task.paths.0: no such file"),
    ("evaluate", {"engine.draft_adapter": "nowhere"}, "engine.draft_adapter: "),
    (
        "evaluate",
        {"task": FILES | {"paths": ["bad.jsonl"], "grade": NO_GRADE}},
        "task.grade.function: there is no module nomod",
    ),
    (
        "train",
        {"data.train": BAD},
        "data.train: none of 2 rows can be used; the first: ",
    ),
    ("evaluate", {"output_dir": "notes.md"}, "output_dir: notes.md cannot be made"),
    ("generate", {"checkpoint": "empty"}, "checkpoint: empty has no config.json"),
    ("generate", {"prompts": [CORPUS, FILES]}, "prompts.1.paths.0: no such file"),
    ("generate", {"exclude": ["nowhere.jsonl"]}, "exclude.0: no such file"),
    ("generate", {"output": "dir.jsonl"}, "output: dir.jsonl is a directory"),
    ("generate", {"output": "notes.md/o.jsonl"}, "output: notes.md/o.jsonl cannot be made"),
    ("adapt", {"model": "nowhere"}, "model: there is no directory nowhere"),
    ("adapt", {"model": "nowhere.gguf"}, "model: there is no file nowhere.gguf"),
    ("adapt", {"model": "package:no name"}, "model: 'no name' names no package"),
    ("adapt", {"measure.kinds": {"a": FILES}}, "measure.kinds.a.paths.0: no such file"),
    ("adapt", {"answers.exclude": ["no.jsonl"]}, "answers.exclude.0: no such file"),
    ("adapt", {"recipe.adapter.start_from": "empty"}, "recipe.adapter.start_from: "),
    ("demo", {"prompts": "no.jsonl"}, "prompts: no such file: no.jsonl"),
    ("demo", {"adapt.model": "nowhere"}, "adapt.model: "),
    ("bench", {"checkpoint": "empty"}, "checkpoint: empty has no config.json"),
    ("bench", {"engine.draft_adapter": "empty"}, "draft_adapter: empty is no draft adapter"),
    ("export", {"checkpoint": "empty"}, "checkpoint: empty has no config.json"),
    ("export", {"checkpoint": "nowhere"}, "checkpoint: nowhere is no model"),
    ("export", {"model_cache": "notes.md/cache"}, "model_cache: "),
    ("serve", {"checkpoint": "nowhere"}, "checkpoint: nowhere is no model"),
    ("serve", {"checkpoint": "notes.md"}, "is a file: name the directory of a model"),
    ("bench", {"checkpoint": "notes.md"}, "is a file: name the directory of a model"),
    ("serve", {"checkpoint": "cut"}, "is damaged or was cut short"),
    ("serve", {"engine.draft_adapter": "empty"}, "empty is no draft adapter"),
    ("serve", {"more_models": [{"checkpoint": "empty", "model_name": "b"}]}, "more_models.0.check"),
    ("serve", {"keys_file": "no.toml"}, "keys_file: no such file"),
    ("simulate", {"service_model": "no.json"}, "service_model: no.json: cannot be read"),
    ("simulate", {"traces.a": {"type": "azure", "path": "no.csv"}}, "traces.a.path: no such file"),
    ("advise", {"source": "no.csv"}, "source: no such file: no.csv"),
    ("advise", {"service_model": "no.json"}, "service_model: no.json: cannot be read"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of WRONG."""
    looks_like_a_model(tmp_path / "model")
    cut = looks_like_a_model(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-3])
    for name in ("empty", "adapter", "dir.jsonl"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "draft.json").write_text("{}")
    (tmp_path / "notes.md").write_text("# Notes")
    (tmp_path / "bad.jsonl").write_text('{"question": "Why?"}\nno JSON\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(kind: str, changes: dict[str, Any]) -> Config:
    table = jobs("model", "adapter")[kind]
    words = [f"{key}={toml(value)}" for key, value in changes.items()]
    return parse_job(table, source="a", overrides=words, kinds=ALL_KINDS)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@pytest.mark.parametrize(("kind", "changes", "said"), WRONG)
def test_what_is_wrong_is_told_by_its_key(here: Path, kind: str, changes: Any, said: str):
    job = job_of(kind, changes)
    with pytest.raises(MarsError) as raised:
        check_inputs(job)
    assert said in str(raised.value)


@pytest.mark.parametrize("kind", sorted(set(ALL_KINDS) - {"demo-tiny"}))
def test_what_is_right_passes_and_nothing_is_made(here: Path, kind: str):
    before = sorted(here.rglob("*"))
    check_inputs(job_of(kind, {}))
    assert sorted(here.rglob("*")) == before


def test_a_name_that_is_no_users_is_a_name(here: Path):
    """Guards a traceback for `~drafts.jsonl`, which a shell leaves as it is."""
    (here / "~rows.jsonl").write_text("{}")
    check_inputs(job_of("generate", {"exclude": ["~rows.jsonl"], "output": "~old/a.jsonl"}))
    with pytest.raises(MarsError, match=r"no such file: ~none\.jsonl"):
        check_inputs(job_of("generate", {"exclude": ["~none.jsonl"]}))


def test_what_may_not_be_looked_into_is_told(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards a traceback for another user's home."""

    look = Path.exists

    def refuse(path: Path) -> bool:
        if "theirs" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(MarsError, match=r"exclude\.0: cannot read theirs/a\.jsonl: .*Permission"):
        check_inputs(job_of("generate", {"exclude": ["theirs/a.jsonl"]}))
    check_inputs(job_of("generate", {"output": "theirs/a.jsonl"}))


def test_a_missing_numba_is_told(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards "nothing is missing" where the simulator ends at once."""
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    for kind in ("simulate", "advise"):
        with pytest.raises(MarsError, match="needs numba"):
            check_inputs(job_of(kind, {}))


def test_a_row_that_can_be_used_is_enough(here: Path):
    """How many may be bad is known when all have been read."""
    with (here / "bad.jsonl").open("a") as file:
        file.write('{"prompt": "Why?", "response": "So."}\n')
    check_inputs(job_of("train", {"data.train": BAD}))


def test_what_a_demo_makes_need_not_be_there(here: Path):
    """Its evaluation and its service are of the model that it trains."""
    check_inputs(load_job("jobs/demo-tiny.toml", ["serve.port=20019"]))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"serve.port={taken.getsockname()[1]}"
        with pytest.raises(MarsError, match="cannot listen"):
            check_inputs(load_job("jobs/demo-tiny.toml", [port]))


COMMANDS = [
    ("train", "train JOB", {"data.train": FILES}),
    ("tune", "tune JOB", {"train.data.train": FILES}),
    ("evaluate", "evaluate JOB", {"checkpoint": "nowhere"}),
    ("generate", "generate JOB", {"checkpoint": "nowhere"}),
    ("adapt", "adapt JOB", {"model": "nowhere"}),
    ("demo", "demo JOB", {"prompts": "no.jsonl"}),
    ("bench", "bench JOB --output o.json", {"checkpoint": "nowhere"}),
    ("export", "export JOB", {"checkpoint": "nowhere"}),
    ("serve", "serve JOB", {"checkpoint": "nowhere"}),
    ("serve", "update JOB", {"checkpoint": "nowhere"}),
    ("simulate", "simulate JOB", {"service_model": "no.json"}),
]


@pytest.mark.parametrize(("kind", "words", "changes"), COMMANDS)
def test_a_command_tells_it_before_torch_and_ray(here: Path, kind: str, words: str, changes: Any):
    """Within two seconds, as one line. Guards half a minute of starting Ray before a file's name is
    found wrong."""
    table = job_of(kind, changes).model_dump(mode="json", exclude_none=True)
    (here / "job.toml").write_text(tomli_w.dumps(table))
    said = told(*words.replace("JOB", "job.toml").split(), cwd=here)
    assert next(iter(changes)) in said
    dry = CliRunner().invoke(app, [*words.replace("JOB", "job.toml").split(), "--dry-run"])
    assert isinstance(dry.exception, MarsError)
    assert json.loads(dry.stdout)["kind"] == kind, "the job is printed all the same"


def test_a_submitted_job_is_told_why_a_directory_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its working directory was uploaded without what git ignores, such as models/ and runs/."""
    (tmp_path / "_ray_pkg_1a2b").mkdir()
    monkeypatch.chdir(tmp_path / "_ray_pkg_1a2b")
    with pytest.raises(MarsError, match="comes without the files that git ignores"):
        check_inputs(job_of("evaluate", {"checkpoint": "runs/a/models/mars"}))
    with pytest.raises(MarsError, match="correct the path"):
        check_inputs(job_of("evaluate", {"checkpoint": "/runs/a/models/mars"}))


def test_advice_tells_it_too(here: Path):
    assert "no.csv" in told("advise", "no.csv", "--model", MODEL, cwd=here)


def test_a_dry_run_asks_the_hub(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards `adapt nosuch/dir --dry-run`, which a typing error in a directory's name passed."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    dry = CliRunner().invoke(app, ["adapt", "nosuch/dir", "--dry-run"])
    assert json.loads(dry.stdout)["model"] == "nosuch/dir"
    assert "model: there is no directory nosuch/dir" in str(dry.exception)
    assert "HF_HUB_OFFLINE is set" in str(dry.exception)
    check_inputs(job_of("adapt", {"model": "nosuch/dir"}))
