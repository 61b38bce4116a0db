"""Tokens per second in `exact` and with drafts: one engine, the same prompts, in turn."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from mars_ray.adapt.report import Speed
from mars_ray.config.adapt import MeasureConfig
from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.core.statistics import ratio_fault
from mars_ray.decode.engine import generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.evaluate.tasks import Problem, prompts_of
from mars_ray.model.load import stop_ids
from mars_ray.progress import Bars

_MODES = (ExactMode(), VerifiedMode())
_Decode = Callable[[Mode, Sequence[tuple[int, ...]]], list[Completion]]


def measure_speeds(
    base: Path,
    adapter: Path,
    problems: Sequence[Problem],
    config: MeasureConfig,
    console: Console,
    *,
    one_text: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Speed]:
    """Speeds at every batch size. Both modes answer a batch before the next one, so that a drift of
    the machine affects them alike; the first answers warm up and are not counted.

    With `one_text`, answers that differ between the modes are a fault. They may in bfloat16, and
    then two texts are timed.
    """
    if not config.batch_sizes:
        return []
    changes = {"draft_adapter": str(adapter), "prefix_cache": False}
    changes |= {"max_batch": max(config.batch_sizes)}
    engine, tokenizer = load_engine(base, config.engine.model_copy(update=changes))
    # Prompts of all kinds in equal shares.
    step = max(1, len(problems) // config.speed_prompts)
    prompts = prompts_of(problems[::step][: config.speed_prompts], tokenizer)
    stops = stop_ids(engine.model)

    def decode(mode: Mode, batch: Sequence[tuple[int, ...]]) -> list[Completion]:
        requests = [
            Request(str(index), prompt, mode, Sampling(), config.max_new_tokens, stops)
            for index, prompt in enumerate(batch)
        ]
        return generate_all(engine, requests)

    for mode in _MODES:
        decode(mode, prompts[: max(config.batch_sizes)])
    speeds = []
    with Bars(console) as bars:
        bar = bars.add_task("speeds", total=len(config.batch_sizes) * config.rounds)
        for size in config.batch_sizes:
            starts = range(0, max(1, len(prompts) - size + 1), size)
            batches = [prompts[start : start + size] for start in starts]
            rounds = []
            for _ in range(config.rounds):
                rounds.append(_round(decode, batches, clock))
                bars.advance(bar)
            speeds.append(_speed(size, rounds, one_text))
    return speeds


@dataclass(slots=True)
class _Run:
    """One mode's answers in one round."""

    seconds: float = 0.0
    answers: list[Completion] = field(default_factory=list)
    steps: int = 0  # forwards of each batch's longest answer

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def forwards(self) -> int:
        return sum(answer.forwards for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def _round(
    decode: _Decode, batches: Sequence[Sequence[tuple[int, ...]]], clock: Callable[[], float]
) -> list[_Run]:
    runs = [_Run() for _ in _MODES]
    for batch in batches:
        for mode, run in zip(_MODES, runs, strict=True):
            begun = clock()
            answers = decode(mode, batch)
            run.seconds += clock() - begun
            run.answers += answers
            run.steps += max(answer.forwards for answer in answers)
    return runs


def _speed(size: int, rounds: Sequence[Sequence[_Run]], one_text: bool) -> Speed:
    exact, drafts = (list(runs) for runs in zip(*rounds, strict=True))
    same = [
        own.tokens == plain.tokens
        for runs in rounds
        for plain, own in zip(*(run.answers for run in runs), strict=True)
    ]
    tokens_per_forward = sum(run.tokens for run in drafts) / sum(run.forwards for run in drafts)
    # A step costs something for itself and something for each sequence in it, and with drafts no
    # less than without: time falls at most as steps or forwards do, whichever fall more.
    fewer_steps = sum(run.steps for run in exact) / sum(run.steps for run in drafts)
    speed = Speed(
        batch=size,
        exact=[run.tokens_per_s for run in exact],
        drafts=[run.tokens_per_s for run in drafts],
        tokens_per_forward=tokens_per_forward,
        same=sum(same) / len(same),
        fault=None,
    )
    if one_text and speed.same < 1:
        return replace(speed, fault=f"{1 - speed.same:.1%} of the answers differ from exact's")
    return replace(speed, fault=ratio_fault(speed.ratios, max(tokens_per_forward, fewer_steps)))
