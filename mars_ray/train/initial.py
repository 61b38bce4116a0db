"""The model that a job's first stage starts from."""

from collections.abc import Iterator
from pathlib import Path

from mars_ray.config.train import TrainJob
from mars_ray.data.sources import BadRows, read
from mars_ray.model.card import CARD_FILE
from mars_ray.model.create import create_model


def initial_model(job: TrainJob) -> Path:
    """The model directory that the first stage starts from, made if it is not there yet."""
    model = Path(job.output_dir) / "initial"
    if not (model / CARD_FILE).exists():
        create_model(job.model, lambda: _texts(job), model, job.seed)
    return model


def _texts(job: TrainJob) -> Iterator[str]:
    """Every message of the training data; its bad rows are reported when it is tokenised."""
    for record in read(job.data.train, BadRows()):
        for message in record.messages:
            yield message.content
