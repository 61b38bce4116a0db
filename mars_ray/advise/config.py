"""What `mars-ray advise` is asked. Needs no numba."""

from typing import Annotated, Literal

from pydantic import Field

from mars_ray.config.base import DISTINCT, Config, Names
from mars_ray.config.modes import Threshold
from mars_ray.config.scaling import Slo


class AdviseJob(Config):
    """Advice from a trace or a Prometheus server, for one service model."""

    kind: Literal["advise"] = "advise"
    source: Annotated[str, Names("file")] = Field(
        description="trace file of docs/simulator.md, or http(s) URL of Prometheus"
    )
    service_model: Annotated[str, Names("service model")] = Field(
        description="JSON file (docs/simulator.md)"
    )
    slos: Annotated[tuple[Slo, ...], DISTINCT] = Field(
        default=(), description="default: three around what the model can do"
    )
    hours: float | None = Field(
        default=None, gt=0, le=168, description="the first of a trace, the last of Prometheus"
    )
    model_name: str | None = Field(default=None, description="where Prometheus has several")
    threshold: Threshold | None = Field(
        default=None, description="the lower one to judge; default: at the floor of a service"
    )
    cold_start_s: float = Field(default=100.0, ge=0)
    max_replicas: int = Field(default=64, ge=1, description="no larger fleet is tried")

    @property
    def from_prometheus(self) -> bool:
        """Whether the source is a server."""
        return self.source.startswith(("http://", "https://"))
