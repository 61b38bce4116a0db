"""IFEval: how many instructions a model follows, in `exact` and below a threshold of 1.

    pip install "lm-eval[ifeval]" && pip install --target build/nltk --no-deps llama-index-core
    NLTK_DATA=build/nltk/llama_index/core/_static/nltk_cache \
        python benchmarks/ifeval.py benchmarks/results/ifeval.json

The checks are those of lm-eval. At import they want sentence rules of nltk, which would come from
the internet; the wheel of `llama-index-core` brings them. The detection of languages is seeded.
A prompt counts if the answer follows all of its instructions ("prompt-level strict").
"""

import argparse
import json
from pathlib import Path
from typing import Any

from lib import mars_model
from rich.console import Console

from mars_ray.config.decode import EngineConfig
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.core.frontier import Frontier, mode_label
from mars_ray.evaluate.run import print_table, run_evaluation, written

DATA = Path("../shared/data/ifeval/input_data.jsonl")
# With an adapter, `exact` is the model that nobody has trained.
ARMS = {
    "adapter": ("models/smollm2", "adapters/smollm2"),
    "mars": ("models/smollm2-mars", None),
}
_TOLD = ("accuracy", "accuracy_low", "accuracy_high", "difference", "difference_low")
_TOLD += ("difference_high", "p_value", "agreement", "identical", "tokens", "tokens_per_forward")


def follows(answer: str, reference: dict[str, Any]) -> bool:
    """Whether the answer follows all instructions of its prompt."""
    from lm_eval.tasks.ifeval import instructions, utils

    instructions.langdetect.DetectorFactory.seed = 0
    return utils.test_instruction_following_strict(
        utils.InputExample(**reference), answer
    ).follow_all_instructions


def main() -> None:
    """Answer all prompts in both arms and each mode, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--directory", type=Path, default=Path("runs/ifeval"))
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.9])
    parser.add_argument("--tokens", type=int, default=512, help="of an answer, at most")
    parser.add_argument("--limit", type=int, help="prompts, drawn at random")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    asked = parser.parse_args()
    rows = asked.directory / "prompts.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    prompts = [json.loads(line) for line in DATA.open()]
    with rows.open("w") as file:
        for row in prompts:
            print(json.dumps({"prompt": row["prompt"], "reference": row}), file=file)
    result = {"prompts": asked.limit or len(prompts), "max_new_tokens": asked.tokens}
    before = json.loads(asked.output.read_text()) if asked.output.exists() else {}
    if before.items() >= result.items():  # the other arms stay
        result = before
    for name in asked.arms:
        frontier = _measured(asked, name, rows)
        result.setdefault("arms", {})[name] = [
            {"mode": mode_label(point.mode)} | {key: getattr(point, key) for key in _TOLD}
            for point in frontier.points
        ]
        # Of the measurement, which may be an earlier run's.
        facts = {key: value for key, value in frontier.provenance.items() if key != "job"}
        result.setdefault("provenance", facts)
        result.setdefault("measured", {})[name] = facts
        asked.output.write_text(json.dumps(result, indent=1) + "\n")


def _measured(asked: argparse.Namespace, name: str, rows: Path) -> Frontier:
    """An arm's frontier; of an earlier run, if that was whole."""
    checkpoint, adapter = ARMS[name]
    mars_model.make(Path("models/smollm2"), Path("models/smollm2-mars"))
    drawn = {"limit": asked.limit, "shuffle_seed": 0} if asked.limit else {}
    job = EvaluateJob.model_validate(
        {
            "kind": "evaluate",
            "checkpoint": checkpoint,
            "output_dir": str(asked.directory / name),
            "task": {"type": "files", "paths": [str(rows)]}
            | {"grade": {"type": "function", "function": "ifeval:follows"}}
            | drawn,
            "modes": [{"type": "confidence", "threshold": each} for each in asked.thresholds],
            "max_new_tokens": asked.tokens,
            "engine": EngineConfig(
                max_batch=16,
                max_context=2048,
                dtype="bfloat16",
                window_control=False,
                draft_adapter=adapter,
            ).model_dump(),
        }
    )
    if (kept := written(job)) is not None:
        return kept
    done = run_evaluation(job, Console())
    print_table(done, Console())
    return done.frontier


if __name__ == "__main__":
    main()
