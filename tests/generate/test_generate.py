"""Own answers: what is written, and how it goes on."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from train.small_jobs import make_model

from mars_ray import generate, progress
from mars_ray.config.data import CorpusSource, FilesSource
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.generate import GenerateJob
from mars_ray.config.model import PretrainedModel
from mars_ray.data.sources import BadRows, read
from mars_ray.errors import DataError
from mars_ray.generate import run_generation
from mars_ray.model.create import create_model

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("generate")
    plain = PretrainedModel(path=str(make_model(directory / "plain")))
    # As a training job starts from it: with the token that ends an answer.
    create_model(plain, lambda: (), directory / "model", 0)
    return directory / "model"


def make_job(model: Path, output: Path, **changes: Any) -> GenerateJob:
    job = {
        "checkpoint": str(model),
        "prompts": CorpusSource(count=6),
        "output": str(output),
        # A random model ends its answers now and then if every token is about as likely.
        "sampling": Sampling(temperature=2.0, seed=1),
        "max_new_tokens": 40,
        "save_every": 2,
        "engine": EngineConfig(max_batch=2, max_context=160, threads=1),
    }
    return GenerateJob.model_validate(job | changes)


def test_an_interrupted_generation_goes_on_to_the_same_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards answers that are lost or doubled; a line cut in the middle is written anew."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    result = run_generation(make_job(model, whole), QUIET)
    assert result.conversations + result.left_out == 6
    # The end of a run is where its lines become the output: stopped there, all are in the part.
    part = tmp_path / "cut.jsonl.part"
    with monkeypatch.context() as patch:
        patch.setattr(generate, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_generation(make_job(model, cut), QUIET)
    lines = part.read_text().splitlines(keepends=True)
    assert len(lines) == 7
    part.write_text("".join(lines[:4]) + lines[4][:7])
    assert run_generation(make_job(model, cut), QUIET).conversations == result.conversations
    assert cut.read_text() == whole.read_text()
    assert not part.exists()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_the_output_is_a_source_with_the_prompts_of_the_data(model: Path, tmp_path: Path):
    output = tmp_path / "own.jsonl"
    run_generation(make_job(model, output), QUIET)
    asked = {record.messages[0].content for record in read(CorpusSource(count=6), BadRows())}
    report = BadRows()
    records = list(read(FilesSource(paths=(str(output),)), report))
    assert report.bad == 0
    assert {record.messages[0].content for record in records} <= asked
    assert all(record.messages[-1].role == "assistant" for record in records)


def test_answers_without_an_end_are_counted_and_left_out(model: Path, tmp_path: Path):
    """Guards training on answers that never stop."""
    job = make_job(model, tmp_path / "own.jsonl", max_new_tokens=1, sampling=Sampling())
    result = run_generation(job, QUIET)
    assert (result.conversations, result.left_out) == (0, 6)


def test_another_jobs_output_is_not_touched(model: Path, tmp_path: Path):
    output = tmp_path / "own.jsonl"
    run_generation(make_job(model, output), QUIET)
    before = output.read_text()
    with pytest.raises(DataError, match="another job, with another max_new_tokens"):
        run_generation(make_job(model, output, max_new_tokens=8), QUIET)
    assert output.read_text() == before
    assert json.loads(output.with_suffix(".json").read_text())["generated"]["output"] == str(output)


def test_a_log_says_how_far_it_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards a submitted job that looks stuck for as long as the model answers."""
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    log = Console(file=io.StringIO(), width=120)
    run_generation(make_job(model, tmp_path / "own.jsonl"), log)
    assert isinstance(log.file, io.StringIO)
    assert re.search(r"^answers: \d of 6, \d+ s$", log.file.getvalue(), re.MULTILINE)
