"""Processes that are found again and ended: ours, and no others."""

import os
import sys
from dataclasses import replace

from mars_ray.cluster.local import end, start


def test_a_process_is_known_again_and_ended(tmp_path):
    """Guards a node that outlives `cluster down`."""
    process = start([sys.executable, "-c", "input()or 1"], tmp_path / "log", os.environ)
    sleeper = start(["sleep", "60"], tmp_path / "other", os.environ)
    assert sleeper.is_alive
    end([process, sleeper], patience_s=5)
    assert not sleeper.is_alive
    assert not process.is_alive


def test_one_that_does_not_listen_is_killed(tmp_path):
    """Guards a `cluster down` that waits for ever, or leaves a stuck node."""
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    log = tmp_path / "log"
    process = start([sys.executable, "-c", f"{script}; time.sleep(60)"], log, os.environ)
    while not log.read_text():
        assert process.is_alive
    end([process], patience_s=0.3)
    os.waitpid(process.pid, 0)
    assert not process.is_alive


def test_another_process_of_the_same_number_is_left_alone(tmp_path):
    """Guards a stranger's process, killed because it got the number of one of ours."""
    process = start(["sleep", "60"], tmp_path / "log", os.environ)
    stranger = replace(process, started_tick=process.started_tick + 1)
    assert not stranger.is_alive
    end([stranger], patience_s=0.1)
    assert process.is_alive
    end([process], patience_s=5)
