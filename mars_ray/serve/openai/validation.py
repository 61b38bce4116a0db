"""Turns a checked body into a generation request: limits, defaults, contradictory settings."""

from collections.abc import Iterable
from typing import Any

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import (
    ConfidenceMode,
    ExactMode,
    JacobiMode,
    Mode,
    VerifiedMode,
)
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.core.thresholds import Budget, Elastic, Quality
from mars_ray.serve.openai.request_models import (
    AnswerBody,
    ChatBody,
    ChatMessage,
    CompletionBody,
    JsonFormat,
    NamedTool,
    SchemaFormat,
    TokenizeBody,
    ToolBody,
    ToolMessage,
    refuse,
)
from mars_ray.serve.protocol import GenerationRequest, Prompt, TokenizeRequest, Tools, Turn

_MODES: dict[str, Mode] = {
    mode.type: mode for mode in (ExactMode(), VerifiedMode(), ConfidenceMode(), JacobiMode())
}
# OpenAI's default for completions; a chat's answer may use all the room left.
_COMPLETION_TOKENS = 16
# Fields that have the same name in `Sampling` and in a request.
_SAME_NAME = (
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def to_generation_request(
    body: ChatBody | CompletionBody, request_id: str, seed: int, job: ServeJob
) -> GenerationRequest:
    """The request to a replica; `seed` is used if the body has none.

    Raises ApiError for settings that contradict each other or exceed a limit.
    """
    if (body.wants_usage or body.wants_usage_so_far) and not body.stream:
        refuse("stream_options", "'stream_options' has no effect without 'stream'")
    if body.best_of not in (None, body.n or 1):
        refuse("best_of", "'best_of' must be 'n': all answers that are written are returned")
    call = GenerationRequest(
        id=request_id,
        prompts=_prompts(body),
        mode=_mode(body, job.mode),
        sampling=_sampling(body, seed),
        max_new_tokens=_max_new_tokens(body, job.limits),
        new_tokens_limit=_new_tokens_limit(body, job.limits),
        stop=body.stops,
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=_ignore_eos(body),
        shows_stop=bool(body.include_stop_str_in_output),
        is_echoed=isinstance(body, CompletionBody) and bool(body.echo),
        add_special_tokens=isinstance(body, ChatBody) or body.add_special_tokens is not False,
        switches=body.switches if isinstance(body, ChatBody) else (),
        shows_reasoning=_shows_reasoning(body, job),
        priority=body.priority or 0,
        n=body.n or 1,
        logprobs=_logprobs(body),
        is_mode_open=body.mode is None and body.threshold is None and body.window is None,
        quality=_quality(body, job),
        quality_class=_quality_class(body, job),
        schema=_schema(body),
        is_strict=_is_strict(body),
        tools=_tools(body),
        delivery="steps" if body.return_forwards else "paced" if body.stream else "whole",
        is_streamed=bool(body.stream),
        timeout_s=_timeout_s(body, job.limits),
    )
    # More answers than the engine has places would be refused even by an idle engine.
    most = min(job.limits.choices, job.engine.max_batch + job.limits.waiting_requests)
    if call.choices > most:
        refuse(call.choices_param, f"{call.choices} answers are more than this server's {most}")
    return call


def to_tokenize_request(body: TokenizeBody) -> TokenizeRequest:
    """The request to a replica. Raises ApiError for fields that would have no effect."""
    if (body.prompt is None) == (body.messages is None):
        refuse("prompt", "give either 'prompt' or 'messages'")
    of_chats = {
        "tools": bool(body.tools),
        "chat_template_kwargs": body.chat_template_kwargs is not None,
        "reasoning_effort": body.reasoning_effort is not None,
        "add_generation_prompt": body.add_generation_prompt is False,
    }
    of_texts = {"add_special_tokens": bool(body.add_special_tokens)}
    other = "prompt" if body.messages is None else "messages"
    for param, is_given in (of_chats if body.messages is None else of_texts).items():
        if is_given:
            refuse(param, f"'{param}' has no effect with '{other}'")
    return TokenizeRequest(
        turns_of(body.messages or ()) if body.prompt is None else body.prompt,
        Tools(_definitions(body.tools)) if body.tools else None,
        body.switches,
        add_special_tokens=body.add_special_tokens is not False,
        add_generation_prompt=body.add_generation_prompt is not False,
        with_strings=bool(body.return_token_strs),
    )


def _ignore_eos(body: AnswerBody) -> bool:
    if body.ignore_eos and (_schema(body) is not None or _tools(body) is not None):
        refuse(
            "ignore_eos",
            "'ignore_eos' contradicts 'response_format' and 'tools', by which an answer is over",
        )
    return bool(body.ignore_eos)


def _shows_reasoning(body: AnswerBody, job: ServeJob) -> bool | None:
    """Whether the reply has the thoughts; None if they are part of the answer."""
    if not isinstance(body, ChatBody):
        return None
    is_hidden = body.include_reasoning is False
    if job.reasoning_parser is None:
        if is_hidden:
            refuse(
                "include_reasoning",
                "'include_reasoning' can only be false where the service's job names a "
                "reasoning_parser: without one thoughts are part of the answer",
            )
        return None
    if is_hidden and body.logprobs:
        refuse("logprobs", "'logprobs' would tell the thoughts that 'include_reasoning' hides")
    return not is_hidden


def _timeout_s(body: AnswerBody, limits: Limits) -> float:
    if body.timeout_s is not None and body.timeout_s > limits.request_s:
        refuse("timeout_s", f"'timeout_s' is more than this server's {limits.request_s:g} s")
    return body.timeout_s or limits.request_s


def _prompts(body: ChatBody | CompletionBody) -> tuple[Prompt, ...]:
    if isinstance(body, ChatBody):
        return (turns_of(body.messages),)
    if isinstance(body.prompt, str):
        return (body.prompt,)
    texts: list[str] = [part for part in body.prompt if isinstance(part, str)]
    tokens: list[int] = [part for part in body.prompt if isinstance(part, int)]
    lists: list[tuple[int, ...]] = [part for part in body.prompt if isinstance(part, tuple)]
    return (tuple(tokens),) if tokens else (*texts, *lists)


def turns_of(messages: Iterable[ChatMessage]) -> tuple[Turn, ...]:
    """The turns of a conversation. Chat templates identify a tool's result by its position, so the
    results of several calls are put in the order of the calls.

    Raises ApiError for a result of a call that the assistant's message before it did not make.
    """
    turns: list[Turn] = []
    order: dict[str, int] = {}  # places of the calls whose results are due, by their ids
    results: list[tuple[int, Turn]] = []
    for number, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in order:
                place = f"messages.{number}.tool_call_id"
                refuse(place, f"'{place}': no call of the message before it has this id")
            results.append((order[message.tool_call_id], message.turn()))
            continue
        turns += _in_order(results)
        turns.append(message.turn())
        order, results = {call.id: place for place, call in enumerate(turns[-1].calls)}, []
    return (*turns, *_in_order(results))


def _in_order(results: list[tuple[int, Turn]]) -> list[Turn]:
    return [turn for _, turn in sorted(results, key=lambda result: result[0])]


def _sampling(body: AnswerBody, seed: int) -> Sampling:
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=seed if body.seed is None else body.seed,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        min_new_tokens=body.min_tokens or 0,
        **given,
    )


