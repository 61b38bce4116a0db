"""What is asked: several sources, prompts of the model's own, and none of an evaluation's."""

import gzip
import io
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generate.engines import QUIET, InProcess, make_job, run
from generate.test_generate import lines_of, stop_at_the_end
from pydantic import ValidationError
from rich.console import Console

from mars_ray.config.decode import Sampling
from mars_ray.config.generate import GenerateJob, OwnPrompts
from mars_ray.config.load import parse_job
from mars_ray.data.chat import encoder_of
from mars_ray.decode.request import Completion
from mars_ray.errors import ConfigError, DataError
from mars_ray.generate.prompts import Choice, Try, requests_of, tried
from mars_ray.model.load import load_tokenizer

OWN = {"type": "own", "count": 30, "max_new_tokens": 24}


def own_job(talker: Path, output: Path, **changes: Any) -> GenerateJob:
    changes = {"prompts": OWN, "sampling": Sampling(), "max_new_tokens": 8} | changes
    return make_job(talker, output, **changes)


def questions(output: Path) -> list[str]:
    return [line["messages"][0]["content"] for line in lines_of(output)]


def test_a_model_writes_its_own_prompts_and_answers_them(talker: Path, tmp_path: Path):
    """Sensible ones of a model that was trained on users' turns, each once, with its answer."""
    output = tmp_path / "own.jsonl"
    result = run(own_job(talker, output), QUIET)
    asked = questions(output)
    assert len(set(asked)) == len(asked) == result.own_prompts == result.conversations == 30
    shaped = [text for text in asked if text.startswith("How many are ") and text.endswith("?")]
    assert len(shaped) > 25
    assert result.own_tries == 30 + sum(result.own_faults.values())
    assert result.source_prompts == 0
    assert {line["finish_reason"] for line in lines_of(output)} == {"stop"}
    assert all(line["origin"].startswith("own:") for line in lines_of(output))


def test_what_it_reads_is_what_a_service_would_give_it(talker: Path, tmp_path: Path):
    """Guards prompts whose tokens are those of the sample, which no user's text would have."""
    output = tmp_path / "own.jsonl"
    run(own_job(talker, output), QUIET)
    tokenizer = load_tokenizer(talker)
    for line in lines_of(output):
        asked = tokenizer.apply_chat_template(line["messages"][:1], add_generation_prompt=True)
        assert line["prompt_ids"] == asked["input_ids"]


