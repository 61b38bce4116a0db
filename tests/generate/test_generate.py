"""Own answers: what is written, and how it goes on."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import load_file, save_file
from train.small_jobs import make_model

from mars_ray import generate, progress
from mars_ray.config.data import CorpusSource, FilesSource
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.generate import GenerateJob
from mars_ray.config.model import PretrainedModel
from mars_ray.data.sources import BadRows, read
from mars_ray.errors import ConfigError, DataError
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


ROWS = [{"prompt": f"How many are {i} and 1?", "response": "some"} for i in range(6)]


def stop_at_the_end(job: GenerateJob, monkeypatch: pytest.MonkeyPatch, kept: int) -> Path:
    """A generation that was stopped with some of its answers written."""
    with monkeypatch.context() as patch:
        patch.setattr(generate, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_generation(job, QUIET)
    part = Path(f"{job.output}.part")
    part.write_text("".join(part.read_text().splitlines(keepends=True)[: kept + 1]))
    return part


@pytest.mark.parametrize(("prompts", "output"), [("d.json", "d.jsonl"), ("d.jsonl", "d.jsonl")])
def test_the_prompts_are_not_replaced(model: Path, tmp_path: Path, prompts: str, output: str):
    """Guards a user's data, of which the output or its `.json` has the name."""
    path = tmp_path / prompts
    path.write_text(json.dumps(ROWS) if prompts == "d.json" else json.dumps(ROWS[0]) + "\n")
    before = path.read_text()
    job = make_job(model, tmp_path / output, prompts=FilesSource(paths=(str(path),)))
    with pytest.raises(DataError, match=f"{prompts} is there and is not of mars-ray generate"):
        run_generation(job, QUIET)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("foreign", ['{"a": 1}', "[1]", "not JSON"])
def test_another_table_beside_an_output_is_one_line(model: Path, tmp_path: Path, foreign: str):
    """Guards a traceback."""
    (tmp_path / "own.jsonl").write_text("")
    (tmp_path / "own.json").write_text(foreign)
    with pytest.raises(DataError, match="is not of mars-ray generate"):
        run_generation(make_job(model, tmp_path / "own.jsonl"), QUIET)
    assert (tmp_path / "own.json").read_text() == foreign


def test_a_generation_stopped_before_its_last_file_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards an output of our own that is taken for somebody else's; one that was deleted is
    written anew."""
    output = tmp_path / "own.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(generate, "provenance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_generation(make_job(model, output), QUIET)
    assert output.exists()
    assert not output.with_suffix(".json").exists()
    result = run_generation(make_job(model, output), QUIET)
    written = output.read_text()
    output.unlink()
    assert run_generation(make_job(model, output), QUIET) == result
    assert output.read_text() == written


def test_other_prompts_under_the_same_name_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards answers to prompts that are gone, and prompts that are asked twice or never."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(ROWS))
    job = make_job(model, tmp_path / "own.jsonl", prompts=FilesSource(paths=(str(path),)))
    stop_at_the_end(job, monkeypatch, 3)
    path.write_text(json.dumps(ROWS[::-1]))
    with pytest.raises(DataError, match="with another content of prompts:"):
        run_generation(job, QUIET)
    path.write_text(json.dumps(ROWS))
    run_generation(job, QUIET)
    path.write_text(json.dumps(ROWS[1:]))
    with pytest.raises(DataError, match="with another content of prompts:"):
        run_generation(job, QUIET)


def test_another_model_under_the_same_name_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards answers of two models in one file; a copy of the model is the model."""
    mine = shutil.copytree(model, tmp_path / "model")
    job = make_job(mine, tmp_path / "own.jsonl")
    stop_at_the_end(job, monkeypatch, 3)
    shutil.rmtree(mine)
    shutil.copytree(model, mine, copy_function=shutil.copyfile)
    run_generation(job, QUIET)
    weights = load_file(mine / "model.safetensors")
    torch.manual_seed(1)
    changed = {name: torch.rand_like(value) for name, value in weights.items()}
    save_file(changed, mine / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="with another content of checkpoint:"):
        run_generation(job, QUIET)