def _max_new_tokens(body: ChatBody | CompletionBody, limits: Limits) -> int | None:
    """The length that the client asks for; None if it names none, or more than there is."""
    if (body.min_tokens or 0) > limits.new_tokens:
        refuse("min_tokens", f"'min_tokens' is more than this server's {limits.new_tokens}")
    asked = {"max_tokens": body.max_tokens}
    if isinstance(body, ChatBody):
        asked["max_completion_tokens"] = body.max_completion_tokens
    given = {param: tokens for param, tokens in asked.items() if tokens is not None}
    if len(set(given.values())) > 1:
        refuse("max_completion_tokens", "'max_tokens' and 'max_completion_tokens' differ")
    for param, tokens in given.items():
        if tokens > limits.new_tokens and limits.beyond_new_tokens == "refuse":
            refuse(
                param,
                f"'{param}' is {tokens}, but this server writes at most {limits.new_tokens} tokens",
            )
        if (body.min_tokens or 0) > tokens:
            refuse("min_tokens", f"'min_tokens' is more than '{param}', {tokens}")
        return tokens if tokens <= limits.new_tokens else None
    return None


def _new_tokens_limit(body: ChatBody | CompletionBody, limits: Limits) -> int:
    """Most tokens of an answer whose length the client leaves open, or sets beyond the limit."""
    if isinstance(body, ChatBody) or body.max_tokens is not None:
        return limits.new_tokens
    return min(max(_COMPLETION_TOKENS, body.min_tokens or 0), limits.new_tokens)


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        refuse("top_logprobs", "'top_logprobs' has no effect without 'logprobs'")
    return (body.top_logprobs or 0) if body.logprobs else None


