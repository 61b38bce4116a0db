"""Runs of every policy on every trace with every seed, and their comparison."""

import hashlib
import json
import secrets
import statistics
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mars_ray.autoscale.service_model import ServiceModel, load_service_model
from mars_ray.autoscale.step_size import step_rows
from mars_ray.errors import ConfigError
from mars_ray.files import Kept
from mars_ray.provenance import provenance
from mars_ray.simulator.baselines.contenders import Setting, contender, run
from mars_ray.simulator.baselines.tuning import tuned
from mars_ray.simulator.config import Cluster, PolicyName, SimulateJob
from mars_ray.simulator.engine.result import Outcome, Timeline, summarise
from mars_ray.simulator.parts import run_parts
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Trace
from mars_ray.simulator.verdict import margin, percent

# 97.5% quantiles of Student's t by degrees of freedom; beyond the table, from the normal quantile.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL = 1.959964
_KEPT = "parts.jsonl"
# Points of a timeline in the result, few enough to keep its file small.
_TICKS = 150


@dataclass(frozen=True, slots=True)
class _Part:
    """One policy on one trace at one cold start."""

    trace: str
    cold_start_s: float
    policy: PolicyName

    def __str__(self) -> str:
        return f"{self.trace}, cold start {self.cold_start_s:g} s, {self.policy}"


def run_simulations(
    job: SimulateJob, console: Console, directory: Path | None = None, workers: int | None = None
) -> dict[str, Any]:
    """Figures, means and intervals of all runs, by cold start, trace and policy, as JSON values.

    Finished parts are kept in the directory, and not simulated again for the same job and code.
    Workers are processes, by default one per core. Raises ConfigError or DataError.
    """
    model = load_service_model(job.service_model)
    chosen = step_rows(model, job.scaling.slo.time_per_token_s)
    model = replace(model, step_rows=job.cluster.step_tokens or chosen)
    _check_fixed_threshold(job, model)
    # Loading all traces now shows at once if one is missing.
    traces = [load_trace(source, job.seeds[0]) for source in job.traces.values()]
    colds = dict.fromkeys((job.cluster.cold_start_s, *job.cold_starts_s))
    parts = [_Part(t, cold, p) for cold in colds for t in job.traces for p in job.policies]
    where = provenance()
    kept = Kept(directory / _KEPT if directory else None, _work(job, model, traces, where))
    calls = {str(part): partial(_compared, part, job, model) for part in parts}
    made = run_parts(calls, kept, workers, console)
    results: dict[str, Any] = {}
    for part in parts:
        by_trace = results.setdefault(f"{part.cold_start_s:g}", {})
        by_policy = by_trace.setdefault(part.trace, {"policies": {}})
        row = dict(made[str(part)])
        by_policy["requests"] = row.pop("requests")
        by_policy["policies"][part.policy] = row
    return {
        "job": job.model_dump(mode="json"),
        "model": {
            "name": model.name,
            "step_rows": model.step_rows,
            "provenance": model.provenance,
        },
        "cold_starts": results,
        "provenance": where,
    }


def _check_fixed_threshold(job: SimulateJob, model: ServiceModel) -> None:
    """Check that the model has the threshold of the policy fixed-threshold. Raises ConfigError."""
    wanted = job.fixed_threshold
    if "fixed-threshold" in job.policies and model.level(wanted).threshold != wanted:
        known = ", ".join(f"{level.threshold:g}" for level in model.levels)
        raise ConfigError(
            f"{model.name} has no level {wanted:g} for the policy fixed-threshold: set "
            f"fixed_threshold to one of {known}, or leave the policy out of policies"
        )


def _work(job: SimulateJob, model: ServiceModel, traces: list[Trace], where: dict[str, Any]) -> str:
    """A digest of all that a part's result depends on besides the part. Code with uncommitted
    changes has no name, so each run of it gets a different digest."""
    facts = job.model_dump(mode="json", exclude={"name", "policies", "cold_starts_s"})
    code = [where["mars_ray"], where["commit"]]
    if str(where["commit"]).endswith("+"):
        code.append(secrets.token_hex())
    work = hashlib.sha256(json.dumps([facts, asdict(model), code], sort_keys=True).encode())
    for trace in traces:  # their files may change
        for column in fields(trace)[1:]:
            work.update(np.ascontiguousarray(getattr(trace, column.name)).tobytes())
    return work.hexdigest()[:16]


