"""Draft adapters of an engine that serves: checked at the start, swapped while answers run."""

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from serve import bigram
from serve.asking import ASK, ask, error_of, load_server, text_of, wait_until_free

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import VerifiedMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.core.frontier import FRONTIER_FILE
from mars_ray.errors import ConfigError, ModelError
from mars_ray.model.places import adapter_name
from mars_ray.serve.deploy import check, service_model
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.protocol import Envelope, GenerationRequest, ReplyForm, Turn
from mars_ray.serve.replica.llm_server import LLMServer

TOKENS = 400
# A step's cost decides nothing here: every draft is checked.
SIZE = EngineConfig(
    max_batch=4, max_context=TOKENS + 60, device="cpu", threads=1, window_control=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base and its adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    base = bigram.write_base(folder / "tiny")
    bigram.write_perfect(base, folder / "good")
    bigram.write_useless(base, folder / "weak")
    bigram.write_for_another(base, folder / "another")
    bigram.write_broken(base, folder / "broken")
    shutil.copytree(folder / "good", folder / "cut")
    weights = folder / "cut" / "draft.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def job(folder) -> ServeJob:
    limits = Limits(new_tokens=TOKENS, waiting_requests=8)
    return ServeJob(checkpoint=str(folder / "tiny"), engine=SIZE, limits=limits)


def named(folder: Path, name: str) -> str:
    return adapter_name(str(folder / name), folder / name)


def with_adapter(job: ServeJob, place: Path | str) -> ServeJob:
    engine = job.engine.model_copy(update={"draft_adapter": str(place)})
    return job.model_copy(update={"engine": engine})


@pytest.fixture(scope="module")
def served(job) -> Iterator[LLMServer]:
    """An engine that starts without an adapter."""
    text = load_server(job)
    text.start()
    yield text
    wait_until_free(text)
    text.stop()


@pytest.fixture
def client(job, served) -> Iterator[TestClient]:
    """Of the engine, which has no adapter before and after."""
    yield TestClient(build_api(job, {"tiny": served}))
    asyncio.run(served.take_adapter(None))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another", "is another model"),
        ("broken", "contains NaN or Inf"),
        ("cut", "damaged or was cut short"),
        ("tiny", "no draft adapter"),
        ("nowhere/at/all", "no draft adapter"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_said_before_anything_starts(job, folder, name, said):
    """Guards replicas that fail to start, again and again, in other processes' logs."""
    with pytest.raises(ModelError, match=said):
        check(with_adapter(job, folder / name))
    check(with_adapter(job, folder / "good"))


def test_paths_are_those_of_where_the_command_runs(job, folder, monkeypatch):
    """As in every job: guards an adapter that is looked for beside the job's file."""
    monkeypatch.chdir(folder)
    check(with_adapter(job.model_copy(update={"checkpoint": "tiny"}), "./good"))


def test_an_adapter_gives_the_defaults_their_drafts(job, folder):
    """A mode that needs drafts is refused by a plain model, and fine with an adapter as deep."""
    deep = job.model_copy(update={"default_mode": VerifiedMode(window=bigram.DEPTHS)})
    with pytest.raises(ConfigError, match="needs masks"):
        check(deep)
    check(with_adapter(deep, folder / "good"))
    deeper = deep.model_copy(update={"default_mode": VerifiedMode(window=bigram.DEPTHS + 1)})
    with pytest.raises(ConfigError, match=f"window {bigram.DEPTHS + 1}"):
        check(with_adapter(deeper, folder / "good"))


def test_the_frontier_beside_the_adapter_is_read(job, folder, tmp_path):
    """The base's own says nothing of drafts that it does not make."""
    place = shutil.copytree(folder / "good", tmp_path / "good")
    measured = with_adapter(job, place)
    assert [level.threshold for level in service_model(measured).levels] == [1.0]
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "demo.json"
    shutil.copy(results, place / FRONTIER_FILE)
    assert len(service_model(measured).levels) > 1


def test_requests_are_decoded_by_what_there_is(client, served, job, folder):
    """Whoever leaves the mode open gets masks once there are some, the same text, and no error
    when they are gone; who names a mode that needs them is told what is missing."""
    good = named(folder, "good")
    exact = text_of(ask(client))

    def mars(**fields) -> dict:
        reply = ask(client, mode=None, **fields)
        assert text_of(reply) == exact
        return reply.json()["usage"]["mars"]

    plain = {"mode": "verified", "threshold": 1.0, "adapter": None}
    assert mars() | plain == mars()
    assert mars(quality="fast") | plain == mars(quality="fast")
    assert error_of(ask(client, mode="confidence"), 400)["param"] == "mode"
    (entry,) = client.get("/v1/mars/status").json()["data"]
    assert (entry["mode"], entry["threshold"], entry["adapter"]) == ("verified", 1.0, None)

    asyncio.run(served.take_adapter(str(folder / "good")))
    drafted = mars()
    assert drafted | {"mode": "verified", "threshold": 1.0, "adapter": good} == drafted
    assert drafted["tokens_per_forward"] >= 4
    assert "by_adapter" not in drafted
    assert ask(client).json()["usage"]["mars"]["adapter"] is None  # of `exact`
    (entry,) = client.get("/v1/mars/status").json()["data"]
    assert (entry["mode"], entry["threshold"], entry["adapter"]) == ("verified", 1.0, good)

    asyncio.run(served.take_adapter(None))
    assert mars() | plain == mars()
    assert error_of(ask(client, mode="confidence"), 400)["param"] == "mode"


def test_what_cannot_be_taken_leaves_everything_as_it_is(client, served, folder):
    """Guards a service whose drafts are gone because of a file that is damaged."""

    async def scenario() -> None:
        await served.take_adapter(str(folder / "good"))
        for name, said in (("another", "another model"), ("broken", "NaN"), ("cut", "damaged")):
            with pytest.raises(ModelError, match=said):
                await served.prepare_adapter(str(folder / name))
            with pytest.raises(ModelError, match=said):
                await served.take_adapter(str(folder / name))

    asyncio.run(scenario())
    reply = ask(client, mode=None)
    assert reply.json()["usage"]["mars"]["adapter"] == named(folder, "good")


def test_what_was_prepared_is_taken_whatever_becomes_of_its_files(client, served, folder, tmp_path):
    """Guards a swap of which one replica has done its part and the next one cannot."""
    place = shutil.copytree(folder / "good", tmp_path / "good")
    name = named(tmp_path, "good")

    async def scenario() -> None:
        assert await served.prepare_adapter(str(place)) == name
        shutil.rmtree(place)
        await served.take_adapter(str(place))
        # Once: the next time the files count.
        with pytest.raises(ModelError):
            await served.take_adapter(str(place))

    asyncio.run(scenario())
    assert ask(client, mode=None).json()["usage"]["mars"]["adapter"] == name


@pytest.mark.slow
def test_answers_that_a_swap_overtakes_are_whole_and_say_so(client, served, job, folder):
    """From one adapter to another, to none, and back, while four answers are written: every text is
    `exact`'s, and what each adapter served adds up and is of that adapter alone."""
    good, weak = named(folder, "good"), named(folder, "weak")
    exact = text_of(ask(client, max_tokens=TOKENS))

    async def whole(number: int) -> dict:
        request = _open_call(f"overtaken-{number}")
        (message,) = [message async for message in served.generate(request)]
        assert isinstance(message, Envelope), message
        return json.loads(message.text)

    async def scenario() -> list[dict]:
        await served.take_adapter(str(folder / "good"))
        answers = [asyncio.create_task(whole(number)) for number in range(8)]
        for name in itertools.cycle(("weak", None, "good")):
            await served.take_adapter(name and str(folder / name))
            await _steps_pass(served, answers)
            if all(answer.done() for answer in answers):
                break
        return await asyncio.gather(*answers)

    answers = asyncio.run(scenario())
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {exact}
    seen = set()
    for answer in answers:
        usage, mars = answer["usage"], answer["usage"]["mars"]
        counts = mars | {"completion_tokens": usage["completion_tokens"]}
        served_by = mars.get("by_adapter", [counts])
        tokens = sum(own["completion_tokens"] for own in served_by)
        assert usage["completion_tokens"] == TOKENS == tokens
        assert mars["forwards"] == sum(own["forwards"] for own in served_by)
        for own in served_by:
            seen.add(own["adapter"])
            per_forward = own["completion_tokens"] / own["forwards"]
            if own["adapter"] is None:
                assert per_forward == 1
            elif own["adapter"] == weak:
                assert per_forward < 1.5
            elif own["forwards"] > 20:
                assert per_forward > 3  # fewer where swaps come often
    assert seen == {good, weak, None}


async def _steps_pass(text: LLMServer, answers: list[asyncio.Task]) -> None:
    """Two more steps of the engine: an adapter that none was made with would serve nobody."""
    before = (await text._engine.snapshot()).totals.steps
    while not all(answer.done() for answer in answers):
        if (await text._engine.snapshot()).totals.steps >= before + 2:
            return
        await asyncio.sleep(0)


def _open_call(name: str) -> GenerationRequest:
    prompt = (Turn("user", ASK),)
    form = ReplyForm(is_streamed=False)
    return GenerationRequest(
        name, (prompt,), VerifiedMode(), Sampling(), TOKENS, TOKENS, is_mode_open=True, reply=form
    )


def test_a_reply_over_http_tells_what_each_adapter_served(client, served, folder):
    """In the shape that the description promises, streamed or not."""
    asyncio.run(served.take_adapter(str(folder / "good")))
    streamed = ask(client, mode=None, stream=True, stream_options={"include_usage": True})
    *_, last, done = streamed.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage["mars"]["adapter"] == named(folder, "good")
