"""What is read of a Prometheus server: by its recorded answers, and by a real one."""

import gzip
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
from advise.played import SLO, backfill, needs_prometheus, page, prometheus, requests
from docs.commands import runs
from simulator.simulated import run
from typer.testing import CliRunner

from mars_ray.advise.traffic import (
    FAMILIES,
    Histogram,
    Measured,
    Prometheus,
    draw,
    measure,
    quantile,
)
from mars_ray.cli import app
from mars_ray.errors import ConfigError, DataError
from mars_ray.simulator.engine.run import Outcome

# Of the answers in RECORDED, which a real Prometheus gave (`test_a_real_prometheus`).
BEGIN_S, MINUTES = 1_700_000_040.0, 30
RECORDED = Path(__file__).parent / "recorded.json.gz"
RATES = [30.0 if minute < 15 else 90.0 for minute in range(MINUTES)]


@pytest.fixture(scope="module")
def played() -> Outcome:
    """Half an hour on a fleet that is large enough, with twice the load at the end."""
    return run(requests(RATES), replicas=4)


@pytest.fixture
def recorded() -> Iterator[str]:
    """A server of the recorded answers; its URL. What was not asked then is a bad request."""
    answers = json.loads(gzip.decompress(RECORDED.read_bytes()))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = answers.get(asked(self.path))
            refused = {"status": "error", "error": f"not recorded: {asked(self.path)}"}
            self.send_response(200 if reply else 400)
            self.end_headers()
            self.wfile.write(json.dumps(reply or refused).encode())

        def log_message(self, *_: Any) -> None:
            pass

    yield from serving(Handler)


def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def asked(path: str) -> str:
    """A request's path and parameters, in one form."""
    parts = urlsplit(path)
    return json.dumps([parts.path, sorted(parse_qsl(parts.query))])


class Recording(Prometheus):
    """Keeps what the server says."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.said: dict[str, Any] = {}

    def _get(self, path: str, parameters: Any) -> Any:
        data = super()._get(path, parameters)
        texts = sorted((name, str(value)) for name, value in parameters.items())
        key = json.dumps([f"/api/v1/{path}", texts])
        self.said[key] = {"status": "success", "data": data}
        return data


def assert_measured(measured: Measured, played: Outcome) -> None:
    """The trace that was played, within what a Prometheus that scrapes can know."""
    done = played.requests[played.requests["end_s"] <= MINUTES * 60]
    assert measured.model == "tiny"
    assert measured.requests.sum() == pytest.approx(len(done), rel=0.02)
    assert measured.prompt_tokens.sum() == pytest.approx(done["prompt"].sum(), rel=0.03)
    assert measured.generation_tokens.sum() == pytest.approx(done["output"].sum(), rel=0.03)
    early, late = measured.requests[1:14].mean(), measured.requests[16:].mean()
    assert late / early == pytest.approx(3, rel=0.15)
    assert measured.generation_lengths
    assert sum(measured.generation_lengths.counts) == pytest.approx(len(done), rel=0.02)
    first_s = np.quantile(done["first_s"] - done["arrival_s"], 0.9)
    told = measured.latencies["ttft_s"]["p90"]
    # Inside one bucket nobody knows where.
    assert first_s / 2.6 <= told <= 2.6 * first_s
    assert 0.005 < measured.latencies["time_per_token_s"]["p50"] < SLO.time_per_token_s
    drawn = draw(measured, seed=0)
    assert len(drawn) == pytest.approx(len(done), rel=0.02)
    assert drawn.prompt_tokens.mean() == pytest.approx(done["prompt"].mean(), rel=0.08)
    assert drawn.output_tokens.mean() == pytest.approx(done["output"].mean(), rel=0.08)
    # The lengths were drawn geometrically: a standard deviation like the mean.
    assert drawn.output_tokens.std() == pytest.approx(done["output"].std(), rel=0.2)


def test_recorded_answers_are_read(recorded: str, played: Outcome):
    """The words of a real server, of which a name or a unit may be misread."""
    measured = measure(Prometheus(recorded), MINUTES / 60, None, BEGIN_S + MINUTES * 60)
    assert measured.family == "vllm:"
    assert measured.prompt_lengths
    assert_measured(measured, played)


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_prometheus(family: str, played: Outcome, tmp_path: Path):
    """Half an hour of scrapes, of vLLM, of vLLM on Ray and of ours."""
    backfill(played, MINUTES * 60, 15, BEGIN_S, family, tmp_path)
    with prometheus(tmp_path) as url:
        server = Recording(url)
        measured = measure(server, MINUTES / 60, "tiny", BEGIN_S + MINUTES * 60)
    assert measured.family == family
    assert measured.prompt_lengths
    assert_measured(measured, played)
    if family == "vllm:":
        # Write these to RECORDED when the queries change.
        (tmp_path / RECORDED.name).write_bytes(gzip.compress(json.dumps(server.said).encode()))


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("line", runs("test_the_documented_command_on_a_server"))
def test_the_documented_command_on_a_server(line: str, played: Outcome, tmp_path: Path):
    """To its end: the last half hour of a service of ours."""
    begin_s = time.time() - MINUTES * 60
    backfill(played, MINUTES * 60, 15, begin_s, "ray_mars_", tmp_path)
    with prometheus(tmp_path) as url:
        words = line.replace("http://prometheus:9090", url).split()[1:]
        done = CliRunner().invoke(app, [*words, "--workers", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["requests"] == pytest.approx(len(played.trace), rel=0.05)
    assert last["measured_latencies"]["ttft_s"]["p50"] > 0


@pytest.mark.long
@needs_prometheus
def test_a_service_that_is_scraped(tmp_path: Path):
    """Two minutes of a service's endpoint, as they pass."""
    outcome = run(requests([120.0] * 4), replicas=4)
    begin_s = time.time()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page(outcome, time.time() - begin_s).encode())

        def log_message(self, *_: Any) -> None:
            pass

    for target in serving(Handler):
        with prometheus(tmp_path, target.removeprefix("http://")) as url:
            # To the end of the second whole minute of the clock.
            time.sleep(180 - time.time() % 60 + 2)
            now_s = time.time()
            measured = measure(Prometheus(url), 2 / 60, None, now_s)
            done = outcome.requests["end_s"] + begin_s
            end_s = now_s // 60 * 60
            count = ((done > end_s - 120) & (done <= end_s)).sum()
            assert measured.requests.sum() == pytest.approx(count, rel=0.05)
            assert measured.unknown_minutes == 0
            assert measured.window_s == 60


