"""Thresholds that nobody has pinned."""

import math
from dataclasses import replace

import pytest
from decode import reference
from decode.cases import SIZE
from decode.models import CARD, STOP, pattern
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, Mode, VerifiedMode
from mars_ray.core.thresholds import Budget, Elastic, Quality, Thresholds
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.request import Request
from mars_ray.errors import RequestError


def requests(
    quality: Quality | None,
    threshold: float = 1.0,
    count: int = 12,
    kind: type[Mode] = VerifiedMode,
) -> list[Request]:
    # Sampled hot, the model's own choices often differ from the drafts.
    return [
        Request(
            f"r{start}",
            tuple(pattern(start, 1 + start % 3, 6)),
            ExactMode() if kind is ExactMode else kind(threshold=threshold),
            Sampling(temperature=1.5, seed=start),
            40,
            frozenset({STOP}),
            quality=quality,
        )
        for start in range(count)
    ]


def events_of(engine: Engine, asked: list[Request]) -> dict[str, list]:
    for request in asked:
        engine.submit(request)
    events: dict[str, list] = {request.id: [] for request in asked}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    engine.check_integrity()
    return events


@pytest.mark.parametrize("set_point", [1.0, 0.8, 0.4, 0.0])
@pytest.mark.parametrize("floor", [1.0, 0.3])
@pytest.mark.parametrize("kind", [VerifiedMode, ConfidenceMode])
def test_the_set_point_is_in_force_down_to_the_floor(model, kind, floor, set_point):
    """The text is that of a pinned threshold of the same height, and the reply names it."""
    engine, other = Engine(model, CARD, SIZE), Engine(model, CARD, SIZE)
    engine.thresholds.set_point = set_point
    in_force = max(floor, set_point)
    elastic = events_of(engine, requests(Elastic(floor), kind=kind))
    pinned = events_of(other, requests(None, in_force, kind=kind))
    for name, events in elastic.items():
        assert events[-1].completion == pinned[name][-1].completion
        assert events[-1].threshold == in_force


def test_confidence_at_one_is_plain_decoding(model):
    """Token for token, forward by forward and row for row what `exact` does. Guards masks whose
    proposals nobody takes, and those that pass because their probability was rounded to 1."""
    plain, elastic, pinned = (Engine(model, CARD, SIZE) for _ in range(3))
    expected = generate_all(plain, requests(None, kind=ExactMode))
    asked = requests(Elastic(0.0), threshold=0.0, kind=ConfidenceMode)
    assert generate_all(elastic, asked) == expected
    assert generate_all(pinned, requests(None, 1.0, kind=ConfidenceMode)) == expected
    for engine in (elastic, pinned):
        totals = replace(engine.totals, seconds=plain.totals.seconds)
        assert totals == plain.totals
        assert engine.measures.by_mode == {}, "without masks nothing is known of other thresholds"


def test_confidence_follows_the_set_point_between_two_steps(model):
    """Of every step what the reference says of a request that pins the threshold in force there,
    with all tokens so far as its prompt. What was committed unseen is checked at 1 too."""
    engine, points = Engine(model, CARD, SIZE), (1.0, 0.3, 0.3, 1.0, 0.0, 0.8, 1.0, 1.0)
    for request in (asked := requests(Elastic(0.2), count=3, kind=ConfidenceMode)):
        engine.submit(request)
    texts = {request.id: list(request.prompt) for request in asked}
    sizes: dict[float, list[int]] = {max(point, 0.2): [] for point in points}
    step = 0
    while engine.has_work:
        engine.thresholds.set_point = points[step % len(points)]
        in_force, step = max(0.2, engine.thresholds.set_point), step + 1
        for event in engine.step():
            own = asked[int(event.request_id[1:])]
            left = own.max_new_tokens + len(own.prompt) - len(texts[own.id])
            pinned = replace(
                own,
                prompt=tuple(texts[own.id]),
                mode=ConfidenceMode(threshold=in_force),
                quality=None,
                max_new_tokens=min(left, CARD.block_size + 1),
            )
            said = reference.generate(model, CARD, pinned)
            assert list(event.tokens) == list(said.tokens[: said.token_forward.count(1)])
            texts[own.id] += event.tokens
            sizes[in_force].append(len(event.tokens))
            assert event.threshold == (1.0 if step == 1 else 0.3 if step < 5 else 0.2)
    assert set(sizes[1.0]) == {1}
    assert max(sizes[0.2]) == CARD.block_size + 1
    unseen = sum(size - 1 for each in sizes.values() for size in each)
    checked = engine.measures.by_mode["confidence"].checked
    assert unseen - CARD.block_size * len(asked) <= checked <= unseen


def test_modes_and_classes_share_a_batch(model):
    """Everybody gets what it gets alone, whoever else follows the set-point."""
    size = EngineConfig(max_batch=6, max_context=64)
    kinds: list[tuple[type[Mode], float, Quality | None]] = [
        (ExactMode, 1.0, None),
        (ConfidenceMode, 0.9, Elastic(0.0)),
        (ConfidenceMode, 0.9, None),
        (ConfidenceMode, 0.9, Elastic(1.0)),
        (VerifiedMode, 1.0, Elastic(0.0)),
        (VerifiedMode, 1.0, Elastic(1.0)),
    ]
    asked = [
        replace(request, id=f"{number}-{request.id}")
        for number, (kind, threshold, quality) in enumerate(kinds)
        for request in requests(quality, threshold, count=4, kind=kind)
    ]
    together, alone = Engine(model, CARD, size), Engine(model, CARD, size)
    together.thresholds.set_point = alone.thresholds.set_point = 0.4
    done = generate_all(together, sorted(asked, key=lambda request: request.id[2:]))
    for completion in done:
        own = next(request for request in asked if request.id == completion.request_id)
        assert generate_all(alone, [own]) == [completion]
    tokens = {completion.request_id: completion.tokens for completion in done}
    for request in requests(None, count=4):
        assert len({tokens[f"{number}-{request.id}"] for number in (0, 3, 5)}) == 1
    assert any(tokens[f"1-r{start}"] != tokens[f"0-r{start}"] for start in range(4))


