"""The table behind prefix-aware routing, and how prompts become blocks."""

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.serve.ingress.router import (
    BLOCK_CHARS,
    BLOCK_TOKENS,
    MAX_BLOCKS,
    PrefixTable,
    prefix_blocks,
)
from mars_ray.serve.protocol import Prompt, Turn

REPLICAS = ("a", "b", "c")
PROMPTS = st.lists(st.integers(0, 2), max_size=6)


def chained(symbols: list[int]) -> tuple[int, ...]:
    """Blocks as the hashes are: each stands for everything up to its end."""
    return tuple(hash(tuple(symbols[: end + 1])) for end in range(len(symbols)))


def common(one: list[int], other: list[int]) -> int:
    """Length of the beginning that two prompts share."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(
    st.lists(st.tuples(PROMPTS, st.sampled_from(REPLICAS))),
    PROMPTS,
    st.sets(st.sampled_from(REPLICAS)),
)
def test_longest_is_what_the_history_says(history, prompt, candidates):
    """Against the whole history, compared prompt by prompt."""
    table = PrefixTable[str](capacity=10_000)
    for sent, replica in history:
        table.add(chained(sent), replica)
    shared = {
        replica: max((common(sent, prompt) for sent, to in history if to == replica), default=0)
        for replica in candidates
    }
    best = max(shared.values(), default=0)
    expected = {replica for replica, length in shared.items() if length == best and best > 0}
    assert table.longest(chained(prompt), candidates) == expected


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(REPLICAS))), st.integers(1, 8))
def test_memory_is_bounded_and_the_newest_is_known(history, capacity):
    """What was sent last is found again, as far as it fits; whoever found a prefix was sent it."""
    table = PrefixTable[str](capacity)
    for sent, replica in history:
        table.add(chained(sent), replica)
        assert len(table) <= capacity
        if sent:
            assert replica in table.longest(chained(sent), REPLICAS)


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(REPLICAS))), st.sets(st.sampled_from(REPLICAS)))
def test_replicas_that_left_take_no_memory(history, left):
    """The table is as if they had never been; guards one that grows with every scale-down."""
    table, without = PrefixTable[str](10_000), PrefixTable[str](10_000)
    for sent, replica in history:
        table.add(chained(sent), replica)
        if replica not in left:
            without.add(chained(sent), replica)
    table.keep(set(REPLICAS) - left)
    assert len(table) == len(without)
    for sent, _ in history:
        blocks = chained(sent)
        assert table.longest(blocks, REPLICAS) == without.longest(blocks, REPLICAS)


@given(st.lists(st.text(max_size=150), min_size=1, max_size=6))
def test_a_conversation_begins_with_what_was_said_before(contents):
    """Each turn's request has all blocks of the one before: that is why it stays where it was."""
    turns = tuple(
        Turn("user" if number % 2 == 0 else "assistant", text)
        for number, text in enumerate(contents)
    )
    before: tuple[int, ...] = ()
    for end in range(1, len(turns) + 1):
        blocks = prefix_blocks(turns[:end])
        assert blocks[: len(before)] == before
        before = blocks


def test_blocks_depend_on_everything_before_them():
    """Guards a match in the middle of two prompts that begin differently."""
    same = "x" * BLOCK_CHARS
    one, other = prefix_blocks("a" * BLOCK_CHARS + same), prefix_blocks("b" * BLOCK_CHARS + same)
    assert len(one) == len(other) == 2
    assert not set(one) & set(other)


def test_who_says_it_matters_and_what_is_short_has_no_block():
    """A block is whole or none; a long prompt has a limited number of them."""
    text = "y" * BLOCK_CHARS
    assert prefix_blocks((Turn("user", text),)) != prefix_blocks((Turn("system", text),))
    assert prefix_blocks("y" * (BLOCK_CHARS - 1)) == ()
    assert len(prefix_blocks("y" * (MAX_BLOCKS + 5) * BLOCK_CHARS)) == MAX_BLOCKS
    tokens: Prompt = tuple(range(2 * BLOCK_TOKENS + 1))
    assert len(prefix_blocks(tokens)) == 2
    assert prefix_blocks(tokens[:BLOCK_TOKENS]) == prefix_blocks(tokens)[:1]
