"""The tables of README and docs, each a function of a committed result, for render.py."""

import statistics
from collections.abc import Callable
from typing import Any

from headline import speed_ratio

from mars_ray.simulator.report import policy_rows


def schedules(result: dict[str, Any]) -> list[str]:
    """Variants at equal steps, as differences from the first one."""
    plan = result["plan"]
    rows = [row for row in result["comparison"] if len(row["seeds"]) > 1]
    lines = [
        "| variant | seeds | T/F, one group | difference | T/F, all outcomes | difference | "
        "`exact`, difference |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['variant']} | {len(row['seeds'])} | {row['tokens_per_forward']:.3f} | "
        f"{difference(row, 'tokens_per_forward', '+.3f')} | "
        f"{row['tokens_per_forward_all_outcomes']:.3f} | "
        f"{difference(row, 'tokens_per_forward_all_outcomes', '+.3f')} | "
        f"{difference(row, 'exact_accuracy', '+.1%')} |"
        for row in rows
    ]
    return [
        *lines,
        "",
        f"{result['runs'][0]['steps']} steps, {plan['problems']} held-out problems; T/F of "
        f"`verified` at its whole window, masks behind all drafts or behind each; differences to "
        f"{rows[0]['variant']} at the same seeds, with 95% intervals where there are several. "
        f"{machine(result['provenance'])}.",
    ]


def difference(row: dict[str, Any], measure: str, form: str) -> str:
    """The mean difference from the first variant, with its interval if there is one."""
    half = row[f"{measure}_half_width"]
    text = format(row[f"{measure}_difference"], form)
    return text if half is None else f"{text} ± {format(half, form).lstrip('+')}"


def machine(facts: dict[str, Any]) -> str:
    """A short description of the machine that a result was measured on."""
    device = facts["gpu"] or f"{facts['cores']} cores of {facts['cpu']}"
    return f"{device}, commit {facts['commit']}"


def demo(result: dict[str, Any]) -> list[str]:
    """The frontier of the demo's checkpoint."""
    lines = [
        "| mode | accuracy (95%) | same output as `exact` | tokens per forward |",
        "|---|---|---|---|",
    ]
    for point in result["points"]:
        interval = f"{point['accuracy_low']:.1%} to {point['accuracy_high']:.1%}"
        lines.append(
            f"| `{point['label']}` | {point['accuracy']:.1%} ({interval}) | "
            f"{point['identical']:.1%} | {point['tokens_per_forward']:.2f} |"
        )
    facts = result["provenance"]
    return [*lines, "", f"{result['points'][0]['problems']} held-out problems, {machine(facts)}."]


