"""Each policy by its name, the settings that it ships with, and those that it is tuned among.

All have the same freedoms: a smallest fleet, a warm beginning, and one grid of settings.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mars_ray.autoscale.policy import Decision
from mars_ray.autoscale.sample import Sample
from mars_ray.autoscale.service_model import Level, ServiceModel
from mars_ray.simulator.cases import TARGET_ONGOING, Case, Fixed, RayDefault, first_replicas
from mars_ray.simulator.engine.run import EXACT, Deciding, Outcome, Policy, simulate
from policies.job import PolicyName
from policies.keda import QUEUE_LENGTH, Keda
from policies.knative import TARGET, Knative
from policies.llm_d import BACKLOG_S, LlmD, LlmDTokens

OURS, UNLOWERED, KNOWING = "mars", "mars-lossless", "clairvoyant"
FIXED: tuple[PolicyName, ...] = ("fixed", "fixed-verified")
_VERIFIED = "-verified"
# Smallest fleets of the grid, and sizes of fixed ones, over what the trace needs on average.
_SMALLEST = (0.0, 1.5, 3.0)
_SIZES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0)
# Load varies if within this many seconds the mean of some window is less than half of another's.
_SPAN_S, _WINDOW_S = 3600.0, 300.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a policy, of the same meaning on every trace.

    `target` is that of the policy's rule; None is the one that it ships with. `smallest` is the
    smallest fleet, or the size of a fixed one, as a share of what the trace needs on average.
    """

    target: float | None = None
    smallest: float = 0.0


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting on one trace: its smallest fleet is a number of replicas."""

    target: float | None
    replicas: int

    def __str__(self) -> str:
        target = "as shipped" if self.target is None else f"target {self.target:g}"
        return f"{target}, {self.replicas} replica{'s' * (self.replicas != 1)}"


@dataclass(frozen=True, slots=True)
class Needs:
    """What settings of a cell are shares of, by the trace of its first seed."""

    requests: int
    duration_s: float
    plain: float  # replicas that plain decoding needs on average
    lossless: float  # and the model's lossless level
    varies: bool
    step_rows: int


def needs_of(case: Case) -> Needs:
    """The needs of a case."""
    return Needs(
        requests=len(case.trace),
        duration_s=case.trace.duration_s,
        plain=case.need(EXACT[0]),
        lossless=case.need(case.model.levels[0]),
        varies=_varies(case),
        step_rows=case.model.step_rows,
    )


def _varies(case: Case) -> bool:
    """Whether within an hour the load of five minutes is less than half of that of others."""
    trace = case.trace
    work = trace.prompt_tokens / case.model.step_rows + trace.output_tokens
    window = (trace.arrival_s / _WINDOW_S).astype(int)
    # The last window is not whole.
    loads = np.bincount(window, work)[:-1]
    span = int(_SPAN_S / _WINDOW_S)
    parts = [loads[i : i + span] for i in range(max(1, len(loads) - span + 1))]
    return any(len(part) and part.min() < 0.5 * part.max() for part in parts)


# What makes a policy: the case, the requests that a replica holds at its capacity, the target and
# the smallest fleet.
_Maker = Callable[[Case, float, float | None, int], Policy]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule of scaling, and the targets that it is tuned among."""

    make: _Maker
    targets: tuple[float | None, ...] = (None,)


def _ray(case: Case, load: float, target: float | None, low: int) -> Policy:
    ongoing = TARGET_ONGOING if target is None else target * load
    return RayDefault(ongoing, low, case.config.max_replicas)


def _knative(case: Case, load: float, target: float | None, low: int) -> Policy:
    return Knative(TARGET if target is None else target * load, low, case.config.max_replicas)


def _keda(case: Case, load: float, target: float | None, low: int) -> Policy:
    return Keda(QUEUE_LENGTH if target is None else target, low, case.config.max_replicas)


def _llm_d(case: Case, load: float, target: float | None, low: int) -> Policy:
    return LlmD(case.slo, 1.0 if target is None else target, low, case.config.max_replicas)


def _llm_d_tokens(case: Case, load: float, target: float | None, low: int) -> Policy:
    backlog_s = BACKLOG_S if target is None else target
    return LlmDTokens(case.model, backlog_s, low, case.config.max_replicas)


def _mars(case: Case, load: float, target: float | None, low: int) -> Policy:
    return Deciding(case.config.model_copy(update={"min_replicas": low}), case.model)


def _fixed(case: Case, load: float, target: float | None, low: int) -> Policy:
    return Fixed(low)


