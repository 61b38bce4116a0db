"""Fields of a request that vLLM and OpenAI know, each shown by its effect on a real engine."""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from fastapi.testclient import TestClient
from serve.asking import (
    ASK,
    ask,
    error_of,
    greedy,
    load_server,
    streamed,
    text_of,
    wait_until_free,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.model.load import load_model
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.protocol import Envelope, GenerationRequest
from mars_ray.serve.replica.llm_server import LLMServer

# Qwen3's way: a switch, which is on unless it is set to false.
THINKING = (
    "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "no thoughts {% endif %}"
)
# gpt-oss's way: it stands before everything.
EFFORT = "<|im_start|>system\nReasoning: {{ reasoning_effort | default('medium') }}<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def tokens(checkpoint) -> list[int]:
    """Those of the greedy answer."""
    return greedy(checkpoint, ASK, 24)


@pytest.fixture(scope="module")
def cut(tokens, tokenizer) -> int:
    """The place of one that comes for the first time, between two whole characters."""
    whole = [not tokenizer.decode(tokens[:n]).endswith("\ufffd") for n in range(25)]
    return next(
        n for n in range(5, 24) if tokens[n] not in tokens[:n] and whole[n] and whole[n + 1]
    )


def complete(client: TestClient, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8, "mode": "exact"}
    return client.post("/v1/completions", json=body | fields)


def texts(reply) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


@pytest.fixture(scope="module")
def ending(job: ServeJob, tokenizer, tokens, cut) -> Iterator[tuple[TestClient, int]]:
    """The same model, made to end where its greedy answer goes; and the token at which it does."""
    end = tokens[cut]
    engine, _ = load_engine(job.checkpoint, job.engine)
    assert engine.model.generation_config is not None
    engine.model.generation_config.eos_token_id = [end]
    server = LLMServer(AsyncEngine(engine), tokenizer, job)
    server.start()
    yield TestClient(build_api(job, {"tiny": server})), end
    server.stop()


@pytest.mark.parametrize("mode", ["exact", "verified"])
def test_ignore_eos_writes_on(client, ending, mode):
    """Load tools ask for answers of a given length. Guards a measurement of shorter ones."""
    ends, end = ending
    short = ask(ends, mode=mode).json()
    assert short["choices"][0]["finish_reason"] == "stop"
    assert short["usage"]["completion_tokens"] < 24
    long = ask(ends, mode=mode, ignore_eos=True)
    assert (text_of(long), long.json()["usage"]["completion_tokens"]) == (text_of(ask(client)), 24)
    again = ask(ends, mode=mode, ignore_eos=True, stop_token_ids=[end]).json()
    assert again["choices"] == short["choices"]
    refused = error_of(ask(ends, ignore_eos=True, response_format={"type": "json_object"}), 400)
    assert refused["param"] == "ignore_eos"


@pytest.mark.parametrize("mode", ["exact", "verified"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_ends_the_answer_before_it(client, tokenizer, tokens, cut, mode, stream):
    """Besides the model's own. As with a stop string it is shown only if asked for."""
    fields = {"stop_token_ids": [tokens[cut]], "mode": mode}
    for shows, end in ((False, cut), (None, cut), (True, cut + 1)):
        reply = ask(client, **fields, include_stop_str_in_output=shows, stream=stream)
        if stream:
            *parts, last = streamed(reply)
            text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
            reason = last["choices"][0]["finish_reason"]
        else:
            text, reason = text_of(reply), reply.json()["choices"][0]["finish_reason"]
            assert reply.json()["usage"]["completion_tokens"] == cut + 1
        assert (text, reason) == (tokenizer.decode(tokens[:end]), "stop")


def test_a_stop_token_waits_for_the_least_length_and_must_exist(client, tokens, cut):
    """Guards an answer that is shorter than `min_tokens`, and an index outside the logits."""
    reply = ask(client, stop_token_ids=[tokens[cut]], min_tokens=cut + 2).json()
    assert reply["usage"]["completion_tokens"] > cut + 1
    refused = error_of(ask(client, stop_token_ids=[1 << 20], min_tokens=2), 400)
    assert (refused["param"], refused["code"]) == ("stop_token_ids", "invalid_value")
    assert error_of(ask(client, stop_token_ids=[-1]), 400)["param"] == "stop_token_ids.0"


@pytest.mark.parametrize("mode", ["exact", "verified"])
def test_a_stop_string_can_be_part_of_the_answer(client, mode):
    """Up to its end and no further, although the step that wrote it may have written more."""
    whole = text_of(ask(client))
    stop = whole[len(whole) // 2 :][:3]
    end = whole.index(stop) + len(stop)
    reply = ask(client, stop=stop, include_stop_str_in_output=True, mode=mode)
    assert text_of(reply) == whole[:end]
    assert reply.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", ["one two", [40, 41, 42], ["one", "two"]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(client, tokenizer, prompt, stream):
    """Each answer with its own, as text, in the first chunk. A stop string in it stops nothing."""
    plain = texts(complete(client, prompt, n=2))
    prompts = prompt if isinstance(prompt[0], str) else [prompt]
    prompts = [prompt] if isinstance(prompt, str) else prompts
    shown = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts for _ in range(2)]
    reply = complete(client, prompt, n=2, echo=True, stream=stream, stop="two" * stream or None)
    if not stream:
        assert texts(reply) == [a + b for a, b in zip(shown, plain, strict=True)]
        return
    answers = dict.fromkeys(range(len(shown)), "")
    for chunk in streamed(reply):
        (choice,) = chunk["choices"]
        answers[choice["index"]] += choice["text"]
    for number, text in answers.items():
        assert text == shown[number] + plain[number].partition("two")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_have_their_logprobs(client, checkpoint, stream):
    """With `echo`, as multiple-choice tasks are scored: all but the first token's are those of one
    forward of the model over prompt and answer."""
    prompt = [40, 41, 42, 43, 44, 45]
    reply = complete(client, prompt, echo=True, logprobs=2, stream=stream)
    parts = [reply.json()] if not stream else streamed(reply)
    said = [part["choices"][0]["logprobs"] for part in parts]
    found = {
        name: [each for part in said if part for each in part[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert found["text_offset"] == sorted(found["text_offset"])
    plain = complete(client, prompt, logprobs=2).json()["choices"][0]["logprobs"]
    assert found["tokens"][6:] == plain["tokens"]
    assert found["token_logprobs"][6:] == pytest.approx(plain["token_logprobs"], abs=1e-4)
    model = load_model(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        log_p_LV = model(torch.tensor([prompt])).logits[0].float().log_softmax(dim=-1)
    own = [float(log_p_LV[place, token]) for place, token in enumerate(prompt[1:])]
    assert found["token_logprobs"][1:6] == pytest.approx(own, abs=1e-3)
    best = [max(top.values()) for top in found["top_logprobs"][1:6]]
    assert best == pytest.approx(log_p_LV[:5].max(dim=-1).values.tolist(), abs=1e-3)
    (first, *_), *_ = (complete(client, [40], echo=True, logprobs=0).json()["choices"],)
    assert first["logprobs"]["token_logprobs"][0] is None
    assert len(first["logprobs"]["tokens"]) == 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_scored_without_a_new_token(client, tokenizer, stream):
    """With `echo` and `max_tokens` 0: the prompt with its log-probabilities, and nothing else, also
    where the model would end at once."""
    prompt = [40, 41, 42, 43]
    whole = complete(client, prompt, echo=True, logprobs=1).json()["choices"][0]["logprobs"]
    for bias in (None, {str(tokenizer.eos_token_id): 100}):
        reply = complete(
            client, prompt, echo=True, logprobs=1, max_tokens=0, stream=stream, logit_bias=bias
        )
        parts = [reply.json()] if not stream else streamed(reply)
        choices = [part["choices"][0] for part in parts if part["choices"]]
        said = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        tokens = [token for each in said for token in each["tokens"]]
        assert tokens == whole["tokens"][:4]
        assert "".join(choice["text"] for choice in choices) == "".join(tokens)
        own = [logprob for each in said for logprob in each["token_logprobs"]]
        assert own[1:] == pytest.approx(whole["token_logprobs"][1:4], abs=1e-4)
        assert choices[-1]["finish_reason"] == "length"
        if not stream:
            assert parts[0]["usage"]["completion_tokens"] == 0
    refused = error_of(complete(client, prompt, max_tokens=0), 400)
    assert refused["param"] == "max_tokens"


def test_cached_tokens_are_those_that_the_prefix_cache_had(client):
    """Whole pages of the prompt; the answers of one request count it once."""
    prompt = [50 + n % 200 for n in range(70)]
    usage = [complete(client, prompt).json()["usage"] for _ in range(2)]
    assert [each["prompt_tokens_details"] for each in usage] == [
        {"cached_tokens": 0},
        {"cached_tokens": 64},
    ]
    several = complete(client, prompt, n=3).json()["usage"]
    assert (several["prompt_tokens"], several["prompt_tokens_details"]["cached_tokens"]) == (70, 64)


def test_max_tokens_beyond_the_context_are_what_the_context_has_left(client):
    """As vLLM: clients set one large limit for all. Only a prompt without room is refused."""
    long = [{"role": "user", "content": "zq" * 40}]
    for limit in ("max_tokens", "max_completion_tokens"):
        reply = ask(client, messages=long, **{"max_tokens": None, limit: 100}).json()
        assert reply["usage"]["total_tokens"] == 160
        assert reply["choices"][0]["finish_reason"] == "length"
    assert error_of(ask(client, messages=[{"role": "user", "content": "x " * 400}]), 400)


def test_usage_so_far_is_in_every_chunk(client):
    """GuideLLM asks for it. It grows to what the last chunk says of the whole, choice by choice."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = ask(client, stream=True, stream_options=options, n=2, return_forwards=True)
    *chunks, last = streamed(reply)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == last["usage"]["completion_tokens"] == 48
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    assert error_of(ask(client, stream_options={"continuous_usage_stats": True}), 400)


def with_template(job: ServeJob, before: str = "", behind: str = "") -> LLMServer:
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    tokenizer.chat_template = f"{before}{tokenizer.chat_template}{behind}"
    server = LLMServer(AsyncEngine(engine), tokenizer, job)
    server.start()
    return server


def prompt_tokens(client: TestClient, **fields) -> int:
    reply = ask(client, max_tokens=1, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens"]


def test_thinking_switches_reach_the_template(job, client):
    """Where it knows them; elsewhere only "do not think" is harmless, and the rest is refused."""
    server = with_template(job, behind=THINKING)
    thinking = TestClient(build_api(job, {"tiny": server}))
    plain = prompt_tokens(thinking)
    off = prompt_tokens(thinking, chat_template_kwargs={"enable_thinking": False})
    assert off > plain
    assert prompt_tokens(thinking, chat_template_kwargs={"enable_thinking": True}) == plain
    assert prompt_tokens(thinking, chat_template_kwargs={"enable_thinking": None}) == plain
    assert prompt_tokens(thinking, reasoning_effort="none") == off
    chosen = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_tokens(thinking, reasoning_effort="none", **chosen) == plain
    assert error_of(ask(thinking, reasoning_effort="high"), 400)["param"] == "reasoning_effort"
    wait_until_free(server)
    server.stop()
    switch = "chat_template_kwargs.enable_thinking"
    for name in ("enable_thinking", "thinking"):
        assert prompt_tokens(client, chat_template_kwargs={name: False}) == prompt_tokens(client)
    refused = error_of(ask(client, chat_template_kwargs={"enable_thinking": True}), 400)
    assert (refused["param"], refused["code"]) == (switch, "invalid_value")
    foreign = error_of(ask(client, chat_template_kwargs={"tools": []}), 400)
    assert foreign["param"] == "chat_template_kwargs.tools"


def test_reasoning_effort_reaches_a_template_that_knows_it(job, client):
    """By its own levels. Guards a "high" that changes nothing."""
    server = with_template(job, before=EFFORT)
    api = TestClient(build_api(job, {"tiny": server}))
    lengths = {e: prompt_tokens(api, reasoning_effort=e) for e in ("low", "medium", "minimal")}
    assert lengths["low"] < lengths["medium"] < lengths["minimal"]
    assert lengths["medium"] == prompt_tokens(api) == prompt_tokens(api, reasoning_effort=None)
    server.stop()
    assert error_of(ask(client, reasoning_effort="low"), 400)["param"] == "reasoning_effort"
    assert prompt_tokens(client, reasoning_effort="none") == prompt_tokens(client)


def test_the_smaller_priority_goes_first(job):
    """Among those that wait; vLLM's sense of the number. By chance in one order of six."""
    sizes = EngineConfig(max_batch=1, max_context=160, device="cpu", threads=1)
    server = load_server(
        job.model_copy(update={"engine": sizes, "limits": Limits(waiting_requests=8)})
    )
    server.start()
    over: list[str] = []

    async def answer(name: str, priority: int, tokens: int) -> None:
        call = GenerationRequest(
            name, (ASK,), ExactMode(), Sampling(), tokens, 99, priority=priority
        )
        async for message in server.generate(call):
            assert isinstance(message, Envelope)
            if message.ending:
                over.append(name)

    async def all_of_them() -> None:
        first = asyncio.create_task(answer("first", 0, 90))
        while not (await server.snapshot()).running:
            await asyncio.sleep(0.001)
        later = (("late", 7), ("usual", 0), ("urgent", -3))
        await asyncio.gather(first, *(answer(name, priority, 4) for name, priority in later))

    asyncio.run(all_of_them())
    server.stop()
    assert [name for name in over if name != "first"] == ["urgent", "usual", "late"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_a_deadline_before_the_first_token_is_a_408(client, fields):
    """Guards a 500 where the prompt's log-probabilities were not there yet."""
    body = {"model": "tiny", "prompt": "one two three", "max_tokens": 5, "timeout_s": 1e-6}
    reply = client.post("/v1/completions", json=body | fields)
    assert reply.status_code == 408
    assert reply.json()["error"]["code"] == "deadline_exceeded"
