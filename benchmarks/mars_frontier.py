"""The paper's threshold on a pretrained model and real prompts of five kinds.

    python benchmarks/mars_frontier.py models/smollm2 benchmarks/results/mars_frontier.json

Two arms of one model: its draft adapter, and the model that MARS has trained, which is made of
`--mars-lora` if it is not there. What a threshold costs in words is told by the arm's own choices,
one forward later, and by the model that nobody has trained: its choices, and how likely it finds
the answers. What was measured before is kept, also with `--arms` of which one is left out.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lib import mars_model
from rich.console import Console

from mars_ray.config.decode import EngineConfig
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import load_job
from mars_ray.core.frontier import Frontier, mode_label, read_frontier
from mars_ray.data.chat import encoder_of
from mars_ray.decode.loading import engine_model
from mars_ray.errors import CheckpointError
from mars_ray.evaluate.run import ANSWERS_FILE, is_whole, print_table, run_evaluation
from mars_ray.evaluate.tasks import problems_of, prompts_of
from mars_ray.model.forward import hidden_states, output_head
from mars_ray.model.load import load_tokenizer
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

JOB = "jobs/evaluate-smollm2.toml"
_THRESHOLDS = (0.95, 0.9, 0.8, 0.6)
_MODES: list[dict[str, Any]] = [
    {"type": "confidence", "threshold": threshold} for threshold in _THRESHOLDS
]
_FEW: list[dict[str, Any]] = [
    {"type": "confidence", "threshold": 0.7},
    {"type": "confidence", "threshold": 0.5},
    {"type": "confidence", "threshold": 0.5, "measure": "margin"},
    {"type": "confidence", "threshold": 0.5, "measure": "entropy"},
    {"type": "verified"},
]
# These need masks of the checkpoint itself.
_OWN_MASKS: list[dict[str, Any]] = [
    *({"type": "block_cached", "threshold": 0.9, "cache_block": size} for size in (4, 8, 16)),
    {"type": "jacobi"},
]


def main() -> None:
    """Measure both arms, score their answers, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("original", help="the model that nobody has trained")
    parser.add_argument("output", type=Path)
    parser.add_argument("--arms", nargs="+", default=["mars", "adapter"])
    parser.add_argument("--adapter", default="adapters/smollm2")
    parser.add_argument("--mars", default="models/smollm2-mars")
    parser.add_argument("--mars-lora", type=Path, default=mars_model.LORA)
    parser.add_argument("--directory", type=Path, default=Path("runs/mars-frontier"))
    parser.add_argument("--prompts", type=int, default=20, help="of a kind")
    parser.add_argument("--scored", type=int, default=10, help="answers a kind and mode")
    parser.add_argument("--few", type=int, default=5, help="of a kind, for other modes; 0: none")
    asked = parser.parse_args()
    console = Console()
    mars_model.make(Path(asked.original), Path(asked.mars), asked.mars_lora)
    before = json.loads(asked.output.read_text()) if asked.output.exists() else {}
    arms, commits = before.get("arms", {}), before.get("commits", {})
    facts = provenance()
    for name, checkpoint, adapter in (
        ("mars", asked.mars, None),
        ("adapter", asked.original, asked.adapter),
    ):
        if name not in asked.arms:
            continue
        few = [*_FEW, *([] if adapter else _OWN_MASKS)]
        parts = [
            _measured(asked, checkpoint, adapter, name, _MODES, asked.prompts, console),
        ]
        if asked.few:
            parts.append(
                _measured(asked, checkpoint, adapter, f"{name}-few", few, asked.few, console)
            )
        arms[name] = [
            # All masks are made here, also those that do not pay: no time is told.
            {name: value for name, value in row.items() if name != "tokens_per_s"} | scores
            for directory, frontier in parts
            for row, scores in zip(
                json.loads(frontier.to_json())["points"],
                _scored(asked, directory, frontier),
                strict=True,
            )
        ]
        commits[name] = facts["commit"]
    result = {
        "original": Path(asked.original).name,
        "trained_mask_tokens": _trained_mask_tokens(asked),
        "arms": arms,
        "commits": commits,
        "provenance": facts,
    }
    asked.output.write_text(json.dumps(result, indent=1) + "\n")


def _trained_mask_tokens(asked: argparse.Namespace) -> dict[str, int]:
    """What each arm's training has seen, as it has told itself."""
    lines = (asked.mars_lora / "metrics.jsonl").read_text().splitlines()
    *_, last = (row for row in map(json.loads, lines) if row["kind"] == "train")
    training = json.loads((Path(asked.adapter) / "training.json").read_text())
    return {"mars": last["mask_tokens"], "adapter": training["metrics"]["mask_tokens"]}


