"""Reading of one tick, before anything is decided: load, forecast, rungs and pressure."""

from dataclasses import dataclass
from statistics import fmean

from mars_ray.autoscale.forecast import (
    Forecast,
    Load,
    Surge,
    bucket_s,
    fast_span_s,
    forecast,
    observe,
    passed,
    surprise,
)
from mars_ray.autoscale.operating_points import Rung, ladder
from mars_ray.autoscale.sample import NO_ROOM, PINNED, Sample
from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.autoscale.state import State
from mars_ray.autoscale.threshold_control import Pressure
from mars_ray.autoscale.traffic import Traffic, observe_traffic
from mars_ray.config.scaling import ScalingConfig

_LONGEST_COLD_START_S = 3600.0
# A forecast reaches at most this many buckets ahead: half of those remembered.
_FURTHEST = 32


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample and what follows from it and from earlier ones."""

    sample: Sample  # checked
    load: Load
    surge: Surge
    traffic: Traffic
    ahead: Forecast  # a cold start ahead
    rungs: tuple[Rung, ...]
    pressure: Pressure
    cold_start_s: float

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.sample.arrivals_per_s or self.sample.refused_per_s) or (
            self.pressure.in_system > 0
        )

    @property
    def stay_s(self) -> float | None:
        """Seconds that a request spends in the system, by Little's law; None without requests."""
        if not self.busy:
            return None
        rate = max(self.load.fast, fmean(self.load.rates or (0.0,)))
        return self.pressure.in_system / max(1e-3, rate)

    @property
    def unpinned(self) -> float:
        """Share of the requests that may be refused."""
        return 1 - dict(self.traffic.class_shares).get(PINNED, 0.0)

    @property
    def extra_rate(self) -> float:
        """Capacity to drain the queue built up during one cold start within a second one.

        Replicas that are starting serve in that time for as long as they have been starting so far.
        """
        pressure, lowest = self.pressure, self.rungs[-1]
        span = self.cold_start_s
        serving = pressure.running * span + sum(min(a, span) for a in self.sample.starting_ages_s)
        too_many = max(0.0, pressure.in_system - pressure.running * lowest.sequences)
        piled_up = too_many + pressure.rate * span - lowest.requests_per_s * serving
        return max(0.0, min(piled_up, too_many + pressure.rate * span)) / span


def see(
    sample: Sample, state: State, config: ScalingConfig, model: ServiceModel, dt: float
) -> Seen:
    """The reading of a checked sample, `dt` seconds after the one before."""
    offered = (sample.arrivals_per_s or 0.0) + (sample.refused_per_s or 0.0)
    width = bucket_s(config.cold_start_s)
    load = observe(state.load, offered, dt, fast_span_s(config), width)
    traffic = observe_traffic(state.traffic, sample, model, dt)
    measured = sample.cold_start_s or state.fleet.cold_start_s or config.cold_start_s
    ages = [min(age, NO_ROOM * measured) for age in sample.starting_ages_s]
    cold = min(_LONGEST_COLD_START_S, max([measured, width, *ages]))
    ahead = min(_FURTHEST, max(1, round(cold / width)))
    surge = passed(state.surge, load.level, dt)
    surge = surprise(load, surge, forecast(load, surge, ahead, width), cold)
    pressure = Pressure(
        rate=load.fast,
        in_system=_in_system(sample),
        running=sample.running,
        deadline_s=max(config.slo.ttft_s, dt),
    )
    rungs = ladder(model, config, traffic)
    expected = forecast(load, surge, ahead, width)
    return Seen(sample, load, surge, traffic, expected, rungs, pressure, cold_start_s=cold)


def _in_system(sample: Sample) -> float:
    """Requests decoding or waiting; replicas without a report are assumed to be like the rest."""
    decoding = sum(load.running for load in sample.loads)
    if sample.loads:
        decoding *= max(1.0, sample.running / len(sample.loads))
    waiting = sample.waiting
    return decoding + (sum(load.waiting for load in sample.loads) if waiting is None else waiting)
