"""In bfloat16, how many answers of the plug-in equal plain vLLM's, and by how little others differ?

    python benchmarks/vllm_bfloat16.py jobs/evaluate-smollm2.toml OUTPUT.json \
        --vllm VENV/bin/python [--prompts 80] [--masks 4] [--threads 2] [KEY=VALUE ...]

VENV is as of `vllm_plugin.py`. Products of other shapes are rounded otherwise, so plain vLLM
differs from itself as well: batches of 7, and of 80, which have as many rows as 16 answers with
their masks, beside batches of 16 are the floor. All of it is done with eager and with compiled
engines, whose fused operations round less often: plain eager beside plain compiled vLLM is what
compiling alone changes. Each first difference is listed with the margin between the two likeliest
tokens there, as plain vLLM has it.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import argparse
import json
from pathlib import Path
from typing import Any

from identity import compared
from lib.vllm_side import BATCH
from vllm_plugin import beside, tokens_per_forward

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import load_job
from mars_ray.evaluate.tasks import kinds_in_turn, problems_of, prompts_of
from mars_ray.model.load import load_tokenizer, stop_ids_of
from mars_ray.provenance import provenance

OTHERS = (BATCH // 2 - 1, 5 * BATCH)


def task_of(job: EvaluateJob, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the process with both vLLMs is told."""
    tokenizer = load_tokenizer(job.checkpoint)
    problems = kinds_in_turn(problems_of(job.task))[: arguments.prompts]
    return {
        "checkpoint": str(Path(job.checkpoint).resolve()),
        "adapter": job.engine.draft_adapter and str(Path(job.engine.draft_adapter).resolve()),
        "dtype": "bfloat16",
        "prompts": prompts_of(problems, tokenizer),
        "stops": sorted(stop_ids_of(job.checkpoint, tokenizer)),
        "max_new_tokens": job.max_new_tokens,
        "max_context": job.engine.max_context,
        "masks": arguments.masks,
        "mars": {"masks_by_running": [[1, arguments.masks]]},
        "threads": arguments.threads,
        "other_batches": OTHERS,
    }


def compare(eager: dict[str, Any], compiled: dict[str, Any]) -> dict[str, Any]:
    """The plug-in and the floors, each against plain vLLM in batches of 16 of the same kind."""

    def row(name: str, found: dict[str, Any], answers: list[list[int]]) -> dict[str, Any]:
        both = [[{"tokens": tokens} for tokens in side] for side in (found["plain"], answers)]
        made = compared(name, *both)
        for difference in made["differences"]:
            difference["margin"] = found["margins"][difference["prompt"]][difference["at"]]
        return made

    rows = []
    for kind, found in (("eager", eager), ("compiled", compiled)):
        own = row(f"plug-in, {kind}, batch {BATCH}", found, found["mars"])
        own["tokens_per_forward"] = tokens_per_forward(found["mars"], found["forwards"])
        rows.append(own)
        for size, answers in zip(OTHERS, found["again"], strict=True):
            rows.append(row(f"plain, {kind}, batch {size}", found, answers))
    return {
        "against": f"plain vLLM in batches of {BATCH}, eager or compiled alike, but for the last",
        "prompts": len(eager["plain"]),
        "identical_share": rows[0]["identical"],
        "compiled_share": rows[len(rows) // 2]["identical"],
        "rows": rows,
        "floor": row("plain eager against plain compiled", compiled, eager["plain"]),
        "vllm": eager["vllm"],
    }


def main() -> None:
    """Have both sides answer, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("output", type=Path)
    parser.add_argument("--vllm", required=True, help="the Python of vLLM's environment")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--masks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of vLLM")
    arguments, overrides = parser.parse_known_args()
    job = load_job(arguments.job, overrides)
    assert isinstance(job, EvaluateJob), "a job of kind evaluate"
    task = task_of(job, arguments)
    found = compare(*(beside(arguments, task | {"eager": eager}) for eager in (True, False)))
    result = {"job": job.model_dump(mode="json")} | found | {"provenance": provenance()}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    shown = ("prompts", "identical_share", "compiled_share")
    print(json.dumps({key: result[key] for key in shown}))


if __name__ == "__main__":
    main()
