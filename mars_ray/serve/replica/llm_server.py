"""A replica's work without Ray: makes engine requests of requests, and replies of their events."""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from mars_ray.autoscale.sample import ReplicaCounts
from mars_ray.autoscale.threshold import LocalLoop, SetPoint
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.request import Request, TokenEvent
from mars_ray.decode.stats import THRESHOLDS, Snapshot
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
    Envelope,
    ErrorInfo,
    GenerationRequest,
    Message,
    Tokenized,
    TokenizeRequest,
    TokenText,
    Turn,
    Used,
)
from mars_ray.serve.replica.chat_format import ChatFormat
from mars_ray.serve.replica.engine_client import EngineClient
from mars_ray.serve.replica.output_processor import (
    OutputProcessor,
    TokenBytes,
    Writer,
    reply_writer,
)
from mars_ray.serve.replica.stats import (
    Ending,
    Observer,
    ReplicaCounters,
    count_tokens,
)
from mars_ray.serve.status import ReplicaStatus

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1
_KEPT_GRAMMARS = 64
# Requests whose counts are kept for an ingress that asks afterwards.
_KEPT_USED = 1024
# Longer texts take the tokenizer milliseconds, which would block all streams of the event loop.
_LONG_CHARS = 8192
_SEEDS = 1 << 64
_request_id = attrgetter("request_id")
Made = TypeVar("Made")


@dataclass(slots=True)
class Admission:
    """Counts answers. `shed` is the share to refuse of the requests that pin nothing."""

    places: int
    open: int = 0
    shed: float = 0.0
    _owed: float = 0.0  # accumulated fraction of a refusal

    def refusal(self, request: GenerationRequest) -> ErrorInfo | None:
        """The error for a request that is refused, else None."""
        if self.open + request.choices > self.places:
            message = f"{self.open} answers are being written or wait; try again later"
            return ErrorInfo(429, message, code="too_many_requests", retry_after_s=_RETRY_AFTER_S)
        if request.quality_class is None:
            return None
        # Evenly spread, not random: at a share of 0.3, three of any ten requests.
        self._owed += self.shed
        if self._owed < 1:
            return None
        self._owed -= 1
        message = "the service is overloaded and refuses part of the requests; try again later"
        return ErrorInfo(429, message, code="overloaded", retry_after_s=_RETRY_AFTER_S)


class UsageOfEnded:
    """The usage of the last requests that have ended here, for an ingress that asks afterwards:
    where a client leaves, its ingress closes the request, which can then say nothing more."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self._over: OrderedDict[str, Used] = OrderedDict()

    def begin(self, request_id: str) -> None:
        self._open[request_id] = asyncio.Event()

    def end(self, request_id: str, used: Used) -> None:
        """Note what the request has used in all."""
        self._over[request_id] = used
        if len(self._over) > _KEPT_USED:
            self._over.popitem(last=False)
        self._open.pop(request_id).set()

    async def of(self, request_id: str) -> Used | None:
        """The request's usage, as soon as it has ended; None if it has not been here."""
        if ended := self._open.get(request_id):
            await ended.wait()
        return self._over.pop(request_id, None)


