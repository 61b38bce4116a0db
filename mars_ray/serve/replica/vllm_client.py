"""vLLM's engine behind the interface of the service (`engine_client.py`).

A thread with an event loop of its own owns vLLM's `AsyncLLM`, whose engine runs in another process.
Of `AsyncLLM` it uses the parts: requests are made by its input processor and sent to its engine
core, and steps are read from there as they come. Its own output handler would join the steps of a
request whose reader is slow, and make text of tokens of which text is made here.

All commands from outside go through one queue, in their order.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase
from vllm.config import VllmConfig as EngineArguments
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import LogprobsLists

from mars_ray.config.modes import Mode
from mars_ray.config.vllm import VllmConfig
from mars_ray.core.step_cost import StepCost
from mars_ray.core.thresholds import Elastic
from mars_ray.decode.engine_thread import Close, Deliver, EngineThread, failed
from mars_ray.decode.info import EngineInfo
from mars_ray.decode.request import (
    Completion,
    EngineFacts,
    Request,
    TokenEvent,
    TokenLogprobs,
    check_request,
    without_masks,
)
from mars_ray.decode.request import FinishReason as Reason
from mars_ray.decode.stats import Snapshot
from mars_ray.errors import EngineError, ModelError, PoisonError, RequestError
from mars_ray.model.directory import ModelCard, read_card
from mars_ray.model.draft_adapter import read_draft_adapter, read_draft_card
from mars_ray.model.load import load_tokenizer, stop_ids_of
from mars_ray.serve.replica.vllm_terms import (
    VllmCounts,
    adapters_change,
    engine_args,
    loads,
    sampling_params,
)

_REASONS: dict[FinishReason, Reason] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class VllmAnswer:
    """The state of one request from its submission to its end."""

    request: Request
    deliver: Deliver
    core_id: str  # its name in vLLM's engine
    threshold: float | None  # the lowest in force so far, in modes that have one
    in_force: float | None  # the threshold of the next step
    submitted_s: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    cached_tokens: int | None = None  # of the prompt; None until it has been computed
    forwards: int = 0
    tokens: list[int] = field(default_factory=list)
    token_forward: list[int] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)  # whose drafts were verified, in order
    drafted_by: str | None = None  # the adapter that made drafts for the next step
    is_over: bool = False
    deadline: asyncio.TimerHandle | None = None  # what ends it then

    def follow(self, set_point: float) -> None:
        """Sets the threshold from the next step on, if the request tolerates a change."""
        if self.in_force is not None and isinstance(self.request.quality, Elastic):
            self.in_force = max(self.request.quality.floor, set_point)

    def add(self, output: EngineCoreOutput, adapter: str | None) -> TokenEvent:
        """The event of a step in which this adapter, or none, has made drafts for the next one."""
        for event in output.events or ():
            if event.type == EngineCoreEventType.SCHEDULED and self.queue_s is None:
                self.queue_s = max(0.0, event.timestamp - self.submitted_s)
        if output.prefill_stats and self.cached_tokens is None:
            self.cached_tokens = output.prefill_stats.num_cached_tokens
        tokens, verified = tuple(output.new_token_ids), None
        if tokens:
            verified = self._step(tokens, adapter)
        completion = failure = None
        if output.finish_reason is not None:
            self.is_over = True
            reason = _REASONS.get(output.finish_reason)
            if reason:
                completion = self._completion(reason)
            else:
                failure = PoisonError(f"vLLM ended this request with {output.finish_reason}")
        logprobs = output.new_logprobs if self.request.logprobs is not None else None
        return self._event(
            tokens,
            completion,
            logprobs=_logprobs(logprobs, self.request.logprobs or 0) if logprobs else (),
            adapter=verified,
            failure=failure,
        )

    def _step(self, tokens: tuple[int, ...], adapter: str | None) -> str | None:
        """Counts a forward; returns the adapter whose drafts it has verified."""
        self.forwards += 1
        self.tokens += tokens
        self.token_forward += [self.forwards] * len(tokens)
        if self.threshold is not None and self.in_force is not None:
            self.threshold = min(self.threshold, self.in_force)
        # A prompt's forward has no masks.
        verified, self.drafted_by = self.drafted_by, adapter if self.forwards > 1 else None
        if verified and verified not in self.adapters[-1:]:
            self.adapters.append(verified)
        return verified

    def late(self) -> TokenEvent:
        """The last event of a request whose deadline has passed, with the tokens that it has."""
        self.is_over = True
        return self._event((), self._completion("deadline"))

    def _event(
        self,
        tokens: tuple[int, ...],
        completion: Completion | None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        adapter: str | None = None,
        failure: Exception | None = None,
    ) -> TokenEvent:
        return TokenEvent(
            self.request.id,
            tokens,
            self.forwards,
            completion,
            logprobs=logprobs,
            queue_s=self.queue_s or 0.0,
            cached_tokens=self.cached_tokens or 0,
            threshold=self.threshold,
            adapter=adapter,
            failure=failure,
        )

    def _completion(self, reason: Reason) -> Completion:
        return Completion(
            self.request.id,
            tuple(self.tokens),
            tuple(self.token_forward),
            self.forwards,
            reason,
            tuple(self.adapters),
        )


def _logprobs(lists: LogprobsLists, top: int) -> tuple[TokenLogprobs, ...]:
    """Of each token; vLLM puts the token itself before the likeliest ones."""
    return tuple(
        TokenLogprobs(values[0], tuple(zip(tokens[1 : 1 + top], values[1 : 1 + top], strict=True)))
        for tokens, values in zip(
            lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True
        )
    )


_log = logging.getLogger(__name__)
_Command = Callable[[], Awaitable[None]]
Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Mars:
    """The settings with which an engine was started to decode MARS."""

    directory: Path  # the model's
    card: ModelCard  # of the model alone
    masks: int  # of a request in a step, at most; 0: nothing is ever drafted
    adapter: str | None  # name of the draft adapter
    depths: int  # of what makes drafts
    change: bool  # whether another adapter may take its place


class VllmClient(EngineThread):
    """An engine of vLLM that runs on its own. `start` it before use, `stop` it at the end."""

    def __init__(
        self, llm: AsyncLLM, config: VllmConfig, facts: EngineFacts, info: EngineInfo, mars: Mars
    ) -> None:
        super().__init__()
        self._llm = llm
        self._config = config
        self.facts = facts
        self._info = info
        self._mars = mars
        self._card = replace(mars.card, block_size=mars.depths)
        self._has_masks = mars.depths > 0
        self.adapter_name = mars.adapter
        self._ready: tuple[str, int] | None = None  # name and depths of the adapter made ready
        self._counts = VllmCounts(config.max_step_tokens)
        # Of the steps of `warm_up` the least seconds, by their rows.
        self._least_s: dict[int, float] | None = None
        self._answers: dict[str, VllmAnswer] = {}
        self._by_core_id: dict[str, VllmAnswer] = {}
        self._set_point = 1.0
        self._loop = asyncio.new_event_loop()
        self._commands: asyncio.Queue[_Command] = asyncio.Queue()
        self._main: asyncio.Task[None] | None = None

    @property
    def open_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._answers)

    @property
    def waiting_commands(self) -> int:
        """Number of commands that the thread has not taken up."""
        return self._commands.qsize()

    def can_decode(self, mode: Mode) -> bool:
        """See EngineClient: the masks of a mode are the only drafts here."""
        return self._has_masks or not mode.has_masks

    @property
    def depths(self) -> int:
        """Depths of the drafts that are made now; 0 if none are."""
        return self._card.block_size

    async def warm_up(self) -> None:
        """Measure what steps cost; call it before the first request. Counts begin anew after it."""
        self._least_s = {}
        for requests in loads(self.facts, self._config.max_step_tokens):
            async for _ in self.stream(*requests):
                pass
        cost = StepCost(self._least_s)

        async def forget() -> None:
            self._least_s = None
            self._counts = VllmCounts(self._config.max_step_tokens, cost)

        await self._call(forget)

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)
        self._command(lambda: self._abort([request_id]))

    async def set_threshold(self, threshold: float) -> None:
        async def change() -> None:
            if self._mars.masks:
                await self._llm.collective_rpc("mars_set_threshold", args=(threshold,))
            self._set_point = threshold
            for answer in self._answers.values():
                answer.follow(threshold)

        await self._call(change)

    async def snapshot(self) -> Snapshot:
        async def told() -> Snapshot:
            return self._counts.snapshot(
                self._info,
                open_requests=len(self._answers),
                set_point=self._set_point,
                windows=[
                    min(self._mars.masks, self._card.block_size) if answer.threshold else 0
                    for answer in self._answers.values()
                ],
                adapter=self.adapter_name,
            )

        return await self._call(told)

    async def load_adapter(self, name: str, directory: Path) -> None:
        if not self._mars.change:
            raise ModelError(
                "this vLLM engine has no room for another draft adapter: start the service with "
                "the adapter; or, to change it while the service runs, with engine.masks and, on "
                "GPUs, engine.args.enforce_eager = true"
            )
        adapter = await asyncio.to_thread(read_draft_adapter, directory, self._mars.directory)
        depths = adapter.card.depths
        if depths > self._mars.masks:
            raise ModelError(
                f"the draft adapter has {depths} depths, and the engine has room for "
                f"{self._mars.masks} masks: start the service with engine.masks = {depths}"
            )

        async def load() -> None:
            try:
                await self._llm.collective_rpc("mars_load_adapter", args=(str(directory),))
            except EngineDeadError:
                raise
            except Exception as error:
                raise ModelError(f"vLLM does not take the draft adapter: {error}") from error

        await self._call(load)
        self._ready = name, depths

    async def use_adapter(self, name: str | None) -> None:
        ready = self._ready
        depths = self._mars.card.block_size
        if name is not None:
            if ready is None or ready[0] != name:
                raise ModelError(f"draft adapter {name} is not ready: load it first")
            depths = ready[1]
        self._ready = None
        # Set before the engine is asked, as requests submitted later are decoded after the change.
        self._has_masks = depths > 0

        async def use() -> None:
            if self._mars.change:
                await self._llm.collective_rpc("mars_use_adapter", args=(name is not None,))
            self.adapter_name = name
            self._card = replace(self._mars.card, block_size=depths)

        await self._call(use)

    async def _call(self, question: Callable[[], Awaitable[Reply]]) -> Reply:
        """The reply, made by the engine's thread. Raises what the question raises, and EngineError
        once the engine has ended."""
        reply: concurrent.futures.Future[Reply] = concurrent.futures.Future()

        async def answer() -> None:
            if not reply.set_running_or_notify_cancel():
                return
            try:
                reply.set_result(await question())
            except asyncio.CancelledError:
                reply.set_exception(EngineError("the engine was shut down"))
                raise
            except EngineDeadError:
                reply.set_exception(EngineError("vLLM's engine has ended"))
                raise
            except Exception as error:  # noqa: BLE001 - a question must not end the thread
                reply.set_exception(error)

        self._command(answer)
        return await asyncio.wrap_future(reply)

    def _command(self, command: _Command) -> None:
        """Let the thread execute this. Raises EngineError once it has ended."""
        with self._closing:
            if self._closed:
                raise EngineError("the engine was shut down")
            self._note_command()
            self._loop.call_soon_threadsafe(self._commands.put_nowait, command)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._main = self._loop.create_task(self._serve())
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass  # stopped
        except Exception:  # noqa: BLE001 - the edge of the thread; `check_health` reports it
            _log.exception("vLLM's engine has ended")
        finally:
            self._close()

    async def _serve(self) -> None:
        """Read steps and execute commands until the engine or the client ends."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._process_input_queue())

    async def _read(self) -> None:
        while True:
            self._process_outputs(await self._llm.engine_core.get_output_async())

    async def _process_input_queue(self) -> None:
        while True:
            command = await self._commands.get()
            await command()

    def _close(self) -> None:
        """End all requests: whatever ended the engine, no client may wait for it any longer."""
        with self._closing:
            self._closed = True
        self._fail_all(EngineError("the engine was shut down"))
        # Earlier commands may hold requests and questions that somebody waits for.
        self._loop.run_until_complete(self._refuse_rest())
        self._fail_all(EngineError("the engine was shut down"))
        self._llm.shutdown()
        self._loop.run_until_complete(_end_tasks())
        self._loop.close()

    async def _refuse_rest(self) -> None:
        await asyncio.sleep(0)  # lets commands on their way arrive
        while not self._commands.empty():
            with contextlib.suppress(Exception):
                await self._commands.get_nowait()()

    def _process_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Counts a step, and delivers its events."""
        self.last_step_s = time.monotonic()
        seen = self._counts.step(outputs)
        if seen and self._least_s is not None:
            rows, seconds = seen
            self._least_s[rows] = min(seconds, self._least_s.get(rows, seconds))
        for output in outputs.outputs:
            answer = self._by_core_id.get(output.request_id)
            if answer is not None:
                self._advance(answer, output)
        if not self._answers:
            self._counts.idle()

    def _advance(self, answer: VllmAnswer, output: EngineCoreOutput) -> None:
        for event in output.events or ():
            if event.type == EngineCoreEventType.PREEMPTED:
                self._counts.preempted()
        if output.prefill_stats:
            self._counts.prompt(output.prefill_stats.num_computed_tokens)
        event = answer.add(output, self.adapter_name if answer.request.mode.has_masks else None)
        if event.tokens:
            self._counts.forward(answer.request.mode.type, len(event.tokens), answer.in_force)
        if answer.is_over:
            # The id is free from here on, whether the event is delivered or not.
            self._forget(answer)
        answer.deliver(event)

    async def _submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Submit the requests up to the first that is refused, which ends their stream."""
        for request in requests:
            try:
                await self._add(request, deliver)
            except RequestError as error:
                deliver(failed(request.id, error))
                return
            except Exception as error:  # noqa: BLE001 - one request must not end the thread
                _log.exception("request %s could not be submitted", request.id)
                what = f"the engine failed on the request: {type(error).__name__}"
                deliver(failed(request.id, EngineError(what)))
                return

    async def _add(self, request: Request, deliver: Deliver) -> None:
        """Send a request to the engine. Raises RequestError."""
        self._check(request)
        if request.id in self._answers:
            raise RequestError(f"request id {request.id!r} is in use")
        llm = self._llm
        try:
            made = llm.input_processor.process_inputs(
                request.id,
                tokens_input(list(request.prompt)),
                sampling_params(request, drafts=self._mars.masks > 0),
                supported_tasks=("generate",),
                priority=request.priority,
            )
        except (VLLMClientError, ValueError) as error:
            field = getattr(error, "parameter", None)
            raise RequestError(f"vLLM refuses the request: {error}", field=field) from error
        llm.input_processor.assign_request_id(made)
        # A quality takes the place of the mode's own threshold; a budget's is known to vLLM only.
        threshold = request.mode.own_threshold
        if threshold is not None and request.quality is not None:
            threshold = 1.0 if isinstance(request.quality, Elastic) else None
        answer = VllmAnswer(request, deliver, made.request_id, threshold, threshold)
        answer.follow(self._set_point)
        if not self._answers:
            self.last_step_s = time.monotonic()
            self._counts.begin(self.last_step_s)
        self._answers[request.id] = self._by_core_id[made.request_id] = answer
        if request.deadline is not None:
            delay_s = max(0.0, request.deadline - time.monotonic())
            answer.deadline = self._loop.call_later(delay_s, self._expire, answer)
        try:
            await llm.engine_core.add_request_async(made)
        except Exception:
            self._forget(answer)
            raise

    def _check(self, request: Request) -> None:
        facts = self.facts
        check_request(request, facts.vocabulary, self._card, facts.max_context)
        if request.prompt_logprobs is not None:
            raise RequestError(
                "'echo' with 'logprobs' needs those of the prompt, which a service does not have "
                "with vLLM as its engine: leave 'echo' out",
                field="echo",
            )
        if not self.can_decode(request.mode):
            raise RequestError(without_masks(request.mode), field="mode")
        if problem := self._config.unsupported(request.mode):
            raise RequestError(problem, field="mode")

    def _expire(self, answer: VllmAnswer) -> None:
        """End a request whose deadline has passed, if it is still there."""
        if answer.is_over or self._answers.get(answer.request.id) is not answer:
            return
        self._forget(answer)
        answer.deliver(answer.late())
        with contextlib.suppress(EngineError):
            self._command(lambda: self._llm.engine_core.abort_requests_async([answer.core_id]))

    def _leave(self, requests: Sequence[Request], deliver: Deliver, close: Close) -> None:
        """Forget the requests of a stream that is over or was closed, and count its rest."""
        self._aborted.difference_update(request.id for request in requests)

        async def cancel() -> None:
            # Another request may have this id: a refused request must not end that one.
            own = [
                request.id
                for request in requests
                if request.id in self._answers and self._answers[request.id].deliver is deliver
            ]
            await self._abort(own)
            close(self._counts.discard)

        with contextlib.suppress(EngineError):
            self._command(cancel)

    async def _abort(self, request_ids: list[str]) -> None:
        answers = [self._answers[name] for name in request_ids if name in self._answers]
        for answer in answers:
            answer.is_over = True
            self._forget(answer)
        await self._llm.engine_core.abort_requests_async([answer.core_id for answer in answers])

    def _forget(self, answer: VllmAnswer) -> None:
        del self._answers[answer.request.id], self._by_core_id[answer.core_id]
        if answer.deadline:
            answer.deadline.cancel()
        if not self._answers:
            self._counts.idle()

    def _fail_all(self, error: EngineError) -> None:
        answers, self._answers, self._by_core_id = self._answers, {}, {}
        for answer in answers.values():
            answer.deliver(failed(answer.request.id, error))

    async def _stop(self) -> None:
        assert self._main is not None
        self._main.cancel()


