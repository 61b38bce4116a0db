"""Tokens per second with drafts and in `exact`: one engine, the same prompts, in turn."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from mars_ray.adapt.report import Speed
from mars_ray.config.adapt import MeasureConfig
from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.evaluate.run import prompts_of
from mars_ray.evaluate.tasks import Problem
from mars_ray.model.stop import stop_ids

_DRAFTS = VerifiedMode()


def measure_speeds(
    base: Path,
    adapter: Path,
    problems: Sequence[Problem],
    config: MeasureConfig,
    say: Callable[[str], None],
) -> list[Speed]:
    """Speeds at every batch size; a first round warms up."""
    changes = {"draft_adapter": str(adapter), "prefix_cache": False}
    changes |= {"max_batch": max(config.batch_sizes)}
    engine, tokenizer = load_engine(base, config.engine.model_copy(update=changes))
    # Prompts of all kinds in equal shares.
    step = max(1, len(problems) // config.speed_prompts)
    prompts = prompts_of(problems[::step][: config.speed_prompts], tokenizer)
    speeds = []
    for batch in config.batch_sizes:
        rounds = [
            [_tokens_per_s(engine, mode, prompts, batch, config) for mode in (ExactMode(), _DRAFTS)]
            for _ in range(1 + config.rounds)
        ]
        exact, drafts = (list(column) for column in zip(*rounds[1:], strict=True))
        ratios = [ours / plain for plain, ours in zip(exact, drafts, strict=True)]
        speeds.append(Speed(batch, median(exact), median(drafts), median(ratios)))
        say(f"batch {batch}: {speeds[-1].ratio:.2f} times the tokens/s of exact")
    return speeds


def _tokens_per_s(
    engine: Engine,
    mode: Mode,
    prompts: Sequence[tuple[int, ...]],
    batch: int,
    config: MeasureConfig,
) -> float:
    """Tokens per second over batches that are answered one after the other."""
    stops = stop_ids(engine.model)
    tokens, seconds = 0, 0.0
    for start in range(0, max(1, len(prompts) - batch + 1), batch):
        requests = [
            Request(str(index), prompt, mode, Sampling(), config.max_new_tokens, stops)
            for index, prompt in enumerate(prompts[start : start + batch])
        ]
        begin_s = time.perf_counter()
        done = generate_all(engine, requests)
        seconds += time.perf_counter() - begin_s
        tokens += sum(len(completion.tokens) for completion in done)
    return tokens / seconds
