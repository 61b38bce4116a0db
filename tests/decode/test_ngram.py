"""Drafts that are looked up in the text itself: which, when, and that they change no text."""

from dataclasses import replace

import pytest
from decode.adapters import good_adapter, random_adapter
from decode.cases import SAMPLING_NAMES, SAMPLINGS
from decode.models import CARD, STOP, pattern, request
from decode.test_constraint import Rising
from decode.test_draft_control import BY_ROW, FREE, Told
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.core.thresholds import Elastic
from mars_ray.core.tree import path_to
from mars_ray.decode.drafts import DraftControl
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.ngram import Match, NgramIndex, NgramStats
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies import strategy_of
from mars_ray.errors import RequestError
from mars_ray.model.directory import PLAIN

SIZE = EngineConfig(max_batch=3, max_context=128, prefix_cache=False)


def controlled(model, card=PLAIN, cost=FREE, **arguments) -> Engine:
    engine = Engine(model, card, SIZE, **arguments)
    engine.control = DraftControl(cost, max(1, engine.card.block_size), SIZE.step_tokens)
    return engine


def repeating(mode, sampling=None, count: int = 4, new: int = 60) -> list:
    return [
        request(str(j), pattern(j * 3, 1 + j % 3, 24), mode, sampling=sampling, max_new_tokens=new)
        for j in range(count)
    ]


def speed(done) -> float:
    return sum(len(c.tokens) for c in done) / sum(c.forwards for c in done)


@given(
    tokens=st.lists(st.integers(0, 3), min_size=0, max_size=40),
    chunks=st.lists(st.integers(1, 5)),
    most=st.integers(1, 20),
)
def test_drafts_are_what_followed_the_longest_match(tokens, chunks, most):
    """Against a search through the text; looked up now and then while the text grows."""
    index, end = NgramIndex(), 0
    for chunk in [*chunks, len(tokens)]:
        end = min(len(tokens), end + chunk)
        text = tokens[:end]
        drafts, length = index.drafts(text, most)

        def matching(place: int, text=text) -> int:
            count = 0
            while count < min(place, 16) and text[place - 1 - count] == text[-1 - count]:
                count += 1
            return count

        places = [place for place in range(2, len(text)) if matching(place) >= 2][-8:]
        if not places:
            assert (drafts, length) == ([], 0)
            continue
        best = max(places, key=lambda place: (matching(place), place))
        assert length == matching(best)
        grown = list(text)
        for ahead in range(most):
            grown.append(grown[best + ahead])
        assert drafts == grown[len(text) :]


@pytest.mark.parametrize("cost", [FREE, Told({1: 1.0, 12: 1.0, 120: 9.0}), BY_ROW])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=SAMPLING_NAMES)
@pytest.mark.parametrize("drafter", ["none", "masks", "adapter", "random"])
def test_no_text_changes(model, cost, sampling, drafter):
    """Without masks, with good ones, and with masks that propose at random."""
    adapters = {"adapter": good_adapter, "random": random_adapter}
    adapter = adapters[drafter](model) if drafter in adapters else None
    card = CARD if drafter == "masks" else PLAIN
    exact = generate_all(Engine(model, card, SIZE), repeating(ExactMode(), sampling))
    engine = controlled(model, card, cost, adapter=adapter)
    for _ in range(2):
        got = generate_all(engine, repeating(VerifiedMode(), sampling))
        assert [c.tokens for c in got] == [c.tokens for c in exact]
    engine.check_integrity()


def test_a_plain_model_is_faster_where_its_text_repeats_itself(model):
    """No adapter, no training. And not where the request says so, or where rows are dear."""
    speeds = {
        "ngram": speed(generate_all(controlled(model), repeating(VerifiedMode()))),
        "without": speed(generate_all(controlled(model), repeating(VerifiedMode(ngram=False)))),
        "dear": speed(generate_all(controlled(model, cost=BY_ROW), repeating(VerifiedMode()))),
    }
    assert speeds["ngram"] > 4
    assert speeds["without"] == 1 <= speeds["dear"] < 1.3


def test_with_an_adapter_it_is_at_least_as_fast(model):
    """Both sources in one tree, once it is known what each brings."""
    alone, both = controlled(model), controlled(model, adapter=good_adapter(model))
    for _ in range(2):
        least = speed(generate_all(alone, repeating(VerifiedMode())))
        reached = speed(generate_all(both, repeating(VerifiedMode())))
    assert reached >= least > 4
    totals = both.totals
    assert 0 < totals.ngram_accepted <= totals.ngram_drafts
    assert 0 < totals.mask_accepted <= totals.mask_drafts


def test_drafts_that_were_looked_up_say_nothing_of_masks():
    """Guards masks that were never bought again once the text had repeated itself for a while."""
    control, tokens = DraftControl(FREE, 4, 100), pattern(0, 3, 24)
    sequence = Sequence(request("a", tokens, VerifiedMode()), 4, list(tokens), forwards=1)
    before = control.acceptance[False].worth(0.1)
    for _ in range(60):
        control.choose([sequence])
    assert sequence.draft_matches
    assert all(sequence.draft_matches)
    assert control.acceptance[False].worth(0.1) == before
    assert control.acceptance[False].lasting == 1


