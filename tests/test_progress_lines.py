"""What a log says of a long command, and what it does not."""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mars_ray import progress
from mars_ray.config.load import load_job
from mars_ray.progress import Bars, Lines, short
from mars_ray.simulator import report
from mars_ray.simulator.config import KINDS, SimulateJob
from mars_ray.train.metrics import MetricsReader, StageProgress
from mars_ray.tune.search import Ledger, trials_ended


@pytest.fixture
def log(monkeypatch) -> Console:
    """Not a terminal, and lines come every twentieth of a second."""
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    return Console(file=io.StringIO(), width=120)


def said(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_silence_is_broken_and_nothing_else(log):
    """Lines come while nothing is said, say where it is, and end with it."""
    with Bars(log) as bars:
        wait_for(lambda: said(log))
        assert said(log)[0].startswith("starting, 0 s")
        bars.add_task("read", total=2, completed=2)
        task = bars.add_task("[answers]", total=8)
        bars.advance(task)
        wait_for(lambda: said(log)[-1].startswith("[answers]: 1 of 8, "))
        bars.update(task, total=7_473_000, completed=1_234_567)
        wait_for(lambda: said(log)[-1].startswith("[answers]: 1,234,567 of 7,473,000, "))
    count = len(said(log))
    time.sleep(0.15)
    assert len(said(log)) == count


def test_what_is_said_puts_the_next_line_off(log, monkeypatch):
    """Guards a log of training whose lines are doubled. The test moves the clock."""
    clock, looks = [0.0], [0]

    def now() -> float:
        looks[0] += 1
        return clock[0]

    def look_again() -> None:
        """Until the lines' own thread has looked at the clock again."""
        seen = looks[0]
        wait_for(lambda: looks[0] > seen + 2)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=now))
    with Lines(log, lambda: "silence") as lines:
        for number in range(5):
            clock[0] += 0.04
            lines.say(str(number))
            look_again()
        assert said(log) == [str(number) for number in range(5)]
        clock[0] += 0.06
        wait_for(lambda: len(said(log)) > 5)
    assert said(log)[5:] == ["silence, 0 s"]


def test_a_terminal_has_its_bar_only(monkeypatch):
    """Guards lines that tear a bar apart."""
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Bars(terminal) as bars:
        bars.add_task("answers", total=8)
        time.sleep(0.1)
    assert not any(line.startswith("answers: ") for line in said(terminal))


def test_simulating_says_which_part_it_is_at(log, monkeypatch):
    """Each may take minutes."""
    expected = "flash, 6 ms, cold start 100 s, fixed, seed 0: 0 of 1, "
    small = ["policies=['fixed']", "seeds=[0]"]
    small += ["traces={flash={type='flash', duration_s=60, from_s=20, to_s=40}}"]
    job = load_job("jobs/simulate-demo.toml", small, KINDS)
    assert isinstance(job, SimulateJob)

    def waited(*given: Any) -> dict[str, Any]:
        wait_for(lambda: any(line.startswith(expected) for line in said(log)))
        return one_run(*given)

    one_run = report._run
    monkeypatch.setattr(report, "_run", waited)
    report.run_simulations(job, log, workers=1)


def test_a_stage_that_waits_for_its_first_step_says_so(tmp_path, monkeypatch, capsys):
    """Loading a large model takes minutes, and so does a step of it."""
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    log = tmp_path / "metrics.jsonl"
    heard = [""]

    def hear(line: str) -> None:
        def is_there() -> bool:
            heard[0] += capsys.readouterr().err
            return line in heard[0]

        wait_for(is_there)

    with StageProgress("mars", MetricsReader(log)) as stage:
        hear("mars: starting workers, 0 s\n")
        log.write_text(json.dumps({"kind": "start", "step": 0, "total_steps": 9, "workers": 1}))
        with log.open("a") as file:
            file.write("\n")
        stage.update()
        hear("mars: 0 of 9, ")
    assert heard[0].startswith("mars: starting workers, 0 s\n")


def test_a_path_is_told_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    """Guards the last lines of a command, hours after its start."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert short(gone / "x") == "x"
    assert short(tmp_path / "x") == str(tmp_path / "x")
    gone.rmdir()
    assert short(gone / "x") == str(gone / "x")


def test_who_watches_a_sweep_leaves_its_record_alone(tmp_path: Path):
    """Guards a line that is cut off while it is being written."""
    path = tmp_path / "trials.jsonl"
    assert trials_ended(path) == 0
    ledger = Ledger(path)
    ledger.append("start", "a", values={})
    ledger.append("end", "a", status="finished")
    with path.open("a") as file:
        file.write('{"event": "e')
    content = path.read_bytes()
    assert trials_ended(path) == 1
    assert path.read_bytes() == content
