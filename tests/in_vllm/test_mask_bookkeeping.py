"""Rows of drafts and masks, what they become, and the counts: no vLLM is needed."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.vllm.rows import (
    MASK,
    Layout,
    MarsCounts,
    Origin,
    Row,
    laid_out,
    masks_for,
    next_speculative,
    parsed,
)

DEPTHS = 2
# The picture of rows.py: A checks two drafts, B is a prompt, C has masks only.
SPECULATIVE = {"A": [7, 8, MASK, MASK], "C": [MASK, MASK]}
LAYOUT = laid_out("ABC", {"A": 5, "B": 4, "C": 3}, SPECULATIVE, DEPTHS)


def test_rows_lie_as_drawn():
    """Guards the offsets: a mask taken for a token would give the adapter's words to the model."""
    assert LAYOUT.masks() == ([3, 4, 10, 11], [0, 1, 0, 1])
    assert LAYOUT.real_logits([row.drafts for row in LAYOUT.rows]) == [0, 1, 2, 5, 6]


def test_steps_with_prompts_are_known():
    """Their seconds say nothing about masks."""
    assert not LAYOUT.decodes
    assert laid_out("AC", {"A": 5, "C": 3}, SPECULATIVE, DEPTHS).decodes


def test_paddings_beyond_the_trained_depth_are_no_masks():
    """vLLM pads a resumed request with as many rows as a step can have: no adapter knows those."""
    assert parsed([MASK] * 4, DEPTHS) == Row((), masks=2, padding=2)
    padded = laid_out("AB", {"A": 5, "B": 1}, {"A": [MASK] * 4}, DEPTHS)
    assert padded.masks() == ([1, 2], [0, 1])
    assert padded.real_logits([row.drafts for row in padded.rows]) == [0, 5]


def test_only_masks_behind_the_outcome_propose():
    """A's second draft was rejected: its masks continue another text. C has none to fail."""
    assert LAYOUT.origins([[7, 9], [5], [6]]) == [Origin(request=2, first=7, masks=2, token=6)]
    whole = LAYOUT.origins([[7, 8, 1], [], [6]])
    assert [(origin.first, origin.token) for origin in whole] == [(3, 1), (7, 6)]


def test_a_prompt_in_the_middle_gets_no_masks():
    """Its next chunk is made of prompt tokens; vLLM drops drafts of such requests."""
    assert next_speculative([[7], [], [6]], {0: [1, 2]}, masks=2) == [
        [1, 2, MASK, MASK],
        [],
        [MASK, MASK],
    ]


@pytest.mark.parametrize(("running", "masks"), [(1, 4), (7, 4), (8, 2), (15, 2), (16, 0), (99, 0)])
def test_masks_by_load(running: int, masks: int):
    """The last pair that the number of requests reaches is in force, whatever the order."""
    assert masks_for(running, most=4, limits=[(16, 0), (8, 2)]) == masks


def test_no_limit_and_a_large_one():
    """A limit above what the row can hold must not make a longer row."""
    assert masks_for(3, most=4, limits=[]) == 4
    assert masks_for(3, most=4, limits=[(1, 9)]) == 4


def decoded(text: Sequence[int], right: Sequence[bool], masks: int) -> tuple[list[int], MarsCounts]:
    """Steps of one request as vLLM makes them: `right` says which masks propose the truth."""
    counts, answer, speculative = MarsCounts(), [text[0]], [MASK] * masks
    while len(answer) < len(text):
        layout = laid_out(["r"], {"r": 1 + len(speculative)}, {"r": speculative}, masks)
        sampled = []
        for draft in (*layout.rows[0].drafts, None):
            sampled.append(text[len(answer) + len(sampled)])
            if draft != sampled[-1] or len(answer) + len(sampled) == len(text):
                break
        answer += sampled
        counts.add(["r"], layout, [sampled])
        drafts = {}
        for origin in layout.origins([sampled]):
            assert origin.token == answer[-1]
            here = range(len(answer), min(len(answer) + origin.masks, len(text)))
            drafts[0] = [text[at] if right[at] else text[at] + 1000 for at in here]
        speculative = next_speculative([sampled], drafts, masks)[0]
    return answer, counts


@given(st.data(), st.integers(1, 5))
def test_answers_never_depend_on_drafts(data: st.DataObject, masks: int):
    """Whatever masks propose, the text is the model's, and tokens are counted once."""
    text = list(range(data.draw(st.integers(2, 40))))
    right = data.draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
    answer, counts = decoded(text, right, masks)
    assert answer == text
    assert counts.total.tokens == len(text) - 1
    assert counts.total.tokens == counts.total.forwards + sum(counts.total.accepted)


def test_right_drafts_are_all_accepted():
    """Guards the depths: a mask whose draft lands one place off would never be accepted. The first
    step has masks only; each later one gives two drafts and the token behind them."""
    _, counts = decoded(range(11), [True] * 11, masks=2)
    total = counts.total
    assert (total.tokens, total.forwards, total.forwards_with_drafts) == (10, 4, 3)
    assert total.accepted == total.drafted == [3, 3]


def test_counts_by_request_and_depth():
    """A's first draft is accepted and its second is not; B is a prompt's end, C has no drafts."""
    counts = MarsCounts()
    counts.add("ABC", LAYOUT, [[7, 9], [5], [6]])
    counts.ended(["A", "nobody"])
    requests = counts.to_json()["requests"]
    ended = requests["A"]
    assert (ended["drafted"], ended["accepted"], ended["tokens"]) == ([1, 1], [1, 0], 2)
    assert counts.total.forwards == 3
    assert counts.total.forwards_with_drafts == 1
    assert counts.total.forwards_with_masks == 2
    assert requests["C"]["tokens"] == 1


def test_an_empty_batch_has_no_rows():
    """vLLM runs its model for warm-up without any request."""
    empty = Layout((), ())
    assert empty.masks() == ([], [])
    assert empty.origins([]) == []
