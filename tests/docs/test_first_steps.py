"""The documentation's commands that start a cluster of their own, executed in a fresh checkout."""

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from docs.checkout import Checkout, make_checkout
from docs.commands import runs
from docs.published import publish
from docs.small import SMALL, small
from train.small_jobs import make_model

from mars_ray.cluster.machine import free_port

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]
URL = "http://127.0.0.1:8000"
START_S = 120


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """With the data that its jobs read; services listen elsewhere than they would."""
    directory = tmp_path_factory.mktemp("first")
    places = publish(directory) | {"/tmp/ServeGen": f"{directory}/ServeGen"}
    places |= {"CHECKPOINT": "runs/demo/models/mars"} | at_port(free_port())
    checkout = make_checkout(directory / "checkout", places)
    checkout.run("\n".join(runs("data")))
    return checkout


def at_port(port: int) -> dict[str, str]:
    return {URL: f"http://127.0.0.1:{port}", "port=8000": f"port={port}"}


@pytest.fixture(scope="module")
def adapted(checkout: Checkout) -> Checkout:
    """The checkout after `make demo`, of a model that is at hand."""
    make_model(checkout.directory / "models" / "plain")
    (command,) = runs("adapted")
    settings = shlex.join(SMALL["demo"])
    done = checkout.run(f"{command} ARGS={shlex.quote(settings)}", timeout_s=400)
    assert json.loads(done.stdout.splitlines()[-1])["http_ok"]
    return checkout


@pytest.fixture(scope="module")
def demo(checkout: Checkout) -> Checkout:
    """The checkout after the tiny demo."""
    (command,) = runs("demo")
    done = checkout.run(small(command), timeout_s=400)
    assert json.loads(done.stdout.splitlines()[-1])["http_ok"]
    return checkout


@pytest.fixture(scope="module")
def service(demo: Checkout) -> Iterator[Checkout]:
    """The checkout while the tiny demo's model is served."""
    (command,) = runs("service")
    with serving(demo, small(command)):
        yield demo


@contextmanager
def serving(checkout: Checkout, command: str) -> Iterator[None]:
    """Until Ctrl-C, which it takes as its end."""
    log = checkout.directory / "serving.log"
    process = checkout.start(f"exec {command}", log)
    try:
        deadline = time.monotonic() + START_S
        while "serving on" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def test_the_demo_goes_on_where_it_was(adapted: Checkout):
    """From the package's job file, with nothing trained again."""
    adapter = adapted.directory / "runs" / "demo-smollm2" / "adapter" / "draft.safetensors"
    before = adapter.stat().st_mtime_ns
    (command,) = runs("test_the_demo_goes_on_where_it_was")
    done = adapted.run(f"{command} {shlex.join(('jobs/demo.toml', *SMALL['demo']))}")
    assert json.loads(done.stdout.splitlines()[-1])["http_ok"]
    assert adapter.stat().st_mtime_ns == before


def test_what_the_demo_measured_is_served(adapted: Checkout):
    """Guards a first command after the demo that fails. Here no adapter comes with the package."""
    (command,) = runs("test_what_the_demo_measured_is_served")
    here = replace(adapted, places=adapted.places | {"/shipped/": "/trained_here/"})
    with serving(here, f"{command} port={free_port()}"):
        pass


def test_a_model_is_served_with_an_adapter(adapted: Checkout):
    """The README's first command, of the model and the adapter that are here."""
    (command,) = runs("test_a_model_is_served_with_an_adapter")
    own = {"models/smollm2": "models/plain", "adapters/smollm2": "runs/demo-smollm2/adapter"}
    here = replace(adapted, places=adapted.places | own)
    with serving(here, f"{command} port={free_port()}"):
        pass


def test_the_tiny_demo_goes_on_where_it_was(demo: Checkout):
    """The same of models that were trained whole."""
    model = demo.directory / "runs" / "demo" / "models" / "mars" / "model.safetensors"
    before = model.stat().st_mtime_ns
    (command,) = runs("demo")
    assert json.loads(demo.run(small(command)).stdout.splitlines()[-1])["http_ok"]
    assert model.stat().st_mtime_ns == before


@pytest.mark.parametrize("command", runs("test_a_chat"))
def test_a_chat(service: Checkout, command: str):
    """One question, and the end of what is typed."""
    shown = service.run(f"echo 'How many?' | {command if URL in command else f'{command} {URL}'}")
    assert "mars-demo at http://" in shown.stdout
    assert "a forward, verified at 1" in shown.stdout


def test_any_client(service: Checkout):
    """curl, and the snippet of the README, of the model that is served here."""
    snippet, curl = runs("test_any_client")
    here = replace(service, places=service.places | {'"smollm2"': '"mars-demo"'})
    assert json.loads(here.run(curl).stdout)["usage"]["mars"]["forwards"] > 0
    shown = here.run(f"python - <<'END'\n{snippet}END\n")
    assert "'mode': 'verified', 'threshold': 0.3" in shown.stdout


def test_lm_eval(demo: Checkout):
    """Against a checkpoint that is served by its path alone, and so under its directory's name."""
    serve, lm_eval = runs("test_lm_eval")
    here = replace(demo, places=demo.places | at_port(free_port()))
    offline = f"export HF_HUB_OFFLINE=1 HF_HOME={demo.directory}/hub\n"
    with serving(here, small(serve, "port=8000")):
        here.run(offline + small(lm_eval, "--limit", "2", "--gen_kwargs", "max_gen_toks=8"))
    (results,) = (demo.directory / "runs" / "lm-eval").rglob("results_*.json")
    assert "mars_gsm8k" in json.loads(results.read_text())["results"]


@pytest.mark.parametrize("command", runs("test_training"))
def test_training(checkout: Checkout, command: str):
    """Each run has a folder of its own, with its models."""
    done = checkout.run(small(command))
    models = json.loads(done.stdout.splitlines()[-1])["models"]
    assert set(models) == {"ar", "mars"}
    assert all((checkout.directory / path / "mars.json").exists() for path in models.values())


def test_own_answers(demo: Checkout):
    """Of the demo's first stage, as token ids; by a job, and to a file of prompts."""
    by_job, to_prompts = runs("test_own_answers")
    prompts = (demo.directory / "jobs" / "demo-prompts.jsonl").read_text().splitlines()
    for command, count in ((small(by_job), 8), (f"{to_prompts} max_new_tokens=8", len(prompts))):
        done = demo.run(command)
        told = json.loads(done.stdout.splitlines()[-1])
        output = demo.directory / told["output"]
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        # A model of four steps may answer with white space alone, which is left out.
        assert len(lines) == told["conversations"] > 0
        assert len(lines) + told["left_out"] == count, done.stderr
        assert {*told.get("left_out_why", {})} <= {"the answer is empty"}
        assert all(line["prompt_ids"] and line["answer_ids"] for line in lines)


def test_a_sweep(demo: Checkout):
    """From the demo's first stage to a job for the best trial."""
    (command,) = runs("test_a_sweep")
    demo.run(small(command), timeout_s=500)
    assert (demo.directory / "runs" / "tune-demo" / "best.toml").exists()
