"""A replica's work without Ray: turns calls into engine requests, and events into deltas."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from mars_ray.autoscale.sample import PINNED
from mars_ray.autoscale.threshold import LocalLoop, Rung
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.core.thresholds import Elastic
from mars_ray.decode.request import Request, TokenEvent
from mars_ray.decode.stats import Snapshot
from mars_ray.decode.structured_output import CompiledGrammar, Grammars
from mars_ray.errors import (
    DataError,
    DeadlineError,
    EngineError,
    ModelError,
    PoisonError,
    PromptTooLongError,
    RequestError,
)
from mars_ray.serve.openai.sse import internal_error
from mars_ray.serve.protocol import (
    ErrorInfo,
    GenerationRequest,
    Message,
    OutputDelta,
    Tokenized,
    TokenizeRequest,
    TokenText,
    Turn,
    Used,
    joined,
)
from mars_ray.serve.replica.admission import Admission
from mars_ray.serve.replica.call_usage import CallUsage, used_by
from mars_ray.serve.replica.chat_format import ChatFormat
from mars_ray.serve.replica.engine_client import EngineClient
from mars_ray.serve.replica.engine_requests import engine_requests
from mars_ray.serve.replica.output_processor import OutputProcessor, TokenBytes
from mars_ray.serve.replica.stats import (
    AnswerStats,
    Ending,
    Live,
    Observer,
    Tally,
    to_metrics,
)
from mars_ray.serve.status import ReplicaStatus

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1
_KEPT_GRAMMARS = 64
# Longer texts take the tokenizer milliseconds, which would block all streams of the event loop.
_LONG_CHARS = 8192
Made = TypeVar("Made")


@dataclass(slots=True)
class _Answer:
    """An unfinished answer."""

    output: OutputProcessor
    stats: AnswerStats
    siblings: list["_Answer"]  # those to the same prompt, itself too
    begun_s: float = field(default_factory=time.monotonic)
    last_s: float = field(default_factory=time.monotonic)  # when steps last added to it
    held: OutputDelta | None = None  # not sent yet
    is_over: bool = False


class LLMServer:
    """One engine and its tokenizer, answering calls. `start` it before use."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        job: ServeJob,
        observer: Observer | None = None,
        warning: str | None = None,
        name: str | None = None,
    ) -> None:
        """`warning` is part of the status; `name` is the replica's, told with what calls have used.

        Raises ModelError if the model does not define how an answer ends, or if a parser of the job
        does not fit it.
        """
        self._warning, self._name = warning, name
        self._observer = observer
        self._engine = engine
        self._facts = facts = engine.facts
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._job = job
        grammars = Grammars(tokenizer, facts.vocabulary, facts.stop_ids)
        self._compiled = lru_cache(maxsize=_KEPT_GRAMMARS)(grammars.compiled)
        self._chat = ChatFormat(tokenizer, grammars, job.tool_parser, job.reasoning_parser)
        self._live = Live()
        self._tally = Tally(job.scaling.slo)
        self._local = LocalLoop(job.scaling, job.set_point)
        self._usage = CallUsage()
        self._discarded = 0  # tokens that the engine has written, and no answer has
        self._threshold: float | None = None  # last one set on the engine
        self._admission = Admission(facts.max_batch + job.limits.waiting_requests)

    def start(self) -> None:
        """Start the engine's thread."""
        self._engine.start()

    def stop(self) -> None:
        """End the engine's thread."""
        self._engine.stop()

    def check_health(self) -> None:
        """Raises EngineError if the engine is dead or stuck."""
        self._engine.check_health(self._job.step_timeout_s)

    async def ended(self) -> None:
        """Returns once the engine is dead."""
        await self._engine.ended()

    async def is_ready(self) -> bool:
        """Whether the engine is alive."""
        try:
            self.check_health()
        except EngineError:
            return False
        return True

    async def seen(self) -> Snapshot:
        """A snapshot of the engine between two steps. Raises EngineError if it is dead."""
        seen = await self._engine.snapshot()
        return replace(seen, discarded_tokens=seen.discarded_tokens + self._discarded)

    async def status(self) -> tuple[ReplicaStatus]:
        """The current status of this engine. Raises EngineError if it is dead."""
        status = self._live.status(
            self._job,
            await self.seen(),
            time.monotonic(),
            in_default_mode=self._engine.can_decode(self._job.mode),
        )
        return (replace(status, warning=self._warning),)

    async def decided(self) -> None:
        """Always None: no policy controls a single engine."""

    async def learnt(self) -> None:
        """Always None, too."""

    async def relearn(self, memory: str | None) -> None:
        """Does nothing: there is no policy that could go on from it."""

    async def sums(self) -> dict[str, float]:
        """The sums for the autoscaling policy. Raises EngineError if the engine is dead."""
        return to_metrics(await self.seen(), self._tally, self._job.mode)

    async def follow(self, threshold: float, shed: float, rungs: tuple[Rung, ...] = ()) -> None:
        """Sets the threshold of requests that pin nothing, and the share of new ones to refuse.

        With rungs, the engine may go below that threshold when its own queue is too long. Raises
        EngineError if the engine is dead.
        """
        self._local.threshold, self._local.rungs = threshold, rungs
        self._admission.shed = shed
        await self.steer()

    async def steer(self) -> None:
        """Sets the threshold by this engine's own queue. Raises EngineError if it is dead."""
        arrived = self._tally.quality_class.total()
        threshold = self._local.tick(self._admission.open, arrived, time.monotonic())

        if threshold != self._threshold:
            self._threshold = threshold
            await self._engine.set_threshold(threshold)

    @property
    def open_answers(self) -> int:
        """Number of answers in progress or waiting."""
        return self._admission.open

    async def generate(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        """Yields the additions of engine steps to the answers, or an error as the last message.

        Closing the generator frees the call's places in the engine.
        """
        if refusal := self._admission.refusal(call):
            self._tally.offered(call, refused=True)
            yield replace(refusal, used=Used(replica=self._name))
            return
        self._usage.begin(call.id)
        self._admission.open += call.choices
        self._tally.offered(call)
        answers: dict[str, _Answer] = {}
        unfinished = call.choices
        unread: deque[list[TokenEvent]] = deque()
        try:
            requests = await self._requests(call)
            siblings: list[list[_Answer]] = [[] for _ in call.prompts]
            for choice, request in enumerate(requests):
                of_prompt = siblings[choice // call.n]
                answers[request.id] = self._begun(call, request, choice, of_prompt)
            interval_s = 0.0 if call.delivery == "steps" else self._job.stream_interval_s
            async with aclosing(self._engine.stream(*requests, interval_s=interval_s)) as steps:
                async for events in steps:
                    unread += _apart(events, by_step=call.delivery == "steps")
                    while unread:
                        some = unread.popleft()
                        answer = answers[some[0].request_id]
                        delta = self._added(call, answer, some)
                        if delta is None:
                            continue
                        yield delta
                        if delta.finish:
                            unfinished -= 1
                            if unfinished and not some[-1].completion:  # a stop string
                                await self._engine.abort(some[0].request_id)
                    if not unfinished:
                        return
        except Exception as error:  # noqa: BLE001 - the edge of a replica: errors go on as values
            is_engine_lost = isinstance(error, EngineError) and not isinstance(error, PoisonError)
            ending: Ending = "error" if is_engine_lost else "abort"
            is_refused = False
            for answer in answers.values():
                # Behind one that is refused the engine was asked for no other.
                is_refused = is_refused or answer.stats.ending == "refused"
                is_unbegun = answer.stats.first_token_s is None
                self._ended(answer, "refused" if is_refused and is_unbegun else ending)
            yield replace(_error_info(call, error), used=self._used(answers))
        finally:
            self._admission.open -= call.choices
            self._discarded += sum(map(_tokens, unread))
            for answer in answers.values():
                self._ended(answer, "abort")
            self._usage.end(call.id, self._used(answers))

    async def used(self, call_id: str) -> Used | None:
        """What a call has used whose end nobody has heard of; None if it has not been here."""
        return await self._usage.of(call_id)

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        """A prompt's tokens as for a request; text of a message never becomes a special token."""
        encode = partial(
            self._chat.encode,
            asked.prompt,
            asked.tools,
            asked.switches,
            add_special_tokens=asked.add_special_tokens,
            add_generation_prompt=asked.add_generation_prompt,
        )
        try:
            tokens = await _encoded(encode, asked.prompt, asked.tools)
        except RequestError as error:
            return ErrorInfo(400, str(error), param=error.field, code="invalid_value")
        except (DataError, ModelError) as error:
            return ErrorInfo(400, str(error), param="messages", code="invalid_value")
        strings = None
        if asked.with_strings:
            strings = tuple(self._tokenizer.convert_ids_to_tokens(list(tokens)))
        return Tokenized(tokens, self._facts.max_context, strings)

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        """The text of tokens, special ones included."""
        if any(token >= self._facts.vocabulary for token in tokens):
            message = f"a token is outside the vocabulary of {self._facts.vocabulary}"
            return ErrorInfo(400, message, param="tokens", code="invalid_value")
        text = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    async def _grammar(self, call: GenerationRequest) -> CompiledGrammar | None:
        """The grammar, made in a thread to not block the event loop. Raises RequestError."""
        if call.tools is None and call.schema is None:
            return None
        return await asyncio.to_thread(self._compiled_for, call)

    def _compiled_for(self, call: GenerationRequest) -> CompiledGrammar | None:
        text = self._chat.grammar(call)
        if text is None:
            return None
        return self._compiled(text, "tools" if call.tools else "response_format")

    async def _requests(self, call: GenerationRequest) -> list[Request]:
        """A request for each choice, in a mode that the engine can decode now.

        The requests must be submitted to the engine before anything else is awaited.
        """
        grammar = await self._grammar(call)
        made = await _encoded(partial(self._made, call, grammar), call.prompts, call.tools)
        if not call.is_mode_open or self._engine.can_decode(call.mode):
            return made
        return [replace(request, mode=ExactMode(), quality=None) for request in made]

    def _made(self, call: GenerationRequest, grammar: CompiledGrammar | None) -> list[Request]:
        prompts = [
            self._chat.encode(
                prompt, call.tools, call.switches, add_special_tokens=call.add_special_tokens
            )
            for prompt in call.prompts
        ]
        return engine_requests(call, prompts, self._facts, grammar)

    def _used(self, answers: dict[str, _Answer]) -> Used:
        used = used_by(answer.stats for answer in answers.values())
        return replace(used, replica=self._name)

    def _begun(
        self, call: GenerationRequest, request: Request, choice: int, siblings: list[_Answer]
    ) -> _Answer:
        output = OutputProcessor(
            call,
            request,
            choice,
            partial(self._chat.decode, call),
            self._token_text,
            self._chat.tool_reader(call, request.id),
            self._chat.reasoning_reader(call),
        )
        name = call.quality_class or PINNED
        prompt_tokens = 0 if choice % call.n else len(request.prompt)
        answer = _Answer(output, AnswerStats(request.mode.type, prompt_tokens, name), siblings)
        siblings.append(answer)
        return answer

    def _added(
        self, call: GenerationRequest, answer: "_Answer", events: list[TokenEvent]
    ) -> OutputDelta | None:
        """The addition of steps to an answer, if it is to be sent now. Raises DeadlineError."""
        if answer.is_over:  # the steps came after a stop string
            self._discarded += _tokens(events)
            return None
        failure = events[-1].failure
        steps = events[:-1] if failure else events
        delta = self._processed(call, answer, steps) if steps else None
        if delta and delta.finish:
            self._ended(answer, delta.finish.reason)
        elif failure:
            self._ended(answer, _ending(failure))
        if delta is None or (call.delivery == "whole" and not delta.finish):
            return None
        answer.held = None
        return delta

    def _processed(
        self, call: GenerationRequest, answer: "_Answer", events: list[TokenEvent]
    ) -> OutputDelta:
        """The addition of steps to an answer, after what was held back; counts the steps."""
        stats, before = answer.stats, answer.output.tokens
        try:
            delta, event = answer.output.add(events)
        except Exception as error:
            self._counted(answer, events, before)
            self._ended(answer, _ending(error))
            raise
        self._counted(answer, events, before)
        now = time.monotonic()
        disagreed = event.disagreed - stats.disagreed
        self._live.add(now, len(event.tokens), event.forward - stats.forwards, disagreed)
        is_first = stats.first_token_s is None
        _count(stats, event, now - answer.last_s)
        if is_first:
            self._tally.began(stats)
            delta = replace(delta, replica=self._name)
        stats.degraded = self._is_degraded(call, event)
        answer.last_s = now
        answer.held = joined(answer.held, delta) if answer.held else delta
        return answer.held

    def _counted(self, answer: "_Answer", events: list[TokenEvent], before: int) -> None:
        """Counts the steps' tokens: those of the answer, and those behind its end."""
        new = answer.output.tokens - before
        answer.stats.completion_tokens += new
        self._discarded += _tokens(events) - new

    def _ended(self, answer: "_Answer", ending: Ending) -> None:
        """Reports, once, to the counters of answers that this one is over."""
        if answer.is_over:
            return
        answer.is_over = True
        answer.stats.ending = ending
        answer.stats.total_s = time.monotonic() - answer.begun_s
        if all(sibling.is_over for sibling in answer.siblings):
            tokens = (sibling.stats.completion_tokens for sibling in answer.siblings)
            answer.stats.longest_tokens = max(tokens)
        if ending != "refused":
            self._tally.ended(answer.stats)
        if self._observer:
            self._observer.answer(answer.stats)

    def _is_degraded(self, call: GenerationRequest, event: TokenEvent) -> bool:
        lowest = event.threshold
        return (
            isinstance(call.quality, Elastic)
            and lowest is not None
            and lowest < max(call.quality.floor, self._job.set_point)
        )

    def _token_text(self, token: int, logprob: float) -> TokenText:
        raw = self._bytes.of(token)
        return TokenText(raw.decode("utf-8", "replace"), tuple(raw), logprob)


async def _encoded(encode: Callable[[], Made], *texts: object) -> Made:
    """The result of `encode`, which runs in a thread if the texts are long."""
    if len(repr(texts)) > _LONG_CHARS:
        return await asyncio.to_thread(encode)
    return encode()


def _ending(error: Exception) -> Ending:
    """The ending for an error: a request that the engine refuses is the client's mistake."""
    if isinstance(error, DeadlineError):
        return "deadline"
    return "refused" if isinstance(error, RequestError) else "error"


def _count(stats: AnswerStats, event: TokenEvent, gap_s: float) -> None:
    if stats.first_token_s is None:
        stats.first_token_s, stats.queue_s = gap_s, event.queue_s
    elif event.tokens:
        stats.gaps.append((gap_s, len(event.tokens)))
    if stats.prompt_tokens:
        stats.cached_tokens = event.cached_tokens
    stats.forwards, stats.disagreed = event.forward, event.disagreed


def _error_info(call: GenerationRequest, error: Exception) -> ErrorInfo:
    """The error for the client; internal faults are logged."""
    match error:
        case PromptTooLongError():
            return ErrorInfo(400, str(error), _prompt_param(call), "context_length_exceeded")
        case RequestError(field=field):
            param = _prompt_param(call) if field == "messages" else field
            return ErrorInfo(400, str(error), param, "invalid_value")
        case DataError() | ModelError():  # also of a model without a chat template
            return ErrorInfo(400, str(error), _prompt_param(call), "invalid_value")
        case DeadlineError():
            return ErrorInfo(408, str(error), "timeout_s", "deadline_exceeded")
        case PoisonError():
            return internal_error(call.id)
        case EngineError():
            return ErrorInfo(503, str(error), code="engine_error", retry_after_s=_RETRY_AFTER_S)
    logger.error("request %s failed", call.id, exc_info=error)
    return internal_error(call.id)


def _tokens(events: Iterable[TokenEvent]) -> int:
    return sum(len(event.tokens) for event in events)


def _apart(events: Iterable[TokenEvent], *, by_step: bool) -> list[list[TokenEvent]]:
    """The events in groups: those of a request together, or each by itself."""
    if by_step:
        return [[event] for event in events]
    of_request: dict[str, list[TokenEvent]] = {}
    for event in events:
        of_request.setdefault(event.request_id, []).append(event)
    return list(of_request.values())


def _prompt_param(call: GenerationRequest) -> str:
    """The field of the request that held the prompt."""
    is_chat = isinstance(call.prompts[0], tuple) and isinstance(call.prompts[0][0], Turn)
    return "messages" if is_chat else "prompt"
