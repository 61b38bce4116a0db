"""LangChain's OpenAI chat model, on a real port."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from serve.asking import ASK, ask, text_of
from serve.real_port import served

from mars_ray.serve.ingress.app import build_api

TURNS = [SystemMessage("be short"), HumanMessage(ASK)]


@pytest.fixture(scope="module")
def chat(job, text_engine) -> Iterator[ChatOpenAI]:
    with served(build_api(job, {"tiny": text_engine})) as url:
        yield ChatOpenAI(
            model="tiny",
            base_url=f"{url}/v1",
            api_key="unused",
            temperature=0,
            max_tokens=24,
            max_retries=0,
            stream_usage=True,
            extra_body={"mode": "exact"},
        )


@pytest.fixture
def expected(client) -> str:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": ASK}]
    return text_of(ask(client, messages=messages))


def test_invoke_tells_usage_and_reason(chat, expected):
    """What LangChain reads of a reply."""
    reply = chat.invoke(TURNS)
    assert reply.content == expected
    assert reply.usage_metadata["output_tokens"] == 24
    assert reply.response_metadata["finish_reason"] == "length"
    assert reply.response_metadata["token_usage"]["mars"]["forwards"] == 24


def test_stream_adds_up(chat, expected):
    """Chunks of LangChain's own are added to each other."""
    chunks = list(chat.stream(TURNS))
    assert len(chunks) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == expected
    assert whole.usage_metadata["output_tokens"] == 24


def test_batch_and_async(chat, expected):
    """Several at once."""
    assert [reply.content for reply in chat.batch([TURNS, TURNS])] == [expected] * 2

    async def run() -> list[str]:
        streamed = [chunk.content async for chunk in chat.astream(TURNS)]
        return ["".join(streamed), (await chat.ainvoke(TURNS)).content]

    assert asyncio.run(run()) == [expected] * 2


def test_logprobs_and_stop_pass_through(chat, expected):
    """Bound to the model, as LangChain's users do."""
    stop = expected[len(expected) // 2 :][:3]
    reply = chat.bind(stop=[stop], logprobs=True, top_logprobs=2).invoke(TURNS)
    assert reply.content == expected[: expected.index(stop)]
    assert reply.response_metadata["logprobs"]["content"][0]["top_logprobs"]


def test_errors_are_those_of_the_official_client(chat):
    """LangChain passes them on."""
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        chat.invoke(TURNS, frequency_penalty=3)
