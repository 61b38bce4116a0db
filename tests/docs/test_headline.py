"""Headline numbers come from committed results, and the pages say what the results say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import headline
import pytest
import render

ROOT = Path(__file__).parents[2]

DECODE = {
    "job": {"batch_sizes": [1, 4]},
    "cases": [
        {"label": label, "batch": batch, "tokens": 100, "seconds": seconds}
        for label, batch, seconds in (
            ("mars-ray exact", 1, [2.0, 2.0, 9.0]),
            ("mars-ray exact", 4, [1.0, 1.0, 1.0]),
            ("mars-ray verified 1", 1, [1.0, 1.0, 1.0]),
            ("mars-ray verified 1", 4, [1.25, 1.25, 1.25]),
            ("vllm", 1, [2.0, 3.0, 9.0]),
            ("vllm", 4, [1.0, 2.0, 0.5]),
        )
    ],
}


def test_each_value_is_computed_from_its_result(tmp_path):
    """By hand: the medians of rounds at batch 1 are 2 and 3, the least over batches is that of 4;
    results that are not there are named and nothing else."""
    (tmp_path / "smollm2_decode.json").write_text(json.dumps(DECODE))
    cases = {
        "one": {"draft, 1 grid": {"time_ratio": 0.9, "memory_ratio": 0.5}},
        "two": {"draft, 1 grid": {"time_ratio": 0.8, "memory_ratio": 0.6}},
    }
    (tmp_path / "adapter_step.json").write_text(json.dumps({"cases": cases}))
    found, lacking = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "smollm2.speed_over_exact_b1": 2.0,
        "smollm2.speed_over_exact_b1_least": 2.0,
        "smollm2.speed_over_exact_b1_most": 9.0,
        "smollm2.speed_over_exact_b4": pytest.approx(0.8),
        "smollm2.speed_vs_vllm_b1": 3.0,
        "smollm2.speed_vs_vllm_b1_least": 2.0,
        "smollm2.speed_vs_vllm_b1_most": 9.0,
        "smollm2.speed_vs_vllm_b4": pytest.approx(0.8),
        "smollm2.exact_vs_vllm_b1": 1.0,
        "smollm2.exact_vs_vllm_b1_least": 1.0,
        "smollm2.exact_vs_vllm_b1_most": 1.5,
        "smollm2.exact_vs_vllm_min": 1.0,
        "smollm2.verified_over_exact_min": pytest.approx(0.8),
        "smollm2.verified_over_exact_least": pytest.approx(0.8),
        "adapter.step_time_over_sft": 0.9,
        "adapter.step_memory_over_sft": 0.6,
    }
    assert found["adapter.step_time_over_sft"]["from"] == "benchmarks/results/adapter_step.json"
    assert found.keys() | lacking.keys() == headline.HEADLINES.keys()
    assert {why.partition(":")[0] for why in lacking.values()} == {
        "smollm2_identity.json",
        "story.json",
        "ngram_edit.json",
        "ngram_summarise.json",
        "smollm2_decode_amx.json",
        "smollm2_decode_short.json",
        "adapt_minutes.json",
        "smollm2_decode.json",  # llama.cpp, drafts that are always right, batch 8
        "step_before_after.json",
        "code_size.json",
        "house_walks.json",
        "simulate.json",
        "simulate_overloads.json",
        "test_minutes.json",
        "step_replay.json",
        "load_tools.json",
        "token_sums.json",
        "service_fuzz.json",
        "service_json.json",
        "faults.json",
        "busy.json",
        "newcomer.json",
        "sampling.json",
        "serve_load_smollm2.json",
        "ifeval.json",
        "race.json",
        "mars_decode.json",
        "mars_frontier.json",
        "adapter_training_gpu.json",
        "sweep.json",
        "trade.json",
        "vllm_plugin.json",
        "vllm_bfloat16.json",
    }


def test_figures_of_the_code(tmp_path):
    """By hand: three functions of a chunk, ninety seconds of tests."""
    results = {
        "code_size": {
            "package": {"files": 200, "lines": 24_000, "functions": 2_700, "classes": 600},
            "pages": {"docs_words": 21_000, "readme_lines": 119},
        },
        "house_walks": {
            "chunk": {"before": list("abcd"), "after": list("abc")},
            "request": {"after": ["a: f", "a: g"]},
            "decision": {"after": ["a: f", "a: g", "b: h"]},
            "batch": {"after": ["a: f"]},
        },
        "test_minutes": {
            "fast_s": 60,
            "ray_s": 30.0,
            "runs": [{"is_green": True}, {"is_green": False}, {"is_green": True}],
        },
        "newcomer": {"first_answer": {"minutes": 9.5, "guesses": 3}},
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    found, _ = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "code.lines": 24_000,
        "docs.words": 21_000,
        "readme.lines": 119,
        "code.files": 200,
        "code.functions": 2_700,
        "code.classes": 600,
        "code.chunk_functions": 3,
        "code.request_functions": 2,
        "code.decision_files": 2,
        "code.batch_files": 1,
        "code.test_minutes": 1.5,
        "tests.green_runs": 2,
        "newcomer.minutes_to_first_answer": 9.5,
        "newcomer.guesses": 3,
    }


def test_figures_of_the_service(tmp_path):
    """By hand: kB of a page, and sums that are equal as a number."""
    results = {
        "token_sums": {"requests": 2000, "equal": True},
        "service_fuzz": {"requests": 5100, "status_5xx": 0},
        "service_json": {"requests": 500, "cut": 5},
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    found, _ = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "service.token_requests": 2000,
        "service.token_sums_equal": 1,
        "service.fuzz_requests": 5100,
        "service.fuzz_5xx": 0,
        "service.json_requests": 500,
        "service.json_cut_share": 0.01,
    }


def test_figures_of_the_threshold(tmp_path):
    """By hand: the point at 0.9, and the mean of two seeds of each arm."""
    point = {"label": "confidence 0.9", "tokens_per_forward": 1.3, "agreement": 0.97}
    runs = [
        {"arm": arm, "live": {"attainment": share}, "points_lost": lost}
        for arm, share, lost in (("ours", 0.9, 2.0), ("ours", 0.7, 4.0), ("pinned", 0.5, 0.0))
    ]
    results = {
        "mars_frontier": {"trained_mask_tokens": {"mars": 5_000}, "arms": {"mars": [point]}},
        "adapter_training_gpu": {"run": {"mask_tokens": 7_000}},
        "sweep": {"seeds": [{"winner": w, "paper": 1.0} for w in (1.2, 0.9)]},
        "trade": {"runs": runs},
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    found, _ = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == pytest.approx(
        {
            "mars.response_tokens": 5_000,
            "adapter.mask_tokens": 7_000,
            "mars.tf_at_0_9": 1.3,
            "mars.agreement_at_0_9": 0.97,
            "sweep.winner_over_paper": 0.9,
            "sweep.seeds": 2,
            "trade.in_time_ours": 0.8,
            "trade.in_time_pinned": 0.5,
            "trade.points_lost": 3.0,
        }
    )


def test_figures_of_sampling_and_a_busy_machine(tmp_path):
    """By hand: 10 ms a greedy step, 12 and 11 in the dearest of three ways, eight rows."""
    ways = {"greedy": [10.0] * 3, "T=1": [11.0] * 3, "T=0.7": [10.0, 12.0, 13.0], "penalties": [99]}
    runs = [
        {"model": model, "threads": threads, "step_ms": ways}
        for model in ("smollm2", "wide")
        for threads in (1, 2)
    ]
    results = {
        "sampling": {"batch": 8, "runs": runs},
        "busy": {"idle": {"ratios": [2.0]}, "busy": {"ratios": [0.8, 1.2, 1.0]}},
        "serve_load_smollm2": {"engine": {"exact": {"share": 0.9}, "verified": {"share": 0.8}}},
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    found, _ = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "smollm2.busy_over_exact": 1.0,
        "smollm2.avx2_over_exact_b1": 2.0,
        "smollm2.http_over_engine": 0.8,
        "sampled.ms_per_row_49k": 0.25,
        "sampled.ms_per_row_152k": 0.25,
        "sampled.step_over_greedy_max": 1.2,
    }


def test_figures_of_the_plugin_for_vllm(tmp_path):
    """By hand: the speed at batch 1 with its rounds, and the least of all sizes; T/F without the
    answers that loop."""
    result = {
        "prompts": 200,
        "identical_share": 0.995,
        "tf_over_ours": 0.98,
        "tokens_per_forward": {
            "vllm": {"all": 1.9, "without_loops": 1.4},
            "ours": {"all": 2.0, "without_loops": 1.5},
        },
        "speed": [
            {"batch": 1, "over_plain": 1.3, "ratios": [1.3, 1.2, 1.4]},
            {"batch": 4, "over_plain": 0.99, "ratios": [0.99]},
            {"batch": 16, "over_plain": 1.01, "ratios": [1.01]},
        ],
    }
    (tmp_path / "vllm_plugin.json").write_text(json.dumps(result))
    found, _ = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "vllm.identical_share": 0.995,
        "vllm.prompts": 200,
        "vllm.tf_over_ours": 0.98,
        "vllm.speed_over_plain_b1": 1.3,
        "vllm.speed_over_plain_b1_least": 1.2,
        "vllm.speed_over_plain_b1_most": 1.4,
        "vllm.tf_one_group": 1.4,
        "vllm.speed_over_plain_min": 0.99,
    }


def test_a_step_error_is_that_of_the_worse_mode(tmp_path):
    modes = {"exact": 0.04, "verified": 0.07}
    result = {"modes": {name: {"mean_of_runs": {"p90": p90}} for name, p90 in modes.items()}}
    (tmp_path / "step_replay.json").write_text(json.dumps(result))
    found, _ = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "simulator.step_error_p90": 0.07
    }


def test_steps_over_others(tmp_path):
    """By hand: over the same step before, and over a plain one now; float32 does not count."""
    shapes = [
        {"dtype": dtype, "shape": f"1 x {shape}, context 64", "before_s": before, "after_s": after}
        for dtype, shape, before, after in (
            ("bfloat16", "one row", 4.0, 1.0),
            ("bfloat16", "4 rows, 2 of them masks", 6.0, 1.5),
            ("bfloat16", "9 rows, 4 of them masks", 8.0, 3.0),
            ("float32", "one row", 9.0, 9.0),
        )
    ]
    (tmp_path / "step_before_after.json").write_text(json.dumps({"shapes": shapes}))
    found, _ = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "cpu.plain_over_before": 0.25,
        "cpu.nine_rows_over_before": 0.375,
        "cpu.four_rows_over_plain": 1.5,
        "cpu.nine_rows_over_plain": 3.0,
    }


def test_a_load_tool_counts_if_nothing_failed(tmp_path):
    """Of three: one that is clean, one with an error, one that did not send all."""
    tools = [{"completed": 8, "failed": 0}, {"completed": 8, "failed": 1}]
    result = {"requests": 8, "tools": [*tools, {"completed": 7, "failed": 0}]}
    (tmp_path / "load_tools.json").write_text(json.dumps(result))
    found, _ = headline.headlines(tmp_path)
    assert {name: entry["value"] for name, entry in found.items()} == {"service.load_tools": 1}


def test_a_result_without_the_number_leaves_it_out(tmp_path):
    """Guards a traceback in place of the numbers that there are."""
    (tmp_path / "smollm2_identity.json").write_text(
        json.dumps({"float32": {"prompts": 500}, "bfloat16": None})
    )
    found, lacking = headline.headlines(tmp_path)
    assert found == {
        "smollm2.prompts": {"value": 500, "from": "benchmarks/results/smollm2_identity.json"}
    }
    assert "identical_share" in lacking["smollm2.identical_share"]


def test_the_program_needs_the_standard_library_alone():
    """One JSON object on stdout; everything without a value on stderr."""
    script = str(ROOT / "benchmarks" / "headline.py")
    words = [sys.executable, "-S", "-E", script]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    found = json.loads(done.stdout)
    missing = re.findall(r"^no (\S+):", done.stderr, re.MULTILINE)
    assert found.keys() | set(missing) == headline.HEADLINES.keys()
    for entry in found.values():
        assert (ROOT / entry["from"]).exists()


def test_a_number_in_a_page_is_written_anew(monkeypatch):
    """In the form that its marker asks for; guards a page with a number that no result has."""
    found = {"a.share": {"value": 0.9876, "from": "x"}}
    monkeypatch.setattr(render, "headlines", lambda: (found, {}))
    page = "It is <!-- headline:a.share .1% -->old<!-- /headline --> of all."
    assert render.render(page) == page.replace("old", "98.8%")
    with pytest.raises(KeyError):
        render.render(page.replace("a.share", "a.other"))


def test_the_pages_say_what_the_results_say():
    """Guards numbers and tables that were typed, or are of an older result."""
    for path in render.PAGES:
        text = path.read_text()
        assert render.render(text) == text, f"{path.name}: run python benchmarks/render.py"


def test_the_training_of_the_adapter_is_that_of_its_card():
    """Guards hours where there were minutes."""
    card = json.loads((ROOT / "adapters" / "smollm2" / "draft.json").read_text())["training"]
    minutes = f"{card['seconds'] / 60:.1f}"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"trained for {minutes} minutes" in readme
    assert f"{card['mask_tokens']:,} masks" in readme
    assert f"{minutes} minutes" in (ROOT / "docs" / "start" / "quickstart.md").read_text()
