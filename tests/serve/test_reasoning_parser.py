"""Thoughts told from answers, and what a client puts together of a stream of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.written import events, whole

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import VerifiedMode
from mars_ray.serve.protocol import Finish, GenerationRequest, OutputDelta
from mars_ray.serve.replica.parsers import ReasoningReader, Start, start_of

MARK, END = 1, 2
CALL = GenerationRequest("id", ("x",), VerifiedMode(), Sampling(), None, 9, shows_reasoning=True)
FINISH = Finish("stop", prompt_tokens=1, completion_tokens=1, forwards=1, reasoning_tokens=0)
PARTS = ("<think>", "</think>", "<thi", "</think", " \n", "\n", "so", "é😀", "<", ">", "/")
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
STARTS = st.sampled_from(["thoughts", "marked", "answer"])


def split(parts: list[str], start: Start) -> tuple[str, str]:
    reader = ReasoningReader(start, MARK, END)
    said = [*map(reader.push, parts), reader.flush()]
    thoughts, answer = map("".join, zip(*said, strict=True))
    return thoughts, answer


@pytest.mark.parametrize(
    ("start", "text", "thoughts", "answer"),
    [
        ("thoughts", "hm\n</think>\n\nyes", "hm", "yes"),
        ("thoughts", "<think>\nhm </think>yes", "hm", "yes"),
        ("thoughts", "never done", "never done", ""),
        ("thoughts", "never done </thin", "never done </thin", ""),
        ("thoughts", "hm</think>", "hm", ""),
        ("thoughts", "</think>yes", "", "yes"),
        ("thoughts", "a</think>b</think>c", "a", "b</think>c"),
        ("marked", "<think>hm</think>yes", "hm", "yes"),
        ("marked", "\n<think>hm", "hm", ""),
        ("marked", "yes </think> no", "", "yes </think> no"),
        ("marked", "I <think> so", "", "I <think> so"),
        ("marked", "<thi", "", "<thi"),
        ("marked", " yes", "", " yes"),
        ("answer", "<think>hm</think>yes", "", "<think>hm</think>yes"),
    ],
)
def test_what_is_thought_and_what_is_said(start, text, thoughts, answer):
    """Guards an answer that vanishes among the thoughts, and thoughts in the answer."""
    assert split([text], start) == (thoughts, answer)
    assert split(list(text), start) == (thoughts, answer)


@given(TEXTS, STARTS, st.lists(st.integers(min_value=0), max_size=20))
@settings(max_examples=500, deadline=None)
def test_the_cuts_of_a_stream_do_not_matter(text, start, places):
    """Guards a mark that is missed because two steps have written it."""
    ends = sorted({place % (len(text) + 1) for place in places})
    parts = [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert split(parts, start) == split([text], start)


def test_a_long_run_of_spaces_is_read_in_time():
    """Guards a search that begins anew at each of them."""
    space = " " * 100_000
    assert split([f"x{space}y"], "thoughts") == (f"x{space}y", "")


@pytest.mark.parametrize(
    ("prompt_end", "parser", "start"),
    [
        ("<|assistant|><think>\n", "qwen3", "thoughts"),
        ("<think>\n\n</think>\n\n", "deepseek_r1", "answer"),
        ("<|assistant|>", "deepseek_r1", "thoughts"),
        ("<|assistant|>", "qwen3", "marked"),
    ],
)
def test_where_thoughts_begin(prompt_end, parser, start):
    """What the template has written counts first."""
    assert start_of(prompt_end, parser) == start


@pytest.mark.parametrize(
    ("start", "steps", "text", "expected"),
    [
        ("thoughts", [(5, 6), (7, END, 8)], "a</think>b", 3),
        ("thoughts", [(MARK, 5), (6,)], "<think>a", 2),
        ("thoughts", [(5, END, 6, END, 7)], "a</think>b", 1),
        ("marked", [(MARK, 5, 6, END), (7,)], "<think>a</think>b", 2),
        ("marked", [(5, 6), (END,)], "a</think>", 0),
        ("answer", [(MARK, 5, END)], "<think>a</think>", 0),
    ],
)
def test_the_tokens_of_the_thoughts(start, steps, text, expected):
    """Without the marks, as vLLM counts them, also of steps that hold both parts."""
    reader = ReasoningReader(start, MARK, END)
    for tokens in steps:
        reader.count(tokens)
    reader.push(text)
    assert reader.tokens == expected


def message_of(pieces: list[OutputDelta], call: GenerationRequest) -> dict:
    made = whole(call, *pieces)
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    return made["choices"][0]["message"]


def streamed_of(pieces: list[OutputDelta], call: GenerationRequest) -> dict:
    """Added up as clients do it: a field that no chunk has is missing."""
    made: dict = {}
    for event in events(call, *pieces):
        delta = event["choices"][0]["delta"]
        made |= {name: made.get(name, "") + text for name, text in delta.items()}
    return made


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("", "a"), ("", "b")], {"content": "ab"}),
        ([("t", ""), ("u", "a"), ("", "b")], {"reasoning": "tu", "content": "ab"}),
        ([("t", ""), ("u", "")], {"reasoning": "tu", "content": None}),
        ([], {"content": ""}),
    ],
)
def test_a_stream_has_the_thoughts_of_the_whole_reply(pieces, expected):
    """By both names; the content of nothing but thoughts is null."""
    said = [OutputDelta(text, reasoning=thoughts) for thoughts, text in pieces]
    said.append(OutputDelta("", FINISH))
    if "reasoning" in expected:
        expected = expected | {"reasoning_content": expected["reasoning"]}
    assert message_of(said, CALL) == {"role": "assistant", "refusal": None} | expected
    streamed = streamed_of(said, CALL)
    assert streamed == {"role": "assistant"} | {k: v for k, v in expected.items() if v is not None}


def test_a_reply_without_a_parser_has_no_such_fields():
    """Guards a client that takes empty thoughts for thoughts."""
    plain = replace(CALL, shows_reasoning=None)
    made = whole(plain, OutputDelta("a", replace(FINISH, reasoning_tokens=None)))
    assert "completion_tokens_details" not in made["usage"]
    assert set(made["choices"][0]["message"]) == {"role", "content", "refusal"}
