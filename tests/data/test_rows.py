import copy
import dataclasses
import json
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from data.encoding import encode

from mars_ray.config.inputs import CorpusSource, DataConfig, FilesSource
from mars_ray.data import rows
from mars_ray.data.rows import Joined, tokenize
from mars_ray.data.sources import BadRows, read
from mars_ray.errors import DataError
from mars_ray.model.create import CHAT_TEMPLATE

SOURCE = CorpusSource(count=20)
CONFIG = DataConfig(train=SOURCE)
LONG = {"response": "1 2 3 4 5 6 7 8 9 " * 5}
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def files(tmp_path, *lines):
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return FilesSource(paths=(str(tmp_path / "d.jsonl"),))


def test_thoughts_that_would_be_lost_are_told(tokenizer, tmp_path, caplog):
    """By file and line, with what to do; the other rows are there."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    thought = [turns[0], turns[1] | {"reasoning_content": "think"}]
    source = files(tmp_path, {"messages": thought}, {"messages": turns})
    with pytest.raises(DataError, match=r"d\.jsonl:1: .*leaves out the thoughts of message 2"):
        tokenize(source, tokenizer, CONFIG, tmp_path / "cache")
    some = CONFIG.model_copy(update={"max_bad_share": 0.5})
    assert len(tokenize(source, tokenizer, some, tmp_path / "cache")) == 1


def test_parquet_rows_of_several_forms(tokenizer, tmp_path):
    """Every row has every field there, and null where it was not given, also within messages."""
    ids = encode(next(iter(read(SOURCE, BadRows()))).messages, tokenizer).input_ids.tolist()
    content = [
        {"prompt_ids": ids[:5], "answer_ids": ids[5:]},
        {
            "messages": [
                {"role": "user", "content": "hi", "name": "bob"},
                {"role": "assistant", "content": "yo", "weight": 1},
            ]
        },
        {"prompt": "q", "response": "a"},
        {"instruction": "q", "output": "a", "system": "s", "history": [["q", "a"]]},
    ]
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_filled(content)), path)
    rows = tokenize(FilesSource(paths=(str(path),)), tokenizer, CONFIG, tmp_path / "cache")
    assert len(rows) == 4
    assert rows.summary.bad == 0
    assert rows[0].input_ids.tolist() == ids


def _filled(rows):
    """With all fields in each, as pyarrow would only take them from the first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


@pytest.fixture
def builds(monkeypatch):
    """How often a cache was built."""
    count = []
    build = rows._build
    monkeypatch.setattr(rows, "_build", lambda *args: (count.append(1), build(*args))[1])
    return count


def test_rows_are_the_encoded_conversations(tokenizer, tmp_path):
    """Nothing is lost or moved between the template and the memory map."""
    conversations = tokenize(SOURCE, tokenizer, CONFIG, tmp_path)
    records = list(read(SOURCE, BadRows()))
    assert len(conversations) == len(records) == 20
    for index, record in enumerate(records):
        expected, found = encode(record.messages, tokenizer), conversations[index]
        assert np.array_equal(found.input_ids, expected.input_ids)
        assert np.array_equal(found.response, expected.response)
        assert conversations.lengths[index] == len(expected.input_ids)
    with pytest.raises(IndexError):
        conversations[20]


def test_the_cache_is_used_and_travels_as_its_place(tokenizer, tmp_path, builds):
    """A second run, or a worker that gets the object, does not tokenise or copy anything."""
    first = tokenize(SOURCE, tokenizer, CONFIG, tmp_path)
    again = tokenize(SOURCE, tokenizer, CONFIG, tmp_path)
    assert len(builds) == 1
    moved = pickle.dumps(again)
    assert len(moved) < 1000
    assert np.array_equal(pickle.loads(moved)[7].input_ids, first[7].input_ids)
    assert [path.name for path in tmp_path.iterdir()] == [first.directory.name]


