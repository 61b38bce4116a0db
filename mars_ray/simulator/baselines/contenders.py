"""Each policy by its name, the settings that it ships with, and those that it is tuned among.

All have the same freedoms: a smallest fleet, a warm beginning, and one grid of settings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from mars_ray.autoscale.service_model import Level, ServiceModel
from mars_ray.simulator.baselines.fixed import Fixed, Recorded, Unlowered
from mars_ray.simulator.baselines.keda import QUEUE_LENGTH, Keda
from mars_ray.simulator.baselines.knative import TARGET, Knative
from mars_ray.simulator.baselines.llm_d import BACKLOG_S, LlmD, LlmDTokens
from mars_ray.simulator.baselines.ray_serve import TARGET_ONGOING, RayDefault
from mars_ray.simulator.cells import Case, Needs
from mars_ray.simulator.config import PolicyName
from mars_ray.simulator.engine.result import Outcome
from mars_ray.simulator.engine.run import EXACT, Deciding, Policy, simulate

OURS, UNLOWERED, KNOWING = "mars", "mars-lossless", "clairvoyant"
FIXED: tuple[PolicyName, ...] = ("fixed", "fixed-verified")
_VERIFIED = "-verified"
# Smallest fleets of the grid, and sizes of fixed ones, over what the trace needs on average.
_SMALLEST = (0.0, 1.5, 3.0)
_SIZES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0)


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
    made = _RULES[_rule_name(policy)].make(case, case.load(levels[0]), knob.target, knob.replicas)
    set_point = case.config.threshold.set_point if policy in (OURS, UNLOWERED) else 1.0
    if policy in FIXED:
        replicas = knob.replicas
    else:
        level = next(lv for lv in reversed(levels) if lv.threshold >= min(1.0, set_point))
        replicas = case.begins_with(level, knob.replicas)
    fixture = case.fixture(levels, set_point, replicas)
    if policy != UNLOWERED:
        return simulate(fixture, made)
    recorded = Recorded(made)
    simulate(fixture, recorded)
    return simulate(fixture, Unlowered(recorded.decisions))
