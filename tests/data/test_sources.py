import logging

import pytest
from pydantic import ValidationError

from mars_ray.config.inputs import CorpusSource, FilesSource
from mars_ray.data import sources
from mars_ray.data.sources import BadRows, Message, read, read_prompts
from mars_ray.errors import DataError

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def read_rows(monkeypatch, rows, columns=None, reader=read, **settings):
    """The rows as if they stood in a file, through the public function."""
    numbered = [(f"f.jsonl:{number}", row) for number, row in enumerate(rows, start=1)]
    monkeypatch.setattr(sources.files, "rows", lambda _: iter(numbered))
    report = BadRows()
    source = FilesSource(paths=("f.jsonl",), columns=columns or {}, **settings)
    return list(reader(source, report)), report


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"messages": TURNS, "id": 1, "source": "x"}, {}, ["q", "a"]),
        ({"prompt": "q", "response": "a"}, {}, ["q", "a"]),
        (
            {"question": "q", "answer": "a"},
            {"prompt": "question", "response": "answer"},
            ["q", "a"],
        ),
        ({"instruction": "q", "input": "", "output": "a"}, {}, ["q", "a"]),
        ({"instruction": "q", "output": "a"}, {}, ["q", "a"]),
        ({"instruction": "q", "input": "i", "output": "a"}, {}, ["q\n\ni", "a"]),
        # Parquet has every field in every row, and null where it was not given.
        ({"prompt_ids": None, "answer_ids": None, "messages": TURNS}, {}, ["q", "a"]),
        ({"prompt_ids": [1], "answer_ids": None, "messages": TURNS}, {}, ["q", "a"]),
        ({"messages": None, "prompt": "q", "response": "a"}, {}, ["q", "a"]),
        ({"prompt": "q", "response": None, "instruction": "i", "output": "a"}, {}, ["i", "a"]),
        ({"instruction": "q", "input": None, "output": "a", "history": None}, {}, ["q", "a"]),
        (
            {"question": None, "messages": TURNS, "response": None},
            {"prompt": "question"},
            ["q", "a"],
        ),
        ({"prompt": "q", "question": None, "response": "a"}, {"prompt": "question"}, ["q", "a"]),
        (
            {
                "messages": [
                    turn
                    | dict.fromkeys(
                        ("name", "tool_calls", "reasoning_content", "weight", "refusal")
                    )
                    for turn in TURNS
                ],
                "tools": None,
                "system": None,
            },
            {},
            ["q", "a"],
        ),
        # Whoever renames fields of a form means that form.
        (
            {"messages": TURNS, "prompt": "p", "text": "t"},
            {"response": "text"},
            ["p", "t"],
        ),
    ],
)
def test_forms(monkeypatch, row, columns, expected):
    """The three forms, Dolci's extra fields, and renamed columns."""
    records, report = read_rows(monkeypatch, [row], columns)
    assert [message.content for message in records[0].messages] == expected
    assert [message.role for message in records[0].messages] == ["user", "assistant"]
    assert records[0].origin == "f.jsonl:1"
    assert (report.seen, report.bad) == (1, 0)


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        (
            {"messages": [TURNS[0] | {"name": "bob"}, TURNS[1] | {"reasoning_content": "t"}]},
            {},
            [Message("user", "q", name="bob"), Message("assistant", "a", reasoning="t")],
        ),
        (
            {"messages": [TURNS[0], TURNS[1] | {"reasoning": None, "thinking": "t"}]},
            {},
            [Message("user", "q"), Message("assistant", "a", reasoning="t")],
        ),
        (
            {"prompt": "q", "response": "a", "cot": "t"},
            {"reasoning_content": "cot"},
            [Message("user", "q"), Message("assistant", "a", reasoning="t")],
        ),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": [["p", "b"]]},
            {},
            [
                Message("system", "s"),
                Message("user", "p"),
                Message("assistant", "b"),
                Message("user", "q"),
                Message("assistant", "a"),
            ],
        ),
        (
            {"system_prompt": "s", "prompt": "q", "response": "a", "history": []},
            {},
            [Message("system", "s"), Message("user", "q"), Message("assistant", "a")],
        ),
        (
            {"messages": TURNS, "system": "s", "tools": "[]", "images": []},
            {},
            [Message("system", "s"), Message("user", "q"), Message("assistant", "a")],
        ),
        (
            {"messages": [{"role": "system", "content": "s"}, *TURNS], "system": "s"},
            {},
            [Message("system", "s"), Message("user", "q"), Message("assistant", "a")],
        ),
    ],
)
def test_what_stands_beside_a_conversation_is_part_of_it(monkeypatch, row, columns, expected):
    """Guards thoughts, system texts and earlier turns that are left out without a word."""
    (record,), _ = read_rows(monkeypatch, [row], columns)
    assert list(record.messages) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ValueError("Expecting value"), "not JSON: Expecting value"),
        (["a"], "not an object but list"),
        (
            {},
            "has no fields; expected prompt_ids + answer_ids or messages or prompt + response or ",
        ),
        ({"prompt": "q", "answer": "a"}, "has prompt, answer; expected"),
        ({"prompt": "q", "response": 3}, "response is not text but int"),
        ({"prompt": None, "response": "a"}, "has prompt (null), response; expected"),
        ({"prompt": "q", "response": " "}, "answer is empty"),
        ({"instruction": "q", "input": 5, "output": "a"}, "input is not text"),
        ({"messages": "hi"}, "messages is not a list"),
        ({"messages": ["hi"]}, "messages is not a list"),
        ({"messages": []}, "no message is by the assistant"),
        ({"messages": TURNS[:1]}, "no message is by the assistant"),
        ({"messages": TURNS[1:]}, "first message is by the assistant"),
        ({"messages": [{"role": "user"}]}, "message 1 has no role or no content"),
        ({"messages": [*TURNS, {"role": "tool", "content": "x"}]}, "message 3 has role 'tool'"),
        ({"messages": [*TURNS, {"role": ["user"], "content": "x"}]}, "message 3 has role"),
        ({"messages": [TURNS[0], {**TURNS[1], "function_calls": "f()"}]}, "calls functions"),
        ({"messages": [TURNS[0], {**TURNS[1], "weight": 0}]}, "message 2 is not to be learned"),
        ({"messages": [TURNS[0], {**TURNS[1], "content": None}]}, "message 2 has no role or no"),
        ({"messages": [TURNS[0], {**TURNS[1], "content": [1]}]}, "content that is not text"),
        ({"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}]}, "to be learned with weight 0.5"),
        ({"messages": TURNS, "weight": 0}, "the row is not to be learned"),
        ({"messages": [TURNS[0], {**TURNS[1], "loss": False}]}, "not to be learned (loss false)"),
        ({"messages": [TURNS[0], {**TURNS[1], "train": False}]}, "not to be learned (train false)"),
        ({"messages": [TURNS[0], {**TURNS[1], "function_call": {"name": "f"}}]}, "calls functions"),
        ({"messages": [TURNS[0], {**TURNS[1], "refusal": "no"}]}, "message 2 has refusal"),
        ({"messages": [{**TURNS[0], "name": 3}, TURNS[1]]}, "message 1 has a name that is not"),
        ({"messages": [{**TURNS[0], "thinking": "t"}, TURNS[1]]}, "message 1 has thoughts, and is"),
        ({"messages": [TURNS[0], {**TURNS[1], "thinking": ["t"]}]}, "thoughts that are not text"),
        ({"messages": TURNS, "reasoning_content": "t"}, "thoughts beside its messages"),
        ({"messages": TURNS, "tools": [{"type": "function"}]}, "has tools, which is not supported"),
        ({"prompt": "q", "response": "a", "images": ["x.png"]}, "has images, which is not"),
        ({"prompt": "q", "response": "a", "history": [["q"]]}, "history is not a list of pairs"),
        ({"messages": [*TURNS, *TURNS], "history": [["q", "a"]]}, "history beside messages"),
        ({"prompt": "q", "response": "a", "system": 3}, "system is not text but int"),
        (
            {"messages": [{"role": "system", "content": "s"}, *TURNS], "system": "t"},
            "another system message",
        ),
        ({"messages": [TURNS[0], {**TURNS[1], "content": "\n"}]}, "message 2 is an empty answer"),
    ],
)
def test_bad_rows_are_left_out_and_say_why(monkeypatch, row, reason):
    """Guards against a crash inside the template, or training on half a turn."""
    good = {"messages": [{**turn, "function_calls": None, "weight": 1} for turn in TURNS]}
    records, report = read_rows(monkeypatch, [row, good])
    assert [record.origin for record in records] == ["f.jsonl:2"]
    assert (report.seen, report.bad) == (2, 1)
    with pytest.raises(DataError, match="1 of 2 rows are bad") as error:
        report.check(0.49)
    assert "\n  f.jsonl:1: " in str(error.value)
    assert reason in str(error.value)
    report.check(0.5)


