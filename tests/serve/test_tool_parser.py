"""Calls of tools taken out of a text, and what a client puts together of a stream of them."""

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from serve import written
from serve.asking import ASK

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import VerifiedMode
from mars_ray.serve.protocol import Finish, GenerationRequest, OutputDelta, Tools
from mars_ray.serve.replica.parsers import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    ToolCallReader,
    ToolFormat,
    short_id,
)

CALL = GenerationRequest("id", ("x",), VerifiedMode(), Sampling(), None, 9, tools=Tools(({},)))
NAMES = ("add", "now", "f")
FINISH = Finish("stop", prompt_tokens=1, completion_tokens=1, forwards=1)
ADDED = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "}\\\\", "\\""]}}\n</tool_call>'
TOLD = '<tool_call>{"name":"now","arguments":{}}</tool_call>'
PLAIN = ("{", "}", '"', "]", " \n", "\n", "text", "\\", "é😀", '"arguments": {', ", ", ";")
# Whole ones, their beginnings, and what looks like them.
WRITTEN = {
    HERMES: (
        *(ADDED, TOLD, ADDED[:30], TOLD[:-4], "<tool_call>", "</tool_call>", "<tool_"),
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "more": 1}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    ),
    LLAMA3: (
        *('{"name": "add", "parameters": {"a": [1, "}"]}}', '{"name": "now", "arguments":{}}'),
        *('{"name":"now","parameters":{}}; ', '{"name": "add", "para', '{"name": "unknown", '),
        '{"type": "function", "name": "f", "parameters": {"b": "\\"}"}}',
        '{"name": "add", "age": 5}',
    ),
    MISTRAL: (
        *("[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_", '{"name": "add", "arguments": {"a": 1}}'),
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]',
        *('[TOOL_CALLS][{"name": "f", "arguments": {"x": "]"}}', ', {"name": "unknown", "argu'),
    ),
    MISTRAL_ARGS: (
        *("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]add", '[TOOL_CALLS]add[ARGS]{"a": [1, "}"]}'),
        *("[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "[TOOL_CALLS]unknown[ARGS]{}", "[CALL"),
    ),
}
FORMS = st.sampled_from(sorted(WRITTEN, key=repr))
TEXTS = FORMS.flatmap(
    lambda form: st.tuples(
        st.just(form), st.lists(st.sampled_from(WRITTEN[form] + PLAIN), max_size=8).map("".join)
    )
)


def pieces(parts: list[str], form: ToolFormat = HERMES) -> list[OutputDelta]:
    """As a transcript makes them; the last one has the finish."""
    reader = ToolCallReader("7", form, NAMES)
    made = [OutputDelta(text, calls=calls, tokens=1) for text, calls in map(reader.push, parts)]
    return [*made, OutputDelta(reader.flush(), FINISH, tokens=1)]


def whole(said: list[OutputDelta]) -> dict:
    """The message of a reply that is not streamed."""
    return written.whole(CALL, *said)["choices"][0]["message"]


def accumulated(said: list[OutputDelta]) -> dict:
    """What the official client makes of the stream."""
    state = ChatCompletionStreamState()
    for event in written.events(CALL, *said):
        state.handle_chunk(ChatCompletionChunk.model_validate(event, strict=True))
    message = state.get_final_completion().choices[0].message.model_dump()
    calls = [without_index(call) for call in message["tool_calls"] or []]
    made = {name: message[name] for name in ("role", "content", "refusal")}
    return made | ({"tool_calls": calls} if calls else {})


def without_index(call: dict) -> dict:
    """As it stands in a reply: without the place in the list that deltas have."""
    return {name: call[name] for name in ("id", "type")} | {
        "function": {name: call["function"][name] for name in ("name", "arguments")}
    }


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(TEXTS, st.lists(st.integers(min_value=0), max_size=20))
@settings(max_examples=500, deadline=None)
def test_a_stream_says_what_the_whole_reply_says(written, places):
    """However the text is cut into pieces, and whether or not its calls are whole."""
    form, text = written
    at_once, in_pieces = whole(pieces([text], form)), pieces(cut(text, places), form)
    assert whole(in_pieces) == at_once
    assert accumulated(in_pieces) == at_once
    assert accumulated(pieces(list(text), form)) == at_once


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_every_character_is_delivered(written):
    """Guards text that vanishes because it looked like a call: without what belongs to calls,
    nothing of the text is missing, and it is in order."""
    form, text = written
    message = whole(pieces(list(text), form))
    if "tool_calls" not in message:
        assert message["content"] == text
    rest = iter(text)
    assert all(character in rest for character in message["content"] or "")
    for call in message.get("tool_calls", []):
        assert call["function"]["arguments"] in text
        assert call["function"]["name"] in NAMES


@pytest.mark.parametrize(
    ("form", "text", "calls", "content"),
    [
        (LLAMA3, WRITTEN[LLAMA3][0], ["add"], None),
        (LLAMA3, f"So: {WRITTEN[LLAMA3][1]}", ["now"], "So:"),
        (LLAMA3, "; ".join(WRITTEN[LLAMA3][:2]), ["add", "now"], None),
        (LLAMA3, WRITTEN[LLAMA3][5], ["f"], None),
        (LLAMA3, WRITTEN[LLAMA3][6], [], WRITTEN[LLAMA3][6]),
        (MISTRAL, WRITTEN[MISTRAL][4], ["add", "now"], None),
        (MISTRAL, f"So: {WRITTEN[MISTRAL][5]}", ["f"], "So:"),
        (MISTRAL, WRITTEN[MISTRAL][3], [], WRITTEN[MISTRAL][3]),
        (MISTRAL_ARGS, "".join(WRITTEN[MISTRAL_ARGS][3:5]), ["add", "now"], None),
        (MISTRAL_ARGS, WRITTEN[MISTRAL_ARGS][5], [], WRITTEN[MISTRAL_ARGS][5]),
    ],
)
def test_calls_of_every_format(form, text, calls, content):
    """Several of them, text before them, and what is none: other JSON, a tool that there is not."""
    for parts in ([text], list(text)):
        message = whole(pieces(parts, form))
        assert [call["function"]["name"] for call in message.get("tool_calls", [])] == calls
        assert message["content"] == content
        for call in message.get("tool_calls", []):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_ids_are_those_that_the_family_takes():
    """Mistral's templates refuse others, also those that another server made."""
    message = whole(pieces([WRITTEN[MISTRAL][4]], MISTRAL))
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2
    assert all(short_id(name) == name for name in ids)
    assert len(short_id("call_1")) == 9
    assert short_id("call_1") == short_id("call_1") != short_id("call_2")


def test_the_deltas_of_a_call():
    """Its head with empty arguments, then the arguments as they come; then the next one."""
    said = pieces(["Let me see. ", *cut(ADDED + "\n" + TOLD, [20, 44, 47, 53, 60])])
    text, *calls = [piece for piece in said if piece.text or piece.calls]
    assert (text.text, text.calls) == ("Let me see.", ())
    told = [more for piece in calls for more in piece.calls]
    assert [(more.index, more.name) for more in told if more.id] == [(0, "add"), (1, "now")]
    assert not any(more.arguments for more in told if more.id)
    arguments = [more.arguments for more in told if more.index == 0 and not more.id]
    assert len(arguments) > 3
    assert json.loads("".join(arguments)) == {"a": [1, "}\\", '"']}
    assert len({more.id for more in told if more.id}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "a <tool_call>{nonsense</tool_call> b <tool_call>\n{",
        '<tool_call>\n{"name": "add", "argu',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
        "<tool_calm> ",
    ],
)
def test_what_is_no_call_after_all_stays_text(text):
    """Guards text that vanishes: an opening cut by the length limit, and one that goes on wrong."""
    assert whole(pieces(list(text))) == {"role": "assistant", "content": text, "refusal": None}


