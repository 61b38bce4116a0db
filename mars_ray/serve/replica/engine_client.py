"""The interface between the service and an engine: all that `LLMServer` requires of one.

`decode/async_engine.py` implements it for the engine of this process. Another one, such as vLLM's
`AsyncLLM`, can be added by implementing it and passing `tests/serve/test_engine_client.py`. It is
not in `serve/protocol.py`, because the ingress has neither torch nor an engine.

`running_engine` makes one of a job: ours in a thread of this process, or vLLM's.
"""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from mars_ray.autoscale.service_model import measured, warning, with_room
from mars_ray.config.modes import Mode
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm import VllmConfig
from mars_ray.core.step_cost import CONTEXT
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import EngineFacts, Request, TokenEvent
from mars_ray.decode.stats import Snapshot
from mars_ray.model.places import adapter_name, local_adapter, local_copy
from mars_ray.storage.place import Place


class EngineClient(Protocol):
    """An engine that runs on its own. Every coroutine raises EngineError once it has ended."""

    @property
    def facts(self) -> EngineFacts:
        """Facts that hold for every request. Raises ModelError if answers would never end."""
        ...

    def can_decode(self, mode: Mode) -> bool:
        """Whether a request submitted now may have this mode: some need masks, which an adapter
        gives that may come and go."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """Stop the engine; unfinished requests get an EngineError."""
        ...

    def check_health(self, limit_s: float) -> None:
        """Raises EngineError if the engine has ended, or has had work or a question and reacted to
        neither for `limit_s`."""
        ...

    async def ended(self) -> None:
        """Returns once the engine has ended for any reason and its requests have their errors."""
        ...

    def stream(
        self, *requests: Request, interval_s: float = 0.0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Yields events of all requests, one per forward of each, until every request has its last.

        The requests are submitted together when the first events are requested, before any await,
        each with its own threshold. Events within `interval_s` of the last delivery are held and
        delivered together; a request's first and last event do not wait. A request whose deadline
        has passed ends with a completion that says so. Closing the iterator cancels unfinished
        requests and frees their pages.

        An event with a failure is delivered, and then the failure is raised before any later event:
        RequestError if the engine refuses the request, PoisonError if it fails on this request and
        on no other, EngineError if it has ended.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End one request of a stream; the others continue, even if this one still fails."""
        ...

    async def set_threshold(self, threshold: float) -> None:
        """Sets the threshold of requests that tolerate a change, from the next step on."""
        ...

    async def snapshot(self) -> Snapshot:
        """The engine's state and its counts since the start, including tokens of requests that were
        aborted later, and how many tokens nobody has read: all others have been delivered."""
        ...

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Make a draft adapter ready; it replaces the one made ready before.

        Raises ModelError if it cannot be read or is not for this engine.
        """
        ...

    async def use_adapter(self, name: str | None) -> None:
        """Use the adapter made ready last from the next step on. With None the model drafts itself,
        if it was trained to. Running sequences continue. Raises ModelError, and then nothing has
        changed."""
        ...


async def running_engine(job: ServeJob) -> tuple[EngineClient, PreTrainedTokenizerBase, str | None]:
    """The client of a job's one model, warmed up, its tokenizer, and what is wrong with the job's
    size of a step. The first lines of this process's log say what runs here.

    Raises ConfigError and ModelError.
    """
    checkpoint = local_copy(Place(job.checkpoint, job.revision), job.model_cache)
    config, adapter = job.engine, None
    if place := config.draft_adapter:
        directory = local_adapter(place, job.model_cache)
        adapter = adapter_name(place, directory)
        config = config.model_copy(update={"draft_adapter": str(directory)})
    if isinstance(config, VllmConfig):
        # Only here, because other processes, and most replicas, have no vLLM.
        from mars_ray.serve.replica.vllm_client import load_vllm

        executor = "ray" if config.workers > 1 and job.gpus_per_replica else None
        client, tokenizer = await load_vllm(checkpoint, config, executor)
        client.adapter_name = adapter
        seen = await client.snapshot()
        problem = warning(job, measured(job, seen.step_cost, client.depths))
        info, context, rows = seen.info, client.facts.max_context, config.max_step_tokens
    else:
        engine, tokenizer = load_engine(checkpoint, with_room(config))
        engine.adapter_name = adapter
        assert engine.cost is not None, "the engine is not warmed up"
        model = measured(job, engine.cost.table(config.max_batch, CONTEXT), engine.card.block_size)
        engine.set_step_tokens(model.step_rows)
        problem = warning(job, model)
        info, context, rows = engine.info, engine.config.context, engine.step_tokens
        client = AsyncEngine(engine, checkpoint)
        client.start()
    sizes = f"contexts of {context} tokens, steps of {rows} rows"
    print(f"{job.name}: {info}, {sizes}", flush=True)
    if problem:
        print(f"{job.name}: warning: {problem}", flush=True)
    return client, tokenizer, problem
