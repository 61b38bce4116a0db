"""A fluid fleet for closed loops: requests are a liquid, replicas arrive after a cold start."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mars_ray.autoscale.policy import Decision, Feedback, Floor, State, decide
from mars_ray.autoscale.sample import PINNED, ReplicaLoad, Sample, Traffic
from mars_ray.autoscale.service_model import Level, ServiceModel, Shape
from mars_ray.autoscale.threshold import KEPT, Demand, ladder
from mars_ray.config.scaling import ScalingConfig

# 10 requests/s a replica at the set-point, 12 and 14 below it: 16 sequences of 100 tokens, 16 ms a
# step whatever it holds. A point costs 10%, five points 20% more.
MEMORY_BOUND = ServiceModel(
    "memory-bound",
    ((1, 0.016), (100_000, 0.016)),
    (
        Level(1.0, 0.0, (Shape(1, 2.0, 1.0),)),
        Level(0.3, 1.0, (Shape(1, 2.0, 1.2),)),
        Level(0.1, 5.0, (Shape(1, 2.0, 1.4),)),
    ),
    max_batch=16,
)
# The same where every row costs: masks never pay.
ARITHMETIC_BOUND = ServiceModel(
    "arithmetic-bound", ((1, 0.001), (1000, 1.0)), MEMORY_BOUND.levels, max_batch=16
)
CONFIG = ScalingConfig.model_validate(
    {
        "max_replicas": 20,
        "cold_start_s": 40,
        "threshold": {"floor": 0.1},
        "quality_budget_points": None,
    }
)


# A service that has been watched for long, whose replicas keep all that they are said to carry.
WATCHED = State(
    demand=Demand(windows=(0.0,) * KEPT),
    floor=Floor(age_s=1e6),
    feedback=Feedback(utilisation=1.0),
    traffic=Traffic(output_tokens=100),
)


def config(**changes: object) -> ScalingConfig:
    """CONFIG with other values."""
    return ScalingConfig.model_validate(CONFIG.model_dump() | changes)


def sample(
    running: int, rate: float, waiting: int = 0, decoding: int = 0, **more: object
) -> Sample:
    """A fleet that was given what it asked for."""
    known = {
        "target": running,
        "age_s": 0.5,
        "prompt_tokens": 1.0,
        "output_tokens": 100.0,
        "loads": tuple(ReplicaLoad(running=decoding // max(1, running)) for _ in range(running)),
    }
    return Sample(running=running, arrivals_per_s=rate, waiting=waiting, **(known | more))


@dataclass
class Fleet:
    """Ticks of one second. `log` has every decision."""

    config: ScalingConfig
    model: ServiceModel = MEMORY_BOUND
    running: int = 1
    pinned: float = 0.0  # share of the requests
    state: State = WATCHED
    starting: list[float] = field(default_factory=list)
    in_system: float = 0.0
    now: float = 0.0
    log: list[Decision] = field(default_factory=list)

    def run(self, seconds: int, rate: Callable[[float], float]) -> list[Decision]:
        """The decisions of these seconds."""
        for _ in range(seconds):
            self.tick(rate(self.now))
        return self.log[-seconds:]

    def tick(self, rate: float) -> None:
        """One second of load, then a decision."""
        self._serve(rate)
        slots = 16 * self.running
        seen = sample(
            self.running,
            rate,
            waiting=int(max(0.0, self.in_system - slots)),
            decoding=int(min(slots, self.in_system)),
            target=self.running + len(self.starting),
            starting_ages_s=tuple(self.starting),
            class_shares={PINNED: self.pinned},
            wall_s=self.now,
            **self._in_time(rate, slots),
        )
        decision = decide(seen, self.state, self.config, self.model, self.now)
        self.log.append(decision)
        self.state = decision.state
        self._order(decision.replicas)
        self.now += 1

    def _in_time(self, rate: float, slots: int) -> dict[str, dict[str, float]]:
        """All requests start; they are late while what waits takes longer than they are owed."""
        wait_s = max(0.0, self.in_system - slots) / max(1e-9, 10 * self.running)
        late = rate if wait_s > self.config.slo.ttft_s else 0.0
        return {"started": {"open": rate}, "slow": {"open": late}, "late": {"open": late}}

    def _serve(self, rate: float) -> None:
        ready = sum(age + 1 >= self.config.cold_start_s for age in self.starting)
        self.running += ready
        self.starting = [age + 1 for age in self.starting if age + 1 < self.config.cold_start_s]
        rungs = ladder(self.model, self.config, self.state.traffic)
        threshold = self.state.quality.threshold or 1.0
        rung = next((r for r in rungs if r.threshold <= threshold), rungs[-1])
        shed = self.state.quality.shed * (1 - self.pinned)
        self.in_system += rate * (1 - shed)
        share = min(1.0, self.running * rung.sequences / max(1.0, self.in_system))
        self.in_system -= min(
            self.in_system * share * rung.requests_per_s / rung.sequences, self.in_system
        )

    def _order(self, replicas: int) -> None:
        while self.running + len(self.starting) < replicas:
            self.starting.append(0.0)
        while self.starting and self.running + len(self.starting) > replicas:
            self.starting.pop()
        self.running = min(self.running, replicas)
