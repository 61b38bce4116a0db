"""The headline numbers, each computed from a committed result.

`python benchmarks/headline.py` prints one JSON object, {name: {"value", "from"}}, and on stderr the
names whose result does not exist yet. `render.py` puts them into README and docs:

    <!-- headline:smollm2.tf_groups .2f -->2.31<!-- /headline -->

Standard library only.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Result = dict[str, Any]
# Errors from reading a result that has another shape or is not complete yet.
_MISSING = (FileNotFoundError, KeyError, TypeError, ValueError)


def speed_ratios(own: Result, other: Result) -> list[float]:
    """The tokens/s of one decoder over those of another in each interleaved round. Both are `cases`
    of one `mars-ray bench decode`."""
    rounds = zip(own["seconds"], other["seconds"], strict=True)
    return [(own["tokens"] / a) / (other["tokens"] / b) for a, b in rounds]


def speed_ratio(own: Result, other: Result) -> float:
    """The median of `speed_ratios`."""
    return statistics.median(speed_ratios(own, other))


def _at(*keys: str) -> Callable[[Result], float]:
    """A function that takes the number at this place from a result."""

    def value(result: Result) -> float:
        for key in keys:
            result = result[key]
        assert isinstance(result, int | float), f"{'.'.join(keys)} is no number"
        return result

    return value


def _step(rows: str, base: str | None = None) -> Callable[[Result], float]:
    """Seconds of a step in bfloat16 with 64 tokens in the cache, over those of another such step,
    or over the same one's before."""

    def value(result: Result) -> float:
        own = {row["shape"]: row for row in result["shapes"] if row["dtype"] == "bfloat16"}
        shape = own[f"1 x {rows}, context 64"]
        divisor = own[f"1 x {base}, context 64"]["after_s"] if base else shape["before_s"]
        return shape["after_s"] / divisor

    return value


Choice = Callable[[list[float]], float]


def _times(
    label: str, base: str, batch: int | None = None, of_rounds: Choice = statistics.median
) -> Callable[[Result], float]:
    """Speed-up of a decoder over another at one batch size, by default the least over all sizes.
    `of_rounds` is `min` or `max` for a single round in place of the median."""

    def value(result: Result) -> float:
        greedy = [case for case in result["cases"] if not case.get("temperature")]
        cases = {(case["label"], case["batch"]): case for case in greedy}
        sizes = result["job"]["batch_sizes"] if batch is None else [batch]
        ratios = [speed_ratios(cases[label, size], cases[base, size]) for size in sizes]
        return min(map(of_rounds, ratios))

    return value


def _plugin_round(batch: int, of_rounds: Choice) -> Callable[[Result], float]:
    """The least or the most of the rounds of the plug-in's speed over plain vLLM."""

    def value(result: Result) -> float:
        return of_rounds({row["batch"]: row["ratios"] for row in result["speed"]}[batch])

    return value


def _over_plain(batch: int | None = None) -> Callable[[Result], float]:
    """Speed of the plug-in over plain vLLM at one batch size, by default the least over all."""

    def value(result: Result) -> float:
        ratios = {row["batch"]: row["over_plain"] for row in result["speed"]}
        return min(ratios.values()) if batch is None else ratios[batch]

    return value


def _most(objective: str, ratio: str) -> Callable[[Result], float]:
    """The largest ratio of a training step's objective over all shapes."""

    def value(result: Result) -> float:
        return max(case[objective][ratio] for case in result["cases"].values())

    return value


def _walked(walk: str, *, files: bool = False) -> Callable[[Result], float]:
    """The number of functions of a walk through the package, or of their files: those that hand on
    what it follows, not all that they call."""

    def value(result: Result) -> float:
        functions = result[walk]["after"]
        return len({name.partition(":")[0] for name in functions} if files else functions)

    return value


def _mars(key: str) -> Callable[[Result], float]:
    """A figure of `confidence` at 0.9 on the model that MARS has trained."""

    def value(result: Result) -> float:
        points = {point["label"]: point for point in result["arms"]["mars"]}
        return points["confidence 0.9"][key]

    return value


def _median(key: str) -> Callable[[Result], float]:
    """The median over the questions of a race."""
    return lambda result: statistics.median(result[key].values())


def _ifeval(arm: str) -> Callable[[Result], float]:
    """The share of prompts that an arm follows in `exact`."""
    return lambda result: result["arms"][arm][0]["accuracy"]


