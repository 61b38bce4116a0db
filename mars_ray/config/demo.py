"""The demos: from a model to an answer over HTTP, in one file."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mars_ray.config.adapt import AdaptJob
from mars_ray.config.base import AnyAdapterPath, Config, Names
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.modes import ConfidenceMode, Modes, VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.config.train import TrainJob

# Modes whose results are in the last line of the tiny demo.
SUMMED_UP = (VerifiedMode(), ConfidenceMode(threshold=0.95))


class DemoJob(Config):
    """An adaptation of some minutes, and an adapter of longer training beside it.

    Run again, it goes on where it was.
    """

    kind: Literal["demo"] = "demo"
    adapt: AdaptJob
    prompts: Annotated[str, Names("shipped rows")] = Field(
        min_length=1, description="file of prompts on which all is measured"
    )
    shipped: AnyAdapterPath | None = Field(
        default=None,
        min_length=1,
        description="directory of a draft adapter for the same model; without it, the one that is "
        "trained here is measured and served",
    )
    modes: Modes = Field(
        default=(VerifiedMode(), VerifiedMode(threshold=0.3), VerifiedMode(threshold=0.1)),
        description="modes of the frontier",
    )
    question: str = Field(min_length=1, description="asked over HTTP")
    answer_tokens: int = Field(default=128, ge=1, description="most tokens of its answer")

    @model_validator(mode="after")
    def _measures_its_prompts(self) -> Self:
        if self.adapt.measure.kinds:
            raise ValueError("adapt.measure.kinds: the demo measures its `prompts`; leave it out")
        if self.adapt.measure.engine.dtype == "auto":
            raise ValueError("adapt.measure.engine.dtype: name the one that transformers gets, too")
        for key, modes in (
            ("adapt.measure.modes", self.adapt.measure.modes),
            ("modes", self.modes),
        ):
            if VerifiedMode() not in modes:
                raise ValueError(f"{key}: the demo's last line tells of verified; add it")
        return self


class TinyDemoJob(Config):
    """The last stage's model is evaluated and served; the one before it is the AR baseline."""

    kind: Literal["demo-tiny"] = "demo-tiny"
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
