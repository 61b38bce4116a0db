"""The frontier's file and lookups."""

import json

import pytest

from mars_ray.core.frontier import Frontier, FrontierPoint, read_frontier
from mars_ray.errors import CheckpointError


def point(mode: dict, accuracy: float, tokens: int) -> FrontierPoint:
    return FrontierPoint(
        mode, 100, accuracy, accuracy - 0.1, accuracy + 0.1, tokens, 100, 1.0, 1.0, 0, 0, 0, 1.0
    )


FRONTIER = Frontier(
    "tiny",
    {"type": "corpus"},
    (
        point({"type": "exact"}, 0.9, 100),
        point({"type": "verified", "threshold": 1.0, "window": None}, 0.9, 350),
        point({"type": "confidence", "threshold": 0.95, "measure": "probability"}, 0.85, 250),
        point({"type": "confidence", "threshold": 0.5, "measure": "margin"}, 0.6, 400),
    ),
    {"commit": "abc"},
)


def test_json_round_trip(tmp_path):
    """What is written is what is read, and other readers find labels and T/F."""
    (tmp_path / "frontier.json").write_text(FRONTIER.to_json())
    assert read_frontier(tmp_path) == FRONTIER
    rows = json.loads(FRONTIER.to_json())["points"]
    assert [row["label"] for row in rows] == [
        "exact",
        "verified 1",
        "confidence 0.95",
        "confidence 0.5 margin",
    ]
    assert rows[1]["tokens_per_forward"] == 3.5


def test_points_are_found_by_their_labels():
    """And one that is not there is told with those that are."""
    assert FRONTIER.point("verified 1").accuracy == 0.9
    with pytest.raises(KeyError, match="no point 'x'"):
        FRONTIER.point("x")


@pytest.mark.parametrize("text", ["{", "{}", '{"points": [{}]}', '{"points": []}', "[]"])
def test_what_is_no_frontier_is_refused(tmp_path, text):
    """A broken file must not become an empty policy."""
    (tmp_path / "frontier.json").write_text(text)
    with pytest.raises(CheckpointError, match="is no frontier"):
        read_frontier(tmp_path)


def test_a_missing_frontier_says_what_to_do(tmp_path):
    """The message names the command."""
    with pytest.raises(CheckpointError, match="mars-ray evaluate"):
        read_frontier(tmp_path)