def _job(
    asked: argparse.Namespace,
    checkpoint: str,
    adapter: str | None,
    modes: list[dict[str, Any]],
    limit: int,
    directory: Path,
) -> EvaluateJob:
    job = load_job(JOB, kinds={"evaluate": EvaluateJob})
    given = job.model_dump(mode="json") | {
        "checkpoint": checkpoint,
        "output_dir": str(directory),
        "modes": modes,
        "engine": EngineConfig(max_batch=16, max_context=1536, draft_adapter=adapter).model_dump(),
    }
    for kind in given["task"]["kinds"].values():
        kind |= {"limit": limit, "shuffle_seed": 0}
    return EvaluateJob.model_validate(given)


def _measured(
    asked: argparse.Namespace,
    checkpoint: str,
    adapter: str | None,
    name: str,
    modes: list[dict[str, Any]],
    limit: int,
    console: Console,
) -> tuple[Path, Frontier]:
    """A part's directory and frontier; of an earlier run, if that was whole."""
    directory = asked.directory / name
    job = _job(asked, checkpoint, adapter, modes, limit, directory)
    try:
        kept = read_frontier(directory)
        if is_whole(kept) and kept.provenance["job"] == job.model_dump(mode="json"):
            return directory, kept
    except CheckpointError:
        pass
    done = run_evaluation(job, console)
    print_table(done, console)
    return directory, done.frontier


@torch.inference_mode()
def _scored(
    asked: argparse.Namespace, directory: Path, frontier: Frontier
) -> Iterator[dict[str, Any]]:
    """For each point: the mean negative log-likelihood of its answers' tokens by the original, and
    the share that the original would have chosen itself. The first `scored` answers of a kind,
    their texts encoded again."""
    job = EvaluateJob.model_validate(frontier.provenance["job"])
    tokenizer, problems = load_tokenizer(asked.original), problems_of(job.task)
    prompts, encoder = prompts_of(problems, tokenizer), encoder_of(tokenizer)
    rows = [json.loads(line) for line in (directory / ANSWERS_FILE).open()]
    path = directory / "scores.json"
    kept: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    model = engine_model(asked.original, EngineConfig(dtype="float32", device="cpu"))
    with Bars(Console()) as bars:
        for number, point in enumerate(frontier.points):
            answers = rows[number * len(problems) : (number + 1) * len(problems)]
            task = bars.add_task(f"likelihood {mode_label(point.mode)}", total=len(problems))
            seen: dict[str, int] = {}
            sums = []
            for problem, prompt, answer in zip(problems, prompts, answers, strict=True):
                bars.advance(task)
                kind = problem.kind or ""
                seen[kind] = seen.get(kind, 0) + 1
                if seen[kind] > asked.scored or not answer["text"]:
                    continue
                key = f"{problem.question}\n{answer['text']}"
                if key not in kept:
                    said = encoder.encode([[(answer["text"], True)]])[0].input_ids.tolist()
                    kept[key] = _score(model, prompt, said)
                sums.append(kept[key])
            path.write_text(json.dumps(kept))
            tokens = sum(count for count, *_ in sums)
            yield {
                "scored": len(sums),
                "nll_by_original": sum(nll for _, nll, _ in sums) / tokens,
                "agreement_with_original": sum(same for *_, same in sums) / tokens,
                "nll_by_original_se": statistics.stdev(nll / n for n, nll, _ in sums)
                / len(sums) ** 0.5,
            }


def _score(model: Any, prompt: tuple[int, ...], said: list[int]) -> list[float]:
    """Tokens of an answer, the sum of their negative log-likelihoods, and how many of them are the
    model's own choice."""
    ids = torch.tensor([[*prompt, *said]])
    rows = ids.shape[1]
    sees_RR = torch.ones(rows, rows, dtype=torch.bool).tril()
    hidden = hidden_states(model, ids, torch.arange(rows)[None], sees_RR[None, None])
    logits_AV = output_head(model)(hidden[0, len(prompt) - 1 : -1]).float()
    nll = torch.nn.functional.cross_entropy(logits_AV, ids[0, len(prompt) :], reduction="sum")
    same = (logits_AV.argmax(dim=-1) == ids[0, len(prompt) :]).sum()
    return [len(said), nll.item(), same.item()]


if __name__ == "__main__":
    main()