def test_an_answer_tells_which_of_its_tokens_were_looked_up(model):
    """Never more than came without a forward; a plain model has no other drafts."""
    engine, events = controlled(model), []
    for each in repeating(VerifiedMode()):
        engine.submit(each)
    while engine.has_work:
        events += engine.step()
    last = [event for event in events if event.completion]
    drafted = [len(e.completion.tokens) - e.completion.forwards for e in last if e.completion]
    assert [event.ngram_tokens for event in last] == drafted
    assert sum(drafted) > 0
    # Some may have been accepted behind the token that ended the answer.
    assert sum(drafted) <= engine.totals.ngram_accepted


@pytest.mark.parametrize("grammar", [None, Rising(10)], ids=["looked up", "forced"])
def test_drafts_without_masks_are_no_adapters(model, grammar):
    """Guards the T/F of an adapter: without masks it has made none of the drafts."""
    engine = controlled(model, adapter=good_adapter(model))
    asked = [replace(each, grammar=grammar) for each in repeating(VerifiedMode(window=0))]
    done = generate_all(engine, asked)
    assert speed(done) > 1
    assert {each.adapters for each in done} == {()}


def test_an_engine_without_masks_takes_only_what_needs_none(model):
    """`verified` looks drafts up; `confidence` cannot, and a window is one of masks."""
    engine = controlled(model)
    engine.submit(request("a", [1, 2], VerifiedMode()))
    with pytest.raises(RequestError, match="needs masks"):
        engine.submit(request("b", [1, 2], ConfidenceMode()))
    with pytest.raises(RequestError, match="needs masks"):
        engine.submit(request("c", [1, 2], VerifiedMode(window=2)))


def test_below_threshold_one_nothing_is_looked_up(model):
    """A draft that passes unequal would pull an answer into loops."""
    engine = controlled(model)
    engine.thresholds.set_point = 0.3
    open_ones = [replace(each, quality=Elastic(0.3)) for each in repeating(VerifiedMode())]
    assert speed(generate_all(engine, open_ones)) == 1
    engine.thresholds.set_point = 1.0
    assert speed(generate_all(engine, open_ones)) > 4
    assert engine.totals.ngram_drafts > 0
    # What other thresholds would give is known of masks only.
    assert set(engine.measures.by_mode["verified"].tokens_per_forward().values()) == {1.0}


def test_what_was_looked_up_before_the_threshold_fell_is_dropped(model):
    """A sequence may wait a step with drafts."""
    engine = controlled(model)
    for each in repeating(VerifiedMode(), count=1):
        engine.submit(replace(each, quality=Elastic(0.3)))
    while not any(sequence.drafts for sequence in engine._scheduler.all()):
        engine.step()
        assert engine.control
        engine.control.choose(engine._scheduler.running_sequences())
    (sequence,) = engine._scheduler.all()
    sequence.threshold = 0.3
    engine.control.choose([sequence])
    assert not strategy_of(sequence).plan(sequence).drafts


@pytest.mark.parametrize("drafter", ["none", "adapter"])
def test_under_a_grammar_one_text_is_followed(model, drafter):
    """Tokens that are forced are drafted, and looked-up ones up to the first forbidden."""
    adapter = good_adapter(model) if drafter == "adapter" else None

    def asked(mode):
        return [
            replace(
                request(str(j), pattern(j, 1, 30), mode, max_new_tokens=70),
                grammar=Rising(length=60),
            )
            for j in range(4)
        ]

    exact = generate_all(Engine(model, PLAIN, SIZE), asked(ExactMode()))
    engine = controlled(model, adapter=adapter)
    got = generate_all(engine, asked(VerifiedMode()))
    assert [c.tokens for c in got] == [c.tokens for c in exact]
    assert all(c.tokens[-1] == STOP for c in got)
    assert speed(got) > 2
    assert engine.totals.ngram_accepted > 0


def test_text_that_only_seems_to_repeat_itself_is_soon_left_alone(model):
    """A sequence whose drafts fail is trusted less than others, and is again when they hold."""
    stats, bad, good = NgramStats(), NgramIndex(), NgramIndex()
    match = [Match(4, "silent"), Match(5, "silent")]
    before = stats.likely(match[0], bad)
    for _ in range(10):
        stats.observe(match, 0, [0, 1], bad)
        stats.observe(match, 2, [0, 1], good)
    assert stats.likely(match[0], bad) < 0.5 * before < before < stats.likely(match[0], good)
    for _ in range(20):
        stats.observe(match, 2, [0, 1], bad)
    assert stats.likely(match[0], bad) > before


def test_only_what_was_reached_is_counted():
    """What stands behind a rejected draft says nothing, and masks' drafts are not counted here."""
    stats, index = NgramStats(), NgramIndex()
    parents = [0, 1, 0]
    assert path_to(parents, 3) == [3]
    before = [stats.of(Match(length, "differ")) for length in (2, 3)]
    stats.observe([Match(2, "differ"), Match(3, "differ"), None], 3, parents, index)
    assert stats.of(Match(2, "differ")) < before[0]
    assert stats.of(Match(3, "differ")) == before[1]
    assert index.trust < 1
