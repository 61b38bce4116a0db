"""Draft adapters on disk: what was written comes back, and what does not fit is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mars_ray.core.draft_head import DraftHead
from mars_ray.errors import ModelError
from mars_ray.model.directory import fingerprint
from mars_ray.model.draft_adapter import (
    DraftAdapter,
    DraftCard,
    Lora,
    name_base,
    read_draft_adapter,
    write_draft_adapter,
)

DEPTHS, SIZE, INNER, RANK = 3, 8, 5, 2
LAYER = "model.layers.0.self_attn.q_proj"


def adapter(base_fingerprint: str, *, rank: int = RANK, head: bool = True) -> DraftAdapter:
    """Small numbers that bfloat16 keeps."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel()).float().view(shape) % 7

    card = DraftCard(
        depths=DEPTHS,
        base="a model",
        base_fingerprint=base_fingerprint,
        rank=rank,
        alpha=4.0,
        targets=("q_proj",) if rank else (),
        head_size=INNER if head else 0,
        training={"tokens": 3},
    )
    own = DraftHead(
        numbers(INNER, SIZE), numbers(INNER, SIZE), numbers(DEPTHS, INNER), numbers(SIZE, INNER)
    )
    lora = {LAYER: Lora(numbers(rank, SIZE), numbers(6, rank))} if rank else {}
    return DraftAdapter(card, numbers(DEPTHS, SIZE), lora, own if head else None)


@pytest.fixture
def base(tmp_path):
    """A directory with weights, as far as a fingerprint looks."""
    directory = tmp_path / "base"
    directory.mkdir()
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(("rank", "head"), [(RANK, True), (0, True), (RANK, False), (0, False)])
def test_round_trip(tmp_path, base, rank, head):
    """Each part may be left out."""
    written = adapter(fingerprint(base), rank=rank, head=head)
    write_draft_adapter(tmp_path / "adapter", written)
    read = read_draft_adapter(tmp_path / "adapter", base)
    assert read.card == written.card
    assert torch.equal(read.mask_embedding_DH, written.mask_embedding_DH)
    assert read.lora.keys() == written.lora.keys()
    for name, (down, up) in written.lora.items():
        assert torch.equal(read.lora[name].down_RI, down)
        assert torch.equal(read.lora[name].up_OR, up)
    assert (read.head is None) == (written.head is None)
    if read.head and written.head:
        assert torch.equal(read.head.out_HK, written.head.out_HK)


def test_peft_reads_the_configuration(tmp_path, base):
    """Other loaders find an ordinary LoRA."""
    from peft import LoraConfig

    write_draft_adapter(tmp_path / "adapter", adapter(fingerprint(base)))
    config = LoraConfig.from_pretrained(tmp_path / "adapter")
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (RANK, 4.0, {"q_proj"})


def test_another_base_is_refused(tmp_path, base):
    """Drafts of another model's adapter are right by chance only, and nothing else would say so."""
    write_draft_adapter(tmp_path / "adapter", adapter(fingerprint(base)))
    save_file({"a": torch.arange(6.0) + 1, "b": torch.ones(2, 3)}, base / "model.safetensors")
    with pytest.raises(ModelError, match=r"was trained for a model .* is another model"):
        read_draft_adapter(tmp_path / "adapter", base)


def test_a_fingerprint_does_not_depend_on_how_weights_are_split(tmp_path, base):
    """A copy saved in several files is the same model."""
    other = tmp_path / "split"
    other.mkdir()
    weights = load_file(base / "model.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in weights}}
    for name, value in weights.items():
        save_file({name: value}, other / f"{name}.safetensors")
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(other) == fingerprint(base)


def test_no_adapter_is_told(tmp_path):
    """A base model's directory, most likely."""
    with pytest.raises(ModelError, match=r"no draft adapter.*mars-ray adapt"):
        read_draft_adapter(tmp_path, None)
    with pytest.raises(ModelError, match="nowhere: no such directory"):
        read_draft_adapter(tmp_path / "nowhere", None)


def test_a_file_cut_short_is_told(tmp_path):
    """A copy that was interrupted."""
    write_draft_adapter(tmp_path, adapter("x"))
    path = tmp_path / "draft.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"draft\.safetensors is damaged or was cut short"):
        read_draft_adapter(tmp_path, None)


def test_numbers_that_are_none_are_told(tmp_path):
    """They would make every draft wrong, and no answer."""
    write_draft_adapter(tmp_path, adapter("x"))
    weights = load_file(tmp_path / "draft.safetensors")
    weights["mask_embedding"][1, 2] = torch.nan
    save_file(weights, tmp_path / "draft.safetensors")
    with pytest.raises(ModelError, match=r"contains NaN or Inf, in mask_embedding"):
        read_draft_adapter(tmp_path, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depths": 4}, "3 mask embeddings for 4 depths"),
        ({"head_size": 6}, "the head has shapes"),
        ({"head_size": 0}, "unknown tensors: head"),
        ({"rank": 3}, "not of rank 3"),
        ({"format": 2}, "format 2"),
        ({"more": 1}, "not the card"),
    ],
)
def test_a_card_that_does_not_fit_is_told(tmp_path, change, message):
    """Edited by hand, or of another version."""
    write_draft_adapter(tmp_path, adapter("x"))
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        read_draft_adapter(tmp_path, None)


def test_the_base_has_the_name_under_which_others_get_it(tmp_path, base):
    """Trained from a directory of this machine, a card would name nothing that anybody has."""
    write_draft_adapter(tmp_path / "adapter", adapter(fingerprint(base)))
    name_base(tmp_path / "adapter", "org/model")
    assert read_draft_adapter(tmp_path / "adapter", base).card.base == "org/model"
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/model"
