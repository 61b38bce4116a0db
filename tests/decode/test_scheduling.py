"""Who gets rows and pages when: sharing, priorities, chunks, queues, deadlines."""

import time
from collections import Counter
from dataclasses import replace

from decode import reference
from decode.cases import PAGE_BYTES, SCARCE
from decode.models import CARD, pattern, request

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.decode import scheduler
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.kv_cache import content_hashes


def test_a_shared_beginning_is_computed_once(model):
    """The second request forwards only what the first has not left behind."""
    engine = Engine(model, CARD, EngineConfig(max_batch=2, max_context=64, page_size=4))
    rows = []

    def run(name: str, prompt: list[int]) -> None:
        engine.submit(request(name, prompt, ExactMode(), max_new_tokens=1))
        in_use = engine.pool.in_use
        engine.step()
        rows.append(engine.last_rows)
        assert engine.pool.in_use == in_use == 0

    run("first", pattern(0, 1, 17))
    run("same", pattern(0, 1, 17))
    run("longer", [*pattern(0, 1, 14), 9, 9, 9, 9])
    assert rows == [17, 1, 6]
    seen = engine.snapshot()
    assert (seen.prefix_queries, seen.prefix_hits) == (17 + 17 + 18, 16 + 12)
    assert (engine.totals.prompts, engine.totals.prompt_tokens) == (3, 17 + 1 + 6)
    assert engine.pool.kept == 5


def test_a_waiting_turn_keeps_its_beginning(model):
    """Guards the first page of what it shares: without it the pages behind are worth nothing."""
    config = EngineConfig(max_batch=4, max_context=160, page_size=4, cache_bytes=90 * PAGE_BYTES)
    engine = Engine(model, CARD, config)
    chat = pattern(0, 7, 100)
    generate_all(engine, [request("first", chat, ExactMode(), max_new_tokens=1)])
    for index in range(2):  # they take pages as they grow
        text = pattern(index, 3, 120)
        engine.submit(request(str(index), text, ExactMode(), max_new_tokens=30, stop=-1))
    for _ in range(3):
        engine.step()
    engine.submit(request("next", [*chat, *[5] * 40], ExactMode(), max_new_tokens=20, stop=-1))
    cached = {}
    while engine.has_work:
        cached |= {event.request_id: event.cached_tokens for event in engine.step()}
    assert cached["next"] > 50


def test_priorities_go_first(model):
    """A later request of a smaller number overtakes those that wait."""
    engine = Engine(model, CARD, EngineConfig(max_batch=1, max_context=64))
    for name, priority in (("running", 5), ("late", 1), ("urgent", 0), ("later", 1)):
        item = request(name, [1, 2], ExactMode(), max_new_tokens=3, stop=-1)
        engine.submit(replace(item, priority=priority))
        if name == "running":
            engine.step()
    order = []
    while engine.has_work:
        order += [event.request_id for event in engine.step() if event.completion]
    assert order == ["running", "urgent", "late", "later"]


def test_steps_can_be_made_shorter_and_nobody_starves(model):
    """A sequence that needs more rows than a step now has is decoded alone, and says the same."""
    size = EngineConfig(max_batch=3, max_context=200, page_size=8)
    wide = VerifiedMode(groups=4)
    asked = [request("wide", pattern(0, 1, 90), wide, max_new_tokens=20, stop=-1)]
    asked += [
        request(name, pattern(1, 2, 60), ExactMode(), max_new_tokens=20, stop=-1)
        for name in ("plain", "other")
    ]
    expected = generate_all(Engine(model, CARD, size), asked)
    engine = Engine(model, CARD, size)
    engine.set_step_tokens(1)
    assert 8 <= engine.step_tokens < wide.most_rows(CARD.block_size)
    done, rows = {}, []
    for each in asked:
        engine.submit(each)
    while engine.has_work:
        events = engine.step()
        rows.append((engine.last_rows, len(events)))
        done |= {event.request_id: event.completion for event in events if event.completion}
    assert [done[each.request_id].tokens for each in expected] == [e.tokens for e in expected]
    assert all(count <= engine.step_tokens or events == 1 for count, events in rows)
    assert any(count > engine.step_tokens for count, _ in rows)


def test_a_long_prompt_does_not_hold_up_the_others(model):
    """Chunked prefill: the sequence that decodes gets a token in every forward meanwhile."""
    engine = Engine(
        model, CARD, EngineConfig(max_batch=2, max_context=200, page_size=8, max_step_tokens=16)
    )
    engine.submit(request("short", [1, 2], ExactMode(), max_new_tokens=40, stop=-1))
    engine.step()
    engine.submit(request("long", pattern(0, 1, 150), ExactMode(), max_new_tokens=1, stop=-1))
    first_of_long = None
    for step in range(1, 30):
        events = {event.request_id: event for event in engine.step()}
        assert len(events["short"].tokens) == 1
        if "long" in events:
            first_of_long = step
            break
    assert first_of_long == 10  # 150 tokens, 15 rows each
    totals = engine.totals  # and the short one's prompt before
    assert (totals.steps, totals.prompt_steps) == (11, 11)
    assert (totals.prompt_rows, totals.decode_rows, totals.sequences) == (152, 10, 10)
    assert (totals.prompts, totals.prompt_tokens) == (2, 152)
    engine.step()
    assert (engine.totals.steps, engine.totals.prompt_steps) == (12, 11)


