"""A model to evaluate."""

import pytest

from mars_ray.config.inputs import PresetModel
from mars_ray.data.corpus import problems
from mars_ray.model.create import create_model
from mars_ray.model.directory import ModelCard, read_card, write_card


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Random weights that claim to be MARS-trained: nothing is right, everything runs."""
    directory = tmp_path_factory.mktemp("evaluate") / "tiny"
    solved = problems("train", 300, 0)
    create_model(
        PresetModel(preset="tiny", vocab_size=400),
        lambda: (text for item in solved for text in (item.question, item.solution)),
        directory,
        seed=0,
    )
    card = read_card(directory)
    write_card(directory, ModelCard(card.mask_token, card.mask_token_id, block_size=4))
    return directory
