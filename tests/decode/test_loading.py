"""From a model directory to an engine."""

from dataclasses import replace

import pytest
import torch

from mars_ray.config.decode import EngineConfig
from mars_ray.config.model import PresetModel
from mars_ray.decode import loading
from mars_ray.decode.loading import load_engine
from mars_ray.model.card import read_card
from mars_ray.model.create import create_model
from mars_ray.model.load import load_model, load_tokenizer
from mars_ray.model.save import save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("loading") / "tiny"
    texts = ["one two three four five"] * 50
    create_model(PresetModel(preset="tiny", vocab_size=300), lambda: texts, directory, seed=0)
    model, tokenizer = load_model(directory, dtype=torch.float32), load_tokenizer(directory)
    save_model(directory, model, tokenizer, replace(read_card(directory), block_size=4))
    return directory


def test_bfloat16_is_the_same_whoever_chooses_it(checkpoint, monkeypatch):
    """Guards rotary frequencies that are rounded along with the weights: after some hundred tokens
    a large model lost its way, and a small one never shows it."""
    monkeypatch.setattr(loading, "_prefers_bfloat16", lambda model: True)
    size = {"max_batch": 2, "max_context": 600, "device": "cpu"}
    chosen, named = (
        load_engine(checkpoint, EngineConfig.model_validate(size | {"dtype": dtype}))[0]
        for dtype in ("auto", "bfloat16")
    )
    assert chosen.model.dtype == torch.bfloat16
    for name, weight in named.model.named_parameters():
        assert chosen.model.get_parameter(name).dtype == weight.dtype
    turned, expected = (each._backend.runner._cos_sin for each in (chosen, named))
    assert torch.equal(turned, expected)