def test_a_sequence_that_comes_back_has_the_threshold_of_now(model):
    """Guards a step, and a reply, at the threshold from before it had to give way."""
    engine = Engine(model, CARD, SIZE)
    (asked,) = requests(Elastic(0.0), count=1, kind=ConfidenceMode)
    engine.submit(asked)
    engine.thresholds.set_point = 0.5
    assert engine.step()[0].threshold == 0.5
    (sequence,) = engine.set_aside()
    engine.take_back(sequence)
    engine.thresholds.set_point = 1.0
    while engine.has_work:
        (event,) = engine.step()
        assert (len(event.tokens), event.threshold) == (1, 0.5)


def test_a_pinned_request_ignores_the_set_point(model):
    """Nothing the service does may lower what a request has pinned."""
    engine = Engine(model, CARD, SIZE)
    engine.thresholds.set_point = 0.0
    for events in events_of(engine, requests(None)).values():
        assert events[-1].disagreed == 0
        assert events[-1].threshold == 1.0


def test_the_set_point_moves_while_a_request_runs(model):
    """The reply names the lowest threshold of its steps."""
    engine = Engine(model, CARD, SIZE)
    engine.submit(requests(Elastic(0.2), count=1)[0])
    last = None
    for step in range(100):
        engine.thresholds.set_point = 0.5 if 2 <= step < 4 else 1.0
        events = engine.step()
        last = events[-1] if events else last
        if not engine.has_work:
            break
    assert last is not None
    assert last.threshold == 0.5


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_a_budget_holds_at_every_moment(model, share):
    """Counted by the engine's own measures, which compare with the causal rows."""
    engine = Engine(model, CARD, SIZE)
    told = [
        event for events in events_of(engine, requests(Budget(share))).values() for event in events
    ]
    tokens: dict[str, int] = {}
    for event in told:
        tokens[event.request_id] = tokens.get(event.request_id, 0) + len(event.tokens)
        assert event.disagreed <= share * tokens[event.request_id]
    spent = sum(event.disagreed for event in told if event.completion)
    assert (spent > 0) == (share > 0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=200), st.floats(0, 1))
def test_a_threshold_stays_in_range(steps, share):
    """Whatever is observed."""
    thresholds, budget = Thresholds(), Budget(share)
    for tokens, disagreed in steps:
        thresholds.observe(budget, tokens, min(tokens, disagreed))
        assert 0 < thresholds.of(budget) <= 1


def test_feedback_finds_the_threshold_of_a_budget():
    """Below 0.2 every fifth token differs, above it none: a budget of 0.1 settles there."""
    thresholds, budget = Thresholds(), Budget(0.1)
    for step in range(3000):
        deviates = thresholds.of(budget) < 0.2 and step % 5 == 0
        thresholds.observe(budget, 1, int(deviates))
    assert math.isclose(thresholds.of(budget), 0.2, rel_tol=0.3)


def test_a_threshold_is_kept_for_a_thousand_budgets_at_most():
    """Clients may name any number; guards memory that grows with every new one."""
    thresholds = Thresholds()
    for step in range(5000):
        thresholds.observe(Budget(step / 5000), 1, 0)
    assert len(thresholds._log_of) == 1001


@pytest.mark.parametrize("is_sent_back", [False, True])
def test_a_quality_leaves_nothing_of_the_modes_own_threshold(model, is_sent_back):
    """A default mode may name one. Guards a report of it, and drafts that it accepts right after a
    sequence has come back from where it had to give way."""
    engine, other = Engine(model, CARD, SIZE), Engine(model, CARD, SIZE)
    pinned = events_of(other, requests(None, 1.0, count=3))
    asked = requests(Elastic(1.0), 0.1, count=3)
    for request in asked:
        engine.submit(request)
    done = {}
    while engine.has_work:
        for event in engine.step():
            assert (event.threshold, event.disagreed) == (1.0, 0)
            done[event.request_id] = event.completion
        for sequence in engine.set_aside() if is_sent_back else ():
            engine.take_back(sequence)
    assert done == {name: events[-1].completion for name, events in pinned.items()}


@pytest.mark.parametrize(
    ("mode", "quality", "field"),
    [
        (ExactMode(), Elastic(0.5), "quality"),
        (ConfidenceMode(measure="entropy"), Elastic(0.5), "quality"),
        (ExactMode(), Budget(0.5), "quality_budget"),
        (ConfidenceMode(), Budget(0.5), "quality_budget"),  # sees too late which tokens differ
    ],
)
def test_quality_needs_a_mode_that_it_can_steer(model, mode, quality, field):
    """A setting without effect is an error."""
    engine = Engine(model, CARD, SIZE)
    asked = Request("a", (1, 2), mode, Sampling(), 4, frozenset({STOP}), quality=quality)
    with pytest.raises(RequestError) as caught:
        engine.submit(asked)
    assert caught.value.field == field
    assert generate_all(engine, []) == []
