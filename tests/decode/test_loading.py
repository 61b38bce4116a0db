"""From a model directory to an engine."""

from dataclasses import replace

import pytest
import torch
from decode.adapters import random_adapter
from decode.models import request
from model.toys import write

from mars_ray.config.decode import EngineConfig, ExactMode, VerifiedMode
from mars_ray.config.model import PresetModel
from mars_ray.decode import loading
from mars_ray.decode.engine import generate_all
from mars_ray.decode.loading import drafting_card, load_engine
from mars_ray.errors import ModelError
from mars_ray.model.card import read_card
from mars_ray.model.create import create_model
from mars_ray.model.draft_adapter import write_draft_adapter
from mars_ray.model.fingerprint import fingerprint
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


def test_an_engine_is_loaded_with_its_adapter(tmp_path):
    """By its directory, for its own base only; the card says how deep its masks are."""
    base = write(tmp_path / "base", "llama", 300)
    size = EngineConfig(max_batch=2, max_context=64, window_control=False)
    config = size.model_copy(update={"draft_adapter": str(tmp_path / "drafts")})
    engine, _ = load_engine(base, size)
    made = random_adapter(engine.model, depths=3)
    card = replace(made.card, base_fingerprint=fingerprint(base))
    write_draft_adapter(tmp_path / "drafts", replace(made, card=card))
    assert drafting_card(base, config).block_size == 3
    engine, _ = load_engine(base, config)
    assert engine.card.block_size == 3
    assert engine.adapter_name == "drafts"
    requests = [request(mode.type, [1, 2, 3], mode) for mode in (ExactMode(), VerifiedMode())]
    exact, verified = generate_all(engine, requests)
    assert exact.tokens == verified.tokens
    assert (exact.adapters, verified.adapters) == ((), ("drafts",))
    write_draft_adapter(tmp_path / "drafts", made)
    with pytest.raises(ModelError, match="is another model"):
        load_engine(base, config)
