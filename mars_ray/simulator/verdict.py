"""Claims about our policy, and whether the comparison supports them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

_OF_RAY, _OF_LOSSLESS, _OF_CLAIRVOYANT = 0.55, 0.90, 1.15
_POINTS = 1.0
_LOSSLESS = ("lossless", "ray-verified")
_KNOWING = "clairvoyant"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim on one trace."""

    trace: str
    claim: str
    measured: str
    holds: bool


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """Verdicts at the job's own cold start, except claims about policies that were not run.

    No claim holds for a policy that misses the objective.
    """
    cold = f"{result['job']['cluster']['cold_start_s']:g}"
    wanted = result["job"]["scaling"]["slo"]["attainment"]
    found: list[Verdict] = []
    for trace, part in result["cold_starts"][cold].items():
        means = {name: row["mean"] for name, row in part["policies"].items()}
        if "mars" in means:
            late = means["mars"]["attainment"] < wanted
            # A low cost is worth nothing to a policy that misses the objective.
            found += (
                replace(v, holds=v.holds and not late) for v in _of_trace(trace, means, wanted)
            )
    return found


def percent(share: float) -> str:
    """A share as a percentage with all its digits: 99.9% must not become 100%."""
    return f"{100 * share:g}%"


def margin(half_width: float | None) -> str:
    """The ± after a mean; empty if its interval is not known, as with one seed."""
    return "" if half_width is None else f" ± {half_width:.2f}"


def _of_trace(trace: str, means: dict[str, Any], wanted: float) -> Iterator[Verdict]:
    mars = means["mars"]
    attained = mars["attainment"]
    yield Verdict(
        trace, f"at least {percent(wanted)} in time", f"{attained:.2%}", attained >= wanted
    )
    if "ray" in means:
        yield _ratio(trace, "Ray's default over plain decoding", mars, means["ray"], _OF_RAY)
    lossless = {n: means[n] for n in _LOSSLESS if n in means and means[n]["attainment"] >= wanted}
    if lossless:
        name, best = min(lossless.items(), key=lambda item: item[1]["replica_s"])
        yield _against_lossless(trace, name, mars, best)
    better = [name for name, row in means.items() if name not in ("mars", _KNOWING)]
    better = [name for name in better if _dominates(means[name], mars)]
    measured = f"by {', '.join(better)}" if better else "by none"
    yield Verdict(trace, "dominated by no policy but the clairvoyant one", measured, not better)
    if _KNOWING in means:
        yield _ratio(trace, "the clairvoyant one", mars, means[_KNOWING], _OF_CLAIRVOYANT)


def _ratio(
    trace: str, other: str, mars: dict[str, Any], row: dict[str, Any], most: float
) -> Verdict:
    ratio = mars["replica_s"] / row["replica_s"]
    claim = f"at most {most:.0%} of the replica-seconds of {other}"
    measured = f"{ratio:.0%} (which has {row['attainment']:.2%} in time)"
    return Verdict(trace, claim, measured, ratio <= most)


def _against_lossless(trace: str, name: str, mars: dict[str, Any], best: dict[str, Any]) -> Verdict:
    ratio = mars["replica_s"] / best["replica_s"]
    points = best["effective_accuracy"] - mars["effective_accuracy"]
    cheaper = ratio <= _OF_LOSSLESS and points <= _POINTS
    surer = ratio <= 1 and mars["attainment"] > best["attainment"]
    claim = (
        f"at most {_OF_LOSSLESS:.0%} of the best lossless one at {_POINTS:g} point less, or more "
        "in time at no more replica-seconds"
    )
    measured = f"{ratio:.0%} of {name}, {points:+.2f} points less"
    return Verdict(trace, claim, measured, cheaper or surer)


def _dominates(row: dict[str, Any], mars: dict[str, Any]) -> bool:
    """Whether a policy is no worse than mars in both, and better in one."""
    fewer = row["replica_s"] - mars["replica_s"]
    better = row["effective_accuracy"] - mars["effective_accuracy"]
    return fewer <= 0 <= better and (fewer, better) != (0, 0)
