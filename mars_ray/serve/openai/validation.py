"""Turns a checked body into a generation request: limits, defaults, contradictory settings."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, JacobiMode, Mode, VerifiedMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.core.thresholds import Budget, Elastic, Quality
from mars_ray.serve.openai.request_models import (
    AnswerBody,
    AnyFormat,
    ChatBody,
    ChatMessage,
    CompletionBody,
    NamedTool,
    SchemaFormat,
    StreamOptions,
    TokenizeBody,
    ToolBody,
    ToolMessage,
    refuse,
)
from mars_ray.serve.protocol import (
    GenerationRequest,
    Prompt,
    ReplyForm,
    TokenizeRequest,
    Tools,
    Turn,
)

_MODES: dict[str, Mode] = {
    mode.type: mode for mode in (ExactMode(), VerifiedMode(), ConfidenceMode(), JacobiMode())
}
# OpenAI's default for completions; a chat's answer may use all the room left.
_COMPLETION_TOKENS = 16
# Fields that have the same name in `Sampling` and in a request.
_SAME_NAME = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def to_request(
    body: ChatBody | CompletionBody, request_id: str, seed: int, job: ServeJob, created: int = 0
) -> GenerationRequest:
    """The request to a replica; `seed` is used if the body has none.

    Raises ApiError for settings that contradict each other or exceed a limit.
    """
    chat = body if isinstance(body, ChatBody) else None
    text = body if isinstance(body, CompletionBody) else None
    options = body.stream_options or StreamOptions()
    if (options.include_usage or options.continuous_usage_stats) and not body.stream:
        refuse("stream_options", "'stream_options' has no effect without 'stream'")
    if body.best_of not in (None, body.n or 1):
        refuse("best_of", "'best_of' must be 'n': all answers that are written are returned")
    is_chat = isinstance(body, ChatBody)
    prompts = (turns_of(body.messages),) if is_chat else _prompts(body)
    mode, quality, quality_class = _decoding(body, job)
    sampling = _sampling(body, seed)
    max_new_tokens = _max_new_tokens(body, job.limits)
    limit = job.limits.new_tokens
    if text and text.max_tokens is None:
        limit = min(max(_COMPLETION_TOKENS, text.min_tokens or 0), limit)
    schema, is_strict = _schema(chat) if chat else (None, False)
    tools = _tools(chat) if chat else None
    if body.ignore_eos and (schema is not None or tools is not None):
        refuse(
            "ignore_eos",
            "'ignore_eos' contradicts 'response_format' and 'tools', by which an answer is over",
        )
    shows_reasoning = _shows_reasoning(chat, job) if chat else None
    logprobs = text.logprobs if text else None
    if chat and chat.top_logprobs and not chat.logprobs:
        refuse("top_logprobs", "'top_logprobs' has no effect without 'logprobs'")
    if chat and chat.logprobs:
        logprobs = chat.top_logprobs or 0
    if body.timeout_s is not None and body.timeout_s > job.limits.request_s:
        refuse("timeout_s", f"'timeout_s' is more than this server's {job.limits.request_s:g} s")
    request = GenerationRequest(
        id=request_id,
        prompts=prompts,
        mode=mode,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        new_tokens_limit=limit,
        stop=body.stops,
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        shows_stop=bool(body.include_stop_str_in_output),
        is_echoed=bool(text and text.echo),
        add_special_tokens=text is None or text.add_special_tokens is not False,
        switches=chat.switches if chat else (),
        shows_reasoning=shows_reasoning,
        priority=body.priority or 0,
        n=body.n or 1,
        logprobs=logprobs,
        is_mode_open=body.mode is None and body.threshold is None and body.window is None,
        quality=quality,
        quality_class=quality_class,
        schema=schema,
        is_strict=is_strict,
        tools=tools,
        reply=ReplyForm(
            route="chat" if chat else "completion",
            model=job.name,
            created=created,
            is_streamed=bool(body.stream),
            by_step=bool(body.return_forwards),
            has_usage=bool(options.include_usage),
            has_usage_so_far=bool(options.continuous_usage_stats),
        ),
        timeout_s=body.timeout_s or job.limits.request_s,
    )
    # More answers than the engine has places would be refused even by an idle engine.
    most = min(job.limits.choices, job.engine.max_batch + job.limits.waiting_requests)
    if request.choices > most:
        message = f"{request.choices} answers are more than this server's {most}"
        refuse(request.choices_param, message)
    return request


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


def _shows_reasoning(body: ChatBody, job: ServeJob) -> bool | None:
    """Whether the reply has the thoughts; None if they are part of the answer."""
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


def _prompts(body: CompletionBody) -> tuple[Prompt, ...]:
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
    begin = 0  # of these results among the turns
    due: list[int] = []  # their places, as they come
    for number, message in enumerate(messages):
        turn = message.turn()
        if not isinstance(message, ToolMessage):
            turns.append(turn)
            order = {call.id: place for place, call in enumerate(turn.calls)}
            begin, due = len(turns), []
            continue
        if message.tool_call_id not in order:
            place = f"messages.{number}.tool_call_id"
            refuse(place, f"'{place}': no call of the message before it has this id")
        # Behind those of earlier calls, and of the same call.
        at = bisect_right(due, order[message.tool_call_id])
        due.insert(at, order[message.tool_call_id])
        turns.insert(begin + at, turn)
    return tuple(turns)


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
    elif body.max_tokens == 0 and not body.echo:
        refuse("max_tokens", "'max_tokens' must be at least 1, or 0 with 'echo'")
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


def _decoding(body: AnswerBody, job: ServeJob) -> tuple[Mode, Quality | None, str | None]:
    """The request's mode, in which open settings take the server's default, or else the mode's; the
    quality that replaces its threshold, if any; and the class of quality, which a request that
    itself states how to decode it does not have."""
    mode = job.mode
    if body.mode is not None and body.mode != mode.type:
        mode = _MODES[body.mode]
    asked = {"threshold": body.threshold, "window": body.window}
    given = {name: value for name, value in asked.items() if value is not None}
    for name in given:
        if name not in type(mode).model_fields:
            refuse(name, f"'{name}' has no effect in mode '{mode.type}'")
    if body.window is not None and body.window < mode.least_window:
        refuse("window", f"'window' must be at least {mode.least_window} in mode '{mode.type}'")
    qualities = ("threshold", "quality", "quality_budget")
    several = [name for name in qualities if getattr(body, name) is not None]
    if len(several) > 1:
        first, second, *_ = several
        refuse(second, f"'{first}' and '{second}' say the same thing twice; leave one of them out")
    if body.quality is not None and body.quality not in job.qualities:
        refuse("quality", f"'quality' must be one of {', '.join(sorted(job.qualities))}")
    pins = (body.mode, body.threshold, body.quality_budget)
    name = body.quality
    if name is None and all(pin is None for pin in pins):
        name = job.default_quality
    quality: Quality | None = None
    if body.quality_budget is not None:
        quality = Budget(body.quality_budget)
    elif body.quality is not None or (name is not None and job.mode.is_elastic):
        assert name is not None
        quality = Elastic(job.qualities[name])
    return mode.model_copy(update=given), quality, name


def _schema(body: ChatBody) -> tuple[dict[str, Any] | None, bool]:
    """The schema of the JSON that the answer must be, and whether all of it must be followed."""
    match body.response_format:
        case SchemaFormat(json_schema=named):
            _check_options(named.schema_, "response_format.json_schema.schema")
            return named.schema_, bool(named.strict)
        case AnyFormat(type="json_object"):
            return {"type": "object"}, False
        case _:
            return None, False


def _check_options(schema: dict[str, Any], place: str) -> None:
    """Raises ApiError for options of llguidance, except the one that only shapes white space.
    Others may make it ignore parts of the schema, or write text that is not JSON."""
    options = schema.get("x-guidance", {})
    if not (
        isinstance(options, dict)
        and options.keys() <= {"whitespace_flexible"}
        and all(isinstance(own, bool) for own in options.values())
    ):
        place = f"{place}.x-guidance"
        refuse(place, f"'{place}' may hold 'whitespace_flexible', true or false, and nothing else")


def _tools(body: ChatBody) -> Tools | None:
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