class LLMServer:
    """One engine and its tokenizer, answering requests. `start` it before use."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        job: ServeJob,
        observer: Observer | None = None,
        warning: str | None = None,
        name: str | None = None,
    ) -> None:
        """`warning` is part of the status; `name` is the replica's, and part of what is used.

        Raises ModelError if the model does not define how an answer ends, or if a parser of the job
        does not fit it.
        """
        self._warning, self._name = warning, name
        self._engine = engine
        self._facts = facts = engine.facts
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._job = job
        grammars = Grammars(tokenizer, facts.vocabulary, facts.stop_ids)
        self._compiled = lru_cache(maxsize=_KEPT_GRAMMARS)(grammars.compiled)
        self._chat = ChatFormat(tokenizer, grammars, job.tool_parser, job.reasoning_parser)
        self._counters = ReplicaCounters(job, observer)
        self._local = LocalLoop(job.scaling, SetPoint(job.set_point))
        self._usage = UsageOfEnded()
        self._threshold: float | None = None  # last one set on the engine
        self._admission = Admission(facts.max_batch + job.limits.waiting_requests)

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()

    def check_health(self) -> None:
        """Raises EngineError if the engine is dead or stuck."""
        self._engine.check_health(self._job.step_timeout_s)

    async def is_ready(self) -> bool:
        try:
            self.check_health()
        except EngineError:
            return False
        return True

    async def snapshot(self) -> Snapshot:
        """A snapshot of the engine between two steps. Raises EngineError if it is dead."""
        seen = await self._engine.snapshot()
        return replace(seen, discarded_tokens=seen.discarded_tokens + self._counters.discarded)

    async def status(self) -> tuple[ReplicaStatus]:
        """The current status of this engine. Raises EngineError if it is dead."""
        status = self._counters.live.status(
            self._job,
            await self.snapshot(),
            time.monotonic(),
            in_default_mode=self._engine.can_decode(self._job.mode),
        )
        return (replace(status, warning=self._warning),)

    async def decided(self) -> None:
        """Always None: no policy controls a single engine."""

    async def report(self) -> dict[str, float]:
        """The numbers that Ray Serve carries to the autoscaling policy; thresholds are those of the
        mode of requests that name none. Raises EngineError if the engine is dead."""
        seen, tally = await self.snapshot(), self._counters.tally
        totals, measured = seen.totals, seen.by_mode.get(self._job.mode.type)
        of_mode: dict[str, Any] = {}
        if measured and measured.forwards:
            tokens_at = dict(zip(THRESHOLDS, measured.tokens_at, strict=True))
            of_mode = {"measured_forwards": measured.forwards, "tokens_at": tokens_at}
        return ReplicaCounts(
            running=seen.running,
            waiting=seen.waiting,
            threshold=seen.set_point,
            step_cost=seen.step_cost,
            arrived=tally.quality_class.total() - tally.refused,
            refused=tally.refused,
            finished=tally.finished,
            output_tokens=tally.output_tokens,
            quality_class=dict(tally.quality_class),
            started=dict(tally.started),
            slow=dict(tally.slow),
            late=dict(tally.late),
            prompts=totals.prompts,
            prompt_tokens=totals.prompt_tokens,
            steps=totals.steps,
            step_s=totals.seconds,
            sequences=totals.sequences,
            decode_rows=totals.decode_rows,
            prompt_steps=totals.prompt_steps,
            prompt_rows=totals.prompt_rows,
            **of_mode,
        ).to_metrics()

    async def follow(self, set_point: SetPoint) -> None:
        """Puts this set-point in force, below whose threshold the engine may go when its own queue
        is too long. Raises EngineError if the engine is dead."""
        self._local.set_point = set_point
        self._admission.shed = set_point.shed
        await self.steer()

    async def steer(self) -> None:
        """Sets the threshold by this engine's own queue. Raises EngineError if it is dead."""
        arrived = self._counters.tally.quality_class.total()
        threshold = self._local.tick(self._admission.open, arrived, time.monotonic())
        if threshold != self._threshold:
            self._threshold = threshold
            await self._engine.set_threshold(threshold)

    @property
    def open_answers(self) -> int:
        return self._admission.open

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Message, None]:
        """Yields the reply as engine steps add to it, or an error as the last message.

        Closing the generator frees the request's places in the engine.
        """
        if refusal := self._admission.refusal(request):
            self._counters.tally.offered(request, refused=True)
            yield replace(refusal, used=Used(replica=self._name))
            return
        self._usage.begin(request.id)
        self._admission.open += request.choices
        self._counters.tally.offered(request)
        is_by_step = request.reply.by_step
        answers: dict[str, OutputProcessor] = {}
        unread: deque[list[TokenEvent]] = deque()
        text = ""  # not sent yet
        try:
            writer = reply_writer(request)
            requests = await self._requests(request)
            answers = self._answers(request, requests, writer)
            interval_s = 0.0 if is_by_step else self._job.stream_interval_s
            async with aclosing(self._engine.stream(*requests, interval_s=interval_s)) as steps:
                async for events in steps:
                    if is_by_step:
                        unread += [[event] for event in events]
                    else:
                        ordered = groupby(sorted(events, key=_request_id), _request_id)
                        unread += [list(some) for _, some in ordered]
                    finish = None
                    while unread:
                        some = unread.popleft()
                        answer = answers[some[0].request_id]
                        was_over = answer.is_over
                        text += answer.process(some)
                        if answer.finish and not was_over:
                            finish = answer.finish
                            if not some[-1].completion:  # a stop string
                                await self._engine.abort(some[0].request_id)
                    is_over = finish and all(answer.finish for answer in answers.values())
                    if finish and is_over:
                        text += writer.end()
                        yield Envelope(text, self._used(answers), finish.reason, finish.mode)
                        return
                    if text:
                        text, ready = "", text
                        yield Envelope(ready, self._used(answers))
        except Exception as error:  # noqa: BLE001 - the edge of a replica: errors go on as values
            is_engine_lost = isinstance(error, EngineError) and not isinstance(error, PoisonError)
            ending: Ending = "error" if is_engine_lost else "abort"
            is_refused = False
            for answer in answers.values():
                # Behind one that is refused the engine was asked for no other.
                is_refused = is_refused or answer.stats.ending == "refused"
                is_unbegun = answer.stats.first_token_s is None
                answer.end("refused" if is_refused and is_unbegun else ending)
            if text:
                yield Envelope(text, self._used(answers))
            yield replace(_error_info(request, error), used=self._used(answers))
        finally:
            self._admission.open -= request.choices
            self._counters.discarded += sum(map(count_tokens, unread))
            for answer in answers.values():
                answer.end("abort")
            self._usage.end(request.id, self._used(answers))

    async def used(self, request_id: str) -> Used | None:
        """The usage of a request whose client has left; None if it has not been here."""
        return await self._usage.of(request_id)

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

    async def _requests(self, request: GenerationRequest) -> list[Request]:
        """An engine request for each choice, in a mode that the engine can decode now; those of one
        prompt differ in their seeds.

        They must be submitted to the engine before anything else is awaited. Raises RequestError.
        """
        grammar = None
        if request.tools is not None or request.schema is not None:
            # In a thread, to not block the event loop.
            grammar = await asyncio.to_thread(self._grammar, request)

        def encode() -> list[tuple[int, ...]]:
            return [
                self._chat.encode(
                    prompt,
                    request.tools,
                    request.switches,
                    add_special_tokens=request.add_special_tokens,
                )
                for prompt in request.prompts
            ]

        prompts = await _encoded(encode, request.prompts, request.tools)
        mode, quality = request.mode, request.quality
        if request.is_mode_open and not self._engine.can_decode(mode):
            mode, quality = ExactMode(), None
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        own_stops = frozenset[int]() if request.ignore_eos else self._facts.stop_ids
        sampling = request.sampling
        # At least one, so that the engine refuses a prompt without room, or with too little for the
        # least length.
        least = max(1, sampling.min_new_tokens)
        most = request.max_new_tokens or request.new_tokens_limit
        # Within the range that a seed may have.
        seeds = [
            (sampling.seed + copy + _SEEDS // 2) % _SEEDS - _SEEDS // 2 for copy in range(request.n)
        ]
        return [
            Request(
                id=f"{request.id}-{number * request.n + copy}",
                prompt=prompt,
                mode=mode,
                sampling=sampling.model_copy(update={"seed": seed}),
                max_new_tokens=min(max(least, self._facts.max_context - len(prompt)), most),
                stop_ids=own_stops.union(request.stop_token_ids),
                priority=request.priority,
                logprobs=request.logprobs,
                prompt_logprobs=request.logprobs if request.is_echoed else None,
                grammar=grammar,
                quality=quality,
                deadline=deadline,
            )
            for number, prompt in enumerate(prompts)
            for copy, seed in enumerate(seeds)
        ]

    def _grammar(self, request: GenerationRequest) -> CompiledGrammar | None:
        text = self._chat.grammar(request)
        if text is None:
            return None
        return self._compiled(text, "tools" if request.tools else "response_format")

    def _answers(
        self, request: GenerationRequest, requests: Sequence[Request], writer: Writer
    ) -> dict[str, OutputProcessor]:
        """The answers to come, by the ids of their engine requests."""
        decode = partial(self._chat.decode, request)
        answers = {
            own.id: OutputProcessor(
                request,
                own,
                choice,
                decode,
                self._token_text,
                writer,
                self._counters,
                self._chat.tool_reader(request, own.id),
                self._chat.reasoning_reader(request),
            )
            for choice, own in enumerate(requests)
        }
        every = [answer.stats for answer in answers.values()]
        for choice, stats in enumerate(every):
            first = choice - choice % request.n
            stats.siblings = every[first : first + request.n]
        return answers

    def _used(self, answers: dict[str, OutputProcessor]) -> Used:
        """The sums over a request's answers, but for those that the engine has refused."""
        seen = [a.stats for a in answers.values() if a.stats.ending != "refused"]
        return Used(
            sum(stats.prompt_tokens for stats in seen),
            sum(stats.cached_tokens for stats in seen),
            sum(stats.completion_tokens for stats in seen),
            sum(stats.forwards for stats in seen),
            sum(stats.disagreed for stats in seen),
            self._name,
        )

    def _token_text(self, token: int, logprob: float) -> TokenText:
        raw = self._bytes.of(token)
        return TokenText(raw.decode("utf-8", "replace"), tuple(raw), logprob)


async def _encoded(encode: Callable[[], Made], *texts: object) -> Made:
    """The result of `encode`, which runs in a thread if the texts are long."""
    if len(repr(texts)) > _LONG_CHARS:
        return await asyncio.to_thread(encode)
    return encode()


def _error_info(request: GenerationRequest, error: Exception) -> ErrorInfo:
    """The error for the client; internal faults are logged."""
    match error:
        case PromptTooLongError():
            return ErrorInfo(400, str(error), _prompt_param(request), "context_length_exceeded")
        case RequestError(field=field):
            param = _prompt_param(request) if field == "messages" else field
            return ErrorInfo(400, str(error), param, "invalid_value")
        case DataError() | ModelError():  # also of a model without a chat template
            return ErrorInfo(400, str(error), _prompt_param(request), "invalid_value")
        case DeadlineError():
            return ErrorInfo(408, str(error), "timeout_s", "deadline_exceeded")
        case PoisonError():
            return internal_error(request.id)
        case EngineError():
            return ErrorInfo(503, str(error), code="engine_error", retry_after_s=_RETRY_AFTER_S)
    logger.error("request %s failed", request.id, exc_info=error)
    return internal_error(request.id)


def _prompt_param(request: GenerationRequest) -> str:
    """The field of the request that held the prompt."""
    is_chat = isinstance(request.prompts[0], tuple) and isinstance(request.prompts[0][0], Turn)
    return "messages" if is_chat else "prompt"
