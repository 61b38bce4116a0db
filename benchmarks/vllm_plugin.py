"""vLLM with the plug-in beside plain vLLM and our own engine: text, T/F, tokens per second.

    python benchmarks/vllm_plugin.py jobs/evaluate-smollm2.toml OUTPUT.json --vllm VENV/bin/python \
        [--prompts 200] [--batches 1,4,8,16] [--timed N] [--repeats 5] [--processes 1]
        [KEY=VALUE ...]

The prompts are the job's, its kinds in turn. Our engine decodes them in `verified` with one group
of masks, every step with all of them, which is what the plug-in does. Both vLLMs live in one
process of VENV (`lib/vllm_side.py`) and answer all prompts in batches of 16. Then those whose
answers neither loop nor end at once, or --timed of them, are answered again in batches of each
size, each batch by plain vLLM and by the plug-in in turn. A result holds medians of the seconds,
and ratios of those that stood side by side. Of several --processes every second one makes the
plug-in's engine first: two engines of one process need not be equally fast, whatever they decode.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import load_job
from mars_ray.config.modes import VerifiedMode
from mars_ray.core.statistics import is_looping
from mars_ray.decode.engine import generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.evaluate.tasks import kinds_in_turn, problems_of, prompts_of
from mars_ray.model.load import load_tokenizer, stop_ids
from mars_ray.provenance import provenance

SIDE = Path(__file__).parent / "lib" / "vllm_side.py"
BATCH = 16


def ours(job: EvaluateJob, prompts: list[tuple[int, ...]]) -> dict[str, Any]:
    """Answers and T/F of our engine with one group of masks."""
    changes = {"prefix_cache": False, "window_control": False, "max_batch": BATCH}
    settings = job.engine.model_copy(update=changes | {"dtype": "float32"}).model_dump()
    engine = load_engine(job.checkpoint, EngineConfig(**settings))[0]
    stops = stop_ids(engine.model)
    requests = [
        Request(str(index), prompt, VerifiedMode(groups=1), Sampling(), job.max_new_tokens, stops)
        for index, prompt in enumerate(prompts)
    ]
    done = generate_all(engine, requests, lambda _: None)
    answers = [list(completion.tokens) for completion in done]
    return {
        "stops": sorted(stops),
        "answers": answers,
        "forwards": [completion.forwards for completion in done],
    }


def tokens_per_forward(answers: list[list[int]], forwards: list[int]) -> dict[str, float]:
    """T/F over all answers, and over those that do not loop."""
    pairs = list(zip(answers, forwards, strict=True))
    straight = [pair for pair in pairs if not is_looping(pair[0])] or pairs
    return {
        name: sum(len(tokens) for tokens, _ in part) / sum(count for _, count in part)
        for name, part in (("all", pairs), ("without_loops", straight))
    }


def beside(arguments: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any]:
    """What the process with both vLLMs says."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "task.json", Path(folder) / "found.json"
        given.write_text(json.dumps(task))
        command = [arguments.vllm, str(SIDE), str(given), str(found)]
        subprocess.run(command, check=True, env=os.environ | _openmp(Path(arguments.vllm)))
        return json.loads(found.read_text())


def _openmp(python: Path) -> dict[str, str]:
    """vLLM's CPU build wants Intel's OpenMP, which its environment has, loaded first."""
    library = python.parents[1] / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def _together(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The speed at one batch size over all processes, and what each of them found."""
    ratios = [ratio for row in rows for ratio in row["ratios"]]
    seconds = {
        name: [second for row in rows for second in row["seconds"][name]]
        for name in ("plain", "mars")
    }
    steps = {
        name: sum(row["steps"][name] for row in rows)
        for name in ("tokens", "forwards", "forwards_with_drafts", "forwards_with_masks")
    }
    tokens = rows[0]["tokens"]
    return {
        **{name: rows[0][name] for name in ("batch", "prompts", "tokens")},
        "plain_tokens_per_s": tokens / statistics.median(seconds["plain"]),
        "mars_tokens_per_s": tokens / statistics.median(seconds["mars"]),
        "over_plain": statistics.median(ratios),
        "ratios": ratios,
        "seconds": seconds,
        "steps": {
            **steps,
            "tokens_per_forward": steps["tokens"] / max(1, steps["forwards"]),
            "share_with_drafts": steps["forwards_with_drafts"] / max(1, steps["forwards"]),
        },
        "processes": [
            {"plug_in_first": number % 2 == 1, "over_plain": row["over_plain"]}
            for number, row in enumerate(rows)
        ],
    }


def result(job: EvaluateJob, arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one run."""
    problems = kinds_in_turn(problems_of(job.task))[: arguments.prompts]
    prompts = prompts_of(problems, load_tokenizer(job.checkpoint))
    own = ours(job, prompts)
    looping = [is_looping(answer) for answer in own["answers"]]
    task = {
        "checkpoint": str(Path(job.checkpoint).resolve()),
        "adapter": job.engine.draft_adapter and str(Path(job.engine.draft_adapter).resolve()),
        "prompts": prompts,
        "stops": own["stops"],
        "max_new_tokens": job.max_new_tokens,
        "max_context": job.engine.max_context,
        "straight": [index for index, loops in enumerate(looping) if not loops],
        "timed": arguments.timed,
        "batches": [int(size) for size in arguments.batches.split(",")],
        "repeats": arguments.repeats,
        "masks": arguments.masks,
        "mars": json.loads(arguments.mars),
        "threads": arguments.threads,
    }
    found = beside(arguments, task)
    task["timed_prompts"] = found.pop("timed_prompts")
    speeds = [found.pop("speed")]
    for number in range(1, arguments.processes):
        task["plug_in_first"] = number % 2 == 1
        speeds.append(beside(arguments, task)["speed"])
    plain, mars = found.pop("plain"), found.pop("mars")
    pairs = list(zip(plain, mars["answers"], strict=True))
    inside = tokens_per_forward(mars["answers"], mars["forwards"])
    reference = tokens_per_forward(own["answers"], own["forwards"])
    return {
        "job": job.model_dump(mode="json"),
        "prompts": len(prompts),
        "looping": sum(looping),
        "identical_share": sum(a == b for a, b in pairs) / len(pairs),
        "identical_to_ours": sum(a == b for a, b in zip(plain, own["answers"], strict=True))
        / len(pairs),
        "tokens_per_forward": {"vllm": inside, "ours": reference},
        "tf_over_ours": inside["without_loops"] / reference["without_loops"],
        **found,
        "speed": [_together(rows) for rows in zip(*speeds, strict=True)],
        "provenance": provenance(),
    }


def main() -> None:
    """Measure, write the result, and print the numbers that a reader looks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("output", type=Path)
    parser.add_argument("--vllm", required=True, help="the Python of vLLM's environment")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batches", default="1,4,8,16")
    parser.add_argument("--timed", type=int, help="how many of the prompts are timed; all of them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="that time both, one by one")
    parser.add_argument("--masks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of vLLM")
    parser.add_argument("--mars", default="{}", help="more of additional_config's mars, as JSON")
    arguments, overrides = parser.parse_known_args()
    job = load_job(arguments.job, overrides)
    assert isinstance(job, EvaluateJob), "a job of kind evaluate"
    found = result(job, arguments)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    shown = ("prompts", "identical_share", "tokens_per_forward", "tf_over_ours", "sampled", "speed")
    print(json.dumps({key: found[key] for key in shown}))


if __name__ == "__main__":
    main()
