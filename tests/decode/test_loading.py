"""From a model directory to an engine."""

import json
from dataclasses import replace

import pytest
import torch
from decode.adapters import random_adapter
from decode.models import request
from model.toys import write

from mars_ray.config.decode import EngineConfig
from mars_ray.config.inputs import PresetModel
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.decode import loading
from mars_ray.decode.cpu.library import is_available, supported
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import drafting_card, load_engine
from mars_ray.errors import ModelError
from mars_ray.model.create import create_model
from mars_ray.model.directory import fingerprint, read_card
from mars_ray.model.draft_adapter import write_draft_adapter
from mars_ray.model.load import load_model, load_tokenizer, save_model, stored_dtype

SIZE = EngineConfig(max_batch=2, max_context=600, device="cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("loading") / "tiny"
    texts = ["one two three four five"] * 50
    create_model(PresetModel(preset="tiny", vocab_size=300), lambda: texts, directory, seed=0)
    model, tokenizer = load_model(directory, dtype=torch.float32), load_tokenizer(directory)
    save_model(directory, model, tokenizer, replace(read_card(directory), block_size=4))
    return directory


@pytest.mark.parametrize(
    ("stored", "multiplies", "expected"),
    [
        (torch.float32, True, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, False, torch.float32),
        (torch.float64, True, torch.float32),
    ],
    ids=str,
)
def test_the_dtype_is_the_checkpoints(
    checkpoint, tmp_path, monkeypatch, stored, multiplies, expected
):
    """As far as the processor goes, whatever the model's size. Guards rotary frequencies that are
    rounded along with the weights: after some hundred tokens a large model loses its way, and a
    small one never shows it."""
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)
    model, tokenizer = load_model(checkpoint, dtype=stored), load_tokenizer(checkpoint)
    save_model(tmp_path / "model", model, tokenizer, read_card(checkpoint))
    dense = SIZE.model_copy(update={"attention_backend": "dense"})
    engine, _ = load_engine(tmp_path / "model", dense)
    assert engine.model.dtype == expected
    assert engine.info.dtype == str(expected).removeprefix("torch.")
    named = dense.model_copy(update={"dtype": str(expected).removeprefix("torch.")})
    other, _ = load_engine(checkpoint, named)
    turned, wanted = (each._backend.runner._cos_sin for each in (engine, other))
    assert torch.equal(turned, wanted)


@pytest.mark.parametrize("said", [None, "float32"])
def test_a_configuration_without_a_dtype_leaves_it_to_the_weights(checkpoint, tmp_path, said):
    """As of old checkpoints; what it says counts, as for transformers."""
    model, tokenizer = load_model(checkpoint, dtype=torch.bfloat16), load_tokenizer(checkpoint)
    save_model(tmp_path / "model", model, tokenizer, read_card(checkpoint))
    path = tmp_path / "model" / "config.json"
    table = json.loads(path.read_text())
    del table["dtype"]
    path.write_text(json.dumps(table | ({"torch_dtype": said} if said else {})))
    expected = torch.float32 if said else torch.bfloat16
    assert stored_dtype(tmp_path / "model") == expected
    assert load_model(tmp_path / "model", dtype=None).dtype == expected


def test_what_an_engine_is_can_be_said(checkpoint):
    """The first line of a replica's log."""
    engine, _ = load_engine(checkpoint, SIZE.model_copy(update={"threads": 1}))
    info = engine.info
    assert (info.engine, info.device, info.threads) == ("mars-ray", "cpu", 1)
    compiled = is_available()
    assert info.attention == ("compiled" if compiled else "dense")
    assert info.instructions == (supported()[0] if compiled else None)
    assert info.cache_tokens >= 2 * 600
    # Four layers have keys and values of 2 heads of 32 numbers, 4 bytes each.
    assert info.cache_bytes == info.cache_tokens * 4 * 2 * 2 * 32 * 4
    step = f"compiled step ({info.instructions})" if compiled else "dense attention"
    assert str(info).startswith(f"mars-ray engine, float32 on cpu, {step}, 1 CPU threads, ")


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