_RULES = {
    # Shares of the requests that a replica holds at its capacity; as shipped: 2 requests, and 70.
    "ray": _Rule(_ray, (None, 0.3, 0.7)),
    "knative": _Rule(_knative, (None, 0.3, 0.7)),
    # Waiting requests; as shipped: 5.
    "keda": _Rule(_keda, (None, 1.0, 20.0)),
    # The objective, times; as shipped: 1.
    "llm-d": _Rule(_llm_d, (None, 0.6, 1.6)),
    # Seconds of prompts that wait; as shipped: 1.5.
    "llm-d-tokens": _Rule(_llm_d_tokens, (None, 0.5, 4.0)),
    OURS: _Rule(_mars),
    UNLOWERED: _Rule(_mars),
    "fixed": _Rule(_fixed),
}


def shipped(policy: PolicyName) -> dict[str, Setting]:
    """The settings of a policy that are not tuned, by group.

    Nobody ships a fixed fleet: operators take twice what they need on average, or a little less.
    """
    if policy in FIXED:
        return {"default": Setting(smallest=2.0), "1.5x": Setting(smallest=1.5)}
    return {"hindsight" if policy == KNOWING else "default": Setting()}


def grid(policy: PolicyName) -> list[Setting]:
    """All settings that a policy is tuned among; none if there is nothing to tune."""
    if policy in (UNLOWERED, KNOWING):
        return []
    shares = _SIZES if policy in FIXED else _SMALLEST
    targets = _RULES[_rule_name(policy)].targets
    return [Setting(target, share) for target in targets for share in shares]


def _rule_name(policy: PolicyName) -> str:
    """The name of a policy's rule, whatever it decodes with."""
    return policy.removesuffix(_VERIFIED)


def levels_of(policy: PolicyName, model: ServiceModel) -> tuple[Level, ...]:
    """The levels that a policy may decode at."""
    if policy in (OURS, UNLOWERED):
        return model.levels
    return EXACT if _decodes_plainly(policy) else model.levels[:1]


def mean_need(policy: PolicyName, needs: Needs) -> float:
    """Replicas that the policy's decoding needs on average."""
    return needs.plain if _decodes_plainly(policy) else needs.lossless


def _decodes_plainly(policy: PolicyName) -> bool:
    return not policy.endswith(_VERIFIED) and policy not in (OURS, UNLOWERED, KNOWING)


def knob_of(policy: PolicyName, setting: Setting, needs: Needs, least: int, most: int) -> Knob:
    """The setting on a trace with these needs, between `least` and `most` replicas."""
    replicas = math.ceil(setting.smallest * mean_need(policy, needs) - 1e-9)
    return Knob(setting.target, min(max(replicas, least), most))


def run(case: Case, policy: PolicyName, knob: Knob) -> Outcome:
    """Simulate one run. A fleet that changes begins with what its first minutes need."""
    case = case.unwatched() if policy in FIXED else case
    levels = levels_of(policy, case.model)
    # Requests that a replica holds at its capacity.
    load = case.model.capacity(levels[0], case.mix(), case.slo.time_per_token_s).batch
    made = _RULES[_rule_name(policy)].make(case, load, knob.target, knob.replicas)
    set_point = case.config.threshold.set_point if policy in (OURS, UNLOWERED) else 1.0
    if policy in FIXED:
        replicas = knob.replicas
    else:
        replicas = first_replicas(case, levels, set_point, knob.replicas)
    fixture = case.fixture(levels, set_point, replicas)
    if policy != UNLOWERED:
        return simulate(fixture, made)
    recorded = Recorded(made)
    simulate(fixture, recorded)
    return simulate(fixture, Unlowered(recorded.decisions))


@dataclass(slots=True)
class Recorded:
    """Another policy, with all of its decisions kept."""

    policy: Policy
    decisions: list[Decision] = field(default_factory=list)

    def __call__(self, sample: Sample, now: float) -> Decision:
        """What the policy decides."""
        self.decisions.append(self.policy(sample, now))
        return self.decisions[-1]


class Unlowered:
    """Decisions of another run, tick by tick, but for the threshold, which stays at 1.

    What lowering it brought is the difference between the two runs: same requests, same replicas.
    """

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self._decisions = [replace(one, threshold_setpoint=1.0) for one in decisions]
        self._tick = -1

    def __call__(self, sample: Sample, now: float) -> Decision:
        """The decision of this tick; the last one if that run had ended."""
        self._tick = min(self._tick + 1, len(self._decisions) - 1)
        return self._decisions[self._tick]
