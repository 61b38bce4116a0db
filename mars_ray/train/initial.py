"""The model that a job's first stage starts from."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from mars_ray.config.model import PretrainedModel
from mars_ray.config.train import DraftObjective, TrainJob
from mars_ray.data.sources import BadRows, read
from mars_ray.model.card import CARD_FILE
from mars_ray.model.create import create_model
from mars_ray.model.load import read_config
from mars_ray.model.source import Source, local_copy


def initial_model(job: TrainJob) -> Path:
    """The model directory that the first stage starts from, made if it is not there yet.

    A draft adapter's base is used as it is, wherever it lies; a hub name's is its snapshot. Raises
    ModelError.
    """
    first = next(iter(job.stages.values()))
    if isinstance(first.objective, DraftObjective):
        assert isinstance(job.model, PretrainedModel), "the config demands a pretrained model"
        source = Source(job.model.path, job.model.revision)
        directory = local_copy(source, cache="")
        read_config(directory, called=job.model.path)
        return directory
    model = Path(job.output_dir) / "initial"
    if not (model / CARD_FILE).exists():
        # What a killed attempt left of it.
        for draft in model.parent.glob(f".{model.name}-*"):
            shutil.rmtree(draft, ignore_errors=True)
        create_model(job.model, lambda: _texts(job), model, job.seed)
    return model


def _texts(job: TrainJob) -> Iterator[str]:
    """Every message of the training data. Raises DataError if too many rows are bad: a tokenizer
    made of the rest would stay when the data are mended."""
    report = BadRows()
    for record in read(job.data.train, report):
        for message in record.messages:
            yield message.content
    report.check(job.data.max_bad_share)
