"""The end of a service: nothing that it has accepted is lost or cut."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from ray import serve
from serve.asking import ask, error_of
from serve.command import TOKENS, answers, command, loses_nothing_at_sigterm, read, with_room
from serve.vllm_here import ENVIRONMENT, SMALL, needs_vllm

from mars_ray.cluster.machine import free_port
from mars_ray.config.serve import ServeJob
from mars_ray.serve import deploy
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.middleware import Gate


def test_a_closed_gate_refuses_and_says_so(job, text_engine):
    """Probes still answer: Kubernetes must see a process that lives and takes no more."""
    gate = Gate()
    client = TestClient(build_api(job, {"tiny": text_engine}, gate))
    assert ask(client).status_code == 200
    gate.is_open = False
    refused = ask(client)
    assert error_of(refused, 503)["code"] == "draining"
    assert int(refused.headers["Retry-After"]) >= 1
    assert error_of(client.get("/v1/models"), 503)
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 503
    assert client.get("/readyz").json() == {"status": "draining"}


def test_whoever_is_inside_is_counted_to_the_last_byte(job, text_engine):
    """A stream counts until its end, a refusal not at all."""
    gate = Gate()
    seen = []

    async def app(scope, receive, send) -> None:
        async def look(message) -> None:
            seen.append(gate.inside)
            await send(message)

        await build_api(job, {"tiny": text_engine}, gate)(scope, receive, look)

    client = TestClient(app)
    assert ask(client, stream=True).status_code == 200
    assert len(seen) > 3
    assert set(seen) == {1}
    assert gate.inside == 0
    assert client.get("/v1/nothing").status_code == 404
    assert gate.inside == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_a_second_one_hurries(number, monkeypatch):
    """Guards a Ctrl-C that leaves the service running, and handlers that stay behind."""
    did = []

    def wait(_limit_s: float, at_once: threading.Event) -> bool:
        did.append("drain")
        return not at_once.wait(10)

    monkeypatch.setattr(deploy, "drain", wait)
    monkeypatch.setattr(deploy, "kill_actors", lambda _: did.append("cut"))
    monkeypatch.setattr(serve, "shutdown", lambda: did.append("stop"))
    monkeypatch.setattr(deploy, "end_controls", lambda: did.append("forget"))
    before = signal.getsignal(number)
    for delay_s in (0.2, 0.4):
        threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()
    deploy.wait_until_stopped(ServeJob(checkpoint="m"))
    assert did == ["drain", "cut", "stop", "forget"]
    assert signal.getsignal(number) is before


def test_a_service_that_another_command_has_stopped_ends(monkeypatch, caplog):
    """Nothing is left to drain or to stop. Guards a `serve` in the foreground that outlives
    `mars-ray stop`."""
    there = [{"name": deploy._CONTROLLER, "namespace": "serve"}]
    looks = iter((there, [], there, [], []))  # once is no proof
    monkeypatch.setattr(deploy, "_GONE_LOOK_S", 0.01)
    monkeypatch.setattr(deploy, "list_named_actors", lambda **_: next(looks))
    monkeypatch.setattr(deploy, "_end", lambda _: pytest.fail("Serve is gone"))
    deploy.wait_until_stopped(ServeJob(checkpoint="m"))
    assert "another command has stopped the service" in caplog.text
    assert next(looks, None) is None


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("engine", ["mars", pytest.param("vllm", marks=needs_vllm)])
def test_sigterm_under_load_loses_no_accepted_reply(job, tmp_path, engine):
    """Guards replies that a shutdown cuts, and services that do not end."""
    if engine == "vllm":
        job = job.model_copy(update={"engine": SMALL, "environment": ENVIRONMENT})
    log = tmp_path / "requests.jsonl"
    logged = with_room(job, TOKENS).model_copy(update={"request_log": str(log)})
    with command(logged, tmp_path) as (process, url):
        loses_nothing_at_sigterm(process, url, log)
    said = (tmp_path / "job.json").read_text()
    assert "mars-ray engine" in said or "serving on" in said
    # What Ray's handler of crashes writes of each process that it ends.
    assert "SIGTERM received" not in said
    assert "PC: @" not in said


def test_an_exit_by_sigterm_leaves_the_rest_to_the_system():
    """What was said is written, and nothing runs behind it; other exits are as they were."""
    program = """
import atexit, sys
from mars_ray.cluster.machine import sigterm_ends_at_once
atexit.register(print, "crash")
print("said")
with sigterm_ends_at_once():
    sys.exit(int(sys.argv[1]))
"""
    ended = [
        subprocess.run([sys.executable, "-c", program, code], capture_output=True, text=True)
        for code in ("15", "3")
    ]
    assert [(each.returncode, each.stdout) for each in ended] == [
        (143, "said\n"),
        (3, "said\ncrash\n"),
    ]


@pytest.mark.ray
@pytest.mark.long
def test_a_detached_service_goes_on_until_it_is_stopped(ray_cluster, job, monkeypatch):
    """Each step by a command of its own, on a cluster that outlives them."""
    job = with_room(job, 100)
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address_info["gcs_address"])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")

    def run(*words: str) -> dict:
        command = [sys.executable, "-m", "mars_ray", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    small = ["cpus_per_replica=0.5", "engine.max_batch=2", "engine.max_context=160"]
    url = f"http://127.0.0.1:{job.port}"
    started = run("serve", "--detach", f"--port={job.port}", job.checkpoint, *small)
    assert started["url"] == url
    (model,) = started["models"]
    answer = httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "x"}, timeout=60)
    assert answer.status_code == 200
    assert [each["id"] for each in run("status", url)["models"]] == [model]
    assert run("stop") == {"models": [model]}
    assert not answers(url)


@pytest.mark.ray
@pytest.mark.long
def test_sigterm_while_the_replicas_start_is_no_crash(checkpoint, tmp_path):
    """Guards the frames of Ray's C++ code, and a command that the system has to end."""
    said = (tmp_path / "said").open("w+")
    words = ["serve", str(checkpoint), f"port={free_port()}", "cpus_per_replica=0.5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mars_ray", *words], start_new_session=True, stderr=said, stdout=said
    )
    try:
        while "Started a local Ray" not in Path(said.name).read_text():
            assert process.poll() is None
            time.sleep(0.2)
        time.sleep(2)
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = Path(said.name).read_text()
    assert "SIGTERM received" not in text
    assert "PC: @" not in text


@pytest.mark.ray
@pytest.mark.long
def test_a_second_signal_does_not_wait(checkpoint, job, tmp_path):
    """Ctrl-C twice in a terminal, which sends it to the whole process group."""
    # More than the fastest machine decodes in the seconds until then.
    many = 30_000
    with command(with_room(job, many), tmp_path) as (process, url), ThreadPoolExecutor(1) as pool:
        lost = pool.submit(read, url, stream=False, tokens=many)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
        assert time.monotonic() - begin < 30
        # Cut, or told so by Serve's proxy; in no case answered.
        assert lost.exception(10) is not None or lost.result()[0] >= 500
