"""Small models, traces and runs for the simulator's tests."""

import numpy as np

from mars_ray.autoscale.service_model import Level, ServiceModel, Shape
from mars_ray.simulator.cases import Fixed
from mars_ray.simulator.config import Cluster
from mars_ray.simulator.engine.run import Fixture, Outcome, Policy, simulate
from mars_ray.simulator.traces.trace import Trace

# Every step takes 10 ms, and 1 ms more for each row beyond 100; two tokens a step without masks'
# rows counting, three at the lower threshold.
MODEL = ServiceModel(
    "toy",
    ((1, 0.010), (100, 0.010), (1100, 1.010)),
    (Level(1.0, 0.0, (Shape(1, 2.0, 2.0),)), Level(0.5, 4.0, (Shape(1, 3.0, 3.0),))),
    max_batch=4,
)


def trace(*rows: tuple[float, int, int], **columns: list) -> Trace:
    """Rows of arrival, prompt tokens, output tokens."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    more = {name: np.array(values) for name, values in columns.items()}
    return Trace("test", arrival.astype(float), prompt, output, **more)


def poisson(rate: float, count: int, prompt: int, output: int, seed: int = 0) -> Trace:
    """All requests alike."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return Trace("poisson", np.cumsum(gaps), np.full(count, prompt), np.full(count, output))


def fixture(given: Trace, replicas: int = 1, most: int = 0, seed: int = 0, **changes) -> Fixture:
    """`changes` are of the cluster and the model."""
    model = changes.pop("model", MODEL)
    cluster = Cluster.model_validate({"step_tokens": 100, "metrics_lag_s": 0} | changes)
    return Fixture(given, model, cluster, model.levels, 1.0, replicas, max(most, replicas), seed)


def run(given: Trace, policy: Policy | None = None, **changes) -> Outcome:
    """On a fixed fleet unless a policy is given."""
    made = fixture(given, **changes)
    return simulate(made, policy or Fixed(made.replicas))
