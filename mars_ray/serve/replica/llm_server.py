"""A replica's work without Ray: makes engine requests of requests, and replies of their events."""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

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
from mars_ray.model.places import adapter_name, local_adapter
from mars_ray.serve.openai.sse import internal_error
from mars_ray.serve.protocol import (
    Envelope,
    ErrorInfo,
    GenerationRequest,
    Message,
    Prompt,
    Switches,
    Tokenized,
    TokenizeRequest,
    TokenText,
    Tools,
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
from mars_ray.serve.replica.stats import AnswerStats, Ending, ReplicaCounters, count_tokens
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


class LLMServer:
    """One engine and its tokenizer, answering requests. `start` it before use."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        job: ServeJob,
        observe: Callable[[AnswerStats], None] | None = None,
        warning: str | None = None,
        name: str | None = None,
    ) -> None:
        """`observe` is told of every answer at its end, whatever the ending; `warning` is part of
        the status, `name` is the replica's.

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
        self._counters = ReplicaCounters(job, observe)
        self._local = LocalLoop(job.scaling, SetPoint(job.set_point))
        self._threshold: float | None = None  # last one set on the engine
        self._adapter: tuple[str, str] | None = None  # place and name of the one made ready
        self._places = facts.max_batch + job.limits.waiting_requests
        self.open_answers = 0
        self._refusals_owed = 0.0  # a fraction of one
        # Requests that are answered, and the usage of the last ones that have ended: where a client
        # leaves, its ingress closes the request, which can then say nothing more, and asks.
        self._ended: dict[str, asyncio.Event] = {}
        self._usage: OrderedDict[str, Used] = OrderedDict()

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

    async def status(self) -> ReplicaStatus:
        """The current status of this engine. Raises EngineError if it is dead."""
        status = self._counters.live.status(
            self._job,
            await self.snapshot(),
            time.monotonic(),
            in_default_mode=self._engine.can_decode(self._job.mode),
        )
        return replace(status, warning=self._warning)

    async def report(self) -> dict[str, float]:
        """The numbers that Ray Serve carries to the autoscaling policy; thresholds are those of the
        mode of requests that name none. Raises EngineError if the engine is dead."""
        seen, counts = await self.snapshot(), self._counters
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
            arrived=counts.quality_class.total() - counts.refused,
            refused=counts.refused,
            finished=counts.finished,
            output_tokens=counts.output_tokens,
            quality_class=dict(counts.quality_class),
            started=dict(counts.started),
            slow=dict(counts.slow),
            late=dict(counts.late),
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
        await self.steer()

    async def steer(self) -> None:
        """Sets the threshold by this engine's own queue. Raises EngineError if it is dead."""
        arrived = self._counters.quality_class.total()
        threshold = self._local.tick(self.open_answers, arrived, time.monotonic())
        if threshold != self._threshold:
            self._threshold = threshold
            await self._engine.set_threshold(threshold)

    async def prepare_adapter(self, place: str | None) -> str | None:
        """Makes a draft adapter ready, so that taking it cannot fail; returns its name, or None
        without a place.

        Raises ModelError, and EngineError if the engine is dead.
        """
        if place is None:
            return None
        directory = await asyncio.to_thread(local_adapter, place, self._job.model_cache)
        name = await asyncio.to_thread(adapter_name, place, directory)
        await self._engine.load_adapter(name, directory)
        self._adapter = place, name
        return name

    async def take_adapter(self, place: str | None) -> None:
        """Puts the adapter in force from the engine's next step on, or none without a place.

        Raises as `prepare_adapter`.
        """
        ready, self._adapter = self._adapter, None
        name = ready[1] if ready and ready[0] == place else await self.prepare_adapter(place)
        self._adapter = None
        await self._engine.use_adapter(name)
        logger.info("draft adapter: %s", name or "none")

    def refusal(self, request: GenerationRequest) -> ErrorInfo | None:
        """The 429 for a request that finds the queue full, or that is among the share of those that
        pin nothing which the policy has refused."""
        if self.open_answers + request.choices > self._places:
            message = f"{self.open_answers} answers are being written or wait; try again later"
            return ErrorInfo(429, message, code="too_many_requests", retry_after_s=_RETRY_AFTER_S)
        if request.quality_class is None:
            return None
        # Evenly spread, not random: at a share of 0.3, three of any ten requests.
        self._refusals_owed += self._local.set_point.shed
        if self._refusals_owed < 1:
            return None
        self._refusals_owed -= 1
        message = "the service is overloaded and refuses part of the requests; try again later"
        return ErrorInfo(429, message, code="overloaded", retry_after_s=_RETRY_AFTER_S)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Message, None]:
        """Yields the reply as engine steps add to it, or an error as the last message.

        Closing the generator frees the request's places in the engine.
        """
        if refusal := self.refusal(request):
            self._counters.offered(request, refused=True)
            yield replace(refusal, used=Used(replica=self._name))
            return
        self._ended[request.id] = asyncio.Event()
        self.open_answers += request.choices
        self._counters.offered(request)
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
                        was_over = answer.stats.is_over
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
            fault = _error_info(request.prompts[0], request.id, error)
            yield replace(fault, used=self._used(answers))
        finally:
            self.open_answers -= request.choices
            self._counters.discarded += sum(map(count_tokens, unread))
            for answer in answers.values():
                answer.end("abort")
            self._usage[request.id] = self._used(answers)
            if len(self._usage) > _KEPT_USED:
                self._usage.popitem(last=False)
            self._ended.pop(request.id).set()

    async def used(self, request_id: str) -> Used | None:
        """The usage of a request, as soon as it has ended; None if it has not been here."""
        if ended := self._ended.get(request_id):
            await ended.wait()
        return self._usage.pop(request_id, None)

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        """A prompt's tokens as for a request; text of a message never becomes a special token."""
        try:
            (tokens,) = await self._encoded(
                (asked.prompt,),
                asked.tools,
                asked.switches,
                add_special_tokens=asked.add_special_tokens,
                add_generation_prompt=asked.add_generation_prompt,
            )
        except (RequestError, DataError, ModelError) as error:
            return _error_info(asked.prompt, "", error)
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
        prompts = await self._encoded(
            request.prompts,
            request.tools,
            request.switches,
            add_special_tokens=request.add_special_tokens,
        )
        mode, quality = request.mode, request.quality
        if request.is_mode_open and not self._engine.can_decode(mode):
            mode, quality = ExactMode(), None
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        own_stops = frozenset[int]() if request.ignore_eos else self._facts.stop_ids
        sampling = request.sampling
        # At least one, so that the engine refuses a prompt without room, or with too little for the
        # least length.
        least = max(1, sampling.min_new_tokens)
        most = request.max_new_tokens
        if most is None:
            most = request.new_tokens_limit
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
                max_new_tokens=min(max(least, self._facts.max_context - len(prompt)), max(1, most)),
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

    async def _encoded(
        self, prompts: Sequence[Prompt], tools: Tools | None, switches: Switches, **options: bool
    ) -> list[tuple[int, ...]]:
        """The tokens of prompts, in a thread if they are long; `options` as of `ChatFormat.encode`.

        Raises as that does.
        """

        def encode() -> list[tuple[int, ...]]:
            return [self._chat.encode(prompt, tools, switches, **options) for prompt in prompts]

        if len(repr((prompts, tools))) > _LONG_CHARS:
            return await asyncio.to_thread(encode)
        return encode()

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


def _error_info(prompt: Prompt, request_id: str, error: Exception) -> ErrorInfo:
    """The error for the client; internal faults are logged."""
    is_chat = isinstance(prompt, tuple) and isinstance(prompt[0], Turn)
    own = "messages" if is_chat else "prompt"  # the field that held the prompt
    match error:
        case PromptTooLongError():
            return ErrorInfo(400, str(error), own, "context_length_exceeded")
        case RequestError(field=field):
            param = own if field == "messages" else field
            return ErrorInfo(400, str(error), param, "invalid_value")
        case DataError() | ModelError():  # also of a model without a chat template
            return ErrorInfo(400, str(error), own, "invalid_value")
        case DeadlineError():
            return ErrorInfo(408, str(error), "timeout_s", "deadline_exceeded")
        case PoisonError():
            return internal_error(request_id)
        case EngineError():
            return ErrorInfo(503, str(error), code="engine_error", retry_after_s=_RETRY_AFTER_S)
    logger.error("request %s failed", request_id, exc_info=error)
    return internal_error(request_id)