def _mode(body: AnswerBody, default: Mode) -> Mode:
    """The request's mode; open settings take the server's default, or else the mode's."""
    base = default
    if body.mode is not None and body.mode != default.type:
        base = _MODES[body.mode]
    asked = {"threshold": body.threshold, "window": body.window}
    given = {name: value for name, value in asked.items() if value is not None}
    for name in given:
        if name not in type(base).model_fields:
            refuse(name, f"'{name}' has no effect in mode '{base.type}'")
    if body.window is not None and body.window < base.least_window:
        refuse("window", f"'window' must be at least {base.least_window} in mode '{base.type}'")
    return base.model_copy(update=given)


def _quality(body: AnswerBody, job: ServeJob) -> Quality | None:
    """The quality that replaces the mode's threshold, if any."""
    given = {
        name: value
        for name in ("threshold", "quality", "quality_budget")
        if (value := getattr(body, name)) is not None
    }
    if len(given) > 1:
        first, second, *_ = given
        refuse(second, f"'{first}' and '{second}' say the same thing twice; leave one of them out")
    if body.quality_budget is not None:
        return Budget(body.quality_budget)
    if body.quality is not None:
        if body.quality not in job.qualities:
            refuse("quality", f"'quality' must be one of {', '.join(sorted(job.qualities))}")
        return Elastic(job.qualities[body.quality])
    is_open = _quality_class(body, job) is not None
    if is_open and job.mode.is_elastic:
        return Elastic(job.qualities[job.default_quality])
    return None


def _quality_class(body: AnswerBody, job: ServeJob) -> str | None:
    """The class of quality; None for a request that itself states how to decode it."""
    if body.quality is not None:
        return body.quality
    pins = (body.mode, body.threshold, body.quality_budget)
    return job.default_quality if all(pin is None for pin in pins) else None


def _schema(body: AnswerBody) -> dict[str, Any] | None:
    match body:
        case ChatBody(response_format=SchemaFormat(json_schema=named)):
            _check_options(named.schema_, "response_format.json_schema.schema")
            return named.schema_
        case ChatBody(response_format=JsonFormat()):
            return {"type": "object"}
        case _:
            return None


def _is_strict(body: AnswerBody) -> bool:
    match body:
        case ChatBody(response_format=SchemaFormat(json_schema=named)):
            return bool(named.strict)
        case _:
            return False


def _check_options(schema: dict[str, Any], place: str) -> None:
    """Raises ApiError for options of llguidance, except the one that only shapes white space.
    Others may make it ignore parts of the schema, or write text that is not JSON."""
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict) or not options.keys() <= {"whitespace_flexible"}:
        place = f"{place}.x-guidance"
        refuse(place, f"'{place}' may hold 'whitespace_flexible' and nothing else")


def _tools(body: AnswerBody) -> Tools | None:
    if not isinstance(body, ChatBody):
        return None
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            refuse("tool_choice", "'tool_choice' has no effect without 'tools'")
        return None
    definitions = _definitions(body.tools)
    names = [tool.function.name for tool in body.tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        refuse("tool_choice", f"there is no tool {choice.function.name!r} among 'tools'")
    if choice == "none":
        return None
    for number, tool in enumerate(body.tools):
        _check_options(tool.function.parameters or {}, f"tools.{number}.function.parameters")
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return Tools(
        definitions,
        is_required=named is not None or choice == "required",
        is_parallel=named is None and body.parallel_tool_calls is not False,
        named=named,
    )


def _definitions(tools: tuple[ToolBody, ...]) -> tuple[dict[str, Any], ...]:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        refuse("tools", "two of the tools have the same name")
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)
