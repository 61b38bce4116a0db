"""The demo: train, measure, serve and ask, in one file."""

from typing import Literal, Self

from pydantic import model_validator

from mars_ray.config.base import Config
from mars_ray.config.decode import ConfidenceMode, VerifiedMode
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.serve import ServeJob
from mars_ray.config.train import TrainJob

# What the last line tells of.
SUMMED_UP = (VerifiedMode(), ConfidenceMode(threshold=0.95))


class DemoJob(Config):
    """The last stage's model is evaluated and served; the one before it is the AR baseline."""

    kind: Literal["demo"] = "demo"
    train: TrainJob
    evaluate: EvaluateJob
    serve: ServeJob

    @model_validator(mode="after")
    def _can_be_summed_up(self) -> Self:
        if len(self.train.stages) < 2:
            raise ValueError("train.stages: the demo compares the last two, and there is one")
        for mode in SUMMED_UP:
            if mode not in self.evaluate.modes:
                wanted = f"{mode.type} at threshold {mode.threshold:g}"
                raise ValueError(f"evaluate.modes: the demo's last line tells of {wanted}; add it")
        if self.serve.keys_file:
            raise ValueError("serve.keys_file: the demo asks its service without a key")
        return self
