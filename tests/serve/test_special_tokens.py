"""What a tokenizer adds to a text, and what `/tokenize` tells of it."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from serve.asking import ASK, ask, error_of, text_of
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.replica.llm_server import LLMServer

BOS = "<|endoftext|>"
MESSAGES = [{"role": "user", "content": ASK}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(checkpoint) -> Iterator[tuple[TestClient, PreTrainedTokenizerBase]]:
    """A tokenizer that begins texts with a token, which its template writes too, as Llama's."""
    sizes = EngineConfig(max_batch=4, max_context=600, device="cpu", threads=1)
    job = ServeJob(checkpoint=str(checkpoint), engine=sizes, limits=Limits(new_tokens=100))
    engine, tokenizer = load_engine(job.checkpoint, job.engine)
    tokenizer.bos_token = BOS
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + str(tokenizer.chat_template)
    server = LLMServer(AsyncEngine(engine), tokenizer, job)
    server.start()
    yield TestClient(build_api(job, {"tiny": server})), tokenizer
    server.stop()


def complete(client: TestClient, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "mode": "exact"}
    reply = client.post("/v1/completions", json=body | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def tokens(client: TestClient, **fields) -> list[int]:
    reply = client.post("/tokenize", json=fields)
    assert reply.status_code == 200, reply.text
    made = reply.json()
    assert made["count"] == len(made["tokens"])
    return made["tokens"]


@pytest.mark.parametrize("add", [None, True, False])
def test_a_rendered_chat_begins_once(served, add):
    """As a text, in a list, with `echo`, and for `/tokenize`: the chat's own tokens, and so its
    answer. Guards a second token of the beginning, which says nothing and changes the answer."""
    client, tokenizer = served
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(BOS)
    chat = ask(client, max_tokens=8).json()
    given = {} if add is None else {"add_special_tokens": add}
    expected = tokens(client, messages=MESSAGES)
    assert tokens(client, prompt=rendered, **given) == expected
    assert expected.count(tokenizer.bos_token_id) == 1
    for prompt in (rendered, [rendered, "one"], expected):
        reply = complete(client, prompt, **given)
        assert reply["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert complete(client, rendered, **given)["usage"]["prompt_tokens"] == len(expected)
    echoed = complete(client, rendered, echo=True, logprobs=0, **given)["choices"][0]
    assert echoed["text"].startswith(rendered)
    assert len(echoed["logprobs"]["tokens"]) == len(expected) + 8


def test_special_tokens_are_added_on_request(served):
    """By default, and not to a prompt of tokens, which is complete."""
    client, tokenizer = served
    bare = tokenizer.encode("one two", add_special_tokens=False)
    begun = [tokenizer.bos_token_id, *bare]
    for fields, expected in (({}, begun), ({"add_special_tokens": True}, begun)):
        assert tokens(client, prompt="one two", **fields) == expected
        assert complete(client, "one two", **fields)["usage"]["prompt_tokens"] == len(expected)
    assert tokens(client, prompt="one two", add_special_tokens=False) == bare
    without = complete(client, "one two", add_special_tokens=False)
    assert without["usage"]["prompt_tokens"] == len(bare)
    assert without["choices"] == complete(client, bare)["choices"]
    assert without["choices"] != complete(client, begun)["choices"]
    both = complete(client, ["one two", "two"], add_special_tokens=False)
    assert both["choices"][0] == without["choices"][0]


def test_a_prompt_that_begins_twice_does(served):
    """What the client has written itself stays."""
    client, tokenizer = served
    twice = tokenizer.encode(f"{BOS}{BOS}one", add_special_tokens=False)
    assert twice[:2] == [tokenizer.bos_token_id] * 2
    for add in (True, False):
        assert tokens(client, prompt=f"{BOS}{BOS}one", add_special_tokens=add) == twice


def test_tokens_of_a_chat_are_those_of_the_request(served):
    """With tools and without, with the answer's beginning and without."""
    client, tokenizer = served
    plain, told = (tokens(client, messages=MESSAGES, **tools) for tools in ({}, {"tools": [ADD]}))
    usage = ask(client, tools=[ADD], max_tokens=1).json()["usage"]
    assert len(told) == usage["prompt_tokens"] > len(plain)
    asked = tokens(client, messages=MESSAGES, add_generation_prompt=False)
    assert asked == plain[: len(asked)] != plain
    said = tokenizer.decode(plain[len(asked) :])
    assert said.startswith("<|im_start|>assistant")
    answered = [*MESSAGES, {"role": "assistant", "content": "one"}]
    whole = tokens(client, messages=answered, add_generation_prompt=False)
    assert whole[: len(plain)] == plain


def test_tokens_are_shown_as_the_vocabulary_writes_them(served):
    """On request only."""
    client, tokenizer = served
    for fields in ({"prompt": "one é 🙂"}, {"messages": MESSAGES}):
        made = client.post("/tokenize", json={**fields, "return_token_strs": True}).json()
        assert made["token_strs"] == tokenizer.convert_ids_to_tokens(made["tokens"])
        assert "token_strs" not in client.post("/tokenize", json=fields).json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "tools": [ADD]}, "tools"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "x", "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ({"messages": MESSAGES, "tools": [ADD, ADD]}, "tools"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"thinking": True}},
            "chat_template_kwargs.thinking",
        ),
        ({"messages": MESSAGES, "prompt": "x"}, "prompt"),
    ],
)
def test_what_would_have_no_effect_is_refused(served, fields, param):
    """And what would have none anyway is not: false, and true where it is the default."""
    client, _ = served
    assert error_of(client.post("/tokenize", json=fields), 400)["param"] == param
    off = {"add_special_tokens": False, "continue_final_message": False, "tools": None}
    tokens(client, messages=MESSAGES, add_generation_prompt=True, **off)
    tokens(client, prompt="x", add_generation_prompt=True, tools=[])
    assert text_of(ask(client, add_special_tokens=False, max_tokens=1)) is not None
