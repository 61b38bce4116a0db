"""`/v1/responses`: what the client sends and reads, what is handed back, what is refused."""

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict, TypeAdapter
from serve.asking import ASK, error_of, text_of
from serve.asking import ask as ask_chat
from serve.test_client_reasoning import PAINT
from serve.test_client_tools import Paint

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.request import Completion, Request, TokenEvent
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.openai.response_models import ResponseReply
from mars_ray.serve.openai.responses import ResponseWriter, parse_responses, to_chat
from mars_ray.serve.openai.sse import ReplyWriter
from mars_ray.serve.protocol import GenerationRequest, ReplyForm, TokenText, Tools
from mars_ray.serve.replica.output_processor import OutputProcessor
from mars_ray.serve.replica.parsers import HERMES, ToolCallReader
from mars_ray.serve.replica.stats import ReplicaCounters

ASKED = {"model": "tiny", "input": ASK, "max_output_tokens": 24, "temperature": 0}
TOOL = {"type": "function", "name": "paint", "parameters": PAINT, "strict": True}


class Plain(BaseModel):
    model_config = ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})
    twice: bool


@pytest.fixture(scope="module")
def official(roomy_url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{roomy_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(client, **fields):
    return client.post("/v1/responses", json=ASKED | fields)


def chat_of(**fields):
    return to_chat(parse_responses(json.dumps(ASKED | fields).encode()))


def refused(**fields):
    with pytest.raises(ApiError) as caught:
        chat_of(**fields)
    return caught.value.refusal


def test_the_text_is_that_of_the_chat(client):
    """The same model, prompt and settings; every field is declared."""
    reply = ask(client)
    made = reply.json()
    TypeAdapter(ResponseReply).validate_json(reply.content)
    (message,) = made["output"]
    assert message["content"][0]["text"] == text_of(ask_chat(client, max_tokens=24))
    assert (made["status"], made["store"]) == ("incomplete", False)
    assert made["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = made["usage"]
    assert usage["output_tokens"] == 24
    assert usage["total_tokens"] == usage["input_tokens"] + 24
    assert usage["mars"]["forwards"] <= 24


def test_what_changes_nothing_is_tolerated_and_answered(client):
    """As OpenAI's agent libraries send them by default."""
    fields = {
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "truncation": "disabled",
        "background": False,
        "previous_response_id": None,
        "conversation": None,
        "tools": [],
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "medium"},
        "instructions": "Count.",
    }
    reply = ask(client, **fields)
    assert reply.status_code == 200, reply.text
    made = reply.json()
    TypeAdapter(ResponseReply).validate_json(reply.content)
    assert made["metadata"] == {"a": "b"}
    assert (made["store"], made["instructions"]) == (False, "Count.")
    assert (made["prompt_cache_key"], made["parallel_tool_calls"]) == ("a", False)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "hand the earlier items back"),
        ({"conversation": "conv_1"}, "conversation", "hand the earlier items back"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "hand the earlier items back"),
        ({"background": True}, "background", "should be false"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "would run in the service"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools.0", "would run in the service"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "hand the item back"),
        ({"input": [{"type": "computer_call", "id": "a"}]}, "input.0", "function_call"),
        ({"input": []}, "input", "at least 1 item"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input.0.content.0",
            "input_text",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "input",
            "no call of the message before it has this id",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"tool_choice": "required"}, "tool_choice", "no effect without 'tools'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"messages": []}, "messages", "not supported"),
        ({"n": 2}, "n", "not supported"),
    ],
)
def test_what_is_not_there_is_refused_by_name(client, fields, param, said):
    """And says what to do instead."""
    reply = ask(client, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].startswith(param)
    assert said in error["message"]
    assert "messages." not in error["message"]


def test_limits_are_named_as_the_request_does(client):
    """The chat that it becomes has other names."""
    error = ask(client, reasoning={"effort": "high"}).json()["error"]
    assert error["param"] == "reasoning.effort"
    assert "reasoning_effort" not in error["message"]


