"""Own answers: what is written, and how it goes on."""

import io
import json
import math
import random
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generate.engines import QUIET, InProcess, make_job, run
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import load_file, save_file

from mars_ray import progress
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.generate import GenerateJob, OwnPrompts
from mars_ray.config.inputs import CorpusSource, DataConfig, FilesSource
from mars_ray.config.modes import ConfidenceMode
from mars_ray.data.chat import encode_prompt
from mars_ray.data.rows import tokenize
from mars_ray.data.sources import BadRows, read, read_prompts
from mars_ray.decode.engine import generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import ConfigError, DataError, ModelError, RequestError
from mars_ray.generate import run as generation
from mars_ray.generate.answers import Part
from mars_ray.generate.run import run_generation
from mars_ray.model.load import load_tokenizer, stop_ids


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_interrupted_generation_goes_on_to_the_same_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards answers that are lost or doubled. Answers come in any order; a line cut in the middle
    is written anew, and nothing else is."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    result = run(make_job(model, whole), QUIET)
    assert result.conversations + result.left_out == 6
    # The end of a run is where its lines become the output: stopped there, all are in the part.
    part = stop_at_the_end(make_job(model, cut), monkeypatch, 6)
    header, *lines = part.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    random.Random(0).shuffle(lines)
    part.write_text(header + "".join(lines[:3]) + lines[3][:7])
    monkeypatch.setattr(InProcess, "asked", 0)
    assert run(make_job(model, cut), QUIET).conversations == result.conversations
    assert InProcess.asked == 3
    assert cut.read_text() == whole.read_text()
    assert not part.exists()


def test_what_no_engine_could_do_is_refused_before_a_cluster_starts(
    model: Path, talker: Path, tmp_path: Path
):
    """Guards a start of all engines, and a traceback of each, for a mode, a context or an adapter
    that this model has not; and a cluster for answers that are there."""
    output, connected = tmp_path / "own.jsonl", []

    def go(checkpoint: Path, **changes: Any) -> None:
        run(make_job(checkpoint, output, **changes), QUIET, connect=lambda: connected.append(1))

    with pytest.raises(RequestError, match="needs masks"):
        go(talker, mode=ConfidenceMode())
    with pytest.raises(ConfigError, match="max_context=100000: this model knows"):
        go(model, engine=EngineConfig(max_context=100_000))
    with pytest.raises(ModelError, match="is no draft adapter"):
        go(model, engine=EngineConfig(max_context=160, draft_adapter=str(tmp_path)))
    assert not connected
    go(model)
    go(model)
    assert connected == [1]


