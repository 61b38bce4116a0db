"""What the service relies on in an engine, whichever it is.

To hold another one to it, give `ENGINES` a function that makes a client for a model directory.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from serve import bigram
from serve.vllm_here import ENVIRONMENT, needs_vllm

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, Mode, VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm import VllmConfig
from mars_ray.core.thresholds import Elastic, Quality
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request, TokenEvent
from mars_ray.decode.stats import Snapshot
from mars_ray.errors import EngineError, ModelError, PromptTooLongError, RequestError
from mars_ray.model.load import load_tokenizer
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, Message
from mars_ray.serve.replica.engine_client import EngineClient
from mars_ray.serve.replica.llm_server import LLMServer

CONTEXT, BATCH = 3000, 4
SIZE = EngineConfig(
    max_batch=BATCH, max_context=CONTEXT, device="cpu", threads=1, window_control=False
)
# Large enough for every request of these tests at once.
VLLM_SIZE = VllmConfig(
    max_batch=BATCH,
    max_context=CONTEXT,
    dtype="float32",
    cache_bytes=64_000_000,
    masks=bigram.DEPTHS,
    masks_by_running=((1, bigram.DEPTHS),),
    args={"enforce_eager": True},  # nothing to compile
)


def in_process(directory: Path) -> EngineClient:
    engine, _ = load_engine(directory, SIZE)
    return AsyncEngine(engine, directory)


def vllm(directory: Path) -> EngineClient:
    # Only here: most environments have no vLLM.
    from mars_ray.serve.replica.vllm_client import loaded

    os.environ.update(ENVIRONMENT)
    client, _ = loaded(directory, VLLM_SIZE)
    return client


ENGINES: dict[str, Callable[[Path], EngineClient]] = {"in process": in_process, "vllm": vllm}
# The modes of each whose threshold the service may move.
ELASTIC: dict[str, dict[str, Mode]] = {
    "in process": {"any": VerifiedMode(), "eager": ConfidenceMode()},
    "vllm": {"any": VerifiedMode()},
}
MARKS = {
    "in process": (),
    "vllm": (pytest.mark.slow, *needs_vllm),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model without drafts of its own, and adapters whose drafts are all right, or all wrong."""
    folder = tmp_path_factory.mktemp("engines")
    base = bigram.write_base(folder / "model")
    bigram.write_perfect(base, folder / "right")
    bigram.write_useless(base, folder / "wrong")
    bigram.write_broken(base, folder / "broken")
    return folder


@pytest.fixture(params=[pytest.param(name, marks=MARKS[name]) for name in ENGINES])
def client(request, folder) -> Iterator[EngineClient]:
    client = ENGINES[request.param](folder / "model")
    client.start()
    yield client
    client.stop()


@pytest.fixture
def elastic(request, client) -> dict[str, Mode]:
    return ELASTIC[request.node.callspec.params["client"]]


def asked(
    name: str,
    mode: Mode | None = None,
    tokens: int = 40,
    *,
    quality: Quality | None = None,
    deadline: float | None = None,
) -> Request:
    """All ask for the same answer, which no end of turn ends."""
    return Request(
        name,
        (5, 6, 7),
        mode or ExactMode(),
        Sampling(),
        tokens,
        frozenset(),
        quality=quality,
        deadline=deadline,
    )


async def completions(client: EngineClient, *requests: Request) -> dict[str, Completion]:
    """By request id; events of a request are in their order, and add up to its completion."""
    told: dict[str, list[int]] = {request.id: [] for request in requests}
    done = {}
    async for events in client.stream(*requests):
        for event in events:
            told[event.request_id] += event.tokens
            if event.completion:
                done[event.request_id] = event.completion
    assert {name: tuple(tokens) for name, tokens in told.items()} == {
        name: completion.tokens for name, completion in done.items()
    }
    return done


async def use(client: EngineClient, folder: Path, name: str) -> None:
    await client.load_adapter(name, folder / name)
    await client.use_adapter(name)


async def until_idle(client: EngineClient) -> Snapshot:
    async with asyncio.timeout(10):
        while True:
            seen = await client.snapshot()
            if seen.running + seen.waiting == 0:
                return seen
            await asyncio.sleep(0.01)


def test_it_says_what_it_takes(client):
    """And refuses what is beyond that, by the error that names what is wrong with the request."""
    facts = client.facts
    assert (facts.max_context, facts.max_batch) == (CONTEXT, BATCH)
    assert facts.stop_ids
    assert max(facts.stop_ids) < facts.vocabulary

    async def refused(request: Request) -> tuple[list[TokenEvent], Exception]:
        steps = client.stream(request)
        told = await anext(steps)
        with pytest.raises(RequestError) as caught:
            await anext(steps)
        return told, caught.value

    async def scenario() -> None:
        (event,), error = await refused(asked("long", tokens=CONTEXT))
        assert isinstance(error, PromptTooLongError)
        assert (event.request_id, event.failure) == ("long", error)
        _, error = await refused(asked("draftless", ConfidenceMode()))
        assert error.field == "mode"

    asyncio.run(scenario())


