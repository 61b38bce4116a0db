"""The built-in corpus: grade-school word problems, made from a seed and the texts of corpus.toml.

Every step keeps to small numbers: a result of at most 50, and one single-digit operand in a sum or
difference. Models of this size fail to learn addition of two two-digit numbers.
"""

import itertools
import operator
import random
import re
import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from mars_ray.errors import DataError

Split = Literal["train", "test"]
Expression = tuple[str, str, str]  # left, operation, right, as in ("a", "+", "b")
Numbers = dict[str, int]

_EXPRESSION = re.compile(r"\[(\w) ([-+x]) (\w)\]")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "x": operator.mul}
_RESULTS = "xyz"
_LARGEST_RESULT = 50
_RANGES = {"a": range(2, 21), "b": range(2, 10), "c": range(2, 10), "d": range(2, 10)}
# One question in eight is held out.
_HELD_OUT_OF = 8
# This many draws in a row without a new question mean that the corpus is nearly exhausted.
_PATIENCE = 10_000


@dataclass(frozen=True, slots=True)
class Template:
    """A question and the sentences that solve it, one sentence per step."""

    question: str
    steps: tuple[str, ...]
    answer: str  # the last result as arithmetic with the numbers of the question


_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NAMES, THINGS, BOXES = _TEXTS["names"], _TEXTS["things"], _TEXTS["boxes"]
OPENINGS, CLOSINGS = _TEXTS["openings"], _TEXTS["closings"]
TEMPLATES = [Template(**t | {"steps": tuple(t["steps"])}) for t in _TEXTS["templates"]]


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the answer, and a worked solution that ends with `#### <answer>`."""

    question: str
    solution: str
    answer: int


def problems(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` different problems; the same arguments give the same list.

    No question of one split occurs in the other, whatever the counts and seeds. Raises DataError
    if the corpus does not hold that many.
    """
    rng = random.Random(f"{split}/{seed}")
    found: dict[str, Problem] = {}
    wasted = 0
    while len(found) < count:
        template = rng.choice(TEMPLATES)
        name, friend = rng.sample(NAMES, 2)
        box, boxes = rng.choice(BOXES)
        fields = {"name": name, "friend": friend, "box": box, "boxes": boxes}
        fields["things"] = rng.choice(THINGS)
        numbers = rng.choice(admissible_numbers(_plan(template)[0]))
        question = template.question.format(**fields, **numbers)
        # A question's split depends on a hash of its text and nothing else.
        own = "test" if zlib.crc32(question.encode()) % _HELD_OUT_OF == 0 else "train"
        if own == split and question not in found:
            found[question] = _solved(question, template, fields, numbers, rng)
            wasted = 0
        elif (wasted := wasted + 1) > _PATIENCE:
            raise DataError(
                f"the built-in corpus ran out of new {split} problems after {len(found)}; "
                f"ask for fewer than {count}"
            )
    return list(found.values())


def _solved(
    question: str, template: Template, words: dict[str, str], numbers: Numbers, rng: random.Random
) -> Problem:
    expressions, sentences = _plan(template)
    known = evaluate(expressions, numbers)
    assert known is not None, "numbers are drawn from the admissible ones"
    text = " ".join((_pick(OPENINGS, rng), *sentences, _pick(CLOSINGS, rng)))
    last = known[_RESULTS[len(expressions) - 1]]
    solution = text.format(**words, **known, answer=last) + f"\n#### {last}"
    return Problem(question, solution, last)


def _pick(options: Sequence[tuple[str, float]], rng: random.Random) -> str:
    """One text, drawn by the weights."""
    point = rng.random()
    for text, weight in options:
        point -= weight
        if point < 0:
            return text
    return options[-1][0]


@cache
def _plan(template: Template) -> tuple[tuple[Expression, ...], tuple[str, ...]]:
    """The expressions of the steps, and the steps with `[a + b]` written as `{a} + {b} = {x}`."""
    expressions: list[Expression] = []
    sentences: list[str] = []
    for step, result in zip(template.steps, _RESULTS, strict=False):
        match = _EXPRESSION.search(step)
        assert match, f"no expression in {step!r}"
        left, operation, right = match.groups()
        expressions.append((left, operation, right))
        worked = f"{{{left}}} {operation} {{{right}}} = {{{result}}}"
        sentences.append(step.replace(match.group(), worked))
    return tuple(expressions), tuple(sentences)


@cache
def admissible_numbers(expressions: tuple[Expression, ...]) -> tuple[Numbers, ...]:
    """All operands for which every step of a solution keeps to small numbers."""
    names = sorted({name for left, _, right in expressions for name in left + right} - {*_RESULTS})
    candidates = itertools.product(*(_RANGES[name] for name in names))
    numbered = (dict(zip(names, values, strict=True)) for values in candidates)
    return tuple(numbers for numbers in numbered if evaluate(expressions, numbers) is not None)


def evaluate(expressions: tuple[Expression, ...], numbers: Numbers) -> Numbers | None:
    """The numbers with the results x, y, z of the steps, or None if a step is too hard."""
    known = dict(numbers)
    for (left, operation, right), name in zip(expressions, _RESULTS, strict=False):
        operands = known[left], known[right]
        result = _OPERATIONS[operation](*operands)
        easy = max(operands) < 10 if operation == "x" else min(operands) < 10
        if not easy or not 1 <= result <= _LARGEST_RESULT:
            return None
        known[name] = result
    return known