def test_a_killed_generation_keeps_what_had_come(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards answers that are written only at the end."""
    job = make_job(model, tmp_path / "own.jsonl")
    add, calls = Part.add_answers, []

    def third_time(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        add(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Part, "add_answers", third_time)
        with pytest.raises(KeyboardInterrupt):
            run(job, QUIET)
    had = len(Path(f"{job.output}.part").read_text().splitlines()) - 1
    assert 0 < had < 6
    monkeypatch.setattr(InProcess, "asked", 0)
    run(job, QUIET)
    assert InProcess.asked == 6 - had


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["model", "talker"])
def test_the_output_has_the_tokens_that_the_model_wrote(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
):
    """With a mask token and without a card. What was read and written is what a data source reads,
    with the prompts of the data; the text is for people."""
    directory = request.getfixturevalue(kind)
    output = tmp_path / "own.jsonl"
    job = make_job(directory, output, sampling=Sampling())
    run(job, QUIET)
    engine, tokenizer = load_engine(directory, job.engine)
    asked = [record.messages for record in read_prompts(CorpusSource(count=6), BadRows())]
    prompts = [tuple(encode_prompt(messages, tokenizer)) for messages in asked]
    stops = stop_ids(engine.model)
    requests = [
        Request(str(i), ids, job.mode, job.sampling, 40, stops) for i, ids in enumerate(prompts)
    ]
    expected = generate_all(engine, requests)
    lines = lines_of(output)
    assert [line["prompt_ids"] for line in lines] == [list(ids) for ids in prompts]
    for line, completion in zip(lines, expected, strict=True):
        assert line["answer_ids"] == list(completion.tokens)
        assert line["finish_reason"] == completion.finish_reason
        assert line["forwards"] == completion.forwards
    source = FilesSource(paths=(str(output),))
    rows = tokenize(
        source, tokenizer, DataConfig(train=source, max_bad_share=0), tmp_path / "cache"
    )
    for index, line in enumerate(lines):
        assert rows[index].input_ids.tolist() == line["prompt_ids"] + line["answer_ids"]
        assert rows[index].response.sum() == len(line["answer_ids"])
    records = list(read(source, BadRows()))
    assert [record.messages[:-1] for record in records] == asked
    assert [line["origin"] for line in lines] == [f"corpus:{i}" for i in range(1, 7)]


def test_cut_answers_have_no_end(model: Path, tmp_path: Path):
    """They are kept unless the job says otherwise; guards training on an end that was not said."""
    output, end = tmp_path / "own.jsonl", load_tokenizer(model).eos_token_id
    result = run(make_job(model, output), QUIET)
    reasons = [line["finish_reason"] for line in lines_of(output)]
    assert set(reasons) == {"stop", "length"}
    assert result.finish_reasons == {key: reasons.count(key) for key in result.finish_reasons}
    for line in lines_of(output):
        assert (end in line["answer_ids"]) == (line["finish_reason"] == "stop")
    uncut = tmp_path / "uncut.jsonl"
    result = run(make_job(model, uncut, keep_cut=False), QUIET)
    assert result.conversations == reasons.count("stop")
    assert result.left_out == reasons.count("length")
    assert {line["finish_reason"] for line in lines_of(uncut)} == {"stop"}


def test_every_answer_has_noise_of_its_own(model: Path, tmp_path: Path):
    """Guards a sample of which all members favour the same tokens at the same places: the same
    prompt twice is not the same answer twice."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "How many?"}) + "\n")
    twice = [{"type": "files", "paths": [str(path)]}] * 2
    output = tmp_path / "own.jsonl"
    run(make_job(model, output, prompts=twice), QUIET)
    first, second = lines_of(output)
    assert first["prompt_ids"] == second["prompt_ids"]
    assert first["answer_ids"] != second["answer_ids"]


def test_loops_are_counted_apart(model: Path, tmp_path: Path):
    """A greedy model at random says one thing for ever, and that drafts easily."""
    result = run(make_job(model, tmp_path / "own.jsonl", sampling=Sampling()), QUIET)
    assert 0 < result.looping <= 6
    assert result.looping_tokens == 40 * result.looping == result.looping_forwards


def test_another_jobs_output_is_not_touched(model: Path, tmp_path: Path):
    output = tmp_path / "own.jsonl"
    run(make_job(model, output), QUIET)
    before = output.read_text()
    with pytest.raises(DataError, match="another job, with another max_new_tokens"):
        run(make_job(model, output, max_new_tokens=8), QUIET)
    assert output.read_text() == before
    assert json.loads(output.with_suffix(".json").read_text())["generated"]["output"] == str(output)


def test_a_job_may_go_on_with_other_engines(model: Path, tmp_path: Path):
    """On a smaller cluster, after a larger one was lost."""
    output = tmp_path / "own.jsonl"
    result = run(make_job(model, output), QUIET)
    again = make_job(model, output, workers=3, cpus_per_worker=2, gpus_per_worker=0)
    assert run(again, QUIET) == result


ROWS = [{"prompt": f"How many are {i} and 1?", "response": "some"} for i in range(6)]


def stop_at_the_end(job: GenerateJob, monkeypatch: pytest.MonkeyPatch, kept: int) -> Path:
    """A generation that was stopped with some of its answers written."""
    with monkeypatch.context() as patch:
        patch.setattr(generation, "write_answers", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(job, QUIET)
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
        run(job, QUIET)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("foreign", ['{"a": 1}', "[1]", "not JSON"])
def test_another_table_beside_an_output_is_one_line(model: Path, tmp_path: Path, foreign: str):
    """Guards a traceback."""
    (tmp_path / "own.jsonl").write_text("")
    (tmp_path / "own.json").write_text(foreign)
    with pytest.raises(DataError, match="is not of mars-ray generate"):
        run(make_job(model, tmp_path / "own.jsonl"), QUIET)
    assert (tmp_path / "own.json").read_text() == foreign


def test_a_generation_stopped_before_its_last_file_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards an output of our own that is taken for somebody else's; one that was deleted is
    written anew."""
    output = tmp_path / "own.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(generation, "provenance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(make_job(model, output), QUIET)
    assert output.exists()
    assert not output.with_suffix(".json").exists()
    result = run(make_job(model, output), QUIET)
    written = output.read_text()
    output.unlink()
    assert run(make_job(model, output), QUIET) == result
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
        run(job, QUIET)
    path.write_text(json.dumps(ROWS))
    run(job, QUIET)
    path.write_text(json.dumps(ROWS[1:]))
    with pytest.raises(DataError, match="with another content of prompts:"):
        run(job, QUIET)


def test_another_model_under_the_same_name_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards answers of two models in one file; a copy of the model is the model."""
    mine = shutil.copytree(model, tmp_path / "model")
    job = make_job(mine, tmp_path / "own.jsonl")
    stop_at_the_end(job, monkeypatch, 3)
    shutil.rmtree(mine)
    shutil.copytree(model, mine, copy_function=shutil.copyfile)
    run(job, QUIET)
    weights = load_file(mine / "model.safetensors")
    torch.manual_seed(1)
    changed = {name: torch.rand_like(value) for name, value in weights.items()}
    save_file(changed, mine / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="with another content of checkpoint:"):
        run(job, QUIET)


def test_answers_beside_their_model_are_no_part_of_it(model: Path, tmp_path: Path):
    """Guards a finished output that is refused because it is there."""
    mine = shutil.copytree(model, tmp_path / "model")
    job = make_job(mine, mine / "own.jsonl")
    assert run(job, QUIET) == run(job, QUIET)


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "generation_config.json",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_a_model_that_is_asked_otherwise_is_another(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Guards answers of which half were asked with one template, or ended at one token, and half
    with another; that the model was evaluated meanwhile does not matter."""
    mine = shutil.copytree(model, tmp_path / "model")
    (mine / "additional_chat_templates").mkdir()
    (mine / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    job = make_job(mine, tmp_path / "own.jsonl")
    stop_at_the_end(job, monkeypatch, 3)
    before = (mine / name).read_text()
    (mine / name).write_text(f"{before} ")
    with pytest.raises(DataError, match="with another content of checkpoint:"):
        run(job, QUIET)
    (mine / name).write_text(before)
    (mine / "frontier.json").write_text("{}")
    run(job, QUIET)


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_rows_that_cannot_be_used_are_told(model: Path, tmp_path: Path, share: float):
    """Guards an empty output that counts as done, from columns of other names."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"ask": "?", "answer": "!"}] * 4))
    prompts = FilesSource(paths=(str(path),))
    job = make_job(model, tmp_path / "own.jsonl", prompts=prompts, max_bad_share=share)
    with pytest.raises(DataError, match="4 of 4 rows are bad"):
        run(job, QUIET)
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
        run(make_job(model, tmp_path / "own.jsonl", prompts=prompts), QUIET)
    job = make_job(model, tmp_path / "own.jsonl", prompts=prompts, max_bad_share=0.2)
    result = run(job, QUIET)
    assert result.conversations + result.left_out == 6
    assert "prompts.jsonl:3" in caplog.text


def test_a_log_says_how_far_it_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards a submitted job that looks stuck for as long as the model answers."""
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    log = Console(file=io.StringIO(), width=120)
    run(make_job(model, tmp_path / "own.jsonl"), log)
    assert isinstance(log.file, io.StringIO)
    assert re.search(r"^answers: \d of 6, \d+ s$", log.file.getvalue(), re.MULTILINE)


def test_under_a_limit_of_minutes_a_log_says_what_there_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards totals that the minutes leave open: 0 of 1,036 answers that became 10 of 78."""
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    log = Console(file=io.StringIO(), width=120)
    run(make_job(model, tmp_path / "own.jsonl", minutes=2.0), log)
    assert isinstance(log.file, io.StringIO)
    lines = log.file.getvalue()
    assert re.search(r"^\d answers; minutes: 0 of 2, \d+ s$", lines, re.MULTILINE)
    assert "of 6" not in lines


def test_an_output_has_one_writer_at_a_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards answers that stand twice, as two processes wrote them. Another output in the directory
    is free."""
    job, others = make_job(model, tmp_path / "own.jsonl"), make_job(model, tmp_path / "b.jsonl")
    add, seen = Part.add_answers, []

    def twice(*arguments: Any) -> None:
        add(*arguments)
        if not seen:
            seen.append(1)
            before = Path(f"{job.output}.part").read_text()
            with pytest.raises(ConfigError, match=r"another process is writing .*own\.jsonl:"):
                run(job, QUIET)
            assert Path(f"{job.output}.part").read_text() == before
            run(others, QUIET)

    monkeypatch.setattr(Part, "add_answers", twice)
    result = run(job, QUIET)
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
        run(job, QUIET)


def test_a_home_directory_is_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards answers in a directory that is named `~`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run(make_job(model, Path("~/own.jsonl")), QUIET)
    assert (tmp_path / "home" / "own.jsonl").exists()
    assert not (tmp_path / "~").exists()


def test_two_outputs_beside_their_model_are_no_part_of_it(model: Path, tmp_path: Path):
    """Guards a finished output that is refused because there is another one."""
    mine = shutil.copytree(model, tmp_path / "model")
    first = run(make_job(mine, mine / "a.jsonl"), QUIET)
    run(make_job(mine, mine / "b.jsonl"), QUIET)
    assert run(make_job(mine, mine / "a.jsonl"), QUIET) == first


def test_a_job_without_room_for_an_answer_is_refused(model: Path, tmp_path: Path):
    """Guards an empty output that counts as done; with room, the same command goes on."""
    output = tmp_path / "own.jsonl"
    with pytest.raises(ValidationError, match="max_new_tokens 160 leaves no room for a prompt"):
        make_job(model, output, max_new_tokens=160)
    with pytest.raises(DataError, match="no prompt has room for 159 tokens"):
        run(make_job(model, output, max_new_tokens=159), QUIET)
    assert not list(tmp_path.iterdir())
    run(make_job(model, output), QUIET)


def test_minutes_end_a_generation_and_what_has_no_answer_is_left_out(model: Path, tmp_path: Path):
    """Guards a budget that nobody keeps, and one that begins anew whenever a job goes on."""
    prompts = (CorpusSource(count=4000), OwnPrompts(count=2000))
    job = make_job(model, tmp_path / "a.jsonl", prompts=prompts, minutes=0.05)
    result = run(job, QUIET)
    assert 0 < result.conversations < 6000
    assert 3 <= result.seconds < 30
    assert result.left_out == result.source_prompts + result.own_prompts - result.conversations
    kinds = {line["origin"].partition(":")[0] for line in lines_of(tmp_path / "a.jsonl")}
    assert "corpus" in kinds
    assert run(job, QUIET) == result


def test_minutes_that_give_too_few_answers_are_refused_before_the_first(
    model: Path, tmp_path: Path
):
    """Guards a quarter of an hour on nine answers. With the time that is asked for, or without a
    least number, the same directory is written."""
    changes = {"prompts": CorpusSource(count=40), "minutes": 0.001, "least_answers": 10**6}
    job = make_job(model, tmp_path / "a.jsonl", **changes)
    with pytest.raises(ConfigError, match=r"tokens a second: 0.0 minutes give about \d+ answers"):
        run(job, QUIET)
    assert not (tmp_path / "a.jsonl.part").exists()
    assert run(make_job(model, tmp_path / "a.jsonl", minutes=1.0, least_answers=6), QUIET)


def test_prompts_that_are_there_are_answered_before_others_are_written(
    talker: Path, tmp_path: Path
):
    """Guards a slow machine that writes prompts for half of its minutes, while some were given."""
    prompts = (CorpusSource(count=3), OwnPrompts(count=4, max_new_tokens=24))
    job = make_job(talker, tmp_path / "a.jsonl", prompts=prompts, minutes=1.0)
    order = []

    class Watched(InProcess):
        def decode(self, requests, until=math.inf):
            requests = list(requests)
            order.append([request.max_new_tokens for request in requests])
            yield from super().decode(requests, until)

    run_generation(job, QUIET, Watched)
    asked = [tokens for tokens in order if tokens and tokens[0] != 16]
    assert asked[0] == [40] * 3
    assert asked[1][0] == 24


def test_ten_answers_are_made_however_late_it_is(model: Path, tmp_path: Path):
    """Guards a slow machine whose answers, after a job's minutes, are too few to train on."""
    job = make_job(model, tmp_path / "a.jsonl", prompts=CorpusSource(count=40), minutes=1e-6)
    assert 10 <= run(job, QUIET).conversations < 20


def test_ten_prompts_are_written_however_late_it_is(talker: Path, tmp_path: Path):
    """Guards a slow machine on which a model asks itself four questions, and is trained on four
    answers. Here half of what it asks is excluded, so ten tries do not do."""
    excluded = tmp_path / "excluded.jsonl"
    asked = [f"How many are {a} and {b}?" for a in range(0, 10, 2) for b in range(10)]
    excluded.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    own = OwnPrompts(count=60, max_new_tokens=24)
    changes = {"prompts": own, "exclude": (str(excluded),), "minutes": 1e-6}
    result = run(make_job(talker, tmp_path / "a.jsonl", **changes), QUIET)
    assert result.own_tries > 10
    assert 10 <= result.own_prompts < 30


def test_a_model_that_does_not_ask_is_not_tried_for_long(model: Path, tmp_path: Path):
    """Guards a job whose minutes are over, and which goes on with what brings nothing."""
    job = make_job(model, tmp_path / "a.jsonl", prompts=OwnPrompts(count=2000), minutes=1e-6)
    with pytest.raises(DataError, match=r"writes too few prompts: 0 of 10 tries"):
        run(job, QUIET)


def test_minutes_count_over_all_runs(model: Path, tmp_path: Path):
    """Killed near its end, a job has little time left."""
    part = Part(tmp_path / "b.part", {"job": {}, "content": {}})
    part.add_seconds(50)
    part.add_seconds(9.5)
    again = Part(tmp_path / "b.part", {"job": {}, "content": {}})
    assert again.seconds == 59.5
    clock = generation._Clock(1.0, again)
    assert 0 < clock.until(1.0) - time.monotonic() <= 0.5
    assert clock.until(0.5) < time.monotonic()


def test_prompts_that_were_made_stay_whatever_is_left_of_the_minutes(
    talker: Path, tmp_path: Path, monkeypatch
):
    """Guards a run stopped behind its answers, of which resuming kept the first ten."""
    prompts = OwnPrompts(count=30)
    job = make_job(talker, tmp_path / "a.jsonl", prompts=prompts, minutes=1.0)

    def stop(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generation, "write_answers", stop)
        with pytest.raises(KeyboardInterrupt):
            run(job, QUIET)
    part = Path(f"{job.output}.part")
    kept = sum("prompt" in json.loads(line) for line in part.read_text().splitlines()[1:])
    assert kept == 30
    with part.open("a") as lines:
        lines.write(json.dumps({"seconds": 59.0}) + "\n")
    assert run(job, QUIET).own_prompts == 30


def test_the_start_of_engines_does_not_count(tmp_path: Path, monkeypatch):
    """Guards a demo beside other work, whose minutes were over before its engines were ready. By
    hand: of 60 s, 5 pass before the first start of 300 s, and 20 with the engines."""
    now = 1000.0
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now))
    part = Part(tmp_path / "c.part", {"job": {}, "content": {}})
    clock = generation._Clock(1.0, part)
    untils: list[float] = []

    class Late:
        def start(self, requests: int) -> None:
            nonlocal now
            now += 300

        def decode(self, requests: Iterable[Request], until: float) -> Iterator[list[Completion]]:
            nonlocal now
            untils.append(until - now)
            now += 20
            yield []

    now += 5
    for _ in range(2):
        assert list(generation._decode([], 1.0, clock, Late())) == [[]]
    assert untils == [55, 35]
    assert part.seconds == 45
