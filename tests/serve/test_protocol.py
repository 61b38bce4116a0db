"""Requests are checked field by field, and nothing accepted is ignored."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import ValidationError
from serve.written import whole

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.core.thresholds import Elastic
from mars_ray.serve.openai.request_models import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    parse,
)
from mars_ray.serve.openai.sse import error_body
from mars_ray.serve.openai.validation import to_request
from mars_ray.serve.protocol import ErrorInfo, Finish, OutputDelta, TokenText, Turn

ROOT = Path(__file__).parents[2]
JOB = ServeJob(checkpoint="x", limits=Limits(new_tokens=50))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def body(**fields: Any) -> bytes:
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps(request | fields).encode()


def call(job: ServeJob = JOB, **fields: Any):
    return to_request(parse(ChatBody, body(**fields)), "id", 7, job)


def refusal(job: ServeJob = JOB, **fields: Any) -> ErrorInfo:
    with pytest.raises(ApiError) as caught:
        call(job, **fields)
    return caught.value.refusal


def test_defaults_are_those_of_the_api_and_of_the_job():
    """OpenAI samples at temperature 1 unless told otherwise; the mode is the operator's."""
    made = call()
    assert made.sampling == Sampling(temperature=1.0, seed=7)
    assert made.mode == VerifiedMode()
    assert made.prompts == ((Turn("user", "hi"),),)
    assert made.max_new_tokens is None
    assert made.stop == ()


def test_every_field_arrives():
    """Guards a field that is accepted and then ignored."""
    made = call(
        messages=[
            {
                "role": "system",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "user", "content": "c"},
        ],
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"5": 2},
        min_tokens=4,
        logprobs=True,
        top_logprobs=3,
        n=2,
        seed=-1,
        stop="end",
        mode="confidence",
        threshold=0.6,
        window=2,
    )
    assert made.prompts == ((Turn("system", "ab"), Turn("user", "c")),)
    assert made.sampling == Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=-1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={5: 2.0},
        min_new_tokens=4,
    )
    assert (made.n, made.logprobs, made.choices) == (2, 3, 2)
    assert made.mode == ConfidenceMode(threshold=0.6, window=2)
    assert (made.max_new_tokens, made.stop) == (9, ("end",))


def test_stop_is_a_string_or_a_list_of_them():
    """Guards the list: only the other form may have been tried."""
    assert call(stop="a").stop == ("a",)
    assert call(stop=["a", "b"]).stop == ("a", "b")
    assert call(stop=[]).stop == ()
    assert refusal(stop=3).param == "stop"
    assert refusal(stop=["a", 3]).param == "stop.1"


def test_null_is_a_field_not_given():
    """Clients write null for their own defaults."""
    nulls = ("temperature", "top_p", "max_tokens", "stop", "seed", "stream", "n", "mode", "window")
    assert call(**dict.fromkeys(nulls)) == call()


@pytest.mark.parametrize(
    ("fields", "by_step", "is_streamed"),
    [
        ({}, False, False),
        ({"stream": True}, False, True),
        ({"return_forwards": True}, True, False),
        ({"return_forwards": True, "stream": True}, True, True),
    ],
)
def test_how_the_answer_is_delivered(fields, by_step, is_streamed):
    """Forwards are told by step, though the client may get them all at once."""
    form = call(**fields).reply
    assert (form.by_step, form.is_streamed) == (by_step, is_streamed)


@pytest.mark.parametrize("field", ["audio", "prediction", "functions", "store", "treshold"])
def test_an_unsupported_field_is_named(field):
    """Known to OpenAI or misspelt: both would otherwise be silently ignored."""
    refused = refusal(**{field: 1})
    assert (refused.status, refused.param, refused.code) == (400, field, "unsupported_parameter")
    assert field in refused.message
    assert ("did you mean 'threshold'?" in refused.message) == (field == "treshold")


def test_a_field_of_another_server_is_no_misspelt_one():
    """Guards `return_prompt_text` for a client that wants its prompt cut."""
    rows = (ROOT / "docs/reference/api.md").read_text().split("| **null only** |")[1]
    fields = re.findall(r"`([a-z_]+)`", rows.partition("Unless the request")[0])
    assert "truncate_prompt_tokens" in fields
    for field in fields:
        if not field.startswith("test_"):
            assert "did you mean" not in refusal(**{field: 1}).message, field
    for field in ("structured_outputs", "guided_json"):
        assert "'response_format'" in refusal(**{field: {}}).message


