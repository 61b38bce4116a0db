"""Divides the model's answers into a training part and a held-out part.

    answers.jsonl        what `mars-ray generate` wrote
    train.jsonl          the rows that train
    held_out.jsonl       the others: nothing is trained on them

Whether a row is held out depends on its prompt only, not on the order of rows. A greedy model that
repeats itself for ever teaches nothing by it, so answers are cut after the second round of a loop.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_ray.core.loops import before_loop
from mars_ray.errors import DataError
from mars_ray.files import write_whole

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Split:
    """The files of the two parts, and counts of their content."""

    train: Path
    held_out: Path
    train_rows: int
    held_out_rows: int
    train_tokens: int
    cut: int  # answers of the training part that ended in a loop


def split(answers: Path, directory: Path, held_out: int) -> Split:
    """Divide the rows: `held_out` of them, but at most a tenth, are held out.

    Raises DataError if there are too few to divide.
    """
    rows = sorted(_rows(answers), key=_order)
    count = min(held_out, len(rows) // 10)
    if count < 1:
        raise DataError(
            f"{answers} has {len(rows)} answers, too few to train on and to hold some out: "
            "at least 10 are needed. Give more prompts, or more time"
        )
    train, cut = _without_loops(rows[count:])
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, part in zip(paths, (train, rows[:count]), strict=True):
        write_whole(path, "".join(json.dumps(row) + "\n" for row in part))
    tokens = sum(len(row["answer_ids"]) for row in train)
    return Split(*paths, len(train), count, tokens, cut)


def _rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _order(row: Row) -> str:
    return hashlib.sha256(json.dumps(row["prompt_ids"]).encode()).hexdigest()


def _without_loops(rows: list[Row]) -> tuple[list[Row], int]:
    kept, cut = [], 0
    for row in rows:
        answer = before_loop(row["answer_ids"])
        if len(answer) < len(row["answer_ids"]):
            row = row | {"answer_ids": answer, "finish_reason": "length"}
            cut += 1
        kept.append(row)
    return kept, cut
