"""Each policy by its name, and the settings that it may have (`tuning.py`)."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from mars_ray.autoscale.service_model import Level, Mix, ServiceModel
from mars_ray.config.scaling import ScalingConfig
from mars_ray.simulator.baselines.fixed import Clairvoyant, Fixed
from mars_ray.simulator.baselines.knative import Knative
from mars_ray.simulator.baselines.llm_d import LlmD
from mars_ray.simulator.baselines.ray_serve import RayDefault, RayTtft
from mars_ray.simulator.config import Cluster, PolicyName, SimulateJob
from mars_ray.simulator.engine.result import Outcome
from mars_ray.simulator.engine.run import EXACT, Deciding, Fixture, Policy, Progress, simulate
from mars_ray.simulator.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Manner:
    """How one of our policies counts capacity: ScalingConfig's `aim` and `caution`."""

    aim: float = 1.0
    caution: float = 1.0


# Knob settings from cheap to safe: the share of a replica's capacity to use.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05)
# The share of a window's requests that the clairvoyant policy wants in time.
_KNOWN = (0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 1.0)
# The time per token at which capacity is counted, over that of the objective. Far below these
# values, even a single sequence takes too long for some service models, and capacity is undefined.
_AIMS = (1.06, 1.02, 0.98, 0.94, 0.9)
_STAYING = tuple(Manner(aim) for aim in _AIMS)
_CHANGING = (*_STAYING, Manner(0.94, 0.5), Manner(1.02, 0.25))
# A fleet that is warm when a run begins is sized for this many seconds of it, times this spare
# factor.
_BEGINNING_S, _SPARE = 120.0, 1.5
_WINDOW_S = 30.0
# No larger fleet is tried after this attainment, or after this many without this much improvement.
_ALL, _LOOK, _MORE = 0.9995, 3, 1e-4


@dataclass(frozen=True, slots=True)
class Setting:
    """A job with one of its traces, on one cluster."""

    job: SimulateJob
    model: ServiceModel
    trace: Trace
    cluster: Cluster

    @property
    def config(self) -> ScalingConfig:
        """The job's scaling settings, with this cluster's cold start."""
        changes = {"cold_start_s": max(1e-3, self.cluster.cold_start_s)}
        return self.job.scaling.model_copy(update=changes)

    def needs(self, level: Level, window_s: float) -> np.ndarray:
        """The replicas, with fractions, that carry each window's requests."""
        trace = self.trace
        window = (trace.arrival_s / window_s).astype(int)
        needs = np.zeros(int(window.max()) + 1)
        slo_s = self.job.scaling.slo.time_per_token_s
        for i in np.unique(window).tolist():
            here = window == i
            mix = Mix(trace.prompt_tokens[here].mean(), trace.output_tokens[here].mean())
            rate = self.model.capacity(level, mix, slo_s).requests_per_s
            needs[i] = here.sum() / window_s / rate
        return needs

    def load(self, level: Level) -> float:
        """Requests that a replica holds at its capacity."""
        mix = Mix(self.trace.prompt_tokens.mean(), self.trace.output_tokens.mean())
        return self.model.capacity(level, mix, self.job.scaling.slo.time_per_token_s).batch