def test_space_around_calls_is_theirs_and_text_behind_them_is_said():
    """As in a reply with text on both sides."""
    message = whole(pieces([f"<tool_calm> \n{ADDED}\n{TOLD}\n so"]))
    assert message["content"] == "<tool_calm>\n so"
    assert len(message["tool_calls"]) == 2


def test_a_long_run_of_spaces_is_read_in_time():
    """Guards a search that begins anew at each of them: 10^10 steps for these."""
    space = " " * 100_000
    assert whole(pieces([space + "x" + space]))["content"] == space + "x" + space


COUNT = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": COUNT}}
ASKED = {
    "model": "tiny",
    "messages": [{"role": "user", "content": ASK}],
    "seed": 3,
    "tools": [TOOL],
    "tool_choice": "required",
}


@pytest.mark.parametrize(
    ("fields", "extra", "reason"),
    [
        ({"parallel_tool_calls": False}, {"mode": "exact"}, "tool_calls"),
        ({"parallel_tool_calls": False}, {"mode": "verified"}, "tool_calls"),
        ({"parallel_tool_calls": False}, {"return_forwards": True}, "tool_calls"),
        ({"parallel_tool_calls": False, "logprobs": True}, {}, "tool_calls"),
        ({"seed": 7, "max_tokens": 300}, {}, "tool_calls"),
        (
            {"seed": 7, "max_tokens": 150},
            {},
            "length",
        ),  # two calls, and the beginning of one that is text
        ({"parallel_tool_calls": False, "max_tokens": 48}, {}, "length"),
        ({"parallel_tool_calls": False, "stop": ["count"]}, {}, "stop"),
        ({"parallel_tool_calls": False, "stop": ["</tool_call>"]}, {}, "tool_calls"),
        ({"tool_choice": "auto", "max_tokens": 40}, {}, "length"),
        ({"n": 2, "parallel_tool_calls": False}, {}, "tool_calls"),
    ],
    ids=[
        "exact",
        "verified",
        "steps",
        "logprobs",
        "many",
        "more",
        "length",
        "cut",
        "stop",
        "text",
        "two",
    ],
)
def test_the_official_client_accumulates_the_whole_reply(roomy_url, fields, extra, reason):
    """Same seed, streamed and not; several tokens at a time, calls cut in their middle."""
    asked = {"max_tokens": 200, "temperature": 1} | ASKED | fields
    with openai.OpenAI(base_url=f"{roomy_url}/v1", api_key="unused", max_retries=0) as client:
        told = client.chat.completions.create(**asked, extra_body=extra).choices
        state = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(**asked, extra_body=extra, stream=True):
            state.handle_chunk(chunk)
    # Not `get_final_completion`, which raises for an answer that is cut.
    made = state.current_completion_snapshot.choices
    assert [choice.finish_reason for choice in told] == [reason] * len(told)
    for streamed, expected in zip(made, told, strict=True):
        assert streamed.finish_reason == expected.finish_reason
        assert streamed.message.content == expected.message.content
        assert called(streamed.message) == called(expected.message)
    if "seed" in fields:
        assert len(told[0].message.tool_calls) > 1


def called(message) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
