"""A sweep beside the paper's setting, and both again with other seeds.

    mars-ray tune jobs/tune-gsm8k.toml
    for seed in 0 1; do
      mars-ray tune jobs/tune-gsm8k.toml output_dir=runs/tune-gsm8k-$seed train.seed=$seed \\
          space='{"objective.noisy_share"={type="choice",values=[1.0,0.5]},
                  "objective.block_size"={type="choice",values=[{type="constant",size=4},
                      {type="mixed",sizes=[4,8],weights=[1.0,1.0]}]}}'
      mars-ray tune jobs/tune-gsm8k.toml output_dir=runs/tune-gsm8k-sft-$seed train.seed=$seed \\
          space='{"objective.ar_weight"={type="choice",values=[1.0,0.0]}}'
    done
    python benchmarks/sweep.py benchmarks/results/sweep.json runs/tune-gsm8k \\
        runs/tune-gsm8k-0 runs/tune-gsm8k-1 \\
        --clean-loss runs/tune-gsm8k-sft-0 runs/tune-gsm8k-sft-1

The first sweep chooses. The others say whether it holds: they have at least its winner and the
paper's setting among their trials, blocks of a constant size 4 and a noisy stream beside every
sequence. Those of --clean-loss vary the weight of the loss on the clean stream alone.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PAPER = {
    "objective.block_size": {"type": "constant", "size": 4},
    "objective.noisy_share": 1.0,
}


def main() -> None:
    """Write the sweep's trials, and the winner and the paper's setting by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--clean-loss", type=Path, nargs="+", default=[])
    asked = parser.parse_args()
    first, *others = map(_results, asked.sweeps)
    result = compared(first, others) | {
        "clean_loss": by_weight(map(_results, asked.clean_loss)),
        "provenance": first["provenance"],
    }
    asked.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["seeds"], indent=1))


def _results(sweep: Path) -> dict[str, Any]:
    result = json.loads((sweep / "results.json").read_text())
    for trial in result["trials"]:
        (log,) = sweep.glob(f"trials/{trial['trial']}/*/stages/*/metrics.jsonl")
        *_, last = (row for row in map(json.loads, log.open()) if row["kind"] == "train")
        trial["seconds"] = last["seconds"]
    return result


def by_weight(sweeps: Iterable[dict[str, Any]]) -> list[Row]:
    """What each weight of the loss on the clean stream gave, by seed."""
    kept = (
        "steps",
        "seconds",
        "clean_ce",
        "tokens_per_forward",
        "tokens_per_forward_expected",
        "threshold",
    )
    return [
        {"seed": sweep["job"]["train"]["seed"], "weight": trial["values"]["objective.ar_weight"]}
        | {name: trial[name] for name in kept}
        for sweep in sweeps
        for trial in sorted(
            sweep["trials"], key=lambda each: each["values"]["objective.ar_weight"], reverse=True
        )
    ]


def compared(first: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The first sweep's trials and settings; for each other the winner's T/F and the paper's."""
    winner = first["trials"][0]["values"]
    seeds = [
        {
            "seed": sweep["job"]["train"]["seed"],
            "winner": (won := _of(sweep["trials"], winner))["tokens_per_forward"],
            "paper": (papers := _of(sweep["trials"], PAPER))["tokens_per_forward"],
            "seconds": [won["seconds"], papers["seconds"]],
        }
        for sweep in others
    ]
    job = first["job"]
    (stage,) = job["train"]["stages"].values()
    return {
        "minutes": stage["minutes"],
        "most_lost": job["objectives"]["max_accuracy_loss"],
        "problems": sum(kind["limit"] for kind in job["objectives"]["task"]["kinds"].values()),
        "trials": first["trials"],
        "seeds": seeds,
    }


def _of(trials: list[Row], values: dict[str, Any]) -> Row:
    """The trial with these settings. Raises ValueError if it has not generated."""
    for trial in trials:
        if trial["values"] == values and trial["tokens_per_forward"] is not None:
            return trial
    raise ValueError(f"no trial with {values} has generated: raise objectives.max_survivors")


if __name__ == "__main__":
    main()