def test_each_request_has_its_own_threshold(client, folder):
    """Side by side in one batch: the lossless one gets what exact decoding gives though all drafts
    are wrong, and the one that takes every draft needs fewer forwards and says other things."""

    async def scenario() -> dict[str, Completion]:
        await use(client, folder, "wrong")
        return await completions(
            client,
            asked("exact"),
            asked("lossless", VerifiedMode()),
            asked("anything", VerifiedMode(threshold=0.0)),
            asked("tolerant", VerifiedMode(), quality=Elastic(0.0)),
        )

    done = asyncio.run(scenario())
    assert done["lossless"].tokens == done["exact"].tokens == done["tolerant"].tokens
    assert done["anything"].tokens != done["exact"].tokens
    assert done["anything"].forwards < 20 < done["lossless"].forwards


def test_the_set_point_is_in_force_within_a_second(client, folder, elastic):
    """Also for requests under way, down to what each tolerates, and back for those that come."""

    async def scenario() -> None:
        await use(client, folder, "wrong")
        await client.set_threshold(1.0)
        requests = [
            asked("half", VerifiedMode(), 2500, quality=Elastic(0.5)),
            *(asked(name, mode, 2500, quality=Elastic(0.0)) for name, mode in elastic.items()),
        ]
        wanted = {"half": 0.5} | dict.fromkeys(elastic, 0.25)
        lowest = {request.id: 1.0 for request in requests}
        changed_s = None
        async with aclosing(client.stream(*requests)) as steps:
            async for events in steps:
                for event in events:
                    assert event.threshold is not None
                    lowest[event.request_id] = event.threshold
                if changed_s is None:
                    assert set(lowest.values()) == {1.0}
                    changed_s = time.monotonic()
                    await client.set_threshold(0.25)
                if lowest == wanted:
                    break
                assert time.monotonic() < changed_s + 10
        assert lowest == wanted
        assert (await client.snapshot()).set_point == 0.25
        await client.set_threshold(1.0)
        async for events in client.stream(asked("new", VerifiedMode(), quality=Elastic(0.0))):
            assert {event.threshold for event in events} == {1.0}

    asyncio.run(scenario())


def counted(before: Snapshot, after: Snapshot) -> tuple[int, list[int]]:
    """Forwards in `verified`, and tokens that they accepted, by depth."""
    name = VerifiedMode().type
    depths = range(bigram.DEPTHS)
    accepted = [
        [(*seen.accepted_at.get(name, ()), *[0] * bigram.DEPTHS)[depth] for depth in depths]
        for seen in (before, after)
    ]
    forwards = [
        seen.by_mode[name].forwards if name in seen.by_mode else 0 for seen in (before, after)
    ]
    return forwards[1] - forwards[0], [b - a for a, b in zip(*accepted, strict=True)]


def test_forwards_and_accepted_tokens_are_counted_by_depth(client, folder):
    """Of perfect drafts every depth is accepted, but for the end of an answer."""

    async def scenario() -> tuple[dict[str, Completion], Snapshot, Snapshot]:
        await use(client, folder, "right")
        before = await client.snapshot()
        requests = [asked(str(number), VerifiedMode(), 101) for number in range(2)]
        return await completions(client, *requests), before, await client.snapshot()

    done, before, after = asyncio.run(scenario())
    forwards, accepted = counted(before, after)
    assert forwards == sum(completion.forwards for completion in done.values())
    assert forwards + sum(accepted) == 2 * 101
    assert accepted == sorted(accepted, reverse=True)
    assert min(accepted) > forwards / 2
    assert after.totals.steps > before.totals.steps


def test_tokens_of_aborted_requests_are_counted(client, folder):
    """The policy learns of the work that was done, not only of that which somebody waited for."""

    async def scenario() -> tuple[int, int, Snapshot, Snapshot]:
        await use(client, folder, "right")
        before = await client.snapshot()
        tokens = forwards = 0
        async with aclosing(client.stream(asked("left", VerifiedMode(), 2500))) as steps:
            async for events in steps:
                tokens += sum(len(event.tokens) for event in events)
                forwards = events[-1].forward
                if tokens > 200:
                    break
        return forwards, tokens, before, await until_idle(client)

    told_forwards, told_tokens, before, after = asyncio.run(scenario())
    forwards, accepted = counted(before, after)
    assert forwards >= told_forwards
    assert forwards + sum(accepted) >= told_tokens
    assert forwards + sum(accepted) < 2500


