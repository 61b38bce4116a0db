import json

import pytest
import torch
from model.toys import build, write
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from mars_ray.errors import ModelError
from mars_ray.model import load
from mars_ray.model.create import ensure_mask_token
from mars_ray.model.directory import ModelCard, read_card, write_card
from mars_ray.model.load import load_model, load_tokenizer, save_model

TEXT = "Tom has 12 apples<|im_end|>"


def logits(model, tokens=(5, 6, 7)):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_saved_model_is_an_ordinary_one(tmp_path, architecture):
    """Plain transformers reads it with no code of ours and computes the same."""
    model, tokenizer = build(architecture, 320)
    card = ensure_mask_token(model, tokenizer)
    save_model(tmp_path / "model", model, tokenizer, card)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours = load_model(tmp_path / "model", dtype=torch.float32)
    assert type(plain) is type(ours) is type(model)
    assert torch.equal(logits(plain), logits(model.eval()))
    assert torch.equal(logits(ours), logits(model))
    assert not ours.training
    for read in (AutoTokenizer.from_pretrained, load_tokenizer):
        loaded = read(tmp_path / "model")
        assert loaded.mask_token_id == card.mask_token_id
        assert loaded.chat_template == tokenizer.chat_template
        assert loaded.decode(loaded(TEXT)["input_ids"]) == TEXT
    assert read_card(tmp_path / "model") == card
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "mars.json"} <= names
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1, "a server that runs as another user reads all files or none"


def test_named_chat_templates_are_saved_so_that_others_can_read_them(tmp_path):
    """Guards their directory, which nobody enters who may only read it."""
    model, tokenizer = build("qwen2", 320)
    card = ensure_mask_token(model, tokenizer)
    tokenizer.chat_template = {"default": str(tokenizer.chat_template), "tool_use": "{{ tools }}"}
    save_model(tmp_path / "model", model, tokenizer, card)
    assert load_tokenizer(tmp_path / "model").chat_template == tokenizer.chat_template
    directory = tmp_path / "model" / "additional_chat_templates"
    assert directory.stat().st_mode & 0o555 == 0o555


def test_weights_may_be_given(tmp_path):
    """Under ZeRO-3 the model's own parameters are empty, and else pieces of one large tensor; the
    tied head is not repeated."""
    model, tokenizer = build("qwen2", 320)
    card = ensure_mask_token(model, tokenizer)
    sizes = {name: value.numel() for name, value in model.state_dict().items()}
    pieces = torch.full((sum(sizes.values()),), 0.25).split(list(sizes.values()))
    state = {
        name: piece.view_as(value)
        for (name, value), piece in zip(model.state_dict().items(), pieces, strict=True)
    }
    save_model(tmp_path / "model", model, tokenizer, card, state)
    loaded = load_model(tmp_path / "model", dtype=torch.float32)
    assert all((value == 0.25).all() for value in loaded.state_dict().values())


def test_a_loaded_model_has_the_dtype_asked_for(tmp_path):
    """None keeps the stored one."""
    directory = write(tmp_path, "qwen2", 320)
    assert load_model(directory, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_model(directory, dtype=None).dtype == torch.float32


def test_saving_replaces_a_whole_directory(tmp_path):
    """No file of the older model stays, and nothing is left beside it."""
    model, tokenizer = build("qwen2", 320)
    card = ensure_mask_token(model, tokenizer)
    save_model(tmp_path / "model", model, tokenizer, card)
    (tmp_path / "model" / "stale.txt").touch()
    save_model(tmp_path / "model", model, tokenizer, ModelCard("<|mask|>", card.mask_token_id, 4))
    assert read_card(tmp_path / "model").block_size == 4
    assert not (tmp_path / "model" / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    """A full disk halfway must not cost the last good model."""
    model, tokenizer = build("qwen2", 320)
    card = ensure_mask_token(model, tokenizer)
    save_model(tmp_path / "model", model, tokenizer, card)

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(load, "write_card", fail)
    with pytest.raises(OSError, match="no space"):
        save_model(tmp_path / "model", model, tokenizer, card)
    assert load_model(tmp_path / "model", dtype=None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_architectures_are_refused(tmp_path):
    """With the names of those that work."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="type 'gpt2'; supported are Qwen2, Qwen3, Llama"):
        load_model(tmp_path, dtype=None)


def test_a_quantised_model_is_refused(tmp_path):
    """Guards a library that is not there, or types that do not match, far from here."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "qwen2", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantised"):
        load_model(tmp_path, dtype=None)


def test_incomplete_weights_are_refused(tmp_path):
    """transformers would fill them with random numbers and only warn."""
    write(tmp_path, "qwen2", 320)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config | layers))
    with pytest.raises(ModelError, match=r"missing keys .*layers\.2"):
        load_model(tmp_path, dtype=None)
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config | layers))
    with pytest.raises(ModelError, match=r"unexpected keys .*layers\.1"):
        load_model(tmp_path, dtype=None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ModelError, match="cannot load"):
        load_model(tmp_path, dtype=None)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "abc"},
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_type": "strange", "rope_theta": 1e4}},
    ],
)
def test_a_wrong_value_of_the_configuration_is_an_error(tmp_path, change):
    """transformers raises what it comes upon: KeyError, ZeroDivisionError, its own."""
    write(tmp_path, "qwen2", 320)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match="cannot load"):
        load_model(tmp_path, dtype=None)


def test_a_damaged_file_is_an_error(tmp_path):
    """A download that broke off, with the model's name."""
    weights = write(tmp_path, "qwen2", 320) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load"):
        load_model(tmp_path, dtype=None)


def test_only_safetensors_are_read(tmp_path):
    """A pickle runs code when it is opened."""
    write(tmp_path, "qwen2", 320)
    model = load_model(tmp_path, dtype=None)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_model(tmp_path, dtype=None)


def test_code_of_a_checkpoint_is_not_run(tmp_path):
    """`trust_remote_code` stays off, whatever config.json asks for."""
    write(tmp_path, "qwen2", 320)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ModelError):
        load_model(tmp_path, dtype=None)


@pytest.mark.parametrize("load", [load_tokenizer, lambda place: load_model(place, dtype=None)])
def test_a_missing_model_is_an_error(tmp_path, monkeypatch, load):
    """Neither a directory nor, offline, a hub name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"no directory /.*nothing: correct the path"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"the .* hub does not give no-such/model"):
        load("no-such/model")


def test_another_models_tokenizer_is_refused(tmp_path):
    """Guards against 12% accuracy without an error, seen with a tokenizer of other data."""
    write(tmp_path, "qwen2", 320)
    load_tokenizer(tmp_path)
    write_card(tmp_path, ModelCard("<|im_end|>", 3, 0))
    with pytest.raises(ModelError, match="not the one its model was trained with"):
        load_tokenizer(tmp_path)
