"""Sums of replicas become rates of a fleet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.autoscale.sample import Collector, ReplicaCounts, Report, Sample, step_costs

NOTHING = dict.fromkeys(("arrived", "refused", "finished", "running", "waiting"), 0.0)


def report(at_s: float, **sums: float) -> Report:
    return Report(at_s, ReplicaCounts.from_metrics(NOTHING | sums))


def look(
    collector: Collector, reports: dict[str, Report], running: int, target: int, now: float
) -> Sample:
    """Where all clocks say the same."""
    return collector.sample(reports, running, target, now, now)


def test_rates_are_differences():
    """Two replicas, two looks, worked by hand."""
    collector = Collector()
    first = {"a": report(10.0, arrived=100, finished=90), "b": report(10.5, arrived=7)}
    assert look(collector, first, 2, 2, 11.0).arrivals_per_s is None
    second = {
        "a": report(12.0, arrived=110, finished=94, output_tokens=200, running=3, waiting=2),
        "b": report(11.5, arrived=9, refused=1, finished=1, output_tokens=50, running=1),
    }
    seen = look(collector, second, 2, 2, 12.5)
    assert seen.arrivals_per_s == pytest.approx(10 / 2 + 2 / 1)
    assert seen.refused_per_s == pytest.approx(1.0)
    assert seen.output_tokens == pytest.approx(250 / 5)
    assert (seen.waiting, seen.age_s) == (2, 1.0)
    assert sorted(load.running for load in seen.loads) == [1, 3]


def test_a_replica_that_comes_is_no_burst():
    """Its sums begin at what they are, and one that goes takes nothing with it."""
    collector = Collector()
    look(collector, {"a": report(0, arrived=1000)}, 1, 1, 0)
    look(collector, {"a": report(1, arrived=1010)}, 1, 1, 1)
    both = {"a": report(2, arrived=1020), "b": report(2, arrived=500)}
    assert look(collector, both, 2, 2, 2).arrivals_per_s == pytest.approx(10)
    assert look(collector, {"b": report(3, arrived=504)}, 1, 1, 3).arrivals_per_s == 4


def test_a_report_from_a_clock_that_is_ahead_is_new():
    """Guards a fleet without metrics wherever its nodes' clocks are ahead of the controller's."""
    reports = {"a": report(102.0), "b": report(98.5)}
    seen = Collector().sample(reports, 2, 2, now=5.0, wall_s=100.0)
    assert seen.age_s == 1.5
    assert Collector().sample({"a": report(102.0)}, 1, 1, now=5.0, wall_s=100.0).age_s == 0


def test_a_late_report_counts_with_what_was_before():
    """Guards a fleet that seems idle because one tick had nothing new."""
    collector = Collector()
    for at_s, arrived in ((0, 0), (1, 5)):
        look(collector, {"a": report(at_s, arrived=arrived)}, 1, 1, at_s)
    seen = look(collector, {"a": report(1, arrived=5)}, 1, 1, 4.0)
    assert (seen.arrivals_per_s, seen.age_s) == (5, 3)


@pytest.mark.parametrize(
    ("at_s", "rates"),
    [
        ((0, 1, 1.00001, 2), [None, 5, 5, 10]),  # a moment apart: one report
        ((100, 101, 91, 92), [None, 5, None, 5]),  # ten seconds back
    ],
)
def test_a_clock_that_is_set_back(at_s, rates):
    """Guards a rate without end of five requests, and ten seconds' requests in one of them."""
    collector = Collector()
    seen = [
        look(collector, {"a": report(at, arrived=5 * i)}, 1, 1, at).arrivals_per_s
        for i, at in enumerate(at_s)
    ]
    assert seen == rates


def test_a_replica_that_started_anew_counts_from_zero():
    """Sums that fall are another process's; no rate is negative."""
    collector = Collector()
    look(collector, {"a": report(0, arrived=100)}, 1, 1, 0)
    assert look(collector, {"a": report(1, arrived=3)}, 1, 1, 1).arrivals_per_s == 0


def test_starts_are_timed():
    """From the order to the first sight of the replica; those still on their way have an age."""
    collector = Collector()
    look(collector, {}, 1, 1, 0)
    assert look(collector, {}, 1, 3, 10).starting_ages_s == (0, 0)
    half = look(collector, {}, 2, 3, 17)
    assert (half.starting_ages_s, half.cold_start_s) == ((7,), 7)
    assert look(collector, {}, 2, 2, 20).starting_ages_s == ()
    again = look(collector, {}, 2, 4, 30)
    assert (again.starting_ages_s, again.cold_start_s) == ((0, 0), 7)


def test_a_wait_for_a_machine_is_no_cold_start():
    """Nobody can tell the two apart, so a start counts at most three times the one before."""
    collector = Collector()
    look(collector, {}, 1, 2, 0)
    assert look(collector, {}, 2, 3, 10).cold_start_s == 10
    assert look(collector, {}, 3, 4, 1810).cold_start_s == 30
    assert look(collector, {}, 4, 5, 1820).cold_start_s == 10
    collector = Collector(usual_s=60)
    look(collector, {}, 1, 2, 0)
    assert look(collector, {}, 2, 3, 1800).cold_start_s == 180
    assert look(collector, {}, 3, 4, 1801).cold_start_s == 1
    # A short one, as after a restart of whoever looks, does not hide what is usual.
    assert look(collector, {}, 4, 5, 1951).cold_start_s == 150


