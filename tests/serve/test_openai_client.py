"""The official Python client, on a real port."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serve.asking import ASK, text_of, wait_until_free
from serve.asking import ask as plainly_ask
from serve.real_port import served

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.protocol import GenerationRequest, Turn

CHAT = [{"role": "user", "content": ASK}]
GREEDY = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "temperature": 0}
EXACT = {"mode": "exact"}


@pytest.fixture(scope="module")
def url(job, text_engine) -> Iterator[str]:
    with served(build_api(job, {"tiny": text_engine})) as root:
        yield f"{root}/v1"


@pytest.fixture(scope="module")
def official(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
def expected(client) -> str:
    return text_of(plainly_ask(client))


def test_chat_whole_and_streamed(official, expected):
    """Held to the client's own types; what is ours passes through them."""
    reply = official.chat.completions.create(**GREEDY, extra_body=EXACT)
    ChatCompletion.model_validate(reply.model_dump(), strict=True)
    assert reply.choices[0].message.content == expected
    assert reply.usage.model_extra["mars"]["forwards"] == 24
    chunks = list(official.chat.completions.create(**GREEDY, stream=True, extra_body=EXACT))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected


def test_the_stream_helper_puts_the_answer_together(official, expected):
    """It is strict about roles and indices, and takes an answer cut by its length for a fault."""
    stop = expected[len(expected) // 2 :][:3]
    fields = GREEDY | {"stop": stop, "stream_options": {"include_usage": True}, "logprobs": True}
    with official.chat.completions.stream(**fields, extra_body=EXACT) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds
    assert final.choices[0].message.content == expected[: expected.index(stop)]
    assert final.choices[0].finish_reason == "stop"
    assert 0 < len(final.choices[0].logprobs.content) <= final.usage.completion_tokens < 24


def test_several_answers_and_their_logprobs(official):
    """Each choice has its own; the chosen token is among the likeliest at temperature 0."""
    reply = official.chat.completions.create(**GREEDY, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice in reply.choices:
        for entry in choice.logprobs.content:
            assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)


def test_completions_whole_and_streamed(official):
    """Two prompts side by side."""
    fields = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 6, "temperature": 0}
    reply = official.completions.create(**fields, logprobs=1)
    assert [len(choice.logprobs.tokens) for choice in reply.choices] == [6, 6]
    texts = ["", ""]
    for chunk in official.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]


def test_the_raw_reply_is_there(official):
    """Headers and body as they came."""
    raw = official.chat.completions.with_raw_response.create(**GREEDY)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].finish_reason == "length"


def test_the_async_client(url, expected, text_engine):
    """Many at once, each its own answer; one that is cancelled leaves the engine."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x") as official:
            ask = official.chat.completions.create
            replies = await asyncio.gather(*(ask(**GREEDY, extra_body=EXACT) for _ in range(4)))
            stream = await ask(**GREEDY | {"max_tokens": 100}, stream=True)
            await anext(aiter(stream))
            await stream.close()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await ask(**GREEDY | {"max_tokens": 100}, extra_body=EXACT)
            return [reply.choices[0].message.content for reply in replies]

    assert asyncio.run(run()) == [expected] * 4
    wait_until_free(text_engine)


def test_errors_are_of_the_clients_types(official):
    """With the field, the code and the type that it reads out of them."""
    with pytest.raises(openai.BadRequestError) as wrong:
        official.chat.completions.create(**GREEDY, store=True)
    assert (wrong.value.param, wrong.value.code) == ("store", "unsupported_parameter")
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        official.chat.completions.create(**GREEDY | {"model": "other"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        official.chat.completions.create(**GREEDY | {"messages": CHAT * 20}, stream=True)
    assert long.value.code == "context_length_exceeded"


@contextmanager
def full(text_engine, until: threading.Event) -> Iterator[None]:
    """Every place of the engine taken, until then."""
    turns = (Turn("user", ASK),)
    taken = threading.Event()

    async def hold() -> None:
        answers = [
            text_engine.generate(
                GenerationRequest(f"hold-{i}", (turns,), ExactMode(), Sampling(), 2, 100)
            )
            for i in range(6)
        ]
        for answer in answers:
            await anext(answer)
        taken.set()
        await asyncio.to_thread(until.wait)
        for answer in answers:
            await answer.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(hold()))
    thread.start()
    assert taken.wait(10)
    yield
    until.set()
    thread.join()


def test_the_client_tries_again_when_it_is_told_to(url, text_engine, expected):
    """A 429 has Retry-After, which the client waits for by itself."""
    room = threading.Event()
    with full(text_engine, room), openai.OpenAI(base_url=url, api_key="x", max_retries=2) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            client.with_options(max_retries=0).chat.completions.create(**GREEDY)
        assert refused.value.response.headers["Retry-After"] == "1"
        threading.Timer(0.5, room.set).start()
        begin = time.monotonic()
        raw = client.chat.completions.with_raw_response.create(**GREEDY, extra_body=EXACT)
        assert 1.0 <= time.monotonic() - begin < 5
    assert raw.retries_taken == 1
    assert raw.parse().choices[0].message.content == expected