def _settings(job: SimulateJob, model: ServiceModel, part: _Part) -> list[Setting]:
    cluster = Cluster.model_validate(job.cluster.model_dump() | {"cold_start_s": part.cold_start_s})
    source = job.traces[part.trace]
    return [Setting(job, model, load_trace(source, seed), cluster) for seed in job.seeds]


def _compared(part: _Part, job: SimulateJob, model: ServiceModel) -> dict[str, Any]:
    settings = _settings(job, model, part)
    knob = tuned(settings[: job.tuning_seeds], part.policy)
    runs, first = [], None
    for seed, setting in zip(job.seeds, settings, strict=True):
        outcome = run(setting, contender(part.policy, setting), knob, seed)
        runs.append(summarise(outcome, job.scaling.slo, job.accuracy))
        first = first or outcome
    assert first is not None
    return {
        "requests": [len(setting.trace) for setting in settings],
        "knob": asdict(knob),
        "runs": runs,
        "mean": {key: statistics.fmean(r[key] for r in runs) for key in runs[0]},
        "half_width": {key: _half_width([r[key] for r in runs]) for key in runs[0]},
        "timeline": _thinned(first.timeline),
        "reasons": _reasons(first),
    }


def _half_width(values: list[float]) -> float | None:
    """Half the width of the mean's 95% interval over seeds; None if it is not known."""
    if len(values) < 2 or not all(map(np.isfinite, values)):
        return None
    return _quantile(len(values) - 1) * statistics.stdev(values) / sqrt(len(values))


def _quantile(degrees: int) -> float:
    """Student's 97.5% quantile, by Cornish and Fisher's expansion beyond the table (to 0.2%)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = _NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


def _thinned(timeline: Timeline) -> dict[str, list[float]]:
    """The timeline as means over equal spans; for the threshold, the lowest value."""
    spans = np.array_split(np.arange(len(timeline.at_s)), min(_TICKS, len(timeline.at_s)))
    columns = {
        "at_s": [timeline.at_s[i[0]] for i in spans],
        "arrivals_per_s": [timeline.arrivals_per_s[i].mean() for i in spans],
        "ready": [timeline.ready[i].mean() for i in spans],
        "starting": [timeline.starting[i].mean() for i in spans],
        "threshold": [timeline.threshold[i].min() for i in spans],
        "outstanding": [timeline.outstanding[i].mean() for i in spans],
    }
    return {name: [round(float(v), 3) for v in values] for name, values in columns.items()}


def _reasons(outcome: Outcome) -> list[tuple[float, str]]:
    """The first decisions that changed something, with their reasons."""
    return [(round(at, 1), reason) for at, reason in outcome.reasons[:20]]


def print_comparison(result: dict[str, Any], console: Console) -> None:
    """Print a table for each trace, at the job's own cold start."""
    cold = f"{result['job']['cluster']['cold_start_s']:g}"
    wanted = result["job"]["scaling"]["slo"]["attainment"]
    for trace, part in result["cold_starts"][cold].items():
        title = f"{trace}: {part['requests'][0]} requests, cold start {cold} s"
        table = Table(title=title, title_justify="left")
        table.add_column("policy")
        for name in (
            "replicas",
            "attained",
            "effective accuracy",
            "points lost",
            "below set-point",
        ):
            table.add_column(name, justify="right")
        for policy, row in part["policies"].items():
            mean, half = row["mean"], row["half_width"]
            mark = "" if mean["attainment"] >= wanted else " *"
            table.add_row(
                policy,
                f"{mean['mean_replicas']:.2f}{margin(half['mean_replicas'])}",
                f"{mean['attainment']:.2%}{mark}",
                f"{mean['effective_accuracy']:.2f}{margin(half['effective_accuracy'])}",
                f"{mean['points_lost']:.2f}",
                f"{mean['below_set_point_s']:.0f} s",
            )
        console.print(table)
    console.print(f"* below {percent(wanted)}; means over seeds, 95% intervals", style="dim")


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The result without timelines, runs and reasons."""

    def short(row: dict[str, Any]) -> dict[str, Any]:
        return {key: row[key] for key in ("knob", "mean", "half_width")}

    colds = {
        cold: {
            trace: {name: short(row) for name, row in part["policies"].items()}
            for trace, part in traces.items()
        }
        for cold, traces in result["cold_starts"].items()
    }
    return {key: result[key] for key in ("job", "model", "provenance")} | {"cold_starts": colds}