def test_whatever_changes_the_tokens_changes_the_place(tokenizer, tmp_path, builds, monkeypatch):
    """Guards against tokens of another tokenizer: 12% accuracy and no error, once."""
    import copy

    def run(source=SOURCE, config=CONFIG, tokenizer=tokenizer):
        return tokenize(source, tokenizer, config, tmp_path / "cache").directory

    other = copy.deepcopy(tokenizer)
    other.chat_template = other.chat_template.replace(
        "message['content']", "' ' + message['content']"
    )
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["apples"])
    source = files(tmp_path, {"prompt": "q", "response": "a"})
    places = {
        run(),
        run(CorpusSource(count=21)),
        run(CorpusSource(count=20, seed=1)),
        run(config=CONFIG.model_copy(update={"max_length": 64})),
        run(config=CONFIG.model_copy(update={"overlong": "drop"})),
        run(tokenizer=other),
        run(tokenizer=grown),
        run(source),
        run(files(tmp_path, {"prompt": "q", "response": "b"})),
        run(source.model_copy(update={"limit": 1})),
        run(source.model_copy(update={"limit": 1, "shuffle_seed": 0})),
    }
    assert len(places) == len(builds) == 11


@pytest.mark.parametrize("name", ["tokens.bin", "response.bin", "starts.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_cache_is_rebuilt(tokenizer, tmp_path, builds, name, damage):
    """A full disk or a killed process must not decide what a model is trained on."""
    whole = tokenize(SOURCE, tokenizer, CONFIG, tmp_path)
    expected = [whole[index].input_ids.tolist() for index in range(20)]
    path = whole.directory / name
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-3])
    rebuilt = tokenize(SOURCE, tokenizer, CONFIG, tmp_path)
    assert len(builds) == 2
    assert [rebuilt[index].input_ids.tolist() for index in range(20)] == expected
    assert len(list(tmp_path.iterdir())) == 1


def test_several_builders_agree(tokenizer, tmp_path):
    """All workers of a job may find the cache missing at the same moment."""
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(tokenize, SOURCE, tokenizer, CONFIG, tmp_path) for _ in range(4)]
        results = [run.result() for run in runs]
    assert len({run.directory for run in results}) == 1
    assert [len(run) for run in results] == [20] * 4
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("overlong", "lengths", "dropped", "truncated"),
    [("truncate", [None, 24], 1, 1), ("drop", [None], 2, 0)],
)
def test_overlong_conversations(tokenizer, tmp_path, overlong, lengths, dropped, truncated):
    """Cut to max_length, or left out; one whose answer is cut off entirely teaches nothing."""
    source = files(
        tmp_path,
        {"prompt": "q", "response": "a"},
        {"prompt": "q", **LONG},
        {"prompt": "1 2 3 4 5 6 7 8 9 " * 5, "response": "a"},
    )
    config = DataConfig(train=source, max_length=24, overlong=overlong)
    conversations = tokenize(source, tokenizer, config, tmp_path / "cache")
    short = len(conversations[0].input_ids)
    assert conversations.lengths.tolist() == [length or short for length in lengths]
    summary = dataclasses.asdict(conversations.summary)
    assert (summary["dropped"], summary["truncated"]) == (dropped, truncated)


def test_too_many_bad_rows_are_fatal(tokenizer, tmp_path):
    """With file and line; below the share they are counted. Nothing is left behind."""
    source = files(tmp_path, *[{"prompt": "q", "response": "a"}] * 9, {"prompt": "q"})
    with pytest.raises(DataError, match=r"1 of 10 rows are bad") as error:
        tokenize(source, tokenizer, DataConfig(train=source), tmp_path / "cache")
    assert "d.jsonl:10: has prompt" in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []
    config = DataConfig(train=source, max_bad_share=0.1)
    conversations = tokenize(source, tokenizer, config, tmp_path / "cache")
    assert (len(conversations), conversations.summary.bad) == (9, 1)


def test_rows_the_template_refuses_are_bad_rows(tokenizer, tmp_path):
    """And not the end of the job."""
    source = files(
        tmp_path, {"prompt": "\ud83d", "response": "a"}, {"prompt": "q", "response": "a"}
    )
    config = DataConfig(train=source, max_bad_share=0.5)
    conversations = tokenize(source, tokenizer, config, tmp_path / "cache")
    assert (len(conversations), conversations.summary.bad) == (1, 1)


def test_rows_the_template_writes_unusably_are_bad_rows(tokenizer, tmp_path):
    """With file and line: guards a run of hours that one of 200 rows ended without its name."""
    one_turn = copy.deepcopy(tokenizer)
    one_turn.chat_template = "{%- if messages | length > 2 -%}x{%- endif -%}" + CHAT_TEMPLATE
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    source = files(tmp_path, {"messages": turns}, {"messages": turns * 2})
    config = DataConfig(train=source, max_bad_share=0.5)
    conversations = tokenize(source, one_turn, config, tmp_path / "cache")
    assert (len(conversations), conversations.summary.bad) == (1, 1)
    strict = config.model_copy(update={"max_bad_share": 0.1})
    with pytest.raises(DataError, match=r"d\.jsonl:2: the chat template .* cannot be found"):
        tokenize(source, one_turn, strict, tmp_path / "cache")


