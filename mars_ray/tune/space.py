"""Turns a point of the search space into the training job of a trial. Does not use Ray.

A searcher draws a point: a number for each parameter, which for a choice is the index of its value.
Searchers therefore need not handle tables and lists.
"""

import json
import random
from collections.abc import Iterator, Mapping
from math import exp, log
from typing import Any

from mars_ray.config.load import parse_job, put_value
from mars_ray.config.modes import VerifiedMode
from mars_ray.config.train import MarsObjective, TrainJob
from mars_ray.config.tune import Choice, IntRange, LogUniform, Parameter, TuneJob
from mars_ray.errors import ConfigError

Point = Mapping[str, float]
# Number of random points to try besides corners; they find settings that exclude each other.
_TRIED_POINTS = 64


def values_at(job: TuneJob, point: Point) -> dict[str, Any]:
    """The settings of a point, by the keys of the space."""
    return {key: _value(parameter, point[key]) for key, parameter in job.space.items()}


def trial_job(job: TuneJob, values: Mapping[str, Any]) -> TrainJob:
    """The training job with these settings in its last stage. Raises ConfigError."""
    table = json.loads(job.train.model_dump_json(exclude_none=True))
    for key, value in values.items():
        keys = ["stages", job.stage_name, *key.split(".")]
        put_value(table, keys, value, f"space.{key}")
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    trained = parse_job(table, source=f"space at {shown}")
    assert isinstance(trained, TrainJob)
    return trained


def check_space(job: TuneJob) -> None:
    """Try the ends of every parameter, every choice, and random points, before anything starts.

    Raises ConfigError, naming the key, if one of them is not a valid training job, or if its model
    could not generate under the job's objectives.
    """
    for key, parameter in job.space.items():
        for value in _corners(parameter):
            _check_point(job, {key: value})
    generator = random.Random(job.seed)
    for _ in range(_TRIED_POINTS):
        _check_point(job, values_at(job, draw(job, generator)))


def _check_point(job: TuneJob, values: Mapping[str, Any]) -> None:
    objective = trial_job(job, values).stages[job.stage_name].objective
    if not isinstance(objective, MarsObjective):
        return
    asked, depth = job.objectives, objective.max_block_size
    rows = VerifiedMode(groups=asked.groups).most_rows(depth)
    if rows > asked.engine.step_tokens:
        raise ConfigError(
            f"objectives.engine.max_step_tokens {asked.engine.step_tokens} is too small: with "
            f"groups {asked.groups}, a model of block size {depth} generates by forwards of {rows} "
            "rows; set it to that at least, or lower objectives.groups"
        )


def draw(job: TuneJob, generator: random.Random) -> dict[str, float]:
    """A random point."""
    return {key: _draw(parameter, generator) for key, parameter in job.space.items()}


def _value(parameter: Parameter, drawn: float) -> Any:
    match parameter:
        case Choice(values=values):
            return _plain(values[int(drawn)])
        case IntRange(low=low, high=high):
            return min(max(low, int(drawn)), high)
        case _:
            # Population based training may step beyond the ends.
            return min(max(parameter.low, drawn), parameter.high)


def _plain(value: Any) -> Any:
    """A value as JSON has it; a frozen configuration has tuples."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise ConfigError(f"space: {value!r} is no number, text, list or table") from None


def _corners(parameter: Parameter) -> Iterator[Any]:
    if isinstance(parameter, Choice):
        yield from map(_plain, parameter.values)
    else:
        yield from (parameter.low, parameter.high)


def _draw(parameter: Parameter, generator: random.Random) -> float:
    match parameter:
        case Choice(values=values):
            return generator.randrange(len(values))
        case IntRange(low=low, high=high):
            return generator.randint(low, high)
        case LogUniform(low=low, high=high):
            return exp(generator.uniform(log(low), log(high)))
        case _:
            return generator.uniform(parameter.low, parameter.high)