def test_items_become_the_turns_of_a_chat():
    """Thoughts, text and calls in a row are one answer; results follow in any order."""
    chat = chat_of(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "Yes", "annotations": [], "logprobs": None}
                ],
            },
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "b", "output": "2"},
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": [{"type": "input_text", "text": "1"}],
            },
            {"role": "developer", "content": "Go on."},
            {"type": "reasoning", "summary": [], "content": []},
        ],
        tools=[TOOL | {"name": name} for name in ("f", "g")],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "g"}],
        },
        text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert [message.role for message in chat.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "developer",
        "assistant",
    ]
    answer = chat.messages[2].turn()
    assert (answer.content, answer.reasoning) == ("Yes", "hm")
    assert [(call.id, call.name) for call in answer.calls] == [("a", "f"), ("b", "g")]
    assert chat.messages[4].turn().content == "1"
    assert [tool.function.name for tool in chat.tools] == ["g"]
    assert (chat.tool_choice, chat.reasoning_effort) == ("required", "low")
    assert chat.response_format.json_schema.name == "a"
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)


def test_what_cannot_be_followed_is_named_by_its_place(client):
    """In the words of this route, and by the number that the client gave the tool."""
    odd = {"type": "object", "properties": {"p": {"type": "string", "format": "path"}}}
    tools = [TOOL | {"name": name, "parameters": odd} for name in ("f", "g")]
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "g"}],
    }
    error = error_of(ask(client, tools=tools, tool_choice=allowed), 400)
    assert error["param"] == "tools.1.parameters.properties.p.format"
    assert error["message"].startswith(f"'{error['param']}' cannot be followed")
    named = {"type": "json_schema", "name": "a", "schema": odd, "strict": True}
    error = error_of(ask(client, text={"format": named}), 400)
    assert error["param"] == "text.format.schema.properties.p.format"
    named["strict"] = None
    assert ask(client, text={"format": named}).status_code == 200


def test_the_client_reads_it_whole_and_streamed(official):
    """Held to its own types; events are numbered, and the last one has the whole response."""
    whole = official.responses.create(**ASKED)
    Response.model_validate(whole.model_dump(), strict=True)
    events = list(official.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_stream_helper_puts_the_response_together(official):
    """It refuses events that do not fit each other."""
    whole = official.responses.create(**ASKED)
    stop = {"extra_body": {"seed": 1}}
    with official.responses.stream(**ASKED | {"max_output_tokens": 24}, **stop) as stream:
        kinds = {event.type for event in stream}
    assert {"response.output_text.delta", "response.output_text.done"} <= kinds
    with official.responses.stream(
        **ASKED | {"max_output_tokens": 200}, text_format=Plain
    ) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Plain)
    assert whole.status == "incomplete"


def test_it_parses_into_a_model(official):
    """`text.format` by the schema that pydantic and the client make of the class."""
    made = official.responses.parse(**ASKED | {"max_output_tokens": 200}, text_format=Paint)
    assert isinstance(made.output_parsed, Paint)
    assert made.status == "completed"


