"""Early stopping without Ray."""

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.config.tune import AshaScheduler
from mars_ray.tune.search import Asha


def test_halving_asks_for_the_best_third_at_each_rung():
    """By hand: rungs at 10 and 30. Of seven trials at the first, those go on that are, when they
    come, among the best third."""
    rule = Asha(AshaScheduler(grace_steps=10, reduction=3), total_steps=90)
    scores = {"a": 5.0, "b": 4.0, "c": 6.0, "d": 5.5, "e": 7.0, "f": 6.5, "g": 1.0}
    stopped = {name for name, score in scores.items() if rule.stops(name, 10, score)}
    # a is first; c and e are best so far; f is second of six.
    assert stopped == {"b", "d", "g"}
    assert not rule.stops("a", 20, 0.0), "between rungs nobody ends"
    assert not rule.stops("c", 30, 6.0), "first of its rung"
    assert rule.stops("a", 30, 5.0)


def test_a_rung_that_was_jumped_over_counts():
    """Guards a resumed trial whose first report comes after its rung."""
    rule = Asha(AshaScheduler(grace_steps=10, reduction=2), total_steps=40)
    assert not rule.stops("a", 25, 1.0)
    assert rule.stops("b", 20, 0.5)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=60))
def test_what_was_seen_again_changes_nothing(reports: list[tuple[int, float]]):
    """A restored sweep feeds the record again: then it must decide as the undisturbed one does."""
    config = AshaScheduler(grace_steps=2, reduction=2)
    steady, seen = Asha(config, 16), list[tuple[str, int, float]]()
    steps = dict.fromkeys(range(10), 0)
    for trial, score in reports:
        steps[trial] += 2
        seen.append((str(trial), steps[trial], score))
    decisions = [steady.stops(*report) for report in seen]
    half = len(seen) // 2
    restored = Asha(config, 16)
    for report in seen[:half]:
        restored.stops(*report)
    assert [restored.stops(*report) for report in seen[half:]] == decisions[half:]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30, unique=True))
def test_the_best_trial_is_never_stopped(scores: list[float]):
    """Whatever the order in which trials come."""
    rule = Asha(AshaScheduler(grace_steps=1, reduction=3), total_steps=2)
    stopped = {score for score in scores if rule.stops(str(score), 1, score)}
    assert max(scores) not in stopped
