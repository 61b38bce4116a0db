"""Errors name their cause: weights that are NaN are no full disk, a full disk is no wrong name."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
import torch
from model.small_gguf import tiny_gguf
from model.small_hub import NAME, hub
from model.toys import write
from safetensors.torch import load_file, save_file

from mars_ray.config.decode import EngineConfig
from mars_ray.config.inputs import CorpusSource, DataConfig
from mars_ray.data.rows import tokenize
from mars_ray.decode.loading import load_engine
from mars_ray.errors import DataError, ModelError
from mars_ray.importing import import_model
from mars_ray.model.draft_adapter import read_draft_card
from mars_ray.model.gguf import load_gguf
from mars_ray.model.load import load_tokenizer, opened
from mars_ray.model.places import pinned
from mars_ray.storage.place import Place

QUERY = "model.layers.0.self_attn.q_proj.weight"
# Of the kernel, where nobody makes directories.
FORBIDDEN = Path("/sys/mars-ray")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "there" / "tiny", "llama", 300)


def with_weight(source: Path, name: str, value: float) -> Path:
    """The model with one number in another place."""
    weights = load_file(source / "model.safetensors")
    weights[name][1, 2] = value
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    return source


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Longer ones are refused by the system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_import_names_the_weight_that_is_no_number(source, tmp_path, value):
    """Guards "check the disk": what is NaN is not equal to itself once it is read again."""
    with_weight(source, QUERY, value)
    with pytest.raises(ModelError, match=f"its weight {QUERY} holds NaN or infinite") as caught:
        import_model(str(source), tmp_path / "made")
    assert "disk" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_an_import_of_weights_that_are_too_large_says_so(source, tmp_path):
    """Each is finite, and their sum is not: guards "nan% lies elsewhere"."""
    weights = load_file(source / "model.safetensors")
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = torch.full_like(head, 3e38) * head.sign()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="computes NaN by transformers already"):
        import_model(str(source), tmp_path / "made")


def test_an_import_blames_the_space_only_where_it_is_short(source, tmp_path):
    with files_of_at_most(1000), pytest.raises(ModelError, match=r"large.* Free space, and run"):
        import_model(str(source), tmp_path / "made")
    with pytest.raises(
        ModelError, match=r"(not permitted|denied|Read-only).* Let this user write there, and run"
    ):
        import_model(str(source), FORBIDDEN / "made")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"File exists.* Name another place, and run"):
        import_model(str(source), tmp_path / "file" / "made")


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_an_import_says_that_its_own_note_is_damaged(source, tmp_path, damage):
    """Guards "was not made by `mars-ray import`", and an AttributeError."""
    made = import_model(str(source), tmp_path / "made")
    (made / "import.json").write_text(damage)
    message = "cannot be read: Expecting" if damage == "{" else r"import of another model, \[\]"
    with pytest.raises(ModelError, match=message):
        import_model(str(source), made)


@pytest.mark.parametrize("backend", ["compiled", "dense"])
def test_an_engine_names_the_weight_that_is_no_number(source, backend):
    """Guards a service that starts, or does not, without a word about the model's file."""
    with_weight(source, QUERY, float("nan"))
    size = EngineConfig(max_batch=2, device="cpu", threads=1, attention_backend=backend)
    with pytest.raises(ModelError, match=f"{source} cannot be run: its weight {QUERY} holds NaN"):
        load_engine(source, size)


def test_too_little_memory_is_no_fault_of_the_directory(source):
    with pytest.raises(ModelError, match=f"too little memory to load {source}: .*allocate"):
        opened(source, lambda: torch.empty(1 << 50))
    with pytest.raises(ModelError, match=f"too little memory to load {source}$"):
        opened(source, lambda: bytearray(1 << 60))


def test_a_full_cache_of_the_hub_is_no_wrong_name(source, tmp_path, monkeypatch):
    """Guards "correct the path, check its name and the connection"."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub(source) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        message = f"hub gives of {NAME} cannot be kept in {tmp_path / 'hub'}: .* Free space, or set"
        with files_of_at_most(100), pytest.raises(ModelError, match=message):
            pinned(Place(NAME))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(FORBIDDEN))
        with pytest.raises(ModelError, match="Let this user write there, or set HF_HOME"):
            pinned(Place(NAME))


def test_a_cache_of_rows_that_nobody_may_write_is_not_full(source):
    config = DataConfig.model_validate({"train": {"type": "corpus", "count": 4}})
    tokenizer = load_tokenizer(source)
    with pytest.raises(DataError, match=r"Let this user write there, or name another data\.cache"):
        tokenize(CorpusSource(count=4), tokenizer, config, FORBIDDEN / "cache")


def test_a_card_that_cannot_be_read_is_not_a_wrong_card(tmp_path):
    (tmp_path / "draft.json").mkdir()
    with pytest.raises(ModelError, match=r"draft\.json of .* cannot be read: .*Is a directory"):
        read_draft_card(tmp_path)


def test_a_gguf_file_is_damaged_only_if_it_is(tmp_path):
    """A directory; a file of a later version; one whose weights are of a later type."""
    (tmp_path / "directory.gguf").mkdir()
    with pytest.raises(ModelError, match=r"cannot be read: .*Is a directory"):
        load_gguf(tmp_path / "directory.gguf")
    path = tiny_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + (9).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ModelError, match=r"of a newer form of GGUF .*version 9"):
        load_gguf(path)
    # Behind a tensor's name: the number of its dimensions, one size, its type.
    place = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path.write_bytes(whole[:place] + (999).to_bytes(4, "little") + whole[place + 4 :])
    with pytest.raises(ModelError, match=r"of a newer form of GGUF .*999"):
        load_gguf(path)
