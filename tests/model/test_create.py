import json
import re

import pytest
import torch
from model.toys import TEXTS, build, llama_tokenizer, write
from transformers import Qwen2ForCausalLM

from mars_ray.config.inputs import PresetModel, PretrainedModel
from mars_ray.errors import ModelError
from mars_ray.model import create
from mars_ray.model.create import SHAPES, create_model, preset_config
from mars_ray.model.directory import ModelCard, read_card, write_card
from mars_ray.model.load import load_model, load_tokenizer

SURROGATE = "half \ud83d a character"


def no_texts():
    raise AssertionError("a pretrained model has its tokenizer")


def test_a_preset_becomes_a_model_directory(tmp_path):
    """The one the demo trains: its size, its tokens, its end of turn."""
    create_model(PresetModel(preset="tiny", vocab_size=300), lambda: TEXTS * 9, tmp_path / "m", 0)
    model, tokenizer = load_model(tmp_path / "m", dtype=None), load_tokenizer(tmp_path / "m")
    assert model.config.vocab_size == len(tokenizer) <= 300
    assert model.dtype == torch.float32
    assert read_card(tmp_path / "m") == ModelCard("<|mask|>", 3, 0)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == 0
    # The prototype's initialisation: 0.06, which learned faster than 0.02.
    assert 0.055 < model.get_input_embeddings().weight.std() < 0.065


def test_the_same_seed_writes_the_same_files(tmp_path):
    """Byte for byte, whatever the generator's state, which stays as it was."""
    config = PresetModel(preset="tiny", vocab_size=300)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(3)
        state = torch.get_rng_state()
        create_model(config, lambda: TEXTS * 9, tmp_path / name, seed)
        assert torch.equal(torch.get_rng_state(), state)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ac"]
    assert weights[0] != weights[1]


@pytest.mark.parametrize(
    ("name", "vocabulary", "rows", "millions"),
    [
        ("tiny", 768, 768, 0.887),
        ("small", 3072, 3072, 3.9),
        ("qwen2.5-0.5b", 768, 151_936, 494.0),
        ("qwen2.5-7b", 768, 152_064, 7615.6),
    ],
)
def test_preset_sizes(name, vocabulary, rows, millions):
    """The published numbers of parameters, counted without memory for them."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(preset_config(name, vocabulary))
    assert model.config.vocab_size == rows
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.04 if name == "small" else 0.001)
    assert model.config.dtype == SHAPES[name].dtype


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_pretrained_model_gets_a_mask_and_a_stop(tmp_path, architecture):
    """Its weights stay; base models end turns with another token than texts."""
    source = write(tmp_path / "source", architecture, 320)
    config = PretrainedModel(path=str(source))
    create_model(config, no_texts, tmp_path / "initial", 0)
    before, after = (load_model(tmp_path / name, dtype=None) for name in ("source", "initial"))
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(old, new)
    card = read_card(tmp_path / "initial")
    tokenizer = load_tokenizer(tmp_path / "initial")
    assert card == ModelCard(tokenizer.mask_token, tokenizer.mask_token_id, 0)
    turn_end = tokenizer.convert_tokens_to_ids(
        "<|im_end|>" if architecture.startswith("qwen") else "<|eot_id|>"
    )
    assert after.generation_config.eos_token_id == turn_end


def test_stops_of_the_model_are_kept(tmp_path):
    """A base model may still end a text in its own way."""
    source = write(tmp_path / "source", "qwen2", 320)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    create_model(PretrainedModel(path=str(source)), no_texts, tmp_path / "initial", 0)
    assert load_model(tmp_path / "initial", dtype=None).generation_config.eos_token_id == [2, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 0.6, "do_sample": False},
        {"early_stopping": True, "length_penalty": 2.0},
    ],
)
def test_sampling_values_without_sampling_do_not_matter(tmp_path, caplog, settings):
    """As many fine-tuned models have them; transformers loads them and refuses to save them."""
    source = write(tmp_path / "source", "qwen2", 320)
    file = source / "generation_config.json"
    file.write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0} | settings)
    )
    create_model(PretrainedModel(path=str(source)), no_texts, tmp_path / "initial", 0)
    generation = load_model(tmp_path / "initial", dtype=None).generation_config
    assert (generation.bos_token_id, generation.eos_token_id) == (1, [2, 0])
    assert generation.pad_token_id == 0
    assert "only its tokens are kept" in caplog.text


def test_half_characters_do_not_matter_to_a_preset(tmp_path):
    """The row is bad, and counted when it is tokenised; here it was a traceback."""
    config = PresetModel(preset="tiny", vocab_size=300)
    create_model(config, lambda: [*TEXTS * 9, SURROGATE], tmp_path / "m", 0)
    assert len(load_tokenizer(tmp_path / "m")) <= 300


def test_a_preset_has_a_row_for_every_token():
    """Before hours of training a tokenizer, and not as an assertion after them."""
    config = PresetModel(preset="qwen2.5-0.5b", vocab_size=200_000)
    with pytest.raises(ModelError, match="vocab_size 200000 is too large"):
        create_model(config, no_texts, "unused", 0)


@pytest.mark.parametrize(
    ("token", "special", "fits"),
    [("<|pad|>", True, True), ("<|bye|>", True, False), ("apple", False, False)],
)
def test_tokens_without_a_row_are_refused_if_texts_may_have_them(tmp_path, token, special, fits):
    """Guards an IndexError in every worker; a token for padding is often beyond the rows."""
    model, tokenizer = build("llama", len(llama_tokenizer()))
    tokenizer.add_tokens([token], special_tokens=special)
    tokenizer.chat_template = f"{tokenizer.chat_template}<|bye|>"
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "source")
    config = PretrainedModel(path=str(tmp_path / "source"))
    if fits:
        create_model(config, no_texts, tmp_path / "initial", 0)
    else:
        with pytest.raises(ModelError, match=f"1 tokens, such as {re.escape(repr(token))}"):
            create_model(config, no_texts, tmp_path / "initial", 0)


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    """With what to do, instead of a traceback."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(create, "write_model", full)
    with pytest.raises(ModelError, match=r"No space left.*run again"):
        create_model(PresetModel(preset="tiny"), lambda: TEXTS, tmp_path / "m", 0)


def test_a_trained_model_keeps_its_depth(tmp_path):
    """Training goes on from a directory of ours; until then it decodes as before."""
    source = write(tmp_path / "source", "qwen2", 320)
    create_model(PretrainedModel(path=str(source)), no_texts, tmp_path / "first", 0)
    card = read_card(tmp_path / "first")
    write_card(tmp_path / "first", ModelCard(card.mask_token, card.mask_token_id, 4))
    create_model(PretrainedModel(path=str(tmp_path / "first")), no_texts, tmp_path / "next", 0)
    assert read_card(tmp_path / "next") == ModelCard(card.mask_token, card.mask_token_id, 4)


def test_a_model_without_chat_template_is_refused(tmp_path):
    """Before anything is written."""
    source = write(tmp_path / "source", "qwen2", 320)
    (source / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        create_model(PretrainedModel(path=str(source)), no_texts, tmp_path / "initial", 0)
    assert not (tmp_path / "initial").exists()
