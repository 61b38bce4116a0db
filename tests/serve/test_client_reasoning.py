"""Thoughts and calls of a model whose tokens mark both, as the official client and LangChain see
them. Biases have the random weights write the marks; the grammar writes the calls."""

from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
import torch
from langchain_openai import ChatOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from serve.asking import ASK, load_server, wait_until_free
from serve.chat_templates import of_family
from serve.real_port import served

from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.model.directory import read_card
from mars_ray.model.load import load_model, load_tokenizer, save_model
from mars_ray.serve.ingress.app import build_api

PAINT = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "twice": {"type": "boolean"}},
    "required": ["colour", "twice"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": PAINT}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "paint", "schema": PAINT}}
NAMED = {"type": "function", "function": {"name": "paint"}}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": ASK}], "max_tokens": 200}


@dataclass(frozen=True)
class Service:
    url: str
    end: int  # token of </think>
    call: int  # of <tool_call>

    def biased(self, *tokens: int, by: float = 100) -> dict:
        """Greedy, with these tokens first where they may stand."""
        return {"temperature": 0, "logit_bias": {str(token): by for token in tokens}}


@pytest.fixture(scope="module")
def service(checkpoint, tmp_path_factory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("thinking") / "tiny"
    model = load_model(checkpoint, dtype=torch.float32)
    tokenizer = of_family(load_tokenizer(checkpoint), "deepseek-r1")
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    save_model(directory, model, tokenizer, read_card(checkpoint))
    job = ServeJob(
        checkpoint=str(directory),
        engine=EngineConfig(max_batch=4, max_context=1200, device="cpu", threads=1),
        limits=Limits(new_tokens=300),
        reasoning_parser="deepseek_r1",
    )
    engine = load_server(job)
    engine.start()
    end, call = tokenizer.convert_tokens_to_ids(["</think>", "<tool_call>"])
    with served(build_api(job, {"tiny": engine})) as url:
        yield Service(f"{url}/v1", end, call)
    wait_until_free(engine)
    engine.stop()


@pytest.fixture(scope="module")
def official(service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url, api_key="unused", max_retries=0) as made:
        yield made


def both(official: openai.OpenAI, **fields):
    """The choice of the reply, and of the stream that the client has put together."""
    asked = ASKED | fields
    told = official.chat.completions.create(**asked)
    state = ChatCompletionStreamState()
    for chunk in official.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot.choices[0]
    whole = told.choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.message.content == whole.message.content
    assert thoughts_of(streamed.message) == thoughts_of(whole.message)
    assert [c.function.arguments for c in streamed.message.tool_calls or []] == [
        c.function.arguments for c in whole.message.tool_calls or []
    ]
    return told


def thoughts_of(message) -> str | None:
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    return extra.get("reasoning")


def test_thoughts_are_told_from_the_answer(service, official):
    """And counted. Unfinished ones are no answer; hidden ones are counted all the same."""
    told = both(official, seed=0, temperature=1, logit_bias={str(service.end): 26})
    message, usage = told.choices[0].message, told.usage
    assert thoughts_of(message)
    assert message.content
    count = usage.completion_tokens_details.reasoning_tokens
    assert 0 < count < usage.completion_tokens
    unfinished = both(official, temperature=0, max_tokens=12)
    assert unfinished.choices[0].message.content is None
    assert thoughts_of(unfinished.choices[0].message)
    assert unfinished.usage.completion_tokens_details.reasoning_tokens == 12
    asked = {"temperature": 0, "max_tokens": 12, "extra_body": {"include_reasoning": False}}
    hidden = both(official, **asked)
    assert thoughts_of(hidden.choices[0].message) is None
    assert hidden.usage.completion_tokens_details.reasoning_tokens == 12
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        official.chat.completions.create(**ASKED | asked, logprobs=True)


def test_json_follows_the_thoughts(service, official):
    """In every mode; the schema holds from the mark on."""
    for mode in ("exact", "verified"):
        told = both(
            official,
            response_format=FORMAT,
            seed=0,
            temperature=1,
            logit_bias={str(service.end): 26},
            extra_body={"mode": mode},
        )
        message = told.choices[0].message
        assert thoughts_of(message)
        assert message.content in {
            f'{{"colour":"{colour}","twice":{twice}}}'
            for colour in ("red", "green")
            for twice in ("true", "false")
        }


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")]
)
def test_calls_follow_the_thoughts(service, official, choice, reason):
    """By the tokens that mark them. Guards a grammar that forbids these."""
    told = both(
        official,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        **service.biased(service.end, service.call),
    )
    made = told.choices[0]
    assert made.finish_reason == reason
    assert made.message.content is None
    (call,) = made.message.tool_calls
    assert call.function.name == "paint"
    again = [
        *ASKED["messages"],
        made.message.model_dump(exclude_none=True) | {"reasoning": "because"},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert official.chat.completions.create(**ASKED | {"messages": again, "max_tokens": 3})
    none = both(official, tools=[TOOL], tool_choice="none", **service.biased(service.end))
    assert not none.choices[0].message.tool_calls


def test_several_calls_and_one_that_is_cut(service, official):
    """The cut one has the beginning of its arguments."""
    fields = service.biased(service.end, service.call) | {"tools": [TOOL], "tool_choice": "auto"}
    told = both(official, **fields, max_tokens=130)
    made = told.choices[0]
    assert made.finish_reason == "length"
    assert len(made.message.tool_calls) > 1
    assert len({call.id for call in made.message.tool_calls}) == len(made.message.tool_calls)


@pytest.mark.parametrize("choice", ["auto", "required", "paint"])
def test_langchain_calls_by_every_choice(service, choice):
    """Whole and streamed."""
    chat = ChatOpenAI(
        model="tiny",
        base_url=service.url,
        api_key="unused",
        max_tokens=200,
        max_retries=0,
        **service.biased(service.end, service.call),
    )
    bound = chat.bind_tools([TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = bound.invoke(ASK).tool_calls
    assert call["name"] == "paint"
    whole = None
    for chunk in bound.stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert [made["args"] for made in whole.tool_calls] == [call["args"]]


def test_thoughts_come_back_to_the_template(official):
    """By either name; two that differ are an error, since one would be ignored."""
    said = {"role": "assistant", "content": "b", "reasoning": "x", "reasoning_content": "y"}
    turns = [*ASKED["messages"], said, *ASKED["messages"]]
    with pytest.raises(openai.BadRequestError, match="differ"):
        official.chat.completions.create(**ASKED | {"messages": turns})
