"""A job of `benchmarks/compare_policies.py`."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from mars_ray.config.base import DISTINCT, Config
from mars_ray.simulator.config import Simulation

PolicyName = Literal[
    "mars",
    "mars-lossless",
    "fixed",
    "fixed-verified",
    "ray",
    "ray-verified",
    "keda",
    "keda-verified",
    "knative",
    "knative-verified",
    "llm-d",
    "llm-d-verified",
    "llm-d-tokens",
    "llm-d-tokens-verified",
    "clairvoyant",
]
ALL_POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


class ComparisonJob(Simulation):
    """A simulation of every policy, as shipped and tuned on other traces, beside fixed fleets known
    in hindsight and a lower bound. Policies are tuned with a trace's first seed."""

    policies: Annotated[tuple[PolicyName, ...], DISTINCT] = Field(
        default=ALL_POLICIES, min_length=1
    )
    tune: bool = Field(
        default=True,
        description="beside the settings that policies ship with, those that did best on the other "
        "traces",
    )
    tuned_seeds: int | None = Field(
        default=None,
        ge=1,
        description="how many of a trace's seeds judge a tuned setting; default: all, as for those "
        "that policies ship with",
    )


KINDS: dict[str, type[Config]] = {"simulate": ComparisonJob}