class Canned(Prometheus):
    """Answers as given: labels of series, 1 to instant queries, and a value to others twice."""

    def __init__(self, *series: dict[str, str], value: float = 1.0) -> None:
        super().__init__("http://nowhere")
        self._series, self._value = list(series), value

    def _get(self, path: str, parameters: Any) -> Any:
        if path == "series":
            return self._series
        if path == "query":
            return {"result": [{"metric": {}, "value": [0, "1"]}]}
        start, step = parameters["start"], parameters["step"]
        return {"result": [{"values": [[start + step * i, str(self._value)] for i in (7, 50)]}]}


def test_several_models_need_a_name():
    """Guards an advice on the sum of services that share nothing."""
    name = {"__name__": "vllm:request_success_total"}
    server = Canned(name | {"model_name": "one"}, name | {"model_name": "two"})
    with pytest.raises(ConfigError, match="--model-name: one, two"):
        measure(server, 1, None, 7200)
    with pytest.raises(ConfigError, match="--model-name: one, two"):
        measure(server, 1, "three", 7200)
    assert measure(server, 1, "two", 7200).model == "two"


def test_a_service_that_is_scraped_at_both_places_is_one():
    """On its own page under vLLM's names, and at Ray's nodes under ours. Guards a choice between a
    name and the same name."""
    own = {"__name__": "vllm:request_success_total", "model_name": "one", "replica": "a"}
    nodes = {"__name__": "ray_mars_request_success_total", "deployment": "Replica-one"}
    assert measure(Canned(own, nodes), 1, None, 7200).family == "vllm:"
    vllms = {name: value for name, value in own.items() if name != "replica"}
    with pytest.raises(ConfigError, match="--model-name: one, one"):
        measure(Canned(vllms, nodes), 1, None, 7200)


def test_minutes_without_data_are_counted():
    """Of those between the first known one and the last."""
    server = Canned({"__name__": "vllm:request_success_total", "model_name": "one"})
    measured = measure(server, 1, None, 7200)
    assert len(measured.requests) == 44
    assert measured.unknown_minutes == 42
    assert measured.start_s == 7200 - 3600 + 7 * 60
    # One sample in five minutes: rates need twenty.
    assert measured.window_s == 1200
    assert measured.requests.sum() == pytest.approx(2 * 60 / 1200)


def test_no_service_is_told():
    with pytest.raises(DataError, match="does it scrape the service"):
        measure(Canned(), 1, None, 7200)
    name = {"__name__": "vllm:request_success_total", "model_name": "one"}
    with pytest.raises(DataError, match="one has answered no request in the last 1 hours"):
        measure(Canned(name, value=0.0), 1, None, 7200)


def test_what_is_no_prometheus_is_told(recorded: str):
    """By what it says, or that it is not there."""
    with pytest.raises(DataError, match="HTTP 400: not recorded"):
        Prometheus(recorded).at("up", 0)
    with pytest.raises(DataError, match=r"cannot be reached.*is a Prometheus there"):
        Prometheus("http://127.0.0.1:9").at("up", 0)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            denied = self.headers["Authorization"] != "Bearer secret"
            self.send_response(401 if denied else 200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: Any) -> None:
            pass

    for url in serving(Page):
        with pytest.raises(DataError, match="HTTP 401: Unauthorized; give a token with --token"):
            Prometheus(url).at("up", 0)
        with pytest.raises(DataError, match="no answer of Prometheus"):
            Prometheus(url, "secret").at("up", 0)


def test_quantiles_by_hand():
    """Ten values up to 1, thirty up to 2, ten above."""
    histogram = Histogram((1.0, 2.0, float("inf")), (10.0, 30.0, 10.0))
    assert quantile(histogram, 0.1) == pytest.approx(0.5)
    assert quantile(histogram, 0.5) == pytest.approx(1.5)
    assert quantile(histogram, 0.99) == 2.0