def test_tries_are_not_made_again(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards hours of an interrupted run: the same prompts, taken from the same tries."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    result = run(own_job(talker, whole), QUIET)
    # Some tries of the first round, in any order.
    part = stop_at_the_end(own_job(talker, cut), monkeypatch, 20)
    monkeypatch.setattr(InProcess, "asked", 0)
    assert run(own_job(talker, cut), QUIET).own_tries == result.own_tries
    assert InProcess.asked < result.own_tries + 30
    assert questions(cut) == questions(whole)
    assert not part.exists()


def test_seeds_make_other_prompts(talker: Path, tmp_path: Path):
    """Guards two sources that write the same, and tries that are all alike."""
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run(own_job(talker, one), QUIET)
    run(own_job(talker, other, prompts=OWN | {"seed": 1}), QUIET)
    assert set(questions(one)) != set(questions(other))


def test_sources_are_mixed(talker: Path, tmp_path: Path):
    """Prompts of a domain beside what the model asks by itself, which repeats none of them."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"q": f"How many are {a} and 5?"} for a in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"type": "files", "paths": [str(path)], "columns": {"prompt": "q"}, "limit": 5}
    output = tmp_path / "own.jsonl"
    sources = [OWN | {"count": 40}, given | {"shuffle_seed": 1}]
    result = run(own_job(talker, output, prompts=sources), QUIET)
    assert (result.source_prompts, result.own_prompts) == (5, 40)
    asked = questions(output)
    assert set(asked[:5]) <= {row["q"] for row in rows}
    assert len(set(asked)) == 45


def test_prompts_of_an_evaluation_are_excluded(talker: Path, tmp_path: Path):
    """Guards a measurement on what was trained on. Not by bytes: another case, other spaces, and
    fields of any name, in any of the files that evaluations come in; also what the model writes."""
    tests = [{"turns": [f"how many are {a}  and {b}"]} for a in range(10) for b in range(5)]
    evaluation = tmp_path / "test.jsonl.gz"
    evaluation.write_bytes(gzip.compress(("\n".join(map(json.dumps, tests))).encode()))
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt": f"How many are {a} and 4?"} for a in range(3)]))
    sources = [{"type": "files", "paths": [str(path)]}, OWN | {"count": 20}]
    output = tmp_path / "own.jsonl"
    job = own_job(talker, output, prompts=sources, exclude=[str(evaluation)])
    result = run(job, QUIET)
    assert result.excluded == 3 + result.own_faults["excluded"]
    assert result.own_faults["excluded"] > 3
    assert (result.source_prompts, result.own_prompts) == (0, 20)
    assert not [text for text in questions(output) if text[-2] in "01234"]
    evaluation.write_bytes(gzip.compress(json.dumps(tests[0]).encode()))
    with pytest.raises(DataError, match="another content of exclude"):
        run(job, QUIET)


def test_all_prompts_excluded_is_told(talker: Path, tmp_path: Path):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"instruction": "Say", "instances": [{"input": "it"}]}]))
    columns = {"instruction": "instruction", "input": "instances.0.input"}
    source = {"type": "files", "paths": [str(path)], "columns": columns}
    job = own_job(talker, tmp_path / "own.jsonl", prompts=source, exclude=[str(path)])
    with pytest.raises(DataError, match="no prompts: 0 of 1 rows are bad, and 1 are excluded"):
        run(job, QUIET)
    missing = own_job(talker, tmp_path / "own.jsonl", exclude=[str(tmp_path / "gone.jsonl")])
    with pytest.raises(DataError, match="no such file"):
        run(missing, QUIET)


def test_a_model_that_writes_no_prompts_is_told(model: Path, tmp_path: Path):
    """Guards a run for ever, and an adapter that is trained on noise. The numbers say why."""
    prompts = OWN | {"count": 4, "max_new_tokens": 3}
    job = own_job(model, tmp_path / "own.jsonl", prompts=prompts)
    with pytest.raises(DataError, match=r"0 of 16 tries are usable \(\d+ not ended.*4 are wanted"):
        run(job, QUIET)


def test_fewer_prompts_than_wanted_are_said(talker: Path, tmp_path: Path):
    """A small model repeats itself: with most of what was asked for it goes on, and says so."""
    output, log = tmp_path / "own.jsonl", Console(file=io.StringIO(), width=120)
    result = run(own_job(talker, output, prompts=OWN | {"tries_per_prompt": 1}), log)
    assert 15 <= result.own_prompts == result.conversations < 30 == result.own_tries
    assert isinstance(log.file, io.StringIO)
    assert f"30 tries gave {result.own_prompts} of 30 prompts" in log.file.getvalue()


def completion(tokens: list[int], reason: str = "stop") -> Completion:
    return Completion("0", tuple(tokens), (), 1, reason)  # pyright: ignore[reportArgumentType]


def test_what_is_no_prompt(talker: Path):
    """Each fault by its name."""
    tokenizer = load_tokenizer(talker)
    encoder, text = encoder_of(tokenizer), tokenizer.encode("Why?")
    turn = encoder.user_turn()
    end, start = turn.end_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    spelled = tokenizer.encode("<|im_end|>", split_special_tokens=True)
    half = tokenizer.encode("é")[:1]

    def fault(tokens: list[int], reason: str = "stop") -> str:
        return tried(completion(tokens, reason), turn, encoder).fault

    assert tried(completion([*text, end]), turn, encoder) == Try("Why?")
    assert fault(text, "length") == "not ended"
    assert fault([*text, tokenizer.pad_token_id]) == "ended by another token"
    assert fault([*text, start, end]) == "special tokens"
    assert fault([*text, *spelled, end]) == "special tokens"
    assert fault([end]) == "empty"
    assert fault([*text, *half, end]) == "broken characters"


def test_further_tries_are_as_many_as_are_needed():
    """One in four is usable: 10 of 40 tries; never more than were allowed, nor any behind the
    last that was needed."""
    source = OwnPrompts(count=10, tries_per_prompt=6)
    choice = Choice(source, frozenset(), set())
    rounds = []
    while more := choice.more:
        rounds.append(more)
        numbers = range(choice.tries, choice.tries + more)
        choice.take(Try("" if n % 4 else f"Why {n}?", "empty" if n % 4 else "") for n in numbers)
    assert rounds[0] == 10
    assert [record.origin for record in choice.records] == [f"own:{n}" for n in range(0, 40, 4)]
    assert choice.tries == 37
    choice.check()
    stubborn = Choice(source, frozenset(), set())
    while more := stubborn.more:
        stubborn.take([Try("", "empty")] * more)
    assert stubborn.tries == 60


def test_every_try_has_a_seed_of_its_own(talker: Path, tmp_path: Path):
    """Also those of two sources: by chance the same seed, the same prompts."""
    job = own_job(talker, tmp_path / "own.jsonl")
    turn = encoder_of(load_tokenizer(talker)).user_turn()

    def seeds(seed: int) -> Iterator[int]:
        source = OwnPrompts(count=1, seed=seed)
        return (request.sampling.seed for request in requests_of(source, job, turn, range(50)))

    assert len({*seeds(0), *seeds(1), *seeds(2**31 - 1)}) == 150


def test_the_job_of_the_documentation_is_one():
    """Guards a page whose example is refused."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "adapt.md"
    example, *_ = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    job = parse_job(tomllib.loads(example), source=page.name)
    assert isinstance(job, GenerateJob)
    assert [source.type for source in job.prompts] == ["own", "files"]


def test_jobs_that_cannot_be(talker: Path, tmp_path: Path):
    """One table or several, and errors that name the key as it is written."""
    table = {"kind": "generate", "checkpoint": "m", "output": "o.jsonl"}
    job = parse_job(table | {"prompts": dict(OWN)}, source="j", overrides=["prompts.count=7"])
    assert isinstance(job, GenerateJob)
    assert job.prompts == (OwnPrompts(count=7, max_new_tokens=24),)
    with pytest.raises(
        ConfigError, match=r"unknown key 'prompts\.1\.cuont'; did you mean 'prompts\.1\.count'"
    ):
        parse_job(table | {"prompts": [OWN, OWN | {"cuont": 1}]}, source="j")
    with pytest.raises(ConfigError, match="prompts: "):
        parse_job(table | {"prompts": []}, source="j")
    with pytest.raises(ValidationError, match="96 leaves no room for a prompt"):
        own_job(
            talker,
            tmp_path / "o.jsonl",
            prompts=OWN | {"max_new_tokens": 96},
            engine={"max_context": 96},
        )
    with pytest.raises(ValidationError, match="leaves no GPU"):
        own_job(talker, tmp_path / "o.jsonl", engine={"device": "cuda"}, gpus_per_worker=0)
    with pytest.raises(ValidationError, match="gpus_per_worker has no effect"):
        own_job(talker, tmp_path / "o.jsonl", engine={"device": "cpu"}, gpus_per_worker=1)
