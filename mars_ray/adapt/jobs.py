"""The jobs that an adaptation consists of, and the answers divided for training and measurement.

    answers.jsonl        what `mars-ray generate` wrote
    train.jsonl          the rows that train
    held_out.jsonl       the others: nothing is trained on them

Whether a row is held out depends on its prompt only, not on the order of rows. A greedy model that
repeats itself for ever teaches nothing by it, so answers are cut after the second round of a loop.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from mars_ray.config.adapt import AdaptJob
from mars_ray.config.base import Config
from mars_ray.config.evaluate import EvaluateJob, PromptsTask
from mars_ray.config.generate import GenerateJob
from mars_ray.config.inputs import DataConfig, FilesSource, PretrainedModel
from mars_ray.config.load import explain
from mars_ray.config.modes import ExactMode
from mars_ray.config.train import ClusterConfig, StageConfig, TrainJob
from mars_ray.core.statistics import before_loop
from mars_ray.errors import ConfigError, DataError
from mars_ray.files import write_whole


@dataclass(frozen=True, slots=True)
class Split:
    """The files of the two parts, and counts of their content."""

    train: Path
    held_out: Path
    train_rows: int
    held_out_rows: int
    cut: int  # answers of the training part that ended in a loop


def split(answers: Path, directory: Path, held_out: int) -> Split:
    """Divide the rows: `held_out` of them, but at most a tenth, are held out.

    Raises DataError if there are too few to divide.
    """
    with answers.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows.sort(key=lambda row: hashlib.sha256(json.dumps(row["prompt_ids"]).encode()).digest())
    count = min(held_out, len(rows) // 10)
    if count < 1:
        raise DataError(
            f"{answers} has {len(rows)} answers, too few to train on and to hold some out: "
            "at least 10 are needed. Give more prompts, or more time"
        )
    train, cut = [], 0
    for row in rows[count:]:
        answer = before_loop(row["answer_ids"])
        if len(answer) < len(row["answer_ids"]):
            row = row | {"answer_ids": answer, "finish_reason": "length"}
            cut += 1
        train.append(row)
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, part in zip(paths, (train, rows[:count]), strict=True):
        write_whole(path, "".join(json.dumps(row) + "\n" for row in part))
    return Split(*paths, len(train), count, cut)


STAGE = "draft"
# Most of a job's minutes, as a share, for prompts and answers; the rest goes to training.
_ANSWERS_SHARE = 0.4
# Over the same answers, however many minutes are left.
_MOST_PASSES = 4.0


@dataclass(frozen=True, slots=True)
class Devices:
    """Number of workers and of engines, and the resources of each."""

    workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    engines: int  # that answer
    cpus_per_engine: float
    precision: Literal["float32", "bfloat16"]  # the faster one, for all workers


class Places:
    """The paths of an adaptation's files and directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "base"  # the model, if it had to be converted
        self.answers = root / "answers.jsonl"
        self.part = root / "answers.jsonl.part"  # of a generation that goes on
        self.training = root / "training"  # the training job's own directory
        self.adapter = root / "adapter"  # the draft adapter, with its frontier
        self.measured = root / "speeds.json"  # exists once everything is measured
        self.service = root / "serve.toml"
        self.report = root / "report.html"


def generate_job(job: AdaptJob, base: Path, places: Places, devices: Devices) -> GenerateJob:
    """The job that writes prompts and answers, without the prompts used for measurement."""
    answers = job.answers
    measured = [path for source in job.measure.kinds.values() for path in source.paths]
    return GenerateJob(
        checkpoint=str(base),
        prompts=answers.prompts,
        exclude=tuple(dict.fromkeys([*answers.exclude, *measured])),
        output=str(places.answers),
        keep_cut=True,
        mode=ExactMode(),
        sampling=answers.sampling,
        max_new_tokens=answers.max_new_tokens,
        minutes=None if job.minutes is None else _ANSWERS_SHARE * job.minutes,
        least_answers=answers.least,
        workers=devices.engines,
        cpus_per_worker=devices.cpus_per_engine,
        gpus_per_worker=devices.gpus_per_worker or None,
        engine=answers.engine,
    )