def test_who_leaves_frees_what_is_held(client):
    """One request of a stream by name, and at the end of the stream all the rest."""

    async def scenario() -> None:
        names = ["a", "b", "c"]
        ended = set()
        async with aclosing(client.stream(*(asked(name, tokens=2500) for name in names))) as steps:
            begun = set()
            while begun != set(names):
                begun |= {event.request_id for event in await anext(steps)}
            assert (await client.snapshot()).cache_share > 0
            await client.abort("b")
            assert (await client.snapshot()).running == 2
            for _ in range(20):
                ended |= {event.request_id for event in await anext(steps) if event.is_last}
        seen = await until_idle(client)
        assert (ended, seen.cache_share) == (set(), 0)
        # The name is free, and so is the place.
        assert len((await completions(client, asked("b")))["b"].tokens) == 40

    asyncio.run(scenario())


def server(client: EngineClient, folder: Path) -> LLMServer:
    tokenizer = load_tokenizer(folder / "model")
    return LLMServer(client, tokenizer, ServeJob(checkpoint=str(folder / "model"), engine=SIZE))


async def answered(server: LLMServer, **fields) -> list[Message]:
    call = GenerationRequest("call", ("one two",), ExactMode(), Sampling(), 2500, 2500, **fields)
    messages: AsyncGenerator[Message, None] = server.generate(call)
    return [message async for message in messages]


def test_a_deadline_ends_a_request(client, folder):
    """With what it has, which the service does not pass on as if it were an answer."""

    async def scenario() -> tuple[Completion, list[Message]]:
        await completions(client, asked("first"))  # which may take longer than all later ones
        late = asked("late", tokens=2500, deadline=time.monotonic() + 0.5)
        done = await completions(client, late)
        return done["late"], await answered(server(client, folder), timeout_s=0.5)

    completion, messages = asyncio.run(scenario())
    assert completion.finish_reason == "deadline"
    assert 0 < len(completion.tokens) < 2500
    error = messages[-1]
    assert isinstance(error, ErrorInfo)
    assert (error.status, error.param, error.code) == (408, "timeout_s", "deadline_exceeded")


def test_adapters_come_and_go_between_two_steps(client, folder):
    """The text stays; what is damaged changes nothing, nor does what was not made ready."""

    async def scenario() -> None:
        exact = (await completions(client, asked("exact", tokens=60)))["exact"].tokens
        assert not client.can_decode(ConfidenceMode())
        await client.load_adapter("right", folder / "right")
        assert not client.can_decode(ConfidenceMode())
        with pytest.raises(ModelError, match="load it first"):
            await client.use_adapter("wrong")
        await client.use_adapter("right")
        assert client.can_decode(ConfidenceMode())
        with pytest.raises(ModelError, match="NaN"):
            await client.load_adapter("broken", folder / "broken")
        for name in ("broken", "right"):
            with pytest.raises(ModelError, match="load it first"):
                await client.use_adapter(name)
        assert (await client.snapshot()).adapter == "right"
        drafted = (await completions(client, asked("drafted", VerifiedMode(), 60)))["drafted"]
        assert (drafted.tokens, drafted.adapters) == (exact, ("right",))
        assert drafted.tokens_per_forward > 4

        under_way = client.stream(asked("under way", VerifiedMode(), 200))
        await anext(under_way)
        await use(client, folder, "wrong")
        last = [events async for events in under_way][-1][-1]
        assert last.completion
        assert last.completion.adapters == ("right", "wrong")
        await client.use_adapter(None)
        assert not client.can_decode(ConfidenceMode())
        assert (await client.snapshot()).adapter is None

    asyncio.run(scenario())


def test_an_engine_that_has_ended_says_so(client, folder):
    """To those who wait, those who come, and those who look; the service says that it may be asked
    again elsewhere."""

    async def scenario() -> list[Message]:
        client.check_health(60)
        steps = client.stream(asked("under way", tokens=2500))
        await anext(steps)
        await asyncio.to_thread(client.stop)
        with pytest.raises(EngineError):
            async for _ in steps:
                pass
        await asyncio.wait_for(client.ended(), 10)
        with pytest.raises(EngineError):
            await completions(client, asked("new"))
        for ask in (client.snapshot(), client.set_threshold(0.5), client.use_adapter(None)):
            with pytest.raises(EngineError):
                await ask
        with pytest.raises(EngineError):
            client.check_health(60)
        return await answered(server(client, folder))

    (error,) = asyncio.run(scenario())
    assert isinstance(error, ErrorInfo)
    assert (error.status, error.code, error.retry_after_s) == (503, "engine_error", 1)


@pytest.mark.parametrize(
    "client", [pytest.param("vllm", marks=MARKS["vllm"])], indirect=True, ids=["vllm"]
)
def test_ended_requests_leave_no_timer(client):
    """Guards memory for each request until its deadline."""

    async def scenario() -> None:
        late = time.monotonic() + 600
        await completions(client, *(asked(str(n), deadline=late) for n in range(4)))
        await until_idle(client)

    asyncio.run(scenario())
    timers = [timer for timer in client._loop._scheduled if timer._callback == client._expire]
    assert not [timer for timer in timers if not timer.cancelled()]