def test_within_a_message_no_field_of_the_request_is_meant():
    """Guards `messages.0.mode` as a misspelt `messages`."""
    refused = refusal(messages=[{"role": "user", "content": "hi", "mode": "exact"}])
    assert (refused.param, refused.code) == ("messages.0.mode", "unsupported_parameter")
    assert "did you mean" not in refused.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"quality": "best"}, "quality"),
        ({"quality": "fast", "threshold": 0.5}, "quality"),
        ({"quality_budget": 0.1, "quality": "fast"}, "quality_budget"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages.0.name"),
        ({"model": 3}, "model"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05.[key]"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 51}, "min_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop.0"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": "x", "nam": None}]}, "messages.0.nam"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"mode": "block_cached"}, "mode"),
        ({"threshold": 1.5}, "threshold"),
        ({"mode": "exact", "threshold": 0.9}, "threshold"),
        ({"mode": "exact", "window": 2}, "window"),
        ({"mode": "confidence", "window": 0}, "window"),
        ({"mode": "jacobi", "threshold": 0.5}, "threshold"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_its_field(fields, param):
    """Guards errors that leave the client guessing."""
    refused = refusal(**fields)
    assert (refused.status, refused.param) == (400, param)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe", b"[]", b'"x"', b"null", b'{"model":"\\ud800"}', b"[" * 100_000],
)
def test_a_body_that_is_no_request_is_a_400(raw):
    """Guards a 500 for bytes that are no JSON object: cut, not UTF-8, or nested without end."""
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, raw)
    assert caught.value.refusal.status == 400
    assert caught.value.refusal.code == "invalid_json"


def test_a_missing_field_is_named():
    """Guards a KeyError turned into a 500."""
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, b'{"model": "m"}')
    assert caught.value.refusal.param == "messages"


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":1,"n":1}', "n"),
        (b'{"model":"m","messages":[{"role":"user","content":"x","content":"y"}]}', "content"),
    ],
)
def test_a_field_given_twice_is_refused(raw, param):
    """Guards a value that is ignored: parsers disagree which one counts."""
    with pytest.raises(ApiError, match="more than once") as caught:
        parse(ChatBody, raw)
    assert (caught.value.refusal.status, caught.value.refusal.param) == (400, param)


def test_a_field_given_twice_is_found_among_many():
    """Guards an ingress that stands still: compared with all others, these would take minutes."""
    fields = ",".join(f'"{number}":0' for number in range(200_000))
    with pytest.raises(ApiError, match="'199999' is given more than once"):
        parse(ChatBody, body(tools=[TOOL]).replace(b"{}", f'{{{fields},"199999":0}}'.encode()))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [-1] * 5000}),
        (CompletionBody, {"prompt": [[-1]] * 5000}),
        (CompletionBody, {"prompt": ["a", *[1] * 5000]}),
        (CompletionBody, {"prompt": "x", "stop": [""] * 5000}),
        (ChatBody, {"messages": [{}] * 5000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [{}] * 5000}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}], "tools": [{}] * 5000}),
        (DetokenizeBody, {"tokens": [-1] * 5000}),
    ],
)
def test_of_a_list_only_the_first_fault_is_looked_for(kind, fields):
    """Guards an ingress that stands still for seconds while it collects what nobody is told."""
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps({"model": "m"} | fields).encode())
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() < 10


def test_answers_that_never_have_places_are_refused():
    """Guards a client that asks again for ever, as a 429 would tell it to."""
    sizes = {"engine": EngineConfig(max_batch=2), "limits": Limits(waiting_requests=1)}
    small = JOB.model_copy(update=sizes)
    assert call(small, n=3).choices == 3
    refused = refusal(small, n=4)
    assert (refused.status, refused.param, refused.retry_after_s) == (400, "n", None)
    with pytest.raises(ApiError, match="4 answers are more than this server's 3"):
        complete(small, prompt=["a"] * 4)


def test_a_request_changes_only_what_it_names_of_the_default_mode():
    """The operator's threshold holds for the operator's mode, not for another one."""
    job = JOB.model_copy(update={"default_mode": ConfidenceMode(threshold=0.8, measure="margin")})
    assert call(job, window=2).mode == ConfidenceMode(threshold=0.8, measure="margin", window=2)
    assert call(job, mode="confidence").mode == ConfidenceMode(threshold=0.8, measure="margin")
    assert call(job, mode="verified").mode == VerifiedMode()
    assert call(job, mode="exact").mode == ExactMode()


@pytest.mark.parametrize(
    ("mode", "quality"),
    [
        (VerifiedMode(threshold=0.5), Elastic(0.3)),
        (ConfidenceMode(threshold=0.5), Elastic(0.3)),
        (ConfidenceMode(threshold=0.5, measure="entropy"), None),
        (ExactMode(), None),
    ],
)
def test_who_pins_nothing_follows_the_set_point(mode, quality):
    """In the modes whose threshold the service sets; who names mode or threshold keeps both."""
    job = JOB.model_copy(update={"default_mode": mode, "default_quality": "balanced"})
    assert call(job).quality == quality
    assert call(job, mode=mode.type).quality is None
    assert call(job, mode=mode.type).mode == mode
    assert call(job, mode="confidence", quality="fast").quality == Elastic(0.0)
    if mode.own_threshold:
        assert call(job, threshold=0.9).quality is None