def _trade(arm: str, choose: Callable[[Result], float]) -> Callable[[Result], float]:
    """The mean of an arm's seeds."""
    return lambda result: statistics.fmean(
        choose(run) for run in result["runs"] if run["arm"] == arm
    )


def _step_error_p90(result: Result) -> float:
    """The larger of both modes' P90 of a step's error against the mean of its runs."""
    return max(mode["mean_of_runs"]["p90"] for mode in result["modes"].values())


def _clean_tools(result: Result) -> float:
    """How many load tools got an answer to each of their requests."""
    asked = result["requests"]
    return sum(tool["failed"] == 0 and tool["completed"] >= asked for tool in result["tools"])


def _test_minutes(result: Result) -> float:
    """Duration of `make test` without its checks, in minutes."""
    return (result["fast_s"] + result["ray_s"]) / 60


def _sampled(model: str, threads: int) -> Callable[[Result], list[tuple[float, float]]]:
    """Of each sampled way, against greedy in the same round: the median of milliseconds added and
    of ratios."""

    def values(result: Result) -> list[tuple[float, float]]:
        (run,) = (r for r in result["runs"] if (r["model"], r["threads"]) == (model, threads))
        greedy = run["step_ms"]["greedy"]
        ways = [rounds for name, rounds in run["step_ms"].items() if name.startswith("T=")]
        return [
            (
                statistics.median(a - b for a, b in zip(rounds, greedy, strict=True)),
                statistics.median(a / b for a, b in zip(rounds, greedy, strict=True)),
            )
            for rounds in ways
        ]

    return values


def _ms_per_row(model: str) -> Callable[[Result], float]:
    """Milliseconds that the dearest way of sampling adds to a row, on one thread."""
    return lambda result: max(ms for ms, _ in _sampled(model, 1)(result)) / result["batch"]


def _sampled_over_greedy(result: Result) -> float:
    """The largest ratio of a sampled step over a greedy one, on two threads."""
    models = ("smollm2", "wide")
    return max(ratio for model in models for _, ratio in _sampled(model, 2)(result))


def _adapted(result: Result) -> float:
    """Tokens/s of the longest budget's adapter over plain decoding, one answer at a time."""
    run = max(result["runs"], key=lambda run: run["minutes"])
    pairs = zip(run["drafts"], run["exact"], strict=True)
    return statistics.median(own / other for own, other in pairs)


def _read_share(result: Result) -> float:
    """Bytes of weights that plain decoding reads in a second, over what both cores can read."""
    (case,) = (c for c in result["cases"] if (c["label"], c["batch"]) == (_EXACT, 1))
    return case["read_share"]


_PLAIN, _FOUR = "one row", "4 rows, 2 of them masks"
_NINE = "9 rows, 4 of them masks"
_EXACT, _VERIFIED, _VLLM = "mars-ray exact", "mars-ray verified 1", "vllm"
_LLAMA, _ORACLE = "llamacpp", "oracle, 4 drafts"
_LOOKED_UP = "mars-ray verified 1 W=0"
_EDIT, _SUMMARISE = "ngram_edit", "ngram_summarise"


@dataclass(frozen=True, slots=True)
class Headline:
    """One number: the result it is computed from, and how."""

    result: str
    value: Callable[[Result], float]