def gsm8k(result: dict[str, Any]) -> list[str]:
    """Both stages on GSM8K: losses and teacher-forced acceptance on the test split."""
    lines = [
        "| stage | steps | minutes | clean CE | noisy CE | survival by depth | expected T/F |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, metrics in result["metrics"].items():
        depths = [v for k, v in metrics.items() if k.startswith("eval_acceptance_")]
        noisy, expected = metrics.get("eval_noisy_ce"), metrics.get("eval_tokens_per_forward", 1.0)
        lines.append(
            f"| `{stage}` | {result['steps'][stage]} | {result['seconds'][stage] / 60:.1f} | "
            f"{metrics['eval_clean_ce']:.3f} | {f'{noisy:.3f}' if noisy else '-'} | "
            f"{', '.join(f'{share:.3f}' for share in depths) or '-'} | {expected:.2f} |"
        )
    return [*lines, "", f"Held-out: the 1,319 test problems. {machine(result['provenance'])}."]


def train_step(result: dict[str, Any]) -> list[str]:
    """A step's cost over SFT."""
    lines = [
        "| shape | objective | rows | s | tokens/s | time / SFT | peak memory / SFT |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, objectives in result["cases"].items():
        if case == "tiny":
            continue
        for name, row in objectives.items():
            lines.append(
                f"| {case} | {name} | {row['rows']:.0f} | {row['step_s']:.2f} | "
                f"{row['tokens_per_s']:,.0f} | "
                f"{row['time_ratio']:.2f} | "
                f"{row['memory_ratio']:.2f} |"
            )
    steps = " and ".join(
        str(case["sft"]["steps"]) for name, case in result["cases"].items() if name != "tiny"
    )
    facts = machine(result["provenance"])
    types = "float32"
    if "precisions" in result:
        types = ", ".join(f"{case} in {kind}" for case, kind in result["precisions"].items())
    return [
        *lines,
        "",
        f"Medians of {steps} steps, ours interleaved, {types}, {result['threads']} threads, "
        f"{facts}.",
    ]


def identity_summary(result: dict[str, Any]) -> list[str]:
    """The rows in bfloat16, as `identity` has them."""
    half = result["bfloat16"]
    facts = {"largest_margin": None, "provenance": half["provenance"]}
    return identity(result | facts | {"float32": half | facts, "bfloat16": None})


def identity(result: dict[str, Any]) -> list[str]:
    """How many answers equal those of transformers, and the tokens per forward of the same runs."""
    single, limit = result["float32"], result["job"]["max_new_tokens"]
    kinds = list(result["job"]["task"]["kinds"])
    lines = [
        "| decoder | answers | identical | T/F | without loops | " + " | ".join(kinds) + " |",
        "|---|" + "---|" * (4 + len(kinds)),
    ]
    for row in single["rows"]:
        counted = row.get("tokens_per_forward")
        if counted and counted["all"] == 1:
            continue
        numbers = ["-"] * (2 + len(kinds))
        if counted:
            own = [counted["all"], counted["without_loops"], *map(counted["by_kind"].get, kinds)]
            numbers = [f"{number:.2f}" if number else "-" for number in own]
        lines.append(
            f"| {row['name']} | {row['answers']} | {row['identical']:.1%} | {' | '.join(numbers)} |"
        )
    margin = single["largest_margin"]
    worst = f"; the largest margin at a first difference is {margin:.1e}" if margin else ""
    return [
        *lines,
        "",
        f"Against {single['against']}, greedy, at most {limit} new tokens{worst}; "
        f"{machine(result['provenance'])}.",
        *(in_bfloat16(result["bfloat16"]) if result.get("bfloat16") else []),
    ]


def in_bfloat16(half: dict[str, Any]) -> list[str]:
    """Answers in bfloat16 beside those of plain decoding in the same batches."""
    lines = [
        "",
        "| in bfloat16 | answers | identical | T/F without loops | margins: median, largest |",
        "|---|---|---|---|---|",
    ]
    for row in (*half["rows"], *([half["floor"]] if "floor" in half else [])):
        margins = sorted(difference["margin"] for difference in row["differences"]) or [0.0]
        counted = row.get("tokens_per_forward")
        speed = f"{counted['without_loops']:.2f}" if counted else "-"
        lines.append(
            f"| {row['name']} | {row['answers']} | {row['identical']:.1%} | {speed} | "
            f"{statistics.median(margins):.3f}, {margins[-1]:.3f} |"
        )
    return [
        *lines,
        "",
        f"Against {half['against']}; margins between the two likeliest logits at first "
        f"differences; {machine(half['provenance'])}.",
    ]


def adapter_parts(result: dict[str, Any]) -> list[str]:
    """Final results of adapter trainings that differ in one part."""
    lines = [
        "| training | mask tokens | T/F, all outcomes | one group | survival by depth |",
        "|---|---|---|---|---|",
    ]
    for name, found in result["variants"].items():
        depths = ", ".join(f"{share:.3f}" for share in found["survival"])
        lines.append(
            f"| {name} | {found['mask_tokens']:,.0f} | {found['tokens_per_forward']:.3f} | "
            f"{found['one_group']:.3f} | {depths} |"
        )
    return [
        *lines,
        "",
        f"Teacher-forced over {result['held_out']} held-out answers, after {result['steps']} "
        f"conversations each unless said otherwise; {machine(result['provenance'])}.",
    ]


def adapter_ranks(result: dict[str, Any]) -> list[str]:
    """What cutting a trained adapter's LoRA costs in drafts and brings in time."""
    lines = ["| adapter | over `exact` | T/F, one group | same output |", "|---|---|---|---|"]
    for name, found in result["variants"].items():
        if name == "exact":
            continue
        depth = f"{found['tokens_per_forward']:.3f}" if "tokens_per_forward" in found else "-"
        lines.append(
            f"| {name} | {found['over_exact']:.2f} ({found['least']:.2f} to {found['most']:.2f}) | "
            f"{depth} | {found['identical']:.0%} |"
        )
    return [
        *lines,
        "",
        f"One at a time, {result['prompts']} prompts, {result['max_new_tokens']} new tokens, "
        f"median of {result['rounds']} interleaved rounds as served; T/F with all masks; bfloat16, "
        f"{machine(result['provenance'])}.",
    ]


def adapter_training(result: dict[str, Any]) -> list[str]:
    """T/F of held-out answers during a training, and of short trainings that differ in one part."""
    run = result["run"]
    lines = [
        "| mask tokens | seconds | T/F, all outcomes |",
        "|---|---|---|",
        *(f"| {masks:,} | {seconds:.0f} | {tf:.2f} |" for masks, seconds, tf in run["curve"]),
    ]
    answers = result["answers"]
    tried = sorted(result["screening"].items(), key=lambda pair: -pair[1]["tokens_per_forward"])
    return [
        *lines,
        "",
        "| shorter trainings | mask tokens | T/F, all outcomes | one group |",
        "|---|---|---|---|",
        *(
            f"| {name} | {found['mask_tokens']:,} | {found['tokens_per_forward']:.2f} | "
            f"{found['one_group']:.2f} |"
            for name, found in tried
        ),
        "",
        f"Teacher-forced over {result['held_out']} held-out answers; {answers['own_prompts']:,} "
        f"answers to own prompts and {answers['real_prompts']:,} to real ones; "
        f"{machine(result['provenance'])}.",
    ]


def step_before_after(result: dict[str, Any]) -> list[str]:
    """Milliseconds of a step of each shape in two checkouts."""
    lines = ["| step | before | now | times as fast (rounds) |", "|---|---|---|---|"]
    for own in (shape for shape in result["shapes"] if shape["dtype"] == "bfloat16"):
        lines.append(
            f"| {own['dtype']}, {own['shape']} | {1000 * own['before_s']:.1f} ms | "
            f"{1000 * own['after_s']:.1f} ms | {own['ratio']:.2f} ({own['least']:.2f} to "
            f"{own['most']:.2f}) |"
        )
    before = result["sides"]["before"]["provenance"]["commit"]
    return [
        *lines,
        "",
        f"SmolLM2 with its adapter; medians of {result['rounds']} interleaved rounds, "
        f"{result['threads']} threads; before: commit {before}; {machine(result['provenance'])}.",
    ]


def gpu_steps(result: dict[str, Any]) -> list[str]:
    """Milliseconds of a step by sequences, rows and masks, and the share of the bandwidth."""
    lines = [
        "| model | sequences | one row each | 4 rows | of them 2 masks | 9 rows | of them 5 masks "
        "| bandwidth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, model in result["models"].items():
        cases = [case for case in model["cases"] if case["context"] == 128 and case["graphs"]]
        for graphs, sequences in dict.fromkeys((c["graphs"], c["sequences"]) for c in cases):
            own = {
                case["rows"]: case
                for case in cases
                if (case["graphs"], case["sequences"]) == (graphs, sequences)
            }
            plain = own[1]["seconds"]
            share = model["bytes"] / plain / result["bytes_per_s"]
            numbers = [plain, own[4]["seconds"], own[4]["with_masks"]]
            numbers += [own[9]["seconds"], own[9]["with_masks"]]
            row = " | ".join(f"{1000 * number:.2f}" for number in numbers)
            lines.append(f"| {name} | {sequences} | {row} | {share:.0%} |")
    return [
        *lines,
        "",
        "Milliseconds of a step with Python and the copy to the host, least of ten; 128 tokens in "
        "each cache; random weights but for smollm2, random adapters of rank 32 with a head; "
        f"share of {result['bytes_per_s'] / 1e12:.1f} TB/s that a copy moves; bfloat16, "
        f"{machine(result['provenance'])}.",
    ]


def decode(result: dict[str, Any]) -> list[str]:
    """Tokens per second of every decoder at every batch size, also as a multiple of the peer's."""
    job, cases = result["job"], result["cases"]
    sampled = any(case.get("temperature") for case in cases)
    of = {(_decoder(case, sampled), case["batch"]): case for case in cases}
    labels = list(dict.fromkeys(label for label, _ in of))
    # Results of today have their ratios, which are those to the first decoder.
    base = "vllm" if "vllm" in labels and "temperature" not in cases[0] else labels[0]
    sizes = job["batch_sizes"]
    lines = [
        "| decoder | "
        + " | ".join(f"batch {size}" for size in sizes)
        + " | T/F | positions / token | same output |",
        "|---|" + "---|" * (len(sizes) + 3),
    ]
    for label in labels:
        own = {size: of[label, size] for size in sizes if (label, size) in of}
        cells = [_speed(own[size], of[base, size]) if size in own else "-" for size in sizes]
        last = own.get(sizes[-1], {})
        counted = [f"{last[key]:.2f}" if key in last else "-" for key in _COUNTS]
        same = min(case["same_output"] for case in own.values())
        lines.append(f"| {label} | {' | '.join([*cells, *counted])} | {same:.0%} |")
    times = f"{cases[0]['label']} at the same temperature" if sampled else base
    return [
        *lines,
        "",
        f"Tokens/s, and times {times} (median of {job['repeats']} interleaved rounds); T/F and "
        f"positions at batch {sizes[-1]}; {job['dtype']}, {job['threads']} thread(s), "
        f"{machine(result['provenance'])}.",
    ]


_COUNTS = ("tokens_per_forward", "positions_per_token")


def _decoder(case: dict[str, Any], sampled: bool) -> str:
    return f"{case['label']}, temperature {case['temperature']:g}" if sampled else case["label"]


def _speed(own: dict[str, Any], base: dict[str, Any]) -> str:
    """Tokens per second, and how many times those of another. Where the rounds tell no ratio, or
    masks are forced, there is none."""
    if "tokens_per_s" not in own:
        return "-"
    shown = f"{own['tokens_per_s']:,.0f}"
    if own.get("fault"):
        return shown
    if ratios := own.get("speed_ups"):
        return f"{shown} ({own['speed_up']:.2f}x, {min(ratios):.2f}-{max(ratios):.2f})"
    return f"{shown} ({speed_ratio(own, base):.2f}x)"


# Qwen2.5-7B, B = 4, GSM8K at threshold 0.95, 0.9, 0.8 (arXiv 2604.07023, tables of the paper).


def serve_load(result: dict[str, Any]) -> list[str]:
    """The live service compared with the bare engine and vLLM, and at rising rates."""
    lines = ["| mode | bare engine | service | share | tokens per chunk |", "|---|---|---|---|---|"]
    lines += [
        f"| {mode} | {row['engine_tokens_per_s']:,.0f} | {row['service_tokens_per_s']:,.0f} | "
        f"{row['share']:.0%} | {row['tokens_per_chunk']:.1f} |"
        for mode, row in result["engine"].items()
    ]
    lines += [
        "",
        f"Tokens/s at batch {result['batch']}, {result['clients']} clients, at most "
        f"{result['new_tokens']} tokens an answer.",
        "",
    ]
    if firsts := result.get("first_tokens"):
        both = "; ".join(
            f"{first['service_ms']:.1f} ms over HTTP{front.replace(',', ' and')}, "
            f"{first['added_ms_p50']:.1f} ms more at the median"
            for front, first in firsts.items()
        )
        alone = statistics.median(first["engine_ms"] for first in firsts.values())
        lines += [f"A first token takes {alone:.1f} ms in the process; {both}.", ""]
    if "vllm" in result:
        lines += _beside_vllm(result["vllm"])
    facts = machine(result["provenance"])
    return [*lines, f"Medians of {result['rounds']} interleaved rounds, {facts}."]


def _beside_vllm(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| service | clients | tokens/s | times vLLM | first token, ms | per token, ms |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['service']} | {row['clients']} | {row['tokens_per_s']:,.0f} | "
        f"{row['times_vllm']:.2f} | {row['first_token_ms_p50']:.1f} | "
        f"{row['per_token_ms_p50']:.2f} |"
        for row in rows
        if row["clients"] < 16
    ]
    return [*lines, ""]


def comparison(result: dict[str, Any]) -> list[str]:
    """How the policies fare over all cells, by the group of their settings."""
    cells: dict[str, dict[str, str]] = {}
    for policy, group, count, attained, over, _ in policy_rows(result):
        if attained:
            cells.setdefault(policy, {})[group] = f"{attained} of {count} ({over:.2f})"
    groups = ("default", "tuned", "hindsight")
    lines = ["| policy | default | tuned | hindsight |", "|---|---|---|---|"]
    for policy, own in cells.items():
        lines.append(f"| `{policy}` | " + " | ".join(own.get(one, "-") for one in groups) + " |")
    return [
        *lines,
        "",
        "Cells in which the objective was kept, and in brackets replicas over what lossless "
        "decoding needs on average there; policies that kept it nowhere are left out. "
        f"{_cells_facts(result)}",
    ]


def _cells_facts(result: dict[str, Any]) -> str:
    job, cost = result["job"], result["cost"]
    fewer = [
        f"{len(special['seeds'])} of {trace}"
        for trace, special in job["per_trace"].items()
        if special["seeds"]
    ]
    seeds = f"{len(job['seeds'])} seeds" + (f" ({', '.join(fewer)})" if fewer else "")
    return (
        f"{result['model']['name']}, {seeds}, 95% intervals; {cost['runs']:,} runs. Commit "
        f"{result['provenance']['commit']}."
    )


def live(result: dict[str, Any]) -> list[str]:
    """A live autoscaled run compared with the simulation of the same requests."""
    rows = (
        ("requests", "requests", "{:,.0f}"),
        ("in time", "attainment", "{:.1%}"),
        ("first token, P50", "ttft_p50_s", "{:.3f} s"),
        ("first token, P90", "ttft_p90_s", "{:.3f} s"),
        ("whole answer, P90", "answer_p90_s", "{:.2f} s"),
        ("replica-seconds", "replica_s", "{:,.0f}"),
        ("replicas at most", "peak_replicas", "{:.0f}"),
        ("below the set-point", "below_set_point_s", "{:.0f} s"),
    )
    lines = ["| | live | simulated | ratio |", "|---|---|---|---|"]
    for name, key, form in rows:
        one, other = result["live"][key], result["simulated"][key]
        ratio = f"{other / one:.2f}" if one else "-"
        lines.append(f"| {name} | {form.format(one)} | {form.format(other)} | {ratio} |")
    told = result["live"]
    slow = result["slowness"]
    lowered = (
        f"{told['lowered']} answers had a lower threshold, {told['pinned_below_floor']} of those "
        f"that pin one; {told['cut']} streams broke off and were asked for again, "
        f"{told['refused']} were refused at first, {told['requests'] - told['answered']} lost."
    )
    return [
        *lines,
        "",
        f"{lowered} Steps were told to take {statistics.median(slow):.1f} times what the service "
        f"model says at the median of {len(slow)} times ten seconds, a replica "
        f"{result['cold_start_s']:.0f} s to start, and a reply's way "
        f"{1e3 * result['overhead_s']:.0f} ms. {machine(result['provenance'])}; "
        f"simulated at {result['simulated_commit']}.",
    ]


_ARMS = {"mars": "trained by MARS", "adapter": "draft adapter"}


def mars_frontier(result: dict[str, Any]) -> list[str]:
    """What thresholds of `confidence` bring and cost on a pretrained model and real prompts."""
    lines = [
        "| | mode | prompts | T/F | own tokens | the original's tokens | nats by the original | "
        "same as `exact` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, points in result["arms"].items():
        for point in points:
            lines.append(
                f"| {_ARMS[arm]} | `{point['label']}` | {point['problems']} | "
                f"{point['tokens_per_forward']:.2f} | {point['agreement']:.1%} | "
                f"{point['agreement_with_original']:.1%} | {point['nll_by_original']:.3f} ± "
                f"{1.96 * point['nll_by_original_se']:.3f} | {point['identical']:.1%} |"
            )
    scored = next(iter(result["arms"].values()))[0]["scored"]
    return [
        *lines,
        "",
        "Own tokens: what the same model would have chosen, one forward later. By the original, "
        f"which nobody has trained: its choices and nats a token, over {scored} of the answers "
        f"(±: 95%, by the spread of the answers' means). {machine(result['provenance'])} "
        f"(trained by MARS: commit {result['commits']['mars']}).",
    ]


def ifeval(result: dict[str, Any]) -> list[str]:
    """How many prompts each arm and mode follow, and the difference to `exact`."""
    lines = [
        "| | mode | prompts followed | 95% | against `exact` | 95% | T/F |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, points in result["arms"].items():
        for point in points:
            changed = f"{point['difference']:+.1%} | " + " to ".join(
                f"{point[f'difference_{end}']:+.1%}" for end in ("low", "high")
            )
            lines.append(
                f"| {_ARMS[arm]} | `{point['mode']}` | {point['accuracy']:.1%} | "
                f"{point['accuracy_low']:.1%} to {point['accuracy_high']:.1%} | "
                f"{'- | -' if point['mode'] == 'exact' else changed} | "
                f"{point['tokens_per_forward']:.2f} |"
            )
    return [
        *lines,
        "",
        f"{result['prompts']} prompts, answers of at most {result['max_new_tokens']} tokens, a "
        "prompt counts if all of its instructions are followed; bfloat16, "
        + "; ".join(f"{_ARMS[arm]}: {machine(facts)}" for arm, facts in result["measured"].items())
        + ".",
    ]


def story(result: dict[str, Any]) -> list[str]:
    """What each step on the cluster took and left."""
    read = ", ".join(
        f"`{label}` {per_forward:.2f} T/F with {agreement:.1%} own tokens"
        for label, (per_forward, agreement) in result["frontier"].items()
        if label.startswith("confidence")
    )
    resumed = " and ".join(str(step) for step in result["resumed_at"])
    said = {
        "train": f"{result['tokens']:,} mask tokens; loss {result['loss'][0]:.2f} to "
        f"{result['loss'][1]:.2f}; {' and '.join(result['killed'])} killed, gone on from steps "
        f"{resumed}",
        "sweep": f"{result['trials']} trials",
        "evaluate": read,
        "serve": "until it answers",
        "scale": "until a second replica answers and 96 requests have",
        "cluster": "up and down",
    }
    own = dict(result["minutes"])
    # It encloses the others.
    own["cluster"] -= sum(each for step, each in own.items() if step != "cluster")
    lines = ["| step | minutes | |", "|---|---|---|"]
    lines += [f"| {step} | {spent:.1f} | {said.get(step, '')} |" for step, spent in own.items()]
    return [
        *lines,
        "",
        f"{sum(own.values()):.0f} minutes in all, {machine(result['provenance'])}.",
    ]


def adapt_minutes(result: dict[str, Any]) -> list[str]:
    """What budgets of `mars-ray adapt` gave."""
    lines = [
        "| minutes | answers told | answers | mask tokens | T/F, all masks | speed over `exact`, "
        "one at a time |",
        "|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        ratios = sorted(b / a for a, b in zip(run["exact"], run["drafts"], strict=True))
        lines.append(
            f"| {run['minutes']:g} | {run['answers_told']:,} | {run['answers']:,} | "
            f"{run['mask_tokens']:,} | {run['tokens_per_forward']:.2f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    return [*lines, "", f"{result['how']}; {machine(result['provenance'])}."]


def sweep(result: dict[str, Any]) -> list[str]:
    """A sweep's trials, best first, then its winner and the paper's setting by seed."""
    lines = [
        "| blocks | noisy share | steps | seconds | held-out loss of the clean stream | T/F "
        "| threshold |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["trials"]:
        values, threshold = row["values"], row["threshold"]
        shown = "-" if threshold is None else f"{threshold:g}"
        lines.append(
            f"| {_blocks(values['objective.block_size'])} | {values['objective.noisy_share']:g} | "
            f"{row['steps']} | {row['seconds']:.0f} | {row['clean_ce']:.3f} | "
            f"{row['tokens_per_forward']:.3f} | {shown} |"
        )
    seeds = "; ".join(
        f"seed {run['seed']}: {run['winner']:.3f} against {run['paper']:.3f} "
        f"({run['seconds'][0]:.0f} and {run['seconds'][1]:.0f} s)"
        for run in result["seeds"]
    )
    return [
        *lines,
        "",
        f"{result['minutes']:g} minutes a trial asked, two at a time; T/F of `confidence` where at "
        f"most {result['most_lost']:.0%} of the tokens are not the model's own choices, "
        f"{result['problems']} problems. The winner against the paper's setting: {seeds}. "
        f"{machine(result['provenance'])}.",
        "",
        *_clean_loss(result["clean_loss"]),
    ]


def _clean_loss(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| seed | weight of the clean stream's loss | steps | seconds | its held-out loss "
        "| T/F, expected | T/F | threshold |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        reached = row["tokens_per_forward"]
        lines.append(
            f"| {row['seed']} | {row['weight']:g} | {row['steps']} | {row['seconds']:.0f} | "
            f"{row['clean_ce']:.3f} | "
            f"{row['tokens_per_forward_expected']:.2f} | "
            + (f"{reached:.3f} | {row['threshold']:g} |" if reached else "- | - |")
        )
    return lines


def _blocks(size: dict[str, Any]) -> str:
    match size["type"]:
        case "constant":
            return f"{size['size']}"
        case "mixed":
            return " and ".join(map(str, size["sizes"])) + " mixed"
        case _:
            return ", then ".join(str(step["size"]) for step in size["steps"])


def trade(result: dict[str, Any]) -> list[str]:
    """The threshold against a replica, live: three arms on the same arrivals."""
    lines = [
        "| | seed | in time | refused at first | first token, P90 | whole answer, P90 | "
        "replica-seconds | threshold below 1 | points lost | back at 1 after the second replica |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        told, back = run["live"], run["quality_recovered_s"]
        lines.append(
            f"| {run['arm']} | {run['seed']} | {told['attainment']:.1%} | {told['refused']} | "
            f"{told['ttft_p90_s']:.1f} s | {told['answer_p90_s']:.1f} s | "
            f"{told['replica_s']:.0f} | {told['below_set_point_s']:.0f} s | "
            f"{run['points_lost']:.2f} | {'-' if back is None else f'{back:.0f} s'} |"
        )
    first = result["runs"][0]
    rates = ", ".join(
        f"{rate:g}/s for {seconds:.0f} s"
        for rate, seconds in zip(first["rates"], first["stage_s"], strict=True)
    )
    ours = [run for run in result["runs"] if run["arm"] == "ours"]
    counts = " and ".join(f"{run['live']['requests']}" for run in ours)
    starts = " and ".join(f"{run['cold_start_s']:.0f}" for run in ours)
    return [
        *lines,
        "",
        f"{counts} requests by seed ({rates}), to be begun within {result['ttft_s']:g} s; a "
        f"replica of ours took {starts} s to start, {result['slow_start_s']:g} s of it by waiting. "
        f"{machine(result['provenance'])}.",
    ]


def _in_processes(timed: dict[str, Any]) -> str:
    count = len(timed.get("processes", [None]))
    if count == 1:
        return ""
    return f" of {count} processes, every second of which makes the plug-in's engine first"


def plugin(result: dict[str, Any]) -> list[str]:
    """Text and T/F of all prompts, then tokens per second by batch size (vllm_plugin.py)."""
    counted, sampled = result["tokens_per_forward"], result["sampled"]
    lines = [
        f"- Equal to plain vLLM's: {result['identical_share']:.1%} of {result['prompts']} answers.",
        f"- T/F without the {result['looping']} answers that loop: "
        f"{counted['vllm']['without_loops']:.2f}; our engine with one group of masks "
        f"{counted['ours']['without_loops']:.2f}; sampled at temperature 1 "
        f"{sampled['tokens_per_forward']:.2f}.",
        f"- Forwards that carried drafts: {result['greedy']['share_with_drafts']:.0%}.",
        "",
        "| batch | plain vLLM, tokens/s | with the plug-in | ratio: median (rounds) | T/F | "
        "forwards with drafts |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["speed"]:
        ratios, steps = row["ratios"], row["steps"]
        lines.append(
            f"| {row['batch']} | {row['plain_tokens_per_s']:,.1f} | "
            f"{row['mars_tokens_per_s']:,.1f} | {row['over_plain']:.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) | {steps['tokens_per_forward']:.2f} | "
            f"{steps['share_with_drafts']:.0%} |"
        )
    timed = result["speed"][0]
    return [
        *lines,
        "",
        f"vLLM {result['vllm']}, float32, greedy, {timed['prompts']} prompts and "
        f"{timed['tokens']:,} tokens in each of {len(timed['ratios'])} interleaved rounds"
        f"{_in_processes(timed)}, as many masks as pay; {machine(result['provenance'])}.",
    ]


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "adapter_parts": adapter_parts,
    "adapter_ranks": adapter_ranks,
    "adapter_training_gpu": adapter_training,
    "cache": decode,
    "demo": demo,
    "gpu_step": gpu_steps,
    "gsm8k": gsm8k,
    "ifeval": ifeval,
    "live": live,
    "mars_decode": decode,
    "mars_frontier": mars_frontier,
    "ngram_edit": decode,
    "ngram_summarise": decode,
    "schedules_demo": schedules,
    "serve_load": serve_load,
    "serve_load_0_5b": serve_load,
    "simulate": comparison,
    "simulate_measured": comparison,
    "adapt_minutes": adapt_minutes,
    "smollm2_decode": decode,
    "smollm2_decode_amx": decode,
    "smollm2_decode_short": decode,
    "smollm2_identity": identity_summary,
    "smollm2_identity_gpu": lambda result: in_bfloat16(result["bfloat16"]),
    "step_before_after": step_before_after,
    "sweep": sweep,
    "trade": trade,
    "story": story,
    "train_step": train_step,
    "vllm_plugin": plugin,
}
