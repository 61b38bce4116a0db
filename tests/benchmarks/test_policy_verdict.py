"""Which setting is chosen, and what is said of the cells: by hand."""

from typing import Any

import pytest
from policies.choice import Trial, best_elsewhere
from policies.contenders import Setting
from policies.job import ComparisonJob
from policies.verdict import claims, verdicts

from mars_ray.config.scaling import Slo

CHEAP, MIDDLE, SAFE = Setting(None, 0.0), Setting(0.5, 0.0), Setting(0.5, 2.0)


def test_a_setting_is_chosen_by_the_other_traces():
    """Where it attains most often, then where it is cheapest; what it does here does not count."""
    trials = {
        "here": {CHEAP: Trial(True, 1.0), MIDDLE: Trial(False, 9.0), SAFE: Trial(True, 5.0)},
        "one": {CHEAP: Trial(True, 1.0), MIDDLE: Trial(True, 2.0), SAFE: Trial(True, 3.0)},
        "two": {CHEAP: Trial(False, 1.0), MIDDLE: Trial(True, 2.0), SAFE: Trial(True, 3.0)},
    }
    assert best_elsewhere(trials, "here") == MIDDLE
    # There CHEAP and SAFE attain on one more trace than MIDDLE does, or on as many.
    assert best_elsewhere(trials, "two") == CHEAP
    assert best_elsewhere({"here": trials["here"]}, "here") is None


def row(replica_s: float, attainment: float = 1.0, points: float = 0.0) -> dict[str, Any]:
    means = {"replica_s": replica_s, "attainment": attainment, "points_lost": points}
    return {"mean": means | {"mean_replicas": replica_s / 10}}


def cell(trace: str, varies: bool = False, **policies: dict[str, Any]) -> dict[str, Any]:
    where = {"trace": trace, "regime": "slow", "cold_start_s": 30.0, "varies": varies}
    return where | {"policies": {name.replace("_", "-"): one for name, one in policies.items()}}


JOB = ComparisonJob(
    name="t",
    service_model="none",
    traces={"a": {"type": "ramp"}},  # pyright: ignore
    slos={"slow": Slo(attainment=0.99)},
)


def test_claims_by_hand():
    """Four cells: attained by both, by ours alone, by another alone, by none."""
    found = claims(
        [
            cell(
                "both",
                mars={"default": row(50)},
                ray={"default": row(100), "tuned": row(80, 0.5)},
                fixed={"default": row(60), "hindsight": row(40)},
                fixed_verified={"default": row(55), "hindsight": row(45)},
            ),
            cell(
                "ours",
                True,
                mars={"default": row(30)},
                ray={"default": row(90, 0.9)},
                fixed={"default": row(20, 0.8), "hindsight": row(60)},
            ),
            cell(
                "theirs",
                True,
                mars={"default": row(30, 0.98)},
                ray={"default": row(90)},
                fixed={"default": row(20, 0.98), "hindsight": row(60)},
            ),
            cell("none", mars={"default": row(9, 0.1)}, ray={"default": row(9, 0.2)}),
        ],
        JOB,
    )
    attained = found["attained"]
    assert (attained["cells"], attained["by_others"], attained["by_both"]) == (4, 2, 1)
    assert attained["share"] == 0.5
    assert attained["by_ours_alone"] == ["ours, slow, 30 s"]
    assert attained["missed"] == {"theirs, slow, 30 s": ["ray, default"]}
    assert attained["others"]["ray, default"] == 2
    over = found["over_best_fixed"]
    assert over["ratios"] == {"both, slow, 30 s": 1.25, "ours, slow, 30 s": 0.5}
    assert (len(over["varying"]), over["varying_below"]) == (2, ["ours, slow, 30 s"])
    # Who is late on fewer replicas dominates who is as late; who is later does not.
    assert found["dominated"] == {"fixed": ["theirs, slow, 30 s"], "fixed-verified": []}
    ray = found["over_ray"]["ray, default"]
    assert (ray["both"], ray["ours"], ray["theirs"], ray["none"]) == (1, 1, 1, 1)
    assert ray["ratio"] == pytest.approx(0.5)
    assert found["over_ray"]["ray, tuned"]["ratio"] is None


@pytest.mark.parametrize(
    ("ours", "theirs", "dominated"),
    [
        (row(50), row(50), False),
        (row(50), row(49), True),
        (row(50, points=0.1), row(50), True),
        (row(50, 0.999), row(50, 0.995), False),
        (row(50, 0.97), row(49, 0.96), False),
        (row(50, 0.97), row(50, 0.98), True),
        (row(50), row(49, points=0.1), False),
    ],
)
def test_who_is_dominated(ours, theirs, dominated):
    """No worse in replica-seconds, points and attainment, and better in one; those who attain
    attain alike."""
    found = claims([cell("a", mars={"default": ours}, fixed={"default": theirs})], JOB)
    assert bool(found["dominated"]["fixed"]) is dominated


def test_verdicts_tell_what_holds():
    """One attained of two that another attains; at most 1.25 of the best fixed fleet."""
    cells = [
        cell(
            name,
            mars={"default": row(50, attained)},
            ray={"default": row(90)},
            fixed={"default": row(80), "hindsight": row(40)},
        )
        for name, attained in (("a", 1.0), ("b", 0.98))
    ]
    said = verdicts({"claims": claims(cells, JOB)})
    assert [one.holds for one in said] == [False, True, True, True, True, None]
    assert said[0].measured.startswith("1 of 2, of 2 in all")
    assert verdicts({"claims": claims(cells, JOB.model_copy(update={"policies": ("ray",)}))}) == []


def test_a_valve_is_summed_over_cells():
    """Requests are added, points are a mean; without such cells nothing is said."""
    valve = {"kept": 10.0, "points_lost": 0.5, "below_set_point_s": 60.0}
    kept = [cell(name, mars={"default": row(50)}) | {"valve": {"mean": valve}} for name in "ab"]
    found = claims(kept, JOB)["valve"]
    assert (found["requests_kept"], found["points_lost"]) == (20, 0.5)
    assert any("20 in 2 cells" in one.measured for one in verdicts({"claims": claims(kept, JOB)}))
    assert claims([cell("a", mars={"default": row(50)})], JOB)["valve"] is None
