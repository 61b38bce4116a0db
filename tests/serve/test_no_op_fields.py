"""What clients send out of habit passes if it changes nothing, and is refused if it would."""

import json
from typing import Any

import pytest

from mars_ray.config.serve import ServeJob
from mars_ray.serve.openai.request_models import (
    ApiError,
    ChatBody,
    CompletionBody,
    no_ops_of,
    parse,
)
from mars_ray.serve.openai.validation import to_request
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest

JOB = ServeJob(checkpoint="x")
BODIES = {
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionBody: {"model": "m", "prompt": "hi"},
}
# Harmless values, then some that ask for something.
BOTH: dict[str, tuple[list[Any], list[Any]]] = {
    "service_tier": (["auto", "default"], ["flex", "priority"]),
    "store": ([False], [True, 0, "no"]),
    "prompt_cache_key": (["conversation-7", ""], [3]),
    "use_beam_search": ([False], [True]),
    "early_stopping": ([False], [True]),
    "length_penalty": ([1, 1.0], [0.9, 2]),
    "skip_special_tokens": ([True], [False]),
    "spaces_between_special_tokens": ([True, False], ["x"]),
    "detokenize": ([True], [False]),
    "bad_words": ([[]], [["no"]]),
    "watermarking": ([False], [True]),
    "thinking_token_budget": ([-1], [0, 100]),
    "return_token_ids": ([False], [True]),
    "return_tokens_as_token_ids": ([False], [True]),
    "return_token_offsets": ([False], [True]),
    "return_prompt_text": ([False], [True]),
    "routed_experts_prompt_start": ([0], [1]),
    "mm_payload": (["tensors", "none"], ["all"]),
}
CHATS: dict[str, tuple[list[Any], list[Any]]] = {
    "function_call": (["none"], ["auto", {"name": "f"}]),
    "modalities": ([["text"]], [["text", "audio"], ["audio"], []]),
    "verbosity": (["medium"], ["low", "high"]),
    "echo": ([False], [True]),
    "add_generation_prompt": ([True], [False]),
    "continue_final_message": ([False], [True]),
    "add_special_tokens": ([False], [True]),
}
COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {"suffix": ([""], ["end"])}
FIELDS = {ChatBody: BOTH | CHATS, CompletionBody: BOTH | COMPLETIONS}
KINDS = pytest.mark.parametrize("kind", [ChatBody, CompletionBody])


def call(kind: type[ChatBody] | type[CompletionBody], **fields: Any) -> GenerationRequest:
    body = parse(kind, json.dumps(BODIES[kind] | fields).encode())
    return to_request(body, "id", 7, JOB)


def refusal(kind: type[ChatBody] | type[CompletionBody], **fields: Any) -> ErrorInfo:
    with pytest.raises(ApiError) as caught:
        call(kind, **fields)
    return caught.value.refusal


@KINDS
def test_every_such_field_is_tried(kind):
    """Guards a field of which nobody knows whether anything but nothing comes of it."""
    assert set(FIELDS[kind]) == no_ops_of(kind)


@KINDS
def test_harmless_values_change_nothing(kind):
    """Also null, and all of them at once. Guards a client that is refused for its own default."""
    plain = call(kind)
    for field, (harmless, _) in FIELDS[kind].items():
        for value in (*harmless, None):
            assert call(kind, **{field: value}) == plain, (field, value)
    assert call(kind, **{field: harmless[0] for field, (harmless, _) in FIELDS[kind].items()})


@KINDS
def test_what_would_be_ignored_is_refused_by_name(kind):
    """And the error says what to do. Guards an option that silently does nothing."""
    for field, (_, asking) in FIELDS[kind].items():
        for value in asking:
            refused = refusal(kind, **{field: value})
            assert refused.param is not None
            assert (refused.status, refused.code) == (400, "unsupported_parameter"), (field, value)
            assert refused.param.split(".")[0] == field
            assert "leave it out" in refused.message


@KINDS
@pytest.mark.parametrize(
    ("fields", "same_as"),
    [
        ({"top_k": -1}, {}),
        ({"top_k": 0}, {}),
        ({"min_p": 0}, {}),
        ({"min_tokens": 0}, {}),
        ({"logit_bias": {}}, {}),
        ({"stop": []}, {}),
        ({"best_of": 1}, {}),
        ({"best_of": 3, "n": 3}, {"n": 3}),
        ({"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}}, {}),
        ({"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}, {}),
        ({"stream_options": {"include_usage": False, "include_obfuscation": False}}, {}),
        ({"stream_options": {}}, {}),
    ],
)
def test_values_that_are_the_default_are_no_others(kind, fields, same_as):
    """Of fields that do have an effect with another value; load tools send all that they know."""
    assert call(kind, **fields) == call(kind, **same_as)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"tools": []},
        {"logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}},
    ],
)
def test_values_without_an_effect_pass_in_chats(fields):
    """Guards clients that always name how tools may be called, also when there are none."""
    assert call(ChatBody, **fields) == call(ChatBody)


@KINDS
def test_null_is_a_field_not_given_whatever_its_name(kind):
    """Of OpenAI, of another server, or misspelt; only null is. And a body that has a second fault
    is refused for that one."""
    unknown = ("functions", "audio", "prediction", "chat_template", "guided_json", "treshold")
    assert call(kind, **dict.fromkeys(unknown)) == call(kind)
    assert refusal(kind, functions=None, treshold=1).param == "treshold"
    assert refusal(kind, functions=None, temperature="x").param == "temperature"
    assert refusal(kind, functions=[]).code == "unsupported_parameter"


def test_messages_come_back_as_clients_keep_them():
    """With the nulls and empty lists of the answer that they had, from here or from elsewhere."""
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    nulls = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "name", "reasoning"))
    kept = [plain[0] | {"name": None}, plain[1] | nulls | {"annotations": []}]
    assert call(ChatBody, messages=kept) == call(ChatBody, messages=plain)
    refused = refusal(ChatBody, messages=[plain[0], plain[1] | {"annotations": [{}]}])
    assert refused.param == "messages.1.annotations"
