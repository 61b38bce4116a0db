"""Every command that the documentation shows is one: understood, here and now, to its end."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from ray.scripts.scripts import cli as ray_cli
from typer.main import get_command
from typer.testing import CliRunner

from mars_ray.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "jobs" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What stands for a user's own.
PLACES = {
    "CHECKPOINT": "runs/demo/models/mars",
    "JOB.toml": "jobs/train-gsm8k.toml",
    "NAME": "mars",
    "FILE": "clusters/aws.yaml",
    "ID": "raysubmit_1",
    "COMMAND": "train",
}
COMMANDS = {"mars-ray": get_command(app), "ray": ray_cli}


def shown(page: Path) -> Iterator[str]:
    """The lines of a page's code blocks, long ones joined, comments cut off."""
    text = page.read_text().replace("\\\n", " ")
    fenced = re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    \S.*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    for line in [*"".join(fenced).splitlines(), *indented]:
        yield re.sub(r"\s+# .*$", "", line.strip())


def commands(program: str) -> list:
    """Its command lines on all pages, each with the page's name."""
    found = [
        pytest.param(line, id=f"{page.name}: {line[:50]}")
        for page in PAGES
        for line in shown(page)
        if line.startswith(f"{program} ")
    ]
    assert len(found) > 5
    return found


def understood(words: list[str]) -> tuple[click.Command, click.Context]:
    """The command that the words name, with its options and arguments taken in."""
    command, context = COMMANDS[words[0]], None
    rest = words[1:]
    while isinstance(command, click.Group):
        context = command.make_context(words[0], [rest[0]], parent=context, resilient_parsing=True)
        below = command.get_command(context, rest[0])
        assert below is not None, f"no command {rest[0]!r} in {' '.join(words)}"
        command, rest = below, rest[1:]
    return command, command.make_context(words[0], rest, parent=context)


def words_of(line: str) -> list[str]:
    return [PLACES.get(word, word) for word in shlex.split(line)]


@pytest.mark.parametrize("line", commands("mars-ray"))
def test_our_commands_are_understood(line, monkeypatch):
    """Guards options and job fields that were renamed under the documentation: what can be run
    without effect is run."""
    monkeypatch.chdir(ROOT)
    words = words_of(line)
    command, _ = understood(words)
    if any(parameter.name == "dry_run" for parameter in command.params):
        done = CliRunner().invoke(app, [*words[1:], "--dry-run"], catch_exceptions=False)
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("line", commands("ray"))
def test_rays_commands_are_understood(line, monkeypatch):
    """Guards options that Ray has renamed, and lines that end in one of ours which is wrong."""
    monkeypatch.chdir(ROOT)
    words = words_of(line)
    _, context = understood(words)
    if words[1:3] == ["job", "submit"]:
        entrypoint = list(context.params["entrypoint"])
        if entrypoint[:3] == ["python", "-m", "mars_ray"]:
            entrypoint[:3] = ["mars-ray"]
        assert entrypoint[0] == "mars-ray"
        if "..." not in entrypoint:
            understood(entrypoint)


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