def test_only_the_first_bad_rows_are_told(monkeypatch, caplog):
    """A file of another format would fill the log with millions of lines."""
    with caplog.at_level(logging.WARNING):
        _, report = read_rows(monkeypatch, [{}] * 50)
    assert len(caplog.records) == 5
    with pytest.raises(DataError, match="50 of 50") as error:
        report.check(0.01)
    assert str(error.value).count("f.jsonl:") == 5


def test_limit_counts_rows_read(monkeypatch):
    """Bad ones too: the rows of a limited run do not depend on which are bad."""
    records, report = read_rows(monkeypatch, [{}, {"prompt": "q", "response": "a"}] * 3, limit=3)
    assert (len(records), report.seen, report.bad) == (1, 3, 2)


def test_unknown_columns_are_refused(monkeypatch):
    """Left and right are easily mistaken."""
    with pytest.raises(DataError, match="cannot rename question"):
        read_rows(monkeypatch, [{"question": "q"}], {"question": "prompt"})


def test_the_corpus_is_a_source():
    """With its split, and an origin for each row."""
    report = BadRows()
    records = list(read(CorpusSource(split="test", count=3), report))
    assert [record.origin for record in records] == ["corpus:1", "corpus:2", "corpus:3"]
    assert "####" in records[0].messages[1].content
    assert records[0].messages[0] == Message("user", records[0].messages[0].content)
    assert report.seen == 3


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"prompt": "q"}, {}, ["q"]),
        ({"prompt": "q", "response": "a"}, {}, ["q"]),
        ({"question": "q", "answer": "a"}, {"prompt": "question"}, ["q"]),
        ({"instruction": "q", "input": "i"}, {}, ["q\n\ni"]),
        ({"instruction": "q"}, {}, ["q"]),
        ({"messages": TURNS[:1]}, {}, ["q"]),
        ({"messages": [SYSTEM, *TURNS]}, {}, ["s", "q"]),
        # What waits for an answer gets it, and what went before stays.
        ({"messages": [*TURNS, TURNS[0]]}, {}, ["q", "a", "q"]),
        ({"messages": TURNS, "prompt_ids": [1], "answer_ids": [2]}, {}, ["q"]),
        ({"turns": ["q", "more"]}, {"prompt": "turns.0"}, ["q"]),
        (
            {"task": "q", "cases": [{"given": "i"}]},
            {"instruction": "task", "input": "cases.0.given"},
            ["q\n\ni"],
        ),
        ({"a.b": "q"}, {"prompt": "a.b"}, ["q"]),
        ({"messages": None, "prompt": "q"}, {}, ["q"]),
        ({"body": {"messages": None, "prompt": "q", "tools": None}}, {}, ["q"]),
        ({"body": None, "question": "q"}, {}, ["q"]),
        ({"turns": None, "prompt": "q"}, {"prompt": "turns.0"}, ["q"]),
        ({"prompt": "q", "system": "s", "history": [["p", "b"]]}, {}, ["s", "p", "b", "q"]),
        # How it is to be learned says nothing of a prompt.
        ({"prompt": "q", "weight": 0.5}, {}, ["q"]),
    ],
)
def test_prompts_need_no_answer(monkeypatch, row, columns, expected):
    """Guards files of prompts that nobody could use, as none of their rows had an answer."""
    (record,), report = read_rows(monkeypatch, [row], columns, read_prompts)
    assert [message.content for message in record.messages] == expected
    assert report.bad == 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "q"}, "has text; expected messages or prompt or instruction"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": "q", "tools": [{"type": "function"}]}, "has tools, which is not supported"),
        ({"messages": None}, r"has messages .null.; expected"),
        ({"messages": []}, "no message is by the user"),
        ({"messages": [SYSTEM]}, "no message is by the user"),
        ({"messages": TURNS[1:]}, "no message is by the user"),
    ],
)
def test_bad_prompts_say_why(monkeypatch, row, reason):
    records, report = read_rows(monkeypatch, [row], reader=read_prompts)
    assert records == []
    with pytest.raises(DataError, match=f"f.jsonl:1: .*{reason}"):
        report.check(0)


def test_prompts_of_the_corpus():
    """The questions alone."""
    records = list(read_prompts(CorpusSource(count=3), BadRows()))
    assert [[message.role for message in record.messages] for record in records] == [["user"]] * 3


def test_a_random_sample_of_a_file(monkeypatch):
    """Guards files that are sorted by kind, whose first rows are all of one. The same seed draws
    the same rows, in the file's order, from all of it."""
    rows = [{"prompt": str(number), "response": "a"} for number in range(100)]

    def drawn(**settings):
        records, _ = read_rows(monkeypatch, rows, **settings)
        return [int(record.messages[0].content) for record in records]

    sample = drawn(limit=20, shuffle_seed=0)
    assert len(set(sample)) == 20
    assert sample == sorted(sample) != list(range(20))
    assert max(sample) > 50
    assert drawn(limit=20, shuffle_seed=0) == sample != drawn(limit=20, shuffle_seed=1)
    assert drawn(limit=200, shuffle_seed=0) == list(range(100))


def test_a_seed_without_a_limit_is_refused():
    """It would do nothing."""
    with pytest.raises(ValidationError, match="shuffle_seed has no effect without limit"):
        FilesSource(paths=("f.jsonl",), shuffle_seed=1)