def test_shares_and_curves():
    """By class, and by threshold."""
    collector = Collector()
    names = (
        "quality_class:fast",
        "quality_class:pinned",
        "tokens_at:1",
        "tokens_at:0.3",
        "measured_forwards",
    )
    look(collector, {"a": report(0, **dict.fromkeys(names, 0.0))}, 1, 1, 0)
    sums = dict(zip(names, (3.0, 1.0, 20.0, 30.0, 10.0), strict=True))
    sums["arrived"] = 4.0
    seen = look(collector, {"a": report(1, **sums)}, 1, 1, 1)
    assert seen.class_shares == {"fast": 0.75, "pinned": 0.25}
    assert seen.tokens_per_forward == {1.0: 2.0, 0.3: 3.0}


def test_prompts_are_as_long_in_an_overload():
    """Guards a fleet half as large as it should be: of ten that come, replicas get to two, and to
    half of a third."""
    collector = Collector()
    none = {"prompts": 0.0, "prompt_tokens": 0.0, "prompt_rows": 0.0}
    look(collector, {"a": report(0, **none)}, 1, 1, 0)
    sums = {"arrived": 10.0, "prompts": 2.0, "prompt_tokens": 4000.0, "prompt_rows": 5000.0}
    seen = look(collector, {"a": report(1, **sums)}, 1, 1, 1)
    assert (seen.prompt_tokens, seen.prompts_per_s) == (2000.0, 2.0)
    later = sums | {"arrived": 20.0, "prompt_rows": 5500.0}
    assert look(collector, {"a": report(2, **later)}, 1, 1, 2).prompt_tokens is None


def test_shares_are_of_what_was_offered():
    """Guards refusals that feed on themselves: who may be refused seems rarer with each of them."""
    collector = Collector()
    look(collector, {"a": report(0, **{"quality_class:pinned": 0.0})}, 1, 1, 0)
    sums = {
        "quality_class:pinned": 1.0,
        "quality_class:standard": 9.0,
        "arrived": 2.0,
        "refused": 8.0,
    }
    seen = look(collector, {"a": report(1, **sums)}, 1, 1, 1)
    assert seen.class_shares == {"pinned": 0.1, "standard": 0.9}


def test_steps_of_a_replica_are_means_since_the_look_before():
    """Those with prompts apart: 4 of 10 steps, 100 rows of prompts each."""
    collector = Collector()
    names = ("steps", "step_s", "sequences", "decode_rows", "prompt_steps", "prompt_rows")
    look(collector, {"a": report(0, **dict.fromkeys(names, 5.0))}, 1, 1, 0)
    sums = dict(zip(names, (15.0, 5.2, 35.0, 65.0, 9.0, 405.0), strict=True))
    (load,) = look(collector, {"a": report(1, **sums)}, 1, 1, 1).loads
    assert load.step_s == pytest.approx(0.02)
    assert (load.decode_rows, load.positions) == (6.0, 2.0)
    assert (load.prompt_rows, load.prompt_share) == (100.0, 0.4)
    (idle,) = look(collector, {"a": report(2, **sums)}, 1, 1, 2).loads
    assert idle.step_s is idle.prompt_rows is idle.prompt_share is idle.decode_rows is None
    before = {name: value for name, value in sums.items() if name != "prompt_steps"}
    (older,) = look(collector, {"a": report(3, **before | {"steps": 20.0})}, 1, 1, 3).loads
    assert (older.step_s, older.prompt_share) == (0.0, None), "of a release that did not count them"


def test_step_costs_are_medians_over_replicas():
    """A replica that was measured on a busy machine does not decide."""
    costs = [{"step_cost:1": s, "step_cost:8": 2 * s} for s in (0.010, 0.011, 0.5)]
    reports = {str(i): report(0, **cost) for i, cost in enumerate(costs)}
    assert step_costs(reports.values()) == ((1, 0.011), (8, 0.022))
    assert step_costs([report(0)]) == ()


NUMBER = st.floats(0, 1e9)
COUNTS = st.builds(
    ReplicaCounts,
    running=NUMBER,
    waiting=NUMBER,
    threshold=st.none() | st.floats(0, 1),
    step_cost=st.dictionaries(st.integers(1, 10_000), NUMBER),
    quality_class=st.dictionaries(st.text(max_size=5), NUMBER),
    prompt_steps=st.none() | NUMBER,
    tokens_at=st.dictionaries(st.floats(0, 1), NUMBER),
    **dict.fromkeys(("arrived", "output_tokens", "step_s", "measured_forwards"), NUMBER),
)


@given(COUNTS)
def test_what_a_replica_says_arrives(counts):
    """Through names and numbers, which is all that Ray Serve carries."""
    metrics = counts.to_metrics()
    assert all(isinstance(number, float) for number in metrics.values())
    assert ReplicaCounts.from_metrics(metrics) == counts
    # Another release says more, and Serve has numbers of its own.
    assert ReplicaCounts.from_metrics(metrics | {"other": 1.0, "other:1": 1.0}) == counts


def test_a_report_without_what_must_be_there_is_refused():
    """Guards a fleet that seems idle because nobody reads what it says."""
    with pytest.raises(TypeError, match="running"):
        ReplicaCounts.from_metrics({"waiting": 1.0})


REPORTS = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(report, st.floats(0, 1e6), arrived=st.floats(0, 1e9), waiting=st.floats(0, 1e6)),
)


@given(st.lists(st.tuples(REPORTS, st.integers(0, 5), st.integers(0, 5), st.floats(0, 1e6))))
def test_nothing_impossible_comes_out(looks):
    """Whatever the order of reports and clocks."""
    collector = Collector()
    for reports, running, target, now in looks:
        seen = look(collector, reports, running, target, now)
        assert seen.arrivals_per_s is None or seen.arrivals_per_s >= 0
        assert len(seen.starting_ages_s) == max(0, target - running)
        assert len(seen.loads) == len(reports)
