"""Answers are divided by their prompts, and loops do not train."""

import json

import pytest

from mars_ray.adapt.jobs import split
from mars_ray.errors import DataError


def rows(count: int) -> list[dict]:
    return [
        {"prompt_ids": [1, index], "answer_ids": [5, index, 6], "finish_reason": "stop"}
        for index in range(count)
    ]


def write(path, content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_is_in_one_part(tmp_path):
    """A row in both would be measured on what it was trained on."""
    done = split(write(tmp_path / "answers.jsonl", rows(50)), tmp_path, 4)
    train, held_out = read(done.train), read(done.held_out)
    assert (len(train), len(held_out)) == (46, 4) == (done.train_rows, done.held_out_rows)
    assert sorted(row["prompt_ids"][1] for row in train + held_out) == list(range(50))
    assert sum(len(row["answer_ids"]) for row in train) == 3 * 46


def test_the_order_of_rows_does_not_matter(tmp_path):
    """Actors write in any order, and a run that is resumed would hold out others."""
    first = split(write(tmp_path / "a.jsonl", rows(50)), tmp_path, 4)
    held_out = first.held_out.read_text()
    again = split(write(tmp_path / "b.jsonl", rows(50)[::-1]), tmp_path, 4)
    assert again.held_out.read_text() == held_out


def test_loops_are_cut_from_what_trains(tmp_path):
    """Held-out answers stay whole: they are what the model says."""
    looping = [row | {"answer_ids": [3] + [8] * 60} for row in rows(30)]
    done = split(write(tmp_path / "answers.jsonl", looping), tmp_path, 3)
    assert {tuple(row["answer_ids"]) for row in read(done.train)} == {(3, 8, 8)}
    assert {len(row["answer_ids"]) for row in read(done.held_out)} == {61}
    assert done.cut == 27


def test_too_few_answers_are_told(tmp_path):
    """A file of nine prompts, given by mistake."""
    with pytest.raises(DataError, match="has 9 answers, too few"):
        split(write(tmp_path / "answers.jsonl", rows(9)), tmp_path, 3)