def test_what_is_lost_is_said_at_every_start(tokenizer, tmp_path, caplog):
    """Guards a run on 1 of 51 conversations, of which nobody heard; also from the cache."""
    source = files(tmp_path, *[{"prompt": "1 " * 50, "response": "a"}] * 3, {"prompt": "q", **LONG})
    config = DataConfig(train=source, max_length=24)
    for _ in range(2):
        caplog.clear()
        tokenize(source, tokenizer, config, tmp_path / "cache")
        assert "d.jsonl: 1 conversations, 1 of them cut at max_length = 24" in caplog.text
        assert "left out: 0 bad rows, 3 too long" in caplog.text
    caplog.clear()
    tokenize(SOURCE, tokenizer, CONFIG, tmp_path / "cache")
    assert not caplog.text


def test_other_words_have_another_fingerprint(tokenizer, tmp_path):
    """Guards a run resumed on changed answers of the same lengths; also beside other data."""

    def made(answer):
        source = files(tmp_path, {"prompt": "q", "response": answer})
        return tokenize(source, tokenizer, DataConfig(train=source), tmp_path / "cache")

    one, other = made("12"), made("34")
    assert one.lengths.tolist() == other.lengths.tolist()
    assert made("12").fingerprint == one.fingerprint != other.fingerprint
    assert Joined(one, one).fingerprint != Joined(one, other).fingerprint


def test_a_full_disk_is_an_error(tokenizer, tmp_path, monkeypatch):
    """With what to do, instead of a traceback; nothing stays behind."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rows, "_build", full)
    with pytest.raises(DataError, match=r"No space left.*another data\.cache_dir"):
        tokenize(SOURCE, tokenizer, CONFIG, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_conversation_left_is_an_error(tokenizer, tmp_path):
    """With the reasons."""
    source = files(tmp_path, {"prompt": "1 2 3 4 5 6 7 8 9", "response": "a"})
    config = DataConfig(train=source, max_length=8)
    with pytest.raises(DataError, match=r"no conversation is left of 1 rows.*1 do not fit"):
        tokenize(source, tokenizer, config, tmp_path / "cache")


@pytest.mark.skipif(not GSM8K.exists(), reason=f"GSM8K is not at {GSM8K}")
def test_gsm8k(tokenizer, tmp_path):
    """Real data: every problem is read, and its answer survives the round trip."""
    columns = {"prompt": "question", "response": "answer"}
    counts = {}
    for name in ("train.jsonl.gz", "test.jsonl"):
        source = FilesSource(paths=(str(GSM8K / name),), columns=columns)
        report = BadRows()
        counts[name] = len(list(read(source, report)))
        assert report.bad == 0
    assert counts == {"train.jsonl.gz": 7473, "test.jsonl": 1319}
    source = FilesSource(paths=(str(GSM8K / "test.jsonl"),), columns=columns, limit=50)
    config = DataConfig(train=source, max_length=2048)
    conversations = tokenize(source, tokenizer, config, tmp_path)
    for index, record in enumerate(read(source, BadRows())):
        encoded = conversations[index]
        answer = tokenizer.decode(encoded.input_ids[encoded.response])
        assert answer == record.messages[1].content + "<|im_end|>"


def test_what_a_killed_process_has_left_goes_after_a_day(tokenizer, tmp_path):
    """Guards a disk that fills with halves; a process that is building now may have begun long
    ago."""
    now = time.time()
    for name, age_s in (("dead", 2 * 86_400), ("slow", 60)):
        half = tmp_path / f".building-{name}" / "new"
        half.mkdir(parents=True)
        (half / "tokens.bin").touch()
        for path, age in ((half / "tokens.bin", age_s), (half, 2 * 86_400), (half.parent, 2e5)):
            os.utime(path, (now - age, now - age))
    tokenize(SOURCE, tokenizer, CONFIG, tmp_path)
    assert [path.name for path in tmp_path.glob(".building-*")] == [".building-slow"]