HEADLINES = {
    # A step of the compiled library, over one of the same shape before there was one.
    "cpu.plain_over_before": Headline("step_before_after", _step(_PLAIN)),
    "cpu.nine_rows_over_before": Headline("step_before_after", _step(_NINE)),
    "cpu.four_rows_over_plain": Headline("step_before_after", _step(_FOUR, _PLAIN)),
    "cpu.nine_rows_over_plain": Headline("step_before_after", _step(_NINE, _PLAIN)),
    "cpu.share_of_bandwidth": Headline("smollm2_decode", _read_share),
    "smollm2.identical_share": Headline("smollm2_identity", _at("float32", "identical_share")),
    "smollm2.prompts": Headline("smollm2_identity", _at("float32", "prompts")),
    # Answers in batches of 16, 7 and 1, `exact` and `verified`, like those of `exact` in 16.
    "smollm2.bf16_identical_share": Headline(
        "smollm2_identity", _at("bfloat16", "identical_share")
    ),
    "smollm2.tf_tree": Headline("smollm2_identity", _at("tokens_per_forward", "tree")),
    "smollm2.tf_groups": Headline("smollm2_identity", _at("tokens_per_forward", "groups")),
    "smollm2.tf_one_group": Headline("smollm2_identity", _at("tokens_per_forward", "one_group")),
    "smollm2.speed_over_exact_b1": Headline("smollm2_decode", _times(_VERIFIED, _EXACT, 1)),
    "smollm2.speed_over_exact_b1_least": Headline(
        "smollm2_decode", _times(_VERIFIED, _EXACT, 1, min)
    ),
    "smollm2.speed_over_exact_b1_most": Headline(
        "smollm2_decode", _times(_VERIFIED, _EXACT, 1, max)
    ),
    "smollm2.speed_vs_vllm_b1": Headline("smollm2_decode", _times(_VERIFIED, _VLLM, 1)),
    "smollm2.speed_vs_vllm_b1_least": Headline("smollm2_decode", _times(_VERIFIED, _VLLM, 1, min)),
    "smollm2.speed_vs_vllm_b1_most": Headline("smollm2_decode", _times(_VERIFIED, _VLLM, 1, max)),
    "smollm2.speed_vs_vllm_b4": Headline("smollm2_decode", _times(_VERIFIED, _VLLM, 4)),
    "smollm2.exact_vs_vllm_b1": Headline("smollm2_decode", _times(_EXACT, _VLLM, 1)),
    "smollm2.exact_vs_vllm_b1_least": Headline("smollm2_decode", _times(_EXACT, _VLLM, 1, min)),
    "smollm2.exact_vs_vllm_b1_most": Headline("smollm2_decode", _times(_EXACT, _VLLM, 1, max)),
    "smollm2.exact_vs_vllm_min": Headline("smollm2_decode", _times(_EXACT, _VLLM)),
    "smollm2.verified_over_exact_min": Headline("smollm2_decode", _times(_VERIFIED, _EXACT)),
    "smollm2.speed_over_exact_b4": Headline("smollm2_decode", _times(_VERIFIED, _EXACT, 4)),
    "smollm2.speed_over_exact_b8": Headline("smollm2_decode", _times(_VERIFIED, _EXACT, 8)),
    "smollm2.exact_vs_llamacpp_b1": Headline("smollm2_decode", _times(_EXACT, _LLAMA, 1)),
    "smollm2.exact_vs_llamacpp_b4": Headline("smollm2_decode", _times(_EXACT, _LLAMA, 4)),
    "smollm2.exact_vs_llamacpp_b8": Headline("smollm2_decode", _times(_EXACT, _LLAMA, 8)),
    "smollm2.speed_vs_llamacpp_b1": Headline("smollm2_decode", _times(_VERIFIED, _LLAMA, 1)),
    "smollm2.speed_over_exact_b16": Headline("smollm2_decode", _times(_VERIFIED, _EXACT, 16)),
    "smollm2.speed_vs_vllm_b16": Headline("smollm2_decode", _times(_VERIFIED, _VLLM, 16)),
    "short.speed_over_exact_b1": Headline("smollm2_decode_short", _times(_VERIFIED, _EXACT, 1)),
    "short.speed_over_exact_b16": Headline("smollm2_decode_short", _times(_VERIFIED, _EXACT, 16)),
    "short.speed_vs_llamacpp_b1": Headline("smollm2_decode_short", _times(_VERIFIED, _LLAMA, 1)),
    "short.speed_vs_vllm_b1": Headline("smollm2_decode_short", _times(_VERIFIED, _VLLM, 1)),
    # On a processor with AMX, before masks were bought again.
    "amx.speed_over_exact_b1": Headline("smollm2_decode_amx", _times(_VERIFIED, _EXACT, 1)),
    "amx.speed_vs_llamacpp_b1": Headline("smollm2_decode_amx", _times(_VERIFIED, _LLAMA, 1)),
    "amx.speed_vs_vllm_b1": Headline("smollm2_decode_amx", _times(_VERIFIED, _VLLM, 1)),
    "adapt.speed_over_exact_b1": Headline("adapt_minutes", _adapted),
    "adapter.minutes": Headline(
        "adapter_training_gpu", lambda result: result["run"]["seconds"] / 60
    ),
    "race.speed_over_exact": Headline("race", _median("ratios")),
    "race.without_adapter": Headline("race", _median("without_adapter")),
    "ngram.speed_over_exact_editing": Headline(_EDIT, _times(_LOOKED_UP, _EXACT, 1)),
    "ngram.speed_over_exact_summarising": Headline(_SUMMARISE, _times(_LOOKED_UP, _EXACT, 1)),
    "ngram.with_adapter_editing": Headline(_EDIT, _times(_VERIFIED, _EXACT, 1)),
    "ngram.with_adapter_summarising": Headline(_SUMMARISE, _times(_VERIFIED, _EXACT, 1)),
    "ngram.speed_over_exact_b1": Headline("smollm2_decode", _times(_LOOKED_UP, _EXACT, 1)),
    "ngram.speed_over_exact_min": Headline("smollm2_decode", _times(_LOOKED_UP, _EXACT)),
    "smollm2.speed_vs_vllm_b8": Headline("smollm2_decode", _times(_VERIFIED, _VLLM, 8)),
    # Four drafts a step that are always right: what our own engine could do.
    "smollm2.oracle_over_exact_b1": Headline("smollm2_decode", _times(_ORACLE, _EXACT, 1)),
    # The slowest round at any batch size.
    "smollm2.verified_over_exact_least": Headline(
        "smollm2_decode", _times(_VERIFIED, _EXACT, None, min)
    ),
    # The same with another process that keeps one of two cores busy.
    "smollm2.busy_over_exact": Headline(
        "busy", lambda result: statistics.median(result["busy"]["ratios"])
    ),
    # One question at a time on an idle machine, by AVX2 alone.
    "smollm2.avx2_over_exact_b1": Headline(
        "busy", lambda result: statistics.median(result["idle"]["ratios"])
    ),
    # The service over the bare engine at batch 8, in the mode in which that is less.
    "smollm2.http_over_engine": Headline(
        "serve_load_smollm2",
        lambda result: min(result["engine"][mode]["share"] for mode in ("exact", "verified")),
    ),
    "sampled.ms_per_row_49k": Headline("sampling", _ms_per_row("smollm2")),
    "sampled.ms_per_row_152k": Headline("sampling", _ms_per_row("wide")),
    "sampled.step_over_greedy_max": Headline("sampling", _sampled_over_greedy),
    "vllm.identical_share": Headline("vllm_plugin", _at("identical_share")),
    "vllm.bf16_identical_share": Headline("vllm_bfloat16", _at("identical_share")),
    "vllm.bf16_compiled_identical_share": Headline("vllm_bfloat16", _at("compiled_share")),
    "vllm.prompts": Headline("vllm_plugin", _at("prompts")),
    "vllm.tf_over_ours": Headline("vllm_plugin", _at("tf_over_ours")),
    "vllm.speed_over_plain_b1": Headline("vllm_plugin", _over_plain(1)),
    "vllm.speed_over_plain_b1_least": Headline("vllm_plugin", _plugin_round(1, min)),
    "vllm.speed_over_plain_b1_most": Headline("vllm_plugin", _plugin_round(1, max)),
    # The plug-in has one group of masks, and no other.
    "vllm.tf_one_group": Headline(
        "vllm_plugin", _at("tokens_per_forward", "vllm", "without_loops")
    ),
    "vllm.speed_over_plain_min": Headline("vllm_plugin", _over_plain()),
    "adapter.step_time_over_sft": Headline("adapter_step", _most("draft, 1 grid", "time_ratio")),
    "adapter.step_memory_over_sft": Headline(
        "adapter_step", _most("draft, 1 grid", "memory_ratio")
    ),
    "simulator.step_error_p90": Headline("step_replay", _step_error_p90),
    # The package without its simulator.
    "code.lines": Headline("code_size", _at("package", "lines")),
    "docs.words": Headline("code_size", _at("pages", "docs_words")),
    "readme.lines": Headline("code_size", _at("pages", "readme_lines")),
    "code.files": Headline("code_size", _at("package", "files")),
    "code.functions": Headline("code_size", _at("package", "functions")),
    "code.classes": Headline("code_size", _at("package", "classes")),
    "code.chunk_functions": Headline("house_walks", _walked("chunk")),
    "code.request_functions": Headline("house_walks", _walked("request")),
    # Without core/, which they all use.
    "code.decision_files": Headline("house_walks", _walked("decision", files=True)),
    "code.batch_files": Headline("house_walks", _walked("batch", files=True)),
    "policy.cells": Headline("simulate", _at("claims", "attained", "cells")),
    "policy.shipped_attained_share": Headline("simulate", _at("claims", "attained", "share")),
    "policy.shipped_replicas_over_best_fixed": Headline(
        "simulate", _at("claims", "over_best_fixed", "mean")
    ),
    "policy.over_ray_default": Headline(
        "simulate", _at("claims", "over_ray", "ray, default", "ratio")
    ),
    "valve.requests_kept": Headline("simulate_overloads", _at("claims", "valve", "requests_kept")),
    "valve.points_lost": Headline("simulate_overloads", _at("claims", "valve", "points_lost")),
    "mars.response_tokens": Headline("mars_frontier", _at("trained_mask_tokens", "mars")),
    "adapter.mask_tokens": Headline("adapter_training_gpu", _at("run", "mask_tokens")),
    "mars.tf_at_0_9": Headline("mars_frontier", _mars("tokens_per_forward")),
    "mars.agreement_at_0_9": Headline("mars_frontier", _mars("agreement")),
    "mars.ifeval_original": Headline("ifeval", _ifeval("adapter")),
    "mars.ifeval_exact": Headline("ifeval", _ifeval("mars")),
    "mars.speed_over_exact_b1_at_0_9": Headline(
        "mars_decode", _times("mars-ray confidence 0.9", _EXACT, 1)
    ),
    "story.total_minutes": Headline("story", _at("minutes", "cluster")),
    "story.kills_survived": Headline("story", lambda result: len(result["killed"])),
    # The least of the seeds.
    "sweep.winner_over_paper": Headline(
        "sweep", lambda result: min(run["winner"] / run["paper"] for run in result["seeds"])
    ),
    "sweep.seeds": Headline("sweep", lambda result: len(result["seeds"])),
    "trade.in_time_ours": Headline("trade", _trade("ours", _at("live", "attainment"))),
    "trade.in_time_pinned": Headline("trade", _trade("pinned", _at("live", "attainment"))),
    "trade.points_lost": Headline("trade", _trade("ours", _at("points_lost"))),
    "service.token_requests": Headline("token_sums", _at("requests")),
    # 1 where log, metrics and engines have the same sums, for each replica that lives and each key.
    "service.token_sums_equal": Headline("token_sums", lambda result: int(result["equal"])),
    "service.fuzz_requests": Headline("service_fuzz", _at("requests")),
    "service.fuzz_5xx": Headline("service_fuzz", _at("status_5xx")),
    "service.json_requests": Headline("service_json", _at("requests")),
    # Of requests for JSON, those that the limit cut amid endless white space.
    "service.json_cut_share": Headline(
        "service_json", lambda result: result["cut"] / result["requests"]
    ),
    # Kinds of public reports that were looked for with their other members (faults.toml).
    "faults.kinds_mended": Headline("faults", _at("counts", "kinds")),
    "faults.members_tested": Headline("faults", _at("counts", "members")),
    "code.test_minutes": Headline("test_minutes", _test_minutes),
    # Of whole runs of `make test`, alone and beside busy processes.
    "tests.green_runs": Headline(
        "test_minutes", lambda result: sum(run["is_green"] for run in result["runs"])
    ),
    "service.load_tools": Headline("load_tools", _clean_tools),
    # By a reader who had never seen the project.
    "newcomer.minutes_to_first_answer": Headline("newcomer", _at("first_answer", "minutes")),
    "newcomer.guesses": Headline("newcomer", _at("first_answer", "guesses")),
}


def headlines(results: Path = RESULTS) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The values with their sources, and the reason for each name that has no value."""
    found: dict[str, dict[str, Any]] = {}
    lacking: dict[str, str] = {}
    for name, headline in HEADLINES.items():
        path = results / f"{headline.result}.json"
        try:
            value = headline.value(json.loads(path.read_text()))
        except _MISSING as error:
            lacking[name] = f"{path.name}: {type(error).__name__} {error}"
            continue
        found[name] = {"value": value, "from": f"benchmarks/results/{path.name}"}
    return found, lacking


def main() -> None:
    """Print the headline numbers."""
    found, lacking = headlines()
    for name, why in lacking.items():
        print(f"no {name}: {why}", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