def test_answers_beside_their_model_are_no_part_of_it(model: Path, tmp_path: Path):
    """Guards a finished output that is refused because it is there."""
    mine = shutil.copytree(model, tmp_path / "model")
    job = make_job(mine, mine / "own.jsonl")
    assert run_generation(job, QUIET) == run_generation(job, QUIET)


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_a_model_that_is_asked_otherwise_is_another(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Guards answers of which half were asked with one template, or ended at one token, and half
    with another; that the model was evaluated meanwhile does not matter."""
    mine = shutil.copytree(model, tmp_path / "model")
    job = make_job(mine, tmp_path / "own.jsonl")
    stop_at_the_end(job, monkeypatch, 3)
    before = (mine / name).read_text()
    (mine / name).write_text(f"{before} ")
    with pytest.raises(DataError, match="with another content of checkpoint:"):
        run_generation(job, QUIET)
    (mine / name).write_text(before)
    (mine / "frontier.json").write_text("{}")
    run_generation(job, QUIET)


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_rows_that_cannot_be_used_are_told(model: Path, tmp_path: Path, share: float):
    """Guards an empty output that counts as done, from columns of other names."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"question": "?", "answer": "!"}] * 4))
    prompts = FilesSource(paths=(str(path),))
    job = make_job(model, tmp_path / "own.jsonl", prompts=prompts, max_bad_share=share)
    with pytest.raises(DataError, match="4 of 4 rows are bad"):
        run_generation(job, QUIET)
    assert list(tmp_path.iterdir()) == [path]


def test_a_prompt_that_the_template_refuses_is_a_bad_row(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Guards a run that one such row ends, at the same place each time, without a word on which."""
    path = tmp_path / "prompts.jsonl"
    rows = [*ROWS[:2], {"prompt": "half of a pair: \ud83d", "response": "some"}, *ROWS[2:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = FilesSource(paths=(str(path),))
    with pytest.raises(DataError, match=r"1 of 7 rows are bad(.|\n)*prompts\.jsonl:3: a message"):
        run_generation(make_job(model, tmp_path / "own.jsonl", prompts=prompts), QUIET)
    job = make_job(model, tmp_path / "own.jsonl", prompts=prompts, max_bad_share=0.2)
    result = run_generation(job, QUIET)
    assert result.conversations + result.left_out == 6
    assert "prompts.jsonl:3" in caplog.text


def test_a_log_says_how_far_it_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards a submitted job that looks stuck for as long as the model answers."""
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    log = Console(file=io.StringIO(), width=120)
    run_generation(make_job(model, tmp_path / "own.jsonl"), log)
    assert isinstance(log.file, io.StringIO)
    assert re.search(r"^answers: \d of 6, \d+ s$", log.file.getvalue(), re.MULTILINE)


def test_an_output_has_one_writer_at_a_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards answers that stand twice beside prompts without one, as two processes wrote them: a
    line's prompt was told by its place alone. Another output in the directory is free."""
    job, others = make_job(model, tmp_path / "own.jsonl"), make_job(model, tmp_path / "b.jsonl")
    append, seen = generate._append, []

    def twice(*arguments: Any) -> None:
        append(*arguments)
        if not seen:
            seen.append(1)
            with pytest.raises(ConfigError, match=r"another process is writing .*own\.jsonl:"):
                run_generation(job, QUIET)
            assert len(Path(f"{job.output}.part").read_text().splitlines()) == 1 + 2
            run_generation(others, QUIET)

    monkeypatch.setattr(generate, "_append", twice)
    result = run_generation(job, QUIET)
    assert result.conversations + result.left_out == 6
    names = {"own.jsonl", "own.json", "b.jsonl", "b.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_part_with_answers_twice_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards a file that two processes have mixed, on storage without locks."""
    job = make_job(model, tmp_path / "own.jsonl")
    part = stop_at_the_end(job, monkeypatch, 4)
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join([*lines[:3], *lines[1:3]]))
    with pytest.raises(DataError, match="answers twice"):
        run_generation(job, QUIET)


def test_a_home_directory_is_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards answers in a directory that is named `~`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run_generation(make_job(model, Path("~/own.jsonl")), QUIET)
    assert (tmp_path / "home" / "own.jsonl").exists()
    assert not (tmp_path / "~").exists()


def test_two_outputs_beside_their_model_are_no_part_of_it(model: Path, tmp_path: Path):
    """Guards a finished output that is refused because there is another one."""
    mine = shutil.copytree(model, tmp_path / "model")
    first = run_generation(make_job(mine, mine / "a.jsonl"), QUIET)
    run_generation(make_job(mine, mine / "b.jsonl"), QUIET)
    assert run_generation(make_job(mine, mine / "a.jsonl"), QUIET) == first


def test_a_job_without_room_for_an_answer_is_refused(model: Path, tmp_path: Path):
    """Guards an empty output that counts as done; with room, the same command goes on."""
    output = tmp_path / "own.jsonl"
    with pytest.raises(ValidationError, match="max_new_tokens 160 leaves no room for a prompt"):
        make_job(model, output, max_new_tokens=160)
    with pytest.raises(ValidationError, match=r"speculative needs engine\.draft_model"):
        make_job(model, output, mode={"type": "speculative"})
    with pytest.raises(DataError, match="no prompt has room for 159 tokens"):
        run_generation(make_job(model, output, max_new_tokens=159), QUIET)
    assert not list(tmp_path.iterdir())
    run_generation(make_job(model, output), QUIET)
