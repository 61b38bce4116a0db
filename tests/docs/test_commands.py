"""Every command of the documentation is executed by a test, or is one of a few that none can; all
are understood, here and now."""

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from deploy.manifests import documents, merged, rendered
from docs.checkout import make_checkout
from docs.commands import EXECUTED_BY, NOT_HERE, PAGES, ROOT, commands, runs
from docs.small import SMALL
from ray.scripts.scripts import cli as ray_cli
from typer.main import get_command

from mars_ray.cli import app

# What stands for a user's own.
PLACES = {
    "CHECKPOINT": "runs/demo/models/mars",
    "JOB.toml": "jobs/train-gsm8k.toml",
    "runs/demo-smollm2/shipped/serve.toml": "jobs/serve-demo.toml",
    "NAME": "mars",
    "FILE": "clusters/aws.yaml",
    "ID": "raysubmit_1",
}
PROGRAMS: dict[str, Any] = {"mars-ray": get_command(app), "ray": ray_cli}


def beginning_with(program: str) -> list[str]:
    """Distinct commands."""
    texts = [command.text for command in commands() if command.text.startswith(f"{program} ")]
    assert texts
    return list(dict.fromkeys(texts))


def not_here(beginning: str) -> list[str]:
    """What is never executed."""
    known = [command for command in commands() if command.beginning in NOT_HERE]
    return [command.text for command in known if beginning in command.text]


def inline() -> Iterator[str]:
    """Commands of ours with their arguments in running text."""
    for page in PAGES:
        prose = re.sub(r"^(```.*?^```|    .*?)$", "", page.read_text(), flags=re.M | re.S)
        for code in re.findall(r"`(mars-ray [^`]+)`", prose):
            if len(words := code.split()) > 2 and "COMMAND" not in words and "..." not in words:
                yield " ".join(words)


def understood(words: list[str]) -> Any:
    """The command that the words name, and its context with all options and arguments taken in."""
    command, context = PROGRAMS[words[0]], None
    rest = words[1:]
    # typer has a click of its own, so their groups have no class in common.
    while hasattr(command, "commands"):
        assert rest, f"no command in {' '.join(words)}"
        context = command.make_context(words[0], [rest[0]], parent=context, resilient_parsing=True)
        below = command.get_command(context, rest[0])
        assert below is not None, f"no command {rest[0]!r} in {' '.join(words)}"
        command, rest = below, rest[1:]
    return command, command.make_context(words[0], rest, parent=context)


def words_of(line: str) -> list[str]:
    words = [PLACES.get(word, word) for word in shlex.split(line)]
    if words[1] in ("serve", "update"):
        words = [word.replace(PLACES["JOB.toml"], "jobs/serve-demo.toml") for word in words]
    return words


def test_every_command_is_executed_or_cannot_be():
    """Guards a documentation of which only a part is true. A new command belongs into one of the
    two tables of commands.py; one that is gone, out of it."""
    unknown = [f"{each.page}: {each.text}" for each in commands() if each.beginning is None]
    assert not unknown, "no test executes these"
    assert {each.beginning for each in commands()} == {*EXECUTED_BY, *NOT_HERE}


@pytest.mark.parametrize("place", sorted(set(EXECUTED_BY.values())))
def test_who_executes_commands_takes_them_from_the_pages(place):
    """Guards a name in the table without a function behind it, or with one that has a copy."""
    path, _, name = place.partition("::")
    text = (ROOT / path).read_text()
    functions = [
        node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    ]
    assert name in functions
    assert f'runs("{name}")' in text


def test_every_job_file_has_a_small_form():
    """Of those that commands name."""
    named = {job for each in commands() for job in re.findall(r" jobs/([\w.-]+)\.toml", each.text)}
    assert named <= SMALL.keys() <= named | {"demo", "simulate-overloads"}


@pytest.mark.parametrize("line", runs("test_a_dry_run_shows_the_job"))
def test_a_dry_run_shows_the_job(line, monkeypatch, resolved):
    """Without effect, so it runs as it stands."""
    monkeypatch.chdir(ROOT)
    words = words_of(line)
    words.remove("--dry-run")
    assert resolved(words[1:])["kind"] == "train"


@pytest.mark.parametrize("line", [*beginning_with("mars-ray"), *dict.fromkeys(inline())])
def test_our_commands_are_understood(line, monkeypatch, resolved):
    """Guards options and job fields that were renamed under the documentation, in a second."""
    monkeypatch.chdir(ROOT)
    words = words_of(line)
    command, _ = understood(words)
    if any(parameter.name == "dry_run" for parameter in command.params):
        assert resolved(words[1:])["kind"]


@pytest.mark.parametrize("line", beginning_with("ray"))
def test_rays_commands_are_understood(line, monkeypatch):
    """Guards options that Ray has renamed, and lines that end in one of ours which is wrong."""
    monkeypatch.chdir(ROOT)
    words = words_of(line)
    _, context = understood(words)
    if words[1:3] == ["job", "submit"]:
        python, module, name, *rest = context.params["entrypoint"]
        assert (python, module, name) == ("python", "-m", "mars_ray")
        understood(["mars-ray", *rest])


@pytest.mark.parametrize("line", not_here("make"))
def test_make_knows_what_it_would_do(line, tmp_path):
    """Guards a target or a variable that is gone."""
    done = make_checkout(tmp_path / "checkout").run(line.replace("make ", "make --dry-run ", 1))
    assert done.stdout


@pytest.mark.parametrize("line", not_here("kubectl apply"))
def test_what_kubectl_applies_is_there(line):
    """Guards paths that were moved; tests/deploy checks what the manifests say."""
    *_, option, path = shlex.split(line)
    assert option == "--filename"
    assert yaml.safe_load((ROOT / path).read_text())["kind"] == "PersistentVolumeClaim"


@pytest.mark.parametrize("line", [*not_here("helm install"), *not_here("helm upgrade")])
def test_what_helm_installs_renders(line):
    """Guards values that the chart has renamed, and examples that were moved."""
    helm = pytest.importorskip("helm_python", reason="no helm-python-sdk for this machine")
    _, _, name, chart, *options = shlex.split(line)
    assert chart == "deploy/chart"
    values = {}
    for option, given in zip(options[::2], options[1::2], strict=True):
        assert option in ("--values", "--set")
        part = documents(ROOT / given)[0] if option == "--values" else helm.parse_set_string(given)
        values = merged(values, part)
    kinds = {document["kind"] for document in rendered(values, name)}
    assert kinds & {"RayService", "RayJob", "RayCluster"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_make_targets_exist(page):
    """Guards paths in prose that were moved."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    for target in re.findall(r"`make ([a-z-]+)[^`]*`|^    make ([a-z-]+)", text, re.MULTILINE):
        assert next(filter(None, target)) in targets
    pattern = r"`((?:clusters|deploy|jobs|tools|tests|benchmarks|mars_ray)/[\w./-]+)`"
    for path in set(re.findall(pattern, text)) - {"jobs/NAME.toml"}:
        assert (ROOT / path).exists(), path
