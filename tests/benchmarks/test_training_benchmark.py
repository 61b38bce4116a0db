"""The training benchmark's process and files. No times are judged here."""

import json
import os
from pathlib import Path

import pytest
import train_step

from mars_ray.errors import ConfigError, MarsError


@pytest.mark.timeout(120)
def test_a_measuring_process_that_is_killed_ends_the_measurement():
    """Guards a training benchmark that waits for ever where the system ends it for its memory."""
    assert train_step._in_new_process(abs, -7) == 7
    with pytest.raises(MarsError, match="a measuring process was ended"):
        train_step._in_new_process(os._exit, 9)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of cases that were measured, which is done at once."""
    cases: list[str] = []

    def bench(names: list[str], _: object) -> dict[str, float]:
        cases.extend(names)
        return {"step_s": 1.5}

    monkeypatch.setattr(train_step, "run_bench", bench)
    return cases


def test_a_result_that_cannot_be_written_is_told_before_the_measurement(
    measured: list[str], tmp_path: Path
):
    """Guards an hour of a GPU whose result is nowhere."""
    with pytest.raises(ConfigError, match=f"cannot write {tmp_path}: .*--output"):
        train_step.main(["--output", str(tmp_path)])
    assert not measured


def test_a_result_is_written_and_printed(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """In a directory that is made."""
    output = tmp_path / "new" / "result.json"
    train_step.main(["--output", str(output), "--case", "tiny"])
    assert json.loads(output.read_text()) == json.loads(capsys.readouterr().out) == {"step_s": 1.5}
    assert measured == ["tiny"]
