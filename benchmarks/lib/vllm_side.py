"""The part of `vllm_plugin.py` that vLLM's Python runs: TASK.json FOUND.json."""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 16
# The engine in this process, on the threads that it is given, without a word to the world.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Answers of fewer tokens say nothing about speed.
_LEAST_TOKENS = 16


class Sides:
    """Plain vLLM and vLLM with the plug-in, on the same checkpoint."""

    def __init__(self, task: dict[str, Any]) -> None:
        from vllm import LLM

        self.task = task
        common: dict[str, Any] = {
            "model": task["checkpoint"],
            "dtype": task.get("dtype", "float32"),
            "max_model_len": task["max_context"],
            "max_num_seqs": BATCH,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "enforce_eager": task.get("eager", False),
        }
        # Plain vLLM may be asked for larger batches than the plug-in.
        larger = {"max_num_seqs": max([BATCH, *task.get("other_batches", [])])}
        adapter = {"adapter": task["adapter"]} if task["adapter"] else {}
        drafting: dict[str, Any] = {
            "speculative_config": {
                "method": "custom_class",
                "model": "mars_ray.vllm.proposer.MarsProposer",
                "num_speculative_tokens": 2 * task["masks"],
            },
            "additional_config": {"mars": adapter | task["mars"]},
        }
        # Which of two equal engines is the faster depends on which is made first.
        if task.get("plug_in_first"):
            self.mars, self.plain = LLM(**common, **drafting), LLM(**common | larger)
        else:
            self.plain, self.mars = LLM(**common | larger), LLM(**common, **drafting)

    def answers(self, llm: Any, indices: list[int], **sampling: Any) -> list[Any]:
        """vLLM's outputs for some prompts, all given at once."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=self.task["max_new_tokens"],
            stop_token_ids=self.task["stops"],
            detokenize=False,
            **{"temperature": 0.0} | sampling,
        )
        given = [{"prompt_token_ids": list(self.task["prompts"][index])} for index in indices]
        return llm.generate(given, params, use_tqdm=False)

    def counts(self) -> dict[str, Any]:
        """The plug-in's counts."""
        return self.mars.collective_rpc("mars_counts")[0]

    def forwards(self, outputs: list[Any]) -> list[int]:
        """Of each answer that the plug-in's side has given lately."""
        # vLLM adds letters of its own to the ids of requests.
        counted = {
            name.split("-")[0]: counts["forwards"]
            for name, counts in self.counts()["requests"].items()
        }
        return [counted[output.request_id.split("-")[0]] for output in outputs]

    def total_since(self, before: dict[str, Any]) -> dict[str, Any]:
        """Totals since earlier counts."""
        after, old = self.counts()["total"], before["total"]
        totals = {
            key: after[key] - old[key]
            for key in ("tokens", "forwards", "forwards_with_drafts", "forwards_with_masks")
        }
        for key in ("drafted", "accepted"):
            earlier = [*old[key], *[0] * len(after[key])]
            totals[key] = [new - was for new, was in zip(after[key], earlier, strict=False)]
        totals["tokens_per_forward"] = totals["tokens"] / max(1, totals["forwards"])
        totals["share_with_drafts"] = totals["forwards_with_drafts"] / max(1, totals["forwards"])
        return totals


def greedy(sides: Sides) -> dict[str, Any]:
    """Both sides' answers to all prompts, and the plug-in's forwards of each."""
    everything = list(range(len(sides.task["prompts"])))
    plain = sides.answers(sides.plain, everything)
    before = sides.counts()
    mars = sides.answers(sides.mars, everything)
    total = sides.total_since(before)
    return {
        "plain": _tokens(plain),
        "mars": {
            "answers": _tokens(mars),
            "forwards": sides.forwards(mars),
        },
        "greedy": total,
    }


def beside_itself(sides: Sides) -> dict[str, Any]:
    """Plain vLLM's answers, with the margins between the two likeliest tokens at each place, those
    of the plug-in, and plain vLLM's in batches of other sizes."""

    def in_batches(size: int, **sampling: Any) -> list[Any]:
        parts = [everything[at : at + size] for at in range(0, len(everything), size)]
        return [answer for part in parts for answer in sides.answers(sides.plain, part, **sampling)]

    everything = list(range(len(sides.task["prompts"])))
    plain = in_batches(BATCH, logprobs=2)
    mars = sides.answers(sides.mars, everything)
    return {
        "plain": _tokens(plain),
        "margins": [[_margin(entries) for entries in out.outputs[0].logprobs] for out in plain],
        "mars": _tokens(mars),
        "forwards": sides.forwards(mars),
        "again": [_tokens(in_batches(size)) for size in sides.task["other_batches"]],
    }


def _tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def _margin(entries: dict[int, Any]) -> float:
    first, second, *_ = sorted((entry.logprob for entry in entries.values()), reverse=True)
    return first - second


def speed(sides: Sides, batch: int, indices: list[int]) -> dict[str, Any]:
    """Seconds of both sides for the same prompts in batches of one size, each batch in turn."""
    groups = [indices[at : at + batch] for at in range(0, len(indices), batch)]
    seconds: dict[str, list[float]] = {"plain": [], "mars": []}
    tokens = 0
    before = sides.counts()
    for repeat in range(sides.task["repeats"]):
        sums, tokens = {"plain": 0.0, "mars": 0.0}, 0
        for number, group in enumerate(groups):
            order = [("plain", sides.plain), ("mars", sides.mars)]
            for name, llm in order if (repeat + number) % 2 == 0 else reversed(order):
                start = time.perf_counter()
                outputs = sides.answers(llm, group)
                sums[name] += time.perf_counter() - start
                if name == "plain":
                    tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        for name, total in sums.items():
            seconds[name].append(total)
    ratios = [plain / mars for plain, mars in zip(seconds["plain"], seconds["mars"], strict=True)]
    return {
        "batch": batch,
        "prompts": len(indices),
        "tokens": tokens,
        "plain_tokens_per_s": tokens / statistics.median(seconds["plain"]),
        "mars_tokens_per_s": tokens / statistics.median(seconds["mars"]),
        "over_plain": statistics.median(ratios),
        "ratios": ratios,
        "seconds": seconds,
        "steps": sides.total_since(before),
    }


def main() -> None:
    """Read the task, start both sides, measure."""
    task = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(task["threads"]))
    import vllm

    sides = Sides(task)
    if "other_batches" in task:
        found = beside_itself(sides) | {"vllm": vllm.__version__}
        Path(sys.argv[2]).write_text(json.dumps(found))
        return
    if "timed_prompts" in task:
        timed = task["timed_prompts"]
        found = {"speed": [speed(sides, batch, timed) for batch in task["batches"]]}
        Path(sys.argv[2]).write_text(json.dumps(found))
        return
    # T/F is of steps with all masks, as our engine's; speed of steps with as many as pay.
    sides.mars.collective_rpc("mars_set_masks", args=([[1, task["masks"]]],))
    found = greedy(sides) | {"vllm": vllm.__version__}
    long = [index for index in task["straight"] if len(found["plain"][index]) >= _LEAST_TOKENS]
    before = sides.counts()
    sides.answers(sides.mars, long, temperature=1.0)
    found["sampled"] = sides.total_since(before)
    sides.mars.collective_rpc("mars_set_masks", args=(task["mars"].get("masks_by_running", []),))
    timed = long[: task["timed"]]
    found["timed_prompts"] = timed
    found["speed"] = [speed(sides, batch, timed) for batch in task["batches"]]
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
