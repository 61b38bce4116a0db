"""The policy in Ray Serve: turns its context into a sample, and a decision into a number of
replicas and a set-point.

Serve's controller calls the policy in its own loop ten times a second, and all applications wait
meanwhile, so nothing here waits or raises. The decisions come from `autoscale/`, which does not use
Ray.
"""

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from mars_ray.autoscale.policy import Decision, State, decide
from mars_ray.autoscale.sample import Collector, ReplicaCounts, Report, Traffic, step_costs
from mars_ray.autoscale.service_model import ServiceModel, sized
from mars_ray.autoscale.threshold import SetPoint
from mars_ray.config.scaling import ScalingConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm import ServedEngine
from mars_ray.errors import DataError
from mars_ray.files import write_whole
from mars_ray.serve.status import Decided
from mars_ray.serve.threshold_actor import Setting, control_of

logger = logging.getLogger("ray.serve")

# How often what the policy has learnt is written to its file.
_KEEP_S = 60.0
# Time between two decisions, and between two reports of a replica.
_TICK_S = 0.5


def autoscaling(job: ServeJob, model: ServiceModel) -> AutoscalingConfig:
    """Serve's scaling settings for a job of one model. All delays are left to the policy."""
    scaling = job.scaling
    return AutoscalingConfig(
        **_bounds(scaling),
        metrics_interval_s=_TICK_S,
        look_back_period_s=4 * _TICK_S,
        upscale_delay_s=0,
        downscale_delay_s=0,
        downscale_to_zero_delay_s=0,
        policy=AutoscalingPolicy(
            policy_function=Autoscaler,
            policy_kwargs={
                "name": job.name,
                "config": scaling.model_copy(
                    update={"quality_classes": job.qualities}
                ).model_dump_json(),
                "model": model.to_json(),
                "engine": job.engine.model_dump_json(),
                "new_tokens": job.limits.new_tokens,
                "measures_steps": job.service_model is None,
                "memory": str(Path(job.model_cache) / "policies" / f"{job.deployment}.json"),
            },
        ),
    )


def rays_rule(scaling: ScalingConfig) -> AutoscalingConfig:
    """Serve's scaling settings for its own rule, with its own delays."""
    assert scaling.target_ongoing_requests is not None
    return AutoscalingConfig(
        **_bounds(scaling),
        target_ongoing_requests=scaling.target_ongoing_requests,
        downscale_to_zero_delay_s=scaling.idle_to_zero_s,
    )


def _bounds(scaling: ScalingConfig) -> dict[str, Any]:
    return {
        "min_replicas": 0 if scaling.scale_to_zero else scaling.min_replicas,
        "initial_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
    }


class Autoscaler:
    """The policy of one model as Serve calls it; created with every deployment and when the
    controller restarts.

    What it has learnt from traffic is in a file on the controller's node, from which the next one
    goes on. Until the replicas have reported, it keeps the previous target and publishes nothing.
    """

    def __init__(
        self,
        name: str,
        config: str,
        model: str,
        engine: str,
        new_tokens: int,
        measures_steps: bool,
        memory: str,
    ) -> None:
        """`new_tokens` is the most of an answer. `measures_steps`: step times come from the
        replicas, not from the service model. `memory` is the path of the file."""
        self._name = name
        self._config = ScalingConfig.model_validate_json(config)
        self._model = ServiceModel.from_json(model, "the service model")
        self._engine = TypeAdapter(ServedEngine).validate_json(engine)
        self._measures_steps = measures_steps
        self._collector = Collector(self._config.cold_start_s)
        self._memory = Path(memory).expanduser()
        self._state = State(traffic=Traffic.within(new_tokens, self._engine.max_context))
        try:
            self._state = State.from_json(self._memory.read_text("utf-8"))
            logger.info("the policy goes on from %s", self._memory)
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError, DataError) as error:
            logger.warning("%s: %s; the policy begins with nothing learnt", self._memory, error)
        self._keep_s = time.monotonic() + _KEEP_S
        # Build time 0, so that a setting from a replica, which knows the real one, is newer.
        setting = Setting(0.0, self._config.threshold.set_point, is_auto=True)
        self._control = partial(control_of, name, setting)
        self._decision: Decision | None = None
        self._next_s = 0.0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas; Serve clamps it to its own bounds, which are the same."""
        now = time.monotonic()
        ticks = now >= self._next_s
        if ticks:
            try:
                self._tick(context, now)
            except Exception:
                logger.exception("the autoscaling policy of %s failed; it holds", self._name)
                self._decision = None
        # Serve itself may have woken a fleet of zero since.
        if self._decision is None or (not ticks and self._decision.replicas == 0):
            return context.target_num_replicas, {}
        return self._decision.replicas, {}

    def _tick(self, context: AutoscalingContext, now: float) -> None:
        self._next_s = now + _TICK_S
        reports = reports_of(context)
        running, target = context.current_num_replicas, context.target_num_replicas
        sample = self._collector.sample(reports, running, target, now, time.time())
        # Replicas measure them at their start, and they do not change.
        if self._measures_steps and (costs := step_costs(reports.values())):
            model = replace(self._model, seconds_at=costs)
            self._model = sized(model, self._engine, self._config.slo.time_per_token_s)
            self._measures_steps = False
        decision = decide(sample, self._state, self._config, self._model, now)
        self._state = decision.state
        if now >= self._keep_s:
            self._keep_s = now + _KEEP_S
            try:
                self._memory.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._memory, self._state.to_json())
            except OSError as error:
                logger.warning("what the policy has learnt cannot be kept: %s", error)
        self._publish(decision)
        self._decision = decision

    def _publish(self, decision: Decision) -> None:
        """Sends the decision to the model's actor, without waiting for it to arrive."""
        threshold, needed = decision.threshold_setpoint, decision.needed
        if threshold is None or needed is None:
            return  # it holds
        set_point = SetPoint(threshold, decision.shed, decision.rungs)
        feedback = decision.state.feedback
        decided = Decided(
            at_s=time.time(),
            replicas=decision.replicas,
            threshold=threshold,
            shed=decision.shed,
            reason=decision.reason,
            utilisation=feedback.utilisation,
            floor_replicas=needed.floor / needed.utilisation,
            error_budget_spent=feedback.spent(self._config.slo.attainment),
        )
        self._control().publish.remote(set_point, decided)


def reports_of(context: AutoscalingContext) -> dict[str, Report]:
    """The newest report of each running replica; those that have not reported yet are left out."""
    metrics: dict[str, dict[str, float]] = {}
    at_s: dict[str, float] = {}
    running = {str(replica) for replica in context.running_replicas}
    for metric, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            name = str(replica)
            if series and name in running:
                metrics.setdefault(name, {})[metric] = series[-1].value
                at_s[name] = max(at_s.get(name, 0.0), series[-1].timestamp)
    return {
        name: Report(at_s[name], ReplicaCounts.from_metrics(values))
        for name, values in metrics.items()
    }
