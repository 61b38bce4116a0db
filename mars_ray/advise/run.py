"""The advice: a trace from a file or a server, its fleets at each objective, and what pays."""

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mars_ray.advise.config import AdviseJob
from mars_ray.advise.draw import draw
from mars_ray.advise.fleets import HOUR_S, Fleets, case, fleets, ways
from mars_ray.advise.objectives import objectives
from mars_ray.advise.prometheus import Measured, Prometheus, measure
from mars_ray.advise.verdict import Found, Verdict, best, verdicts
from mars_ray.autoscale.service_model import ServiceModel, load_service_model
from mars_ray.files import Kept
from mars_ray.provenance import provenance
from mars_ray.simulator.cases import Case
from mars_ray.simulator.config import FileTrace
from mars_ray.simulator.parts import run_parts
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Trace

_SEED = 0
# Of Prometheus, where nobody says how many.
_HOURS = 24.0


@dataclass(frozen=True, slots=True)
class Objective:
    """What was found for one objective."""

    case: Case
    found: Found
    verdicts: list[Verdict]


@dataclass(frozen=True, slots=True)
class Advice:
    """All that the page shows."""

    job: AdviseJob
    trace: Trace
    model: ServiceModel
    measured: Measured | None  # None for a trace
    objectives: list[Objective]


def advise(
    job: AdviseJob, console: Console, token: str | None = None, workers: int | None = None
) -> Advice:
    """Simulate all fleets. The token is Prometheus's. Raises ConfigError or DataError."""
    model = load_service_model(job.service_model)
    measured = None
    if job.from_prometheus:
        server = Prometheus(job.source, token)
        measured = measure(server, job.hours or _HOURS, job.model_name, time.time())
        trace = draw(measured, _SEED)
    else:
        span_s = job.hours and job.hours * HOUR_S
        trace = load_trace(FileTrace(path=job.source, duration_s=span_s), _SEED)
    cases = [
        case(trace, model, slo, job.cold_start_s, job.max_replicas)
        for slo in job.slos or objectives(model, trace)
    ]
    several = ways(model, job.threshold)
    calls = {
        f"{objective(given)}, {way.name}": partial(fleets, given, way)
        for given in cases
        for way in several
    }
    made = iter(run_parts(calls, Kept(None, ""), workers, console).values())
    found: list[Found] = [{way: next(made) for way in several} for _ in cases]
    judged = [
        Objective(given, each, verdicts(each, given))
        for given, each in zip(cases, found, strict=True)
    ]
    return Advice(job, trace, model, measured, judged)


def objective(given: Case) -> str:
    """A case's objective in words."""
    slo = given.slo
    return f"first token in {slo.ttft_s:g} s, {1e3 * slo.time_per_token_s:g} ms a token"


def recommendation(given: Objective) -> str:
    """One sentence: mode, step size and fleets."""
    rows, most = given.case.model.step_rows, given.case.config.max_replicas
    chosen = best(given.found)
    if chosen is None:
        return f"No lossless fleet of up to {most} replicas keeps every hour."
    way, fleets = chosen
    sizes = [n for n in fleets.by_hour if n]
    span = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    parts = [
        f"Steps of {rows} rows, `{way.name}`: {span} replicas by the hour "
        f"({fleets.replica_hours:.1f} replica-hours)"
    ]
    if fleets.fixed:
        parts.append(f"{fleets.fixed} that stay ({fleets.fixed_hours:.1f})")
    if scaled := fleets.scaled:
        misses = scaled.attainment < given.case.slo.attainment
        parts.append(
            f"{scaled.mean_replicas:.1f} on average as our policy scales them "
            f"({scaled.replica_hours:.1f}, {'but only ' * misses}{scaled.attainment:.1%} in time)"
        )
    return ", ".join(parts) + "."


def print_advice(advice: Advice, console: Console) -> None:
    """Print the sentences of the page."""
    for each in advice.objectives:
        console.print(objective(each.case).capitalize(), style="bold")
        lines = [recommendation(each)]
        lines += [f"{v.question} {'Yes' if v.pays else 'No'}: {v.why}." for v in each.verdicts]
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def summary(advice: Advice, page: Path | None) -> dict[str, Any]:
    """The line that the command prints last."""
    trace = advice.trace
    return {
        "job": advice.job.model_dump(mode="json"),
        "service_model": {"name": advice.model.name, "provenance": advice.model.provenance},
        "requests": len(trace),
        "hours": round(trace.duration_s / HOUR_S, 3),
        "prompt_tokens": round(float(trace.prompt_tokens.mean()), 1),
        "output_tokens": round(float(trace.output_tokens.mean()), 1),
        "measured_latencies": advice.measured.latencies if advice.measured else {},
        "objectives": [
            {
                "slo": each.case.slo.model_dump(),
                "step_rows": each.case.model.step_rows,
                "fleets": {way.name: _short(found) for way, found in each.found.items()},
                "advice": recommendation(each),
                "verdicts": [asdict(verdict) for verdict in each.verdicts],
            }
            for each in advice.objectives
        ],
        "page": str(page) if page else None,
        "provenance": provenance(),
    }


def _short(found: Fleets) -> dict[str, Any]:
    """Without the timeline."""
    table = asdict(replace(found, scaled=None))
    table |= {"replica_hours": found.replica_hours, "fixed_hours": found.fixed_hours}
    if found.scaled:
        scaled = asdict(found.scaled)
        table["scaled"] = {key: scaled[key] for key in scaled if key not in ("at_s", "ready")}
    return table