def test_a_tool_is_called_and_its_result_handed_back(official):
    """The client's own objects are the next input, as agents send them."""
    asked = ASKED | {"max_output_tokens": 200, "tools": [TOOL], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    made = official.responses.create(**asked)
    (call,) = made.output
    assert (call.type, call.name, call.status) == ("function_call", "paint", "completed")
    Paint.model_validate_json(call.arguments)
    events = list(official.responses.create(**asked, stream=True))
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == call.arguments
    (streamed,) = events[-1].response.output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert events[-1].response.status == "completed"

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    turns = [{"role": "user", "content": ASK}, *made.output, result]
    then = official.responses.create(**ASKED | {"input": turns}, tools=[TOOL])
    assert then.output
    named = {"type": "function", "name": "paint"}
    (again,) = official.responses.create(**asked | {"tool_choice": named}).output
    assert again.name == "paint"


def test_logprobs_are_those_of_the_chat(official):
    """By `include`, whole and streamed."""
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (message,) = official.responses.create(**ASKED, **fields).output
    (part,) = message.content
    assert len(part.logprobs) == 24
    assert part.logprobs[0].top_logprobs[0].logprob == pytest.approx(part.logprobs[0].logprob)
    events = list(official.responses.create(**ASKED, **fields, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    seen = [each.logprob for event in deltas for each in event.logprobs]
    assert seen == [each.logprob for each in part.logprobs][: len(seen)]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [each.logprob for each in done.logprobs] == [each.logprob for each in part.logprobs]


def test_errors_are_of_the_clients_types(official):
    """Before the stream and instead of it."""
    with pytest.raises(openai.BadRequestError) as wrong:
        official.responses.create(**ASKED, previous_response_id="resp_1", stream=True)
    assert wrong.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        official.responses.create(**ASKED | {"model": "other"})


def test_an_answer_of_open_length_says_where_it_is_cut(client):
    """By the service's own limit, which the client cannot know."""
    limited = client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": ASK}]},
    )
    assert limited.headers["x-new-tokens-limit"] == "100"
    assert "x-new-tokens-limit" not in ask(client).headers


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAID = f"Well. {CALL}\nDone, now wait."


@pytest.mark.parametrize("route", ["chat", "response"])
def test_text_and_calls_of_one_addition_keep_their_order(route):
    """Steps have several tokens, and are joined. Guards text that closed a call before its last
    arguments, and text behind a call that was told before it."""
    counters = ReplicaCounters(ServeJob(checkpoint="x"))
    for place in range(len(SAID)):
        texts, arguments = said_in_two(place, route, counters)
        assert [text.strip() for text in texts] == ["Well.", "Done, now wait."]
        assert json.loads(arguments) == {"a": 1}


def said_in_two(place: int, route: str, counters: ReplicaCounters) -> tuple[list[str], str]:
    """The text before and behind the call, and its arguments, as a stream tells them."""
    reply = ReplyForm(is_streamed=True, route=route, response={"created_at": 0}, has_usage=True)
    asked = GenerationRequest(
        "resp_1", ("x",), ExactMode(), Sampling(), None, 99, tools=Tools(({},)), reply=reply
    )
    request = Request("a-0", (1,), ExactMode(), Sampling(), 99, frozenset())
    writer = ResponseWriter(asked) if route == "response" else ReplyWriter(asked)
    answer = OutputProcessor(
        asked,
        request,
        0,
        lambda tokens: bytes(tokens).decode(),
        lambda _token, logprob: TokenText("", (), logprob),
        writer,
        counters,
        ToolCallReader("1", HERMES, {"add"}),
    )
    tokens = tuple(SAID.encode())
    done = Completion("a-0", tokens, (1,) * len(tokens), 2, "stop")
    events = answer.process([TokenEvent("a-0", tokens[:place], 1)])
    events += answer.process([TokenEvent("a-0", tokens[place:], 2, done)]) + writer.end()
    datas = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    if route == "chat":
        deltas = [choice["delta"] for data in datas for choice in data["choices"]]
        parts = [(delta.get("content") or "", bool(delta.get("tool_calls"))) for delta in deltas]
        first = next(number for number, (_, is_call) in enumerate(parts) if is_call)
        texts = ["".join(text for text, _ in part) for part in (parts[:first], parts[first:])]
        calls = [own for delta in deltas for own in delta.get("tool_calls") or ()]
        arguments = "".join(own["function"].get("arguments") or "" for own in calls)
        assert sum(data["usage"]["completion_tokens"] for data in datas if data.get("usage"))
    else:
        assert datas[-1]["type"] == "response.completed"
        output = datas[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["message", "function_call", "message"]
        texts = [output[number]["content"][0]["text"] for number in (0, 2)]
        arguments = output[1]["arguments"]
    return texts, arguments
