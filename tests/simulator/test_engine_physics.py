"""What one simulated engine does in its steps: hand-worked effects, equality with stepping."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.simulated import MODEL, fixture, trace

from mars_ray.autoscale.service_model import Level, Mix
from mars_ray.simulator.engine.arrays import PREFIX, make_tables, make_world
from mars_ray.simulator.engine.core import advance, set_levels, start
from mars_ray.simulator.engine.reference import reference
from mars_ray.simulator.traces.trace import Trace

PLAIN = replace(MODEL, levels=(Level(1.0, 0.0, ()),))


@st.composite
def conversations(draw) -> Trace:
    """Up to 25 requests, some of which continue an earlier one.

    Times are no multiples of a step: what arrives in the very moment of a step's end may join the
    next one or the one after it.
    """
    count = draw(st.integers(1, 25))
    times = draw(st.lists(st.integers(1, 2000), min_size=count, max_size=count, unique=True))
    sizes = st.tuples(st.integers(1, 400), st.integers(1, 40))
    rows = [(0.001 * np.pi / 3 * at, *draw(sizes)) for at in sorted(times)]
    parent = [draw(st.integers(-1, number - 1)) for number in range(count)]
    shared = [draw(st.integers(0, 300)) if other >= 0 else 0 for other in parent]
    return trace(*rows, parent=parent, shared_tokens=shared)


@settings(deadline=None, max_examples=60)
@given(
    conversations(),
    st.floats(0.0005, 2.1),
    st.sampled_from([8, 30, 100]),
    st.sampled_from([None, 500, 1500]),
    st.sampled_from([(), (0.2, 1.0, 1.8)]),
)
def test_segments_equal_single_steps(load, changed_s, step_tokens, cache_tokens, spread):
    """The closed form against the slow loop, with all that makes a step longer or shorter and a
    change of level in between: to 1e-9."""
    model = replace(
        MODEL,
        cache_token_s=3e-6,
        prompt_attention_s=2e-7,
        cache_tokens=cache_tokens,
        page_tokens=4,
        spread=spread,
    )
    made = fixture(load, model=model)
    tables = make_tables(
        made.model,
        made.levels,
        Mix(50, 20),
        slowness=1.0,
        step_tokens=step_tokens,
        queue_limit=1000,
        max_retries=0,
        routing=PREFIX,
    )
    world = make_world(
        made.trace, [1.0, 0.5], places=1, batch=4, retries=0, seed=0, spread=model.spread
    )
    start(world, 1, 0.0, 0.0, 0)
    advance(world, tables, changed_s, 0.0)
    set_levels(world, 1, changed_s)
    advance(world, tables, 1e9, 0.0)
    gains = world.requests["gain"].tolist()
    served = reference(made.trace, tables, 4, lambda now: int(now > changed_s), gains)
    assert [each.found for each in served] == world.requests["found"].tolist()
    for name in ("first_s", "end_s"):
        expected = [getattr(each, name) for each in served]
        np.testing.assert_allclose(world.requests[name], expected, rtol=1e-9)