def test_a_thousand_requests_wait_their_turn(model):
    """None is lost, none overtakes another of its priority, and nothing is left behind."""
    engine = Engine(model, CARD, EngineConfig(max_batch=64, max_context=16, page_size=4))
    for index in range(1000):
        engine.submit(request(str(index), [index % 20], VerifiedMode(), max_new_tokens=3, stop=-1))
    assert engine.waiting == 1000
    first_tokens = []
    while engine.has_work:
        first_tokens += [int(e.request_id) for e in engine.step() if e.forward == 1]
        assert engine.running <= 64
    assert first_tokens == list(range(1000))
    engine.check_integrity()
    assert engine.pool.in_use == 0


def test_a_prompt_gets_rows_however_many_decode(model):
    """Guards a new request that waits until an answer ends: drafts and masks fill every step."""
    engine = Engine(
        model, CARD, EngineConfig(max_batch=16, max_context=400, page_size=8, max_step_tokens=64)
    )
    for index in range(8):
        mode = VerifiedMode(threshold=0.0)
        engine.submit(request(str(index), pattern(index, 1, 5), mode, max_new_tokens=300, stop=-1))
    for _ in range(5):
        engine.step()
    engine.submit(request("new", pattern(1, 1, 80), ExactMode(), max_new_tokens=1, stop=-1))
    came = next(i for i in range(100) if "new" in {event.request_id for event in engine.step()})
    assert came <= 80 / (64 / 8)


def test_long_texts_that_come_back_leave_each_other_rows(model):
    """Guards rows below zero: the first takes a whole step, and some are kept for prompts."""
    config = EngineConfig(
        max_batch=8, max_context=300, page_size=8, max_step_tokens=64, prefix_cache=False
    )
    engine = Engine(model, CARD, config)
    asked = [request(str(j), pattern(j, 1, 150), ExactMode(), stop=-1) for j in range(3)]
    for each in asked:
        engine.submit(each)
    while any(sequence.forwards < 2 for sequence in engine._scheduler.all()):
        engine.step()
    for sequence in engine.set_aside():
        engine.take_back(sequence)
    asked.append(request("new", pattern(1, 1, 100), ExactMode(), stop=-1))
    engine.submit(asked[-1])
    done = {}
    while engine.has_work:
        events = engine.step()
        assert 0 < engine.last_rows <= 64
        done |= {event.request_id: event.completion for event in events if event.completion}
        engine.check_integrity()
    assert all(
        done[each.id].tokens == reference.generate(model, CARD, each).tokens for each in asked
    )


def test_a_deadline_ends_a_request_with_what_it_has(model):
    """Waiting or running, and everything it held is free."""
    engine = Engine(model, CARD, EngineConfig(max_batch=1, max_context=64))
    past = time.monotonic() - 1
    item = request("running", [1, 2], ExactMode(), max_new_tokens=50, stop=-1)
    engine.submit(replace(item, deadline=time.monotonic() + 0.2))
    engine.submit(replace(item, id="waiting", deadline=past))
    (late,) = engine.step()
    assert late.request_id == "waiting"
    engine.step()
    time.sleep(0.25)
    ended = {e.request_id: e.completion for e in engine.step() if e.completion}
    assert ended["running"].finish_reason == "deadline"
    assert len(ended["running"].tokens) == 1
    assert not engine.has_work
    assert engine.pool.in_use == 0


def test_masks_of_all_groups_count_when_a_sequence_comes_back(model):
    """A sequence whose widest step finds no pages waits for them; the engine must not spin on it.

    Found by random schedules: admission counted one group of masks where the step had several.
    """
    engine = Engine(model, CARD, SCARCE)
    mode = VerifiedMode(groups=9, window=2)
    requests = [
        request(str(j), pattern(j, 1, 11 + j), mode, max_new_tokens=20, stop=-1) for j in range(3)
    ]
    done = generate_all(engine, requests)
    assert done == [reference.generate(model, CARD, item) for item in requests]
    assert engine.snapshot().preemptions > 0


def test_a_page_of_tokens_is_hashed_once_however_long_its_sequence_waits(model, monkeypatch):
    """Guards prompts without room that are hashed again in every step: 3 ms for 32,000 tokens."""
    hashed = Counter()

    def counted(tokens, page_size, known):
        contents = content_hashes(tokens, page_size, known)
        hashed.update(contents[len(known) :])
        return contents

    monkeypatch.setattr(scheduler, "content_hashes", counted)
    engine = Engine(model, CARD, SCARCE)
    requests = [
        request(str(j), pattern(j, 1 + j, 20), ExactMode(), max_new_tokens=20, stop=-1)
        for j in range(4)
    ]
    done = generate_all(engine, requests)
    assert done == [reference.generate(model, CARD, item) for item in requests]
    assert engine.snapshot().preemptions > 0
    assert set(hashed.values()) == {1}
    assert len(hashed) == 4 * (39 // SCARCE.page_size)
