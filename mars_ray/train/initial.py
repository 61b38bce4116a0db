"""What a job's first stage starts from: a model, or an adapter that adds nothing yet."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from mars_ray.config.model import PretrainedModel
from mars_ray.config.train import DraftAdapterConfig, DraftObjective, TrainJob
from mars_ray.data.sources import BadRows, read
from mars_ray.model.card import CARD_FILE, read_card
from mars_ray.model.create import create_model
from mars_ray.model.directory import fingerprint
from mars_ray.model.draft_adapter import DraftAdapter
from mars_ray.model.load import load_model, read_config
from mars_ray.model.places import local_copy
from mars_ray.storage.place import Place
from mars_ray.train.draft_adapter import adapter_of, draft_card, fresh_weights
from mars_ray.train.frozen import FrozenModel


def initial_model(job: TrainJob) -> Path:
    """The model directory that the first stage starts from, made if it is not there yet.

    A draft adapter's base is used as it is, wherever it lies; a hub name's is its snapshot. Raises
    ModelError.
    """
    first = next(iter(job.stages.values()))
    if isinstance(first.objective, DraftObjective):
        assert isinstance(job.model, PretrainedModel), "the config demands a pretrained model"
        source = Place(job.model.path, job.model.revision)
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


def untrained_adapter(
    directory: Path, config: DraftAdapterConfig, depths: int, seed: int = 0
) -> DraftAdapter:
    """What the training of a draft adapter starts from, for the model in `directory`.

    Raises ModelError.
    """
    base = FrozenModel(load_model(directory, dtype=torch.float32))
    hidden = base.embedding_VH.shape[1]
    card = draft_card(config, depths, hidden, directory.name, fingerprint(directory))
    mask_token_id = read_card(directory).trained_mask_id
    return adapter_of(fresh_weights(card, base, seed, mask_token_id), card, base)