def test_a_threshold_without_effect_is_refused_under_an_exact_default():
    """The request does not name the mode, but the setting would still do nothing."""
    job = JOB.model_copy(update={"default_mode": ExactMode()})
    assert refusal(job, threshold=0.5).param == "threshold"


FINISH = Finish(
    "length",
    prompt_tokens=5,
    completion_tokens=6,
    forwards=4,
    disagreed=3,
    cached_tokens=2,
    ngram_tokens=1,
)
TOKENS = (
    TokenText("a", (97,), -0.5, (TokenText("a", (97,), -0.5), TokenText("b", (98,), -1.5))),
    TokenText("\ufffd", (240,), -0.25),
)


def test_replies_have_the_shapes_of_the_official_client():
    """Held to the `openai` package's own types, which the client parses with."""
    asked = call(threshold=0.5, return_forwards=True)
    made = whole(asked, OutputDelta("te", forward=1, tokens=2), OutputDelta("xt", FINISH))
    parsed = ChatCompletion.model_validate(made, strict=True)
    assert parsed.choices[0].message.content == "text"
    assert made["choices"][0]["mars"] == {"forwards": [1, 1]}
    assert made["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
        "mars": {
            "forwards": 4,
            "tokens_per_forward": 1.5,
            "mode": "verified",
            "threshold": 0.5,
            "disagreement": 0.5,
            "ngram_tokens": 1,
            "adapter": None,
        },
    }


def test_logprobs_have_the_shapes_of_both_apis():
    """A chat's has bytes, so that characters of several tokens can be put together."""
    delta = OutputDelta("a", FINISH, logprobs=TOKENS)
    made = whole(call(logprobs=True), delta)
    parsed = ChatCompletion.model_validate(made, strict=True).choices[0].logprobs
    assert parsed is not None
    assert parsed.content is not None
    assert [entry.bytes for entry in parsed.content] == [[97], [240]]
    assert [other.token for other in parsed.content[0].top_logprobs] == ["a", "b"]
    made = whole(complete(logprobs=2), delta)
    text = Completion.model_validate(made, strict=True).choices[0].logprobs
    assert text is not None
    assert text.token_logprobs == [-0.5, -0.25]
    assert text.top_logprobs is not None
    assert text.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert text.text_offset == [0, 1]


def test_tokens_that_look_alike_keep_the_figure_of_the_chosen_one():
    """Guards the least likely of several halves of characters, which are all written as U+FFFD."""
    half, other, least = (TokenText("\ufffd", (240 + n,), -1.0 - n) for n in range(3))
    chosen = replace(half, top=(half, TokenText("a", (97,), -1.5), other, least))
    made = whole(complete(logprobs=4), OutputDelta("\ufffd", FINISH, logprobs=(chosen,)))
    assert made["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0, "a": -1.5}]


def complete(job: ServeJob = JOB, **fields: Any):
    raw = json.dumps({"model": "m", "prompt": "hi"} | fields).encode()
    return to_request(parse(CompletionBody, raw), "id", 7, job)


def test_a_completion_takes_texts_and_tokens():
    """Four forms of a prompt; the default length is OpenAI's."""
    assert complete().prompts == ("hi",)
    assert (complete().max_new_tokens, complete().new_tokens_limit) == (None, 16)
    assert complete(min_tokens=20).new_tokens_limit == 20
    assert complete(max_tokens=9).max_new_tokens == 9
    assert complete(prompt=["a", "b"]).prompts == ("a", "b")
    assert complete(prompt=[1, 2]).prompts == ((1, 2),)
    assert complete(prompt=[[1], [2, 3]], n=2).prompts == ((1,), (2, 3))
    assert complete(prompt=[[1], [2, 3]], n=2).choices == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"messages": []}, "messages"),
        ({"echo": 1}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ],
)
def test_a_wrong_completion_is_a_400_that_names_its_field(fields, param):
    """Guards errors that leave the client guessing."""
    with pytest.raises(ApiError) as caught:
        complete(**fields)
    assert (caught.value.refusal.status, caught.value.refusal.param) == (400, param)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
    ],
)
def test_errors_have_openai_types(status, kind):
    """Clients decide by the type whether to try again."""
    error = error_body(ErrorInfo(status, "m", "p", "c"))["error"]
    assert error == {"message": "m", "type": kind, "param": "p", "code": "c"}
