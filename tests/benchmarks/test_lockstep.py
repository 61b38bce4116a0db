"""The ablation's decoder against the reference: a slow baseline must at least be a right one."""

from dataclasses import replace

import pytest
from decode import reference
from decode.models import CARD, pattern, request, trained_model
from decoders.lockstep_peer import Lockstep

from mars_ray.config.modes import BlockCachedMode, ConfidenceMode

PROMPTS = [pattern(3 * j, 1 + j % 4, 2 + j) for j in range(5)]


@pytest.mark.parametrize("cache", ["none", "token", "block"])
@pytest.mark.parametrize("stops", [[], [11, 12]], ids=["to-the-limit", "with-stops"])
def test_lockstep_is_the_reference(cache, stops):
    """Same tokens; without blocks also the same forwards, for nobody waits."""
    model = trained_model()
    task = {
        "cache": cache,
        "threshold": 0.6,
        "max_new_tokens": 17,
        "stop_ids": stops,
    }
    decoder = Lockstep(model, CARD, task, PROMPTS)
    decoder.run()
    mode = (
        BlockCachedMode(threshold=0.6, cache_block=CARD.block_size)
        if cache == "block"
        else ConfidenceMode(threshold=0.6)
    )
    expected = []
    for index, prompt in enumerate(PROMPTS):
        item = request(str(index), prompt, mode, max_new_tokens=17)
        item = replace(item, stop_ids=frozenset(stops))
        expected.append(reference.generate(model, CARD, item))
    assert decoder.answers == [list(done.tokens) for done in expected]
    forwards = sum(done.forwards for done in expected)
    if cache == "block":
        assert decoder.forwards >= forwards
    else:
        assert decoder.forwards == forwards
