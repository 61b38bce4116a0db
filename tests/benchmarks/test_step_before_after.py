"""Steps of two checkouts in turn: real processes, a tiny model. No times are judged here."""

import json
import sys
from pathlib import Path

import pytest
import step_before_after
from serve.bigram import write_base, write_perfect
from step_before_after import SHAPES

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_checkout_beside_itself(tmp_path, monkeypatch, capsys):
    """Guards shapes that an engine has no room for, and a side that is not the checkout's."""
    base = write_base(tmp_path / "base")
    adapter, output = write_perfect(base, tmp_path / "adapter"), tmp_path / "steps.json"
    command = ["", str(ROOT), str(ROOT), str(base), str(output), "--adapter", str(adapter)]
    command += ["--dtypes", "float32", "--threads", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", command)
    step_before_after.main()
    result = json.loads(output.read_text())
    assert [own["shape"] for own in result["shapes"]] == list(map(str, SHAPES))
    for own in result["shapes"]:
        assert own["before_s"] > 0 < own["after_s"]
        assert own["least"] == own["ratio"] == own["most"]
    assert result["sides"]["before"]["provenance"] == result["sides"]["after"]["provenance"]
    assert len(capsys.readouterr().out.splitlines()) == len(SHAPES)


def test_shapes_are_told():
    """Guards a row of the result that says another step than was timed."""
    assert [str(SHAPES[n]) for n in (0, 3, 5, 7, 9)] == [
        "1 x one row, context 64",
        "1 x 4 rows, 2 of them masks, context 1000",
        "1 x 9 rows, 4 of them masks, context 1000",
        "16 x one row, context 64",
        "a prompt of 512",
    ]
