"""What each rank and each matrix of a draft adapter's LoRA is worth, by cutting them off.

    python benchmarks/adapter_ranks.py JOB.toml OUTPUT.json [--prompts N] [--rounds N] [KEY=VALUE]
    python benchmarks/adapter_ranks.py JOB.toml --keep 8 DIRECTORY

Every LoRA is cut to its largest singular values (`cut`), or left out for one matrix of all layers,
without further training. Each variant answers the job's prompts greedily, one at a time: with all
masks behind all drafts, which gives T/F, and as served, which gives tokens a second over `exact`.
For each prompt the variants take turns. With `--keep` the adapter of that rank is written instead.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import load_job
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.evaluate.tasks import kinds_in_turn, problems_of, prompts_of
from mars_ray.model.draft_adapter import (
    DraftAdapter,
    Lora,
    read_draft_adapter,
    write_draft_adapter,
)
from mars_ray.model.load import load_tokenizer, stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

RANKS = (16, 8, 4)
LEFT_OUT = 8  # the rank of variants that lack a matrix
BATCH = 16  # where T/F is counted


def cut(adapter: DraftAdapter, rank: int, without: str | None = None) -> DraftAdapter:
    """The adapter whose LoRA has this rank, nearest to its own, and none on one kind of matrix."""
    card, lora = adapter.card, {}
    for name, (down_RI, up_OR) in adapter.lora.items():
        if name.rpartition(".")[2] == without:
            continue
        up_OO, inner_RR = torch.linalg.qr(up_OR)
        down_II, other_RR = torch.linalg.qr(down_RI.T)
        left_RR, values_R, right_RR = torch.linalg.svd(inner_RR @ other_RR.T)
        root_R = values_R[:rank].sqrt()
        lora[name] = Lora(
            root_R[:, None] * (down_II @ right_RR[:rank].T).T, up_OO @ left_RR[:, :rank] * root_R
        )
    own = replace(
        card,
        rank=rank,
        alpha=card.scale * rank,
        targets=tuple(target for target in card.targets if target != without),
        training=card.training | {"rank": card.rank},
    )
    return replace(adapter, card=own, lora=lora)


class Comparison:
    """An engine for each variant, and what it answered in how many seconds."""

    def __init__(self, job: EvaluateJob, prompts: int, console: Console) -> None:
        self.job, self.console = job, console
        problems = kinds_in_turn(problems_of(job.task))
        self.prompts = prompts_of(problems, load_tokenizer(job.checkpoint))[:prompts]

    def engine(self, adapter: Path, batch: int, *, control: bool) -> Engine:
        """An engine of the job with this adapter."""
        changes = {"draft_adapter": str(adapter), "max_batch": batch, "window_control": control}
        own = self.job.engine.model_copy(update=changes | {"prefix_cache": False})
        return load_engine(self.job.checkpoint, EngineConfig(**own.model_dump()))[0]

    def answers(self, engine: Engine, mode: Mode, numbers: range) -> tuple[list[Any], float]:
        """Completions of some prompts, and seconds."""
        stops = stop_ids(engine.model)
        requests = [
            Request(str(i), self.prompts[i], mode, Sampling(), self.job.max_new_tokens, stops)
            for i in numbers
        ]
        began = time.perf_counter()
        return generate_all(engine, requests, lambda _: None), time.perf_counter() - began

    def tokens_per_forward(self, adapter: Path) -> float:
        """T/F with all masks behind all drafts."""
        engine = self.engine(adapter, BATCH, control=False)
        done, _ = self.answers(engine, VerifiedMode(groups=1), range(len(self.prompts)))
        return sum(len(one.tokens) for one in done) / sum(one.forwards for one in done)

    def speeds(self, adapters: dict[str, Path], rounds: int) -> dict[str, Any]:
        """Tokens a second over `exact` of every adapter, and of drafts from the text alone."""
        first = next(iter(adapters.values()))
        arms: dict[str, tuple[Engine, Mode]] = {
            "exact": (self.engine(first, 1, control=True), ExactMode()),
            "n-grams alone": (self.engine(first, 1, control=True), VerifiedMode(window=0)),
        }
        for name, path in adapters.items():
            arms[name] = self.engine(path, 1, control=True), VerifiedMode()
        seconds: dict[str, list[float]] = {name: [0.0] * rounds for name in arms}
        same, names = dict.fromkeys(arms, 0), list(arms)
        with Bars(self.console) as bars:
            task = bars.add_task("prompts", total=rounds * len(self.prompts))
            for turn in range(rounds * len(self.prompts)):
                place, number = divmod(turn, len(self.prompts))
                start, texts = turn % len(names), {}
                for name in names[start:] + names[:start]:
                    done, took = self.answers(*arms[name], range(number, number + 1))
                    seconds[name][place] += took
                    texts[name] = done[0].tokens
                for name, text in texts.items():
                    same[name] += text == texts["exact"]
                bars.advance(task)
        plain = seconds["exact"]
        ratios = {
            name: [a / b for a, b in zip(plain, own, strict=True)] for name, own in seconds.items()
        }
        return {
            name: {
                "over_exact": statistics.median(own),
                "least": min(own),
                "most": max(own),
                "identical": same[name] / (rounds * len(self.prompts)),
            }
            for name, own in ratios.items()
        }


def main() -> None:
    """Measure all variants, or keep one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", nargs=2, metavar=("RANK", "DIRECTORY"))
    asked, settings = parser.parse_known_args()
    job = load_job(asked.job, settings)
    assert isinstance(job, EvaluateJob), "a job of kind evaluate"
    assert job.engine.draft_adapter, "a job with a draft adapter"
    whole = read_draft_adapter(job.engine.draft_adapter, None)
    if asked.keep:
        write_draft_adapter(asked.keep[1], cut(whole, min(int(asked.keep[0]), whole.card.rank)))
        return
    folder = asked.output.with_suffix(".adapters")
    adapters = {f"rank {whole.card.rank}": Path(job.engine.draft_adapter)}
    cuts = {f"rank {rank}": cut(whole, rank) for rank in RANKS}
    cuts |= {
        f"rank {LEFT_OUT} without {target}": cut(whole, LEFT_OUT, target)
        for target in whole.card.targets
    }
    for name, adapter in cuts.items():
        adapters[name] = folder / name.replace(" ", "_")
        write_draft_adapter(adapters[name], adapter)
    run = Comparison(job, asked.prompts, Console(stderr=True))
    speeds = run.speeds(adapters, asked.rounds)
    for name, path in adapters.items():
        speeds[name]["tokens_per_forward"] = run.tokens_per_forward(path)
    result = {
        "prompts": asked.prompts,
        "rounds": asked.rounds,
        "max_new_tokens": job.max_new_tokens,
        "variants": speeds,
        "provenance": provenance(),
    }
    asked.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