async def _end_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


_ENVIRONMENT = {
    # A replica has threads, which a forked process would miss.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
}


async def load_vllm(
    directory: Path, config: VllmConfig, executor: str | None = None
) -> tuple[VllmClient, PreTrainedTokenizerBase]:
    """The client of a started engine, warmed up, and the model's tokenizer.

    `executor` is as in `engine_args`. Raises ConfigError and ModelError.
    """
    # In a thread, because vLLM would bind itself to a running loop.
    client, tokenizer = await asyncio.to_thread(loaded, directory, config, executor)
    client.start()
    await client.warm_up()
    return client, tokenizer


def loaded(
    directory: Path, config: VllmConfig, executor: str | None = None
) -> tuple[VllmClient, PreTrainedTokenizerBase]:
    """The same, but neither started nor warmed up. Must not be called in an event loop."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    tokenizer = load_tokenizer(directory)
    stops = stop_ids_of(directory, tokenizer)
    card = read_card(directory)
    adapter = config.draft_adapter
    depths = read_draft_card(adapter).depths if adapter else card.block_size
    masks = config.masks or depths
    if masks:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the plug-in extends the other one
    args = engine_args(directory, config, masks, executor)
    try:
        llm = AsyncLLM.from_engine_args(args)
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        raise ModelError(f"vLLM does not start with {directory}: {error}") from error
    vocabulary = llm.model_config.get_vocab_size()
    # vLLM's own process may have made it shorter.
    context = llm.model_config.max_model_len
    facts = EngineFacts(context, config.max_batch, vocabulary, stops)
    name = Path(adapter).name if adapter else None
    mars = Mars(directory, card, masks, name, depths, adapters_change(config))
    return VllmClient(llm, config, facts, _info(llm.vllm_config), mars), tokenizer


def _info(config: EngineArguments) -> EngineInfo:
    model, cache = config.model_config, config.cache_config
    tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    heads = model.get_num_kv_heads(config.parallel_config)
    layers = model.get_num_layers(config.parallel_config)
    assert isinstance(model.dtype, torch.dtype)
    token_bytes = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
    device = current_platform.get_device_name() if current_platform.is_cuda() else "cpu"
    backend = config.attention_config.backend
    return EngineInfo(
        engine="vllm",
        dtype=str(model.dtype).removeprefix("torch."),
        device=device,
        attention=backend.name.lower() if backend else "auto",
        instructions=None,
        threads=torch.get_num_threads(),
        cache_bytes=tokens * token_bytes,
        cache_tokens=tokens,
    )