def train_job(
    job: AdaptJob,
    base: Path,
    places: Places,
    split: Split,
    devices: Devices,
    minutes: float | None,
    begun: TrainJob | None = None,
) -> TrainJob:
    """The job that trains the adapter, for `minutes` or for the recipe's epochs. One that has begun
    keeps its batches and its precision on other devices, and has as many workers as divide them."""
    recipe = job.recipe
    epochs = recipe.epochs or (_MOST_PASSES if minutes else 1.0)
    workers = recipe.workers or devices.workers
    batch_size = workers * recipe.conversations_per_worker
    precision = recipe.precision or devices.precision
    if begun is not None:
        batch_size, precision = begun.stages[STAGE].global_batch_size, begun.precision
        workers = max(count for count in range(1, workers + 1) if batch_size % count == 0)
    # More workers than by default share the CPUs of these, on whichever node.
    sharing = math.ceil(workers / devices.workers)
    stage = StageConfig(
        objective=recipe.objective,
        adapter=recipe.adapter,
        optimizer=recipe.optimizer,
        epochs=epochs,
        minutes=minutes,
        global_batch_size=batch_size,
        micro_batch_size=1,
        eval_every_steps=recipe.eval_every_steps,
        eval_rows=split.held_out_rows,
    )
    return TrainJob(
        name=job.name,
        output_dir=str(places.training),
        model=PretrainedModel(path=str(base)),
        data=DataConfig(
            train=FilesSource(paths=(str(split.train),)),
            eval=FilesSource(paths=(str(split.held_out),)),
            max_length=recipe.max_length,
            packing=False,
        ),
        stages={STAGE: stage},
        precision=precision,
        cluster=ClusterConfig(
            workers=workers,
            cpus_per_worker=max(1.0, devices.cpus_per_worker // sharing),
            gpus_per_worker=devices.gpus_per_worker,
        ),
        checkpoint=recipe.checkpoint,
    )


def evaluate_job(job: AdaptJob, base: Path, places: Places, split: Split) -> EvaluateJob:
    """The job that measures all modes, on the prompts that the job names or on held-out ones."""
    measure = job.measure
    kinds = measure.kinds or {"held_out": FilesSource(paths=(str(split.held_out),))}
    return EvaluateJob(
        checkpoint=str(base),
        output_dir=str(places.adapter),
        task=PromptsTask(kinds=kinds),
        modes=measure.modes,
        max_new_tokens=measure.max_new_tokens,
        engine=measure.engine.model_copy(update={"draft_adapter": str(places.adapter)}),
    )


def check_jobs(job: AdaptJob, base: Path, places: Places, devices: Devices) -> None:
    """Makes the jobs that come after hours once before them. Raises ConfigError."""
    parts = Split(places.root / "train.jsonl", places.root / "held_out.jsonl", 1, 1, 0)
    makers: tuple[tuple[type[Config], Callable[[], Config]], ...] = (
        (GenerateJob, lambda: generate_job(job, base, places, devices)),
        (TrainJob, lambda: train_job(job, base, places, parts, devices, job.minutes)),
        (EvaluateJob, lambda: evaluate_job(job, base, places, parts)),
    )
    for kind, make in makers:
        try:
            make()
        except ValidationError as error:
            said = explain(error, f"the {kind.__name__} of this adaptation", kind)
            raise ConfigError(said) from None


def service_table(job: AdaptJob, base: Path, places: Places) -> dict[str, Any]:
    """The serve job as a table for its file, without defaults."""
    service = job.service
    engine = service.engine.model_dump(exclude_defaults=True)
    gpus = service.gpus_per_replica
    return {
        "kind": "serve",
        "checkpoint": str(base),
        "model_name": service.model_name or job.name,
        "port": service.port,
        "cpus_per_replica": service.cpus_per_replica,
        **({} if gpus is None else {"gpus_per_replica": gpus}),
        "engine": engine | {"draft_adapter": str(places.adapter)},
    }
