"""Engines as actors: as many as there is room for, those that die, and those that cannot start."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import tomli_w
from generate.engines import QUIET, make_job, run
from processes import family, titled
from rich.console import Console

from mars_ray.config.decode import Sampling
from mars_ray.config.generate import GenerateJob
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import EngineError, ModelError
from mars_ray.generate import on_ray
from mars_ray.generate.answers import Part
from mars_ray.generate.on_ray import RayEngines
from mars_ray.generate.run import Worker, run_generation

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def mixed_job(talker: Path, output: Path, **changes: Any) -> GenerateJob:
    """Greedy, so that another batch says the same; slow, so that there is a middle."""
    sources = [{"type": "corpus", "count": 40}, {"type": "own", "count": 10, "max_new_tokens": 24}]
    usual = {"prompts": sources, "sampling": Sampling(), "workers": 2}
    return make_job(talker, output, **usual | changes)


def engines() -> list[psutil.Process]:
    """Processes of this test's cluster."""
    return titled(family(os.getpid()), "ray::Worker")


def wait_for(is_so: Any, limit_s: float = 200) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def expected(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one engine in this process writes."""
    output = tmp_path_factory.mktemp("expected") / "own.jsonl"
    run(mixed_job(talker, output), QUIET)
    return output.read_text()


def test_a_dead_engine_is_replaced(
    talker: Path, tmp_path: Path, ray_cluster, expected: str, monkeypatch: pytest.MonkeyPatch
):
    """kill -9 of one of two: all is done, once, and the file is that of a single engine. Guards
    prompts that die with their engine. Afterwards nothing is left of any."""
    add, killed = Part.add_answers, []

    def killing(*arguments: Any) -> None:
        if not killed:
            wait_for(lambda: len(engines()) == 2)
            killed.append(engines()[0])
            killed[0].kill()
        add(*arguments)

    monkeypatch.setattr(Part, "add_answers", killing)
    output, log = tmp_path / "own.jsonl", Console(file=io.StringIO(), width=120)
    run_generation(mixed_job(talker, output), log, RayEngines)
    assert output.read_text() == expected
    assert isinstance(log.file, io.StringIO)
    said = log.file.getvalue()
    assert said.startswith("2 engines, each with 1 CPU\n")
    assert "an engine died and is replaced: " in said
    wait_for(lambda: not engines())


# The command, which kills itself once its second answers are written.
KILLED = """
import os, signal, sys
from mars_ray.cli import main
from mars_ray.generate.answers import Part
add, calls = Part.add_answers, []
def killing(*arguments):
    add(*arguments)
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Part.add_answers = killing
main()
"""


@pytest.mark.long
def test_a_killed_driver_is_started_again(talker: Path, tmp_path: Path, ray_cluster, expected: str):
    """kill -9 of the command; then the same job to its end, with another number of engines."""
    output, job_file = tmp_path / "own.jsonl", tmp_path / "job.toml"
    job = mixed_job(talker, output, workers=1)
    job_file.write_text(tomli_w.dumps(job.model_dump(mode="json", exclude_none=True)))
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", KILLED, "generate", str(job_file)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=250, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert '"answer_ids"' in Path(f"{output}.part").read_text()
    assert not output.exists()
    run_generation(mixed_job(talker, output), QUIET, RayEngines)
    assert output.read_text() == expected


def test_weights_that_do_not_fit_are_one_line(talker: Path, tmp_path: Path, ray_cluster):
    """Found where they are loaded, and told here as there; guards Ray's traceback."""
    broken = Path(shutil.copytree(talker, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(ModelError, match="broken"):
        run_generation(mixed_job(broken, tmp_path / "own.jsonl"), QUIET, RayEngines)


@pytest.mark.long
def test_memory_that_is_not_there_is_said(talker: Path, tmp_path: Path, ray_cluster):
    """With the settings that would lower it."""
    engine = {"max_context": 160, "page_size": 10**9, "cache_bytes": 10**13}
    job = mixed_job(talker, tmp_path / "own.jsonl", engine=engine, workers=1)
    with pytest.raises(EngineError, match=r"loading the model failed on (.|\n)*lower workers"):
        run_generation(job, QUIET, RayEngines)


@pytest.mark.long
def test_starting_may_take_longer_than_a_job_has(talker: Path, tmp_path: Path, ray_cluster):
    """Guards a short job on a busy machine that ends with nothing, since its engines were ready too
    late; and so would any later run of it."""
    own = {"type": "own", "count": 6}
    prompts = [own, {"type": "corpus", "count": 40}]
    job = mixed_job(talker, tmp_path / "own.jsonl", prompts=prompts, workers=1, minutes=0.001)
    generated = run_generation(job, QUIET, RayEngines)
    assert 10 <= generated.conversations + generated.left_out_why.get("the answer is empty", 0) < 40


def dying(when: str) -> type[Worker]:
    """A worker that ends as one for which there is no memory: without a word. Defined here, it
    travels to where it runs with its code."""

    class Dying(Worker):
        def load(self) -> str:
            if when == "loading":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().load()

        def advance(self, requests: Sequence[Request], leave: int) -> list[Completion]:
            if any(request.id == when for request in requests):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().advance(requests, leave)

    return Dying


class NotInstalled(Worker):
    """Of a module that is not on the nodes' path."""


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (dying("loading"), "died 3 times before it was ready, most likely for want of memory"),
        (dying("3"), "3 engines died over the same"),
        (NotInstalled, "an engine cannot be made: ModuleNotFoundError: No module named"),
    ],
)
@pytest.mark.long
def test_engines_that_always_die_are_given_up(
    worker: type[Worker],
    reason: str,
    talker: Path,
    tmp_path: Path,
    ray_cluster,
    monkeypatch: pytest.MonkeyPatch,
):
    """Guards a job that starts engines for ever."""
    monkeypatch.setattr(on_ray, "Worker", worker)
    prompts = {"type": "corpus", "count": 6}
    job = mixed_job(talker, tmp_path / "own.jsonl", prompts=prompts, workers=1)
    with pytest.raises(EngineError, match=reason):
        run_generation(job, QUIET, RayEngines)
