"""What no schedule can do without: by hand, and below whatever any policy does."""

from dataclasses import replace

import numpy as np
import pytest
from policies.contenders import Knob, run
from policies.job import PolicyName
from policies.lower_bound import lower_bound, request_costs
from simulator.simulated import MODEL, poisson, trace

from mars_ray.autoscale.service_model import PLAIN, Level, ServiceModel, Shape
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.simulator.cases import Case
from mars_ray.simulator.config import Cluster
from mars_ray.simulator.traces.trace import Trace

# A step of n rows takes 10 ms and 10 us a row: large ones are cheap and slow.
LINE = ServiceModel(
    "line", ((1, 0.01001), (1000, 0.020)), (Level(1.0, 0.0, (PLAIN,)),), 500, step_rows=1000
)


def case(given: Trace, model: ServiceModel = MODEL, rows: int = 100, **slo: float) -> Case:
    cluster = Cluster(cold_start_s=5, step_tokens=rows)
    owed = Slo(**{"ttft_s": 1.0, "time_per_token_s": 0.02} | slo)
    config = ScalingConfig(max_replicas=6, slo=owed, cold_start_s=5)
    return Case(config, replace(model, step_rows=rows), cluster, given, 90, seed=0)


def test_rows_of_full_steps_by_hand():
    """100 rows in 10 ms: 80 prompt tokens cost 8 ms, and 8 tokens after the first one 0.8 ms."""
    costs = request_costs(case(trace((0.0, 80, 9), (0.0, 100, 1))), MODEL.levels[:1])
    assert costs.tolist() == pytest.approx([0.0088, 0.010])


@pytest.mark.parametrize(("owed_s", "rows"), [(0.018, 800), (0.015, 500), (0.012, 200)])
def test_a_shorter_time_per_token_costs_more(owed_s, rows):
    """A token has to be made in steps of at most so many rows, whose share of the step it costs."""
    given = case(trace((0.0, 1, 101)), LINE, rows=1000, time_per_token_s=owed_s)
    cost = request_costs(given, LINE.levels)[0] - 0.020 / 1000
    assert cost == pytest.approx(100 * owed_s / rows, rel=0.02)
    assert cost <= 100 * owed_s / rows * (1 + 1e-9)


def test_a_context_is_read_in_every_step():
    """1,000 cached tokens of 1 us each, on average 1,050: 1.05 ms a step for 100 steps."""
    model = replace(LINE, cache_token_s=1e-6)
    given = case(trace((0.0, 1000, 101)), model, rows=1000, time_per_token_s=1.0)
    plain = case(trace((0.0, 1000, 101)), LINE, rows=1000, time_per_token_s=1.0)
    more = request_costs(given, LINE.levels)[0] - request_costs(plain, LINE.levels)[0]
    assert more == pytest.approx(100 * 1050e-6, rel=1e-9)


def test_the_cheapest_requests_are_enough():
    """Of a hundred requests one may be late, the longest."""
    rows = [(float(i), 10, 5) for i in range(99)] + [(99.0, 10, 5000)]
    given = case(trace(*rows))
    costs = request_costs(given, MODEL.levels[:1])
    assert lower_bound(given, MODEL.levels[:1]) == pytest.approx(costs[:99].sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["fixed", "fixed-verified", "mars", "mars-lossless", "ray"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_no_run_is_below(policy: PolicyName, replicas: int, seed: int):
    """Requests of all lengths, too many for one replica: those that are in time have cost at least
    what the bound says of them, in all seconds that were paid for."""
    rng = np.random.default_rng(seed)
    load = poisson(25, 1500, 1, 1, seed)
    lengths = {
        "prompt_tokens": rng.geometric(1 / 60, 1500),
        "output_tokens": rng.geometric(1 / 20, 1500),
    }
    model = replace(MODEL, cache_token_s=2e-6)
    given = case(replace(load, **lengths), model, ttft_s=5.0)
    outcome = run(given, policy, Knob(None, replicas))
    within = outcome.within(given.slo)
    assert within.any()
    assert request_costs(given, model.levels)[within].sum() <= outcome.replica_s


def test_a_busy_replica_is_near_it():
    """Guards a bound that is so low that it says nothing: 64 sequences that never pause, with
    128 of 148 rows; the others are kept for prompts."""
    level = Level(1.0, 0.0, (Shape(1, 2.0, 1.5),))
    model = ServiceModel("busy", ((1, 0.010), (148, 0.010), (256, 0.020)), (level,), 64)
    given = case(
        trace(*[(0.0, 2, 4000)] * 256), model, rows=148, ttft_s=100.0, time_per_token_s=0.0067
    )
    outcome = run(given, "fixed-verified", Knob(None, 1))
    bound = lower_bound(given, model.levels)
    assert outcome.within(given.slo).all()
    assert 0.8 * outcome.replica_s < bound <= outcome.replica_s
