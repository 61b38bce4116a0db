"""Long work in parts: on all cores, and none of it twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from mars_ray.files import ResultCache
from mars_ray.simulator.cases import run_parts

ROOT = Path(__file__).parents[2]
QUIET = Console(quiet=True)


def noted(log: Path, value: int) -> list[int]:
    """The value and who made it; the log has a line for each time it was made."""
    with log.open("a") as file:
        file.write(f"{value}\n")
    time.sleep(0.5 if value == 0 else 0)
    return [value, os.getpid()]


def broken() -> None:
    raise ValueError("a part is broken")


@pytest.mark.parametrize("workers", [1, 2])
def test_values_come_in_the_order_of_the_parts(tmp_path, workers):
    """However long each takes, and whoever makes it."""
    parts = {f"part {n}": partial(noted, tmp_path / "log", n) for n in range(6)}
    made = run_parts(parts, ResultCache(None, "w"), workers, QUIET)
    assert list(made) == list(parts)
    assert [value for value, _ in made.values()] == list(range(6))
    here = [maker == os.getpid() for _, maker in made.values()]
    assert all(here) if workers == 1 else not any(here)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_finished_is_not_made_again(tmp_path, workers):
    """Also after a part that fails, and a line that was cut; for other work it does not count."""
    log, file = tmp_path / "log", tmp_path / "folder" / "parts.jsonl"
    good = {f"part {n}": partial(noted, log, n) for n in range(1, 4)}
    with pytest.raises(ValueError, match="broken"):
        run_parts(good | {"bad": broken}, ResultCache(file, "w"), workers, QUIET)
    run_parts(good, ResultCache(file, "w"), workers, QUIET)
    with file.open("a") as cut:
        cut.write('["w", "part 9", ')
    again = good | {"part 0": partial(noted, log, 0)}
    made = run_parts(again, ResultCache(file, "w"), workers, QUIET)
    assert list(made) == list(again)
    # What came after the cut line is found again.
    assert run_parts(again, ResultCache(file, "w"), workers, QUIET) == made
    assert sorted(log.read_text().split()) == ["0", "1", "2", "3"]
    run_parts(good, ResultCache(file, "another"), workers, QUIET)
    assert len(log.read_text().split()) == 7


@pytest.fixture
def heard() -> Iterator[None]:
    """Processes started here hear of Ctrl-C, also where these tests do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heard")
def test_a_simulation_that_is_interrupted_goes_on(tmp_path):
    """Guards an hour of simulations that ends at Ctrl-C, and processes that run on after it."""
    words = [sys.executable, "-m", "mars_ray", "simulate", "jobs/simulate-demo.toml"]
    words += [f"seeds={list(range(12))}"]
    words += ["traces={flash={type='flash', duration_s=200, from_s=60, to_s=120}}"]
    words += ["policies=['mars', 'fixed', 'ray']"]
    words += ["scaling.max_replicas=4", "--workers", "2", "--output"]
    begun = subprocess.Popen([*words, tmp_path / "a"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    kept = tmp_path / "a" / "parts.jsonl"
    limit = time.monotonic() + 200
    # Three, so that the second worker has begun too: one that still starts would say where it was.
    while not kept.exists() or kept.read_text().count("\n") < 3:
        assert begun.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    children = psutil.Process(begun.pid).children(recursive=True)
    begun.send_signal(signal.SIGINT)
    _, said = begun.communicate(timeout=30)
    assert begun.returncode == 130
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    lines = kept.read_text().splitlines()
    assert 3 <= len(lines) < 36
    for name in ("a", "b"):
        subprocess.run([*words, tmp_path / name], cwd=ROOT, capture_output=True, check=True)
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("a", "b")]
    assert results[0]["cells"] == results[1]["cells"]
    # Of files that have changed since their commit, nothing is found again.
    if not str(results[0]["provenance"]["commit"]).endswith("+"):
        assert kept.read_text().splitlines()[: len(lines)] == lines
        assert len(kept.read_text().splitlines()) == len({*kept.read_text().splitlines()})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_command_however_it_ends(tmp_path, number):
    """Guards processes that compute for nobody after a `kill`."""
    program = tmp_path / "long.py"
    program.write_text(
        "import time\n"
        "from functools import partial\n"
        "from rich.console import Console\n"
        "from mars_ray.files import ResultCache\n"
        "from mars_ray.simulator.cases import run_parts\n"
        "if __name__ == '__main__':\n"
        "    parts = {str(n): partial(time.sleep, 300) for n in range(4)}\n"
        "    run_parts(parts, ResultCache(None, 'w'), 2, Console(quiet=True))\n"
    )
    begun = subprocess.Popen([sys.executable, program], cwd=ROOT)
    limit = time.monotonic() + 60
    # Two workers, and what multiprocessing has beside them.
    while len(children := psutil.Process(begun.pid).children(recursive=True)) < 3:
        assert begun.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    time.sleep(2)
    begun.send_signal(number)
    begun.wait(10)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
