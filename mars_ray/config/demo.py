"""The demo: train, measure, serve and ask, in one file."""

from typing import Literal

from mars_ray.config.base import Config
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.serve import ServeJob
from mars_ray.config.train import TrainJob


class DemoJob(Config):
    """The last stage's model is evaluated and served; the one before it is the AR baseline."""

    kind: Literal["demo"] = "demo"
    train: TrainJob
    evaluate: EvaluateJob
    serve: ServeJob
