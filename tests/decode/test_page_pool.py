"""The page pool: counts, sharing by content, eviction, and its own integrity check."""

import pytest
import torch
from decode.cases import PAGE_BYTES, SCARCE, untrained
from decode.models import CARD, pattern, request
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.config.modes import ExactMode
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.kv_cache import PagePool, content_hashes, page_bytes
from mars_ray.decode.request import Request
from mars_ray.model.create import preset_config


def test_taken_pages_come_back():
    """All or nothing: a request for too many takes none."""
    pool = PagePool(4)
    pages = pool.take(3)
    assert len(set(pages)) == 3
    assert pool.take(2) is None
    assert pool.available == 1
    pool.release(pages)
    assert (pool.available, pool.in_use, pool.kept) == (4, 0, 0)


def test_a_published_page_is_found_again_until_it_is_needed():
    """Kept when nobody holds it, found by content, evicted longest unused first."""
    pool = PagePool(2)
    old, new = pool.take(2)
    pool.publish(old, b"old")
    pool.publish(new, b"new")
    pool.release([old])
    pool.release([new])
    assert pool.kept == pool.available == 2
    assert pool.take(1) == [old]
    assert pool.share([b"old"]) == []
    assert pool.share([b"new", b"unknown", b"new"]) == [new]
    pool.check([[old], [new]])


def test_a_shared_page_is_freed_by_its_last_holder():
    """Guards a page given away while another sequence reads it."""
    pool = PagePool(1)
    page = pool.take(1)[0]
    pool.publish(page, b"x")
    assert pool.share([b"x"]) == [page]
    pool.release([page])
    assert pool.take(1) is None
    pool.release([page])
    assert pool.take(1) == [page]


def test_a_second_page_of_the_same_content_stays_private():
    """Guards two pages under one hash: evicting one would lose the other."""
    pool = PagePool(2)
    first, second = pool.take(2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    pool.release([first, second])
    assert (pool.kept, pool.available) == (1, 2)
    pool.check([])


def test_errors_are_noticed():
    """The check has to be able to fail."""
    pool = PagePool(2)
    pages = pool.take(1)
    with pytest.raises(AssertionError, match="1 references and 0 holders"):
        pool.check([])
    pool.release(pages)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(pages)


def test_a_hash_is_of_the_page_and_all_before_it():
    """Guards a page found under another prefix: its keys and values would be others."""
    first, second = content_hashes([1, 2, 3, 4, 5], 2), content_hashes([9, 2, 3, 4], 2)
    assert len(first) == len(second) == 2
    assert first[1] != second[1]
    assert content_hashes([1, 2, 3, 4], 2, known=first[:1]) == first
    # 1, 23 and 12, 3 are not the same.
    assert content_hashes([1, 23], 2) != content_hashes([12, 3], 2)


@pytest.mark.parametrize(("preset", "token"), [("qwen2.5-0.5b", 12_288), ("qwen2.5-7b", 57_344)])
def test_the_documented_sizes(preset, token):
    """docs/reference/decoding.md states them."""
    config = preset_config(preset, 1000)
    assert page_bytes(config, 16, torch.bfloat16) == 16 * token


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_use_keeps_the_pool_whole(data):
    """Tables that take, share, publish and release at random: nothing lost, nothing held twice."""
    pool = PagePool(6)
    tables: list[list[int]] = []
    contents = [bytes([i]) for i in range(4)]
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["take", "share", "publish", "release"])):
            case "take":
                pages = pool.take(data.draw(st.integers(0, 4)))
                if pages is not None:
                    tables.append(pages)
            case "share":
                tables.append(pool.share(data.draw(st.lists(st.sampled_from(contents)))))
            case "publish":
                held = [page for table in tables for page in table]
                if held:
                    page = data.draw(st.sampled_from(held))
                    pool.publish(page, data.draw(st.sampled_from(contents)))
            case "release":
                if tables:
                    pool.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        pool.check(tables)
        assert pool.in_use == len({page for table in tables for page in table})


def test_a_prefix_is_forgotten_from_its_end():
    """A page is worth nothing without those before it. Guards a conversation of which a few other
    prompts took the first page, and left the rest."""
    config = SCARCE.model_copy(update={"max_batch": 1, "cache_bytes": 20 * PAGE_BYTES})
    engine = Engine(untrained("qwen2"), CARD, config)

    def asked(name: str, prompt: list[int]) -> Request:
        return request(name, prompt, ExactMode(), max_new_tokens=1, stop=-1)

    chat = pattern(0, 1, 36)
    generate_all(engine, [asked("chat", chat)])
    generate_all(engine, [asked(str(own), [own, 9, own] * 4) for own in range(4)])
    engine.submit(asked("again", chat))
    events = []
    while not events:
        events = engine.step()
    (event,) = events
    # The prompts took twelve pages, one more than the chat had left.
    assert event.cached_tokens >= 24