@dataclass(frozen=True, slots=True)
class Knob:
    """A policy's setting: the value of its knob, and its manner of counting if it has one."""

    value: float = 1.0
    manner: Manner = Manner()


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy to compare: `make` creates it; the `values` of its knob go from cheap to safe and
    are tried in each manner."""

    levels: tuple[Level, ...]
    make: Callable[[Setting, Knob], Policy]
    values: tuple[float, ...] = (1.0,)
    manners: tuple[Manner, ...] = (Manner(),)
    fixed: Callable[[Setting, Knob], int] | None = None  # replicas of a fleet that never changes
    set_point: float = 1.0


def contender(name: PolicyName, setting: Setting) -> Contender:
    """The contender of this name, for this trace."""
    job, levels = setting.job, setting.model.levels
    config = setting.config
    low, high = config.min_replicas, config.max_replicas
    sizes = tuple(float(n) for n in range(low, high + 1))

    def decides(**changes: object) -> Contender:
        changed = config.model_copy(update=changes)

        def make(_: Setting, knob: Knob) -> Policy:
            update = {"min_replicas": int(knob.value)} | asdict(knob.manner)
            return Deciding(changed.model_copy(update=update), setting.model)

        return Contender(levels, make, sizes, _CHANGING, set_point=changed.threshold.set_point)

    def ray(levels: tuple[Level, ...]) -> Contender:
        aim = setting.load(levels[0])
        return Contender(levels, lambda _, k: RayDefault(k.value * aim, low, high), _SHARES)

    match name:
        case "mars":
            return decides()
        case "lossless":
            return decides(threshold=_only(config, 1.0))
        case "fixed-threshold":
            return decides(threshold=_only(config, job.fixed_threshold))
        case "threshold-only":
            return Contender(levels, _steered, sizes, _STAYING, fixed=_size)
        case "static-peak":
            return Contender(EXACT, lambda _, k: Fixed(int(k.value)), sizes, fixed=_size)
        case "static-mean":
            return Contender(EXACT, lambda s, _: Fixed(_mean(s)), fixed=lambda s, _: _mean(s))
        case "ray":
            return ray(EXACT)
        case "ray-verified":
            return ray(levels[:1])
        case "ray-ttft":
            slo_s = config.slo.ttft_s
            return Contender(EXACT, lambda _, k: RayTtft(k.value * slo_s, low, high), _SHARES)
        case "knative":
            aim = setting.load(EXACT[0])
            return Contender(EXACT, lambda _, k: Knative(k.value * aim, low, high), _SHARES)
        case "llm-d":
            slo = config.slo
            return Contender(EXACT, lambda _, k: LlmD(slo, k.value, low, high), _SHARES)
        case "clairvoyant":
            return Contender(levels[:1], _Knowing().policy, _KNOWN)


def _only(config: ScalingConfig, threshold: float) -> object:
    return config.threshold.model_copy(update={"set_point": threshold, "floor": threshold})


def _size(_: Setting, knob: Knob) -> int:
    return int(knob.value)


def _steered(setting: Setting, knob: Knob) -> Policy:
    """Our fast loop on a fleet of constant size."""
    size = int(knob.value)
    changes = {"min_replicas": size, "max_replicas": size} | asdict(knob.manner)
    return Deciding(setting.config.model_copy(update=changes), setting.model)


def _mean(setting: Setting) -> int:
    """Replicas that the trace's load would need, were it spread evenly."""
    needs = setting.needs(EXACT[0], _WINDOW_S)
    mean = math.ceil(needs.sum() * _WINDOW_S / max(_WINDOW_S, setting.trace.duration_s))
    return min(setting.config.max_replicas, max(1, mean))


class _Knowing:
    """The smallest fixed fleet, for each window, that answers a share of its requests in time.

    It is found by running the trace once on fixed fleets of every size.
    """

    def __init__(self) -> None:
        self._attained: np.ndarray | None = None

    def policy(self, setting: Setting, share: Knob) -> Policy:
        """The clairvoyant policy that reaches the knob's share in every window."""
        if self._attained is None:
            self._attained = _attained(setting)
        reached = np.logical_and.accumulate((self._attained >= share.value)[::-1])[::-1]
        needs = setting.config.min_replicas + (~reached).sum(0)
        return Clairvoyant(needs.tolist(), _WINDOW_S, setting.cluster.cold_start_s)


def _attained(setting: Setting) -> np.ndarray:
    """Share of each window's requests answered in time, by size of a lossless fleet."""
    config = setting.config
    window = (setting.trace.arrival_s / _WINDOW_S).astype(int)
    count = np.maximum(1, np.bincount(window))
    rows, means = [], []
    for size in range(config.min_replicas, config.max_replicas + 1):
        policy = Fixed(size)
        fixture = _fixture(setting, setting.model.levels[:1], 1.0, size, seed=0)
        within = simulate(fixture, policy).within(config.slo)
        late = np.bincount(window, ~within, len(count))
        rows.append(1 - late / count)
        means.append(within.mean())
        if means[-1] > _ALL or (len(means) > _LOOK and means[-1] - means[-1 - _LOOK] < _MORE):
            break
    return np.array(rows)


def run(
    setting: Setting, who: Contender, knob: Knob, seed: int, progress: Progress | None = None
) -> Outcome:
    """Simulate one run. A fleet that changes begins with the replicas its first minutes need."""
    config = setting.config
    if who.fixed:
        replicas = who.fixed(setting, knob)
    else:
        level = next(lv for lv in reversed(who.levels) if lv.threshold >= min(1.0, who.set_point))
        needs = setting.needs(level, _BEGINNING_S)
        replicas = math.ceil(_SPARE * needs[0])
        replicas = min(max(replicas, config.min_replicas), config.max_replicas)
    fixture = _fixture(setting, who.levels, who.set_point, replicas, seed)
    return simulate(fixture, who.make(setting, knob), progress)


def _fixture(
    setting: Setting, levels: tuple[Level, ...], set_point: float, replicas: int, seed: int
) -> Fixture:
    return Fixture(
        trace=setting.trace,
        model=setting.model,
        cluster=setting.cluster,
        levels=levels,
        set_point=set_point,
        replicas=replicas,
        most=max(setting.config.max_replicas, replicas),
        seed=seed,
        slo=setting.config.slo,
    )
