"""A draft adapter: the weights that make a frozen model draft, in a directory of their own.

    adapter_config.json         LoRA, as peft writes it
    adapter_model.safetensors
    draft.safetensors           mask embeddings and sequential head; peft refuses unknown keys
    draft.json                  the card: depths, the base's fingerprint, how it was trained

All of it acts on mask rows only. Real rows never see it, so the model's answers are unchanged. LoRA
of linear layers that share an input is two products: the first factors lie side by side, and the
second factors are the blocks of one matrix.

Shape suffixes: D depths, H hidden size, K hidden size of the head, R rank (summed over layers in a
product), I inputs, O outputs, M rows.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mars_ray.core.draft_head import DraftHead
from mars_ray.errors import ModelError
from mars_ray.model.directory import (
    DRAFT_CARD_FILE,
    DRAFT_FORMAT,
    DraftCard,
    fingerprint,
    read_draft_card,
    written,
)

_PEFT_CONFIG, _PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DRAFT_WEIGHTS = "draft.safetensors"
_PEFT_PREFIX = "base_model.model."
_EMBEDDING = "mask_embedding"
_HEAD = {
    "hidden_KH": "head.hidden.weight",
    "token_KH": "head.token.weight",
    "depth_DK": "head.depth.weight",
    "out_HK": "head.out.weight",
}


class Lora(NamedTuple):
    """The LoRA weights of one linear layer: `y += scale * up(down(x))`, with the card's scale."""

    down_RI: Tensor
    up_OR: Tensor

    def check(self, name: str, outputs: int, inputs: int) -> None:
        """Raises ModelError if the layer of this name has another shape."""
        found, wanted = (self.up_OR.shape[0], self.down_RI.shape[1]), (outputs, inputs)
        if found != wanted:
            raise ModelError(
                f"the draft adapter's weights for {name} have shape {found}, and the model's "
                f"{wanted}: it was trained for another model"
            )


@dataclass(frozen=True, slots=True)
class DraftAdapter:
    """All trained weights. The keys of `lora` are the layers' names in the model, such as
    `model.layers.0.self_attn.q_proj`."""

    card: DraftCard
    mask_embedding_DH: Tensor
    lora: dict[str, Lora]
    head: DraftHead | None

    def check_hidden_size(self, size: int) -> None:
        """Raises ModelError if the model's is another one."""
        own = self.mask_embedding_DH.shape[1]
        if own != size:
            raise ModelError(
                f"the draft adapter has hidden size {own}, and the model {size}: it was trained "
                "for another model"
            )


def write_draft_adapter(directory: str | Path, adapter: DraftAdapter) -> None:
    """Writes the directory in bfloat16; it appears complete or not at all. Raises ModelError."""
    card = adapter.card
    lora = {
        f"{_PEFT_PREFIX}{name}.lora_{side}.weight": weight
        for name, (down, up) in adapter.lora.items()
        for side, weight in (("A", down), ("B", up))
    }
    own = {_EMBEDDING: adapter.mask_embedding_DH}
    if adapter.head:
        own |= {name: getattr(adapter.head, key) for key, name in _HEAD.items()}
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": card.base,
        "r": card.rank,
        "lora_alpha": card.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(card.targets),
        "inference_mode": True,
    }
    with written(directory) as fresh:
        if lora:
            _write_json(fresh / _PEFT_CONFIG, peft_config)
            save_file(_stored(lora), fresh / _PEFT_WEIGHTS)
        save_file(_stored(own), fresh / _DRAFT_WEIGHTS)
        _write_json(fresh / DRAFT_CARD_FILE, {"format": DRAFT_FORMAT} | asdict(card))
        # safetensors makes files readable for their owner only; a server may run as another user.
        mode = (fresh / DRAFT_CARD_FILE).stat().st_mode
        for file in fresh.iterdir():
            file.chmod(mode)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().cpu().to(torch.bfloat16).contiguous() for name, w in weights.items()}


def read_draft_adapter(
    directory: str | Path, base: str | Path | None, dtype: torch.dtype = torch.float32
) -> DraftAdapter:
    """The adapter, checked against the model directory `base` if one is given.

    Raises ModelError if there is no adapter, it is for another base, files were cut short, shapes
    do not fit the card, or weights are not finite.
    """
    directory = Path(directory)
    card = read_draft_card(directory)
    if base is not None and (found := fingerprint(base)) != card.base_fingerprint:
        raise ModelError(
            f"the draft adapter {directory} was trained for {card.base} "
            f"({card.base_fingerprint[:12]}), and {base} is another model ({found[:12]}); "
            "`mars-ray adapt` trains one for it"
        )
    own = _load(directory / _DRAFT_WEIGHTS, dtype)
    lora = _load(directory / _PEFT_WEIGHTS, dtype) if card.rank else {}
    try:
        adapter = _adapter(card, own, lora)
    except (KeyError, ValueError, AssertionError) as error:
        raise ModelError(
            f"the weights of the draft adapter {directory} do not fit its card: {error}"
        ) from error
    return adapter


def _load(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        weights = {name: value.to(dtype) for name, value in load_file(path).items()}
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: copy the whole directory of the adapter") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except (SafetensorError, ValueError) as error:
        raise ModelError(f"{path} is damaged or was cut short: {error}") from error
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        raise ModelError(f"{path} contains NaN or Inf, in {broken[0]}")
    return weights


def _adapter(card: DraftCard, own: dict[str, Tensor], lora: dict[str, Tensor]) -> DraftAdapter:
    """The adapter from its tensors. Raises KeyError, ValueError or AssertionError if anything is
    missing or does not fit."""
    embedding_DH = own.pop(_EMBEDDING)
    depths, size = embedding_DH.shape
    assert depths == card.depths, f"{depths} mask embeddings for {card.depths} depths"
    head = None
    if card.head_size:
        head = DraftHead(**{key: own.pop(name) for key, name in _HEAD.items()})
        shapes = [tuple(getattr(head, key).shape) for key in _HEAD]
        inner = card.head_size
        wanted = [(inner, size), (inner, size), (depths, inner), (size, inner)]
        assert shapes == wanted, f"the head has shapes {shapes}, not {wanted}"
    assert not own, f"unknown tensors: {', '.join(own)}"
    by_layer: dict[str, Lora] = {}
    for name in [name for name in lora if name.endswith(".lora_A.weight")]:
        stem = name.removesuffix(".lora_A.weight")
        down, up = lora.pop(name), lora.pop(f"{stem}.lora_B.weight")
        assert down.shape[0] == up.shape[1] == card.rank, f"{stem} is not of rank {card.rank}"
        by_layer[stem.removeprefix(_PEFT_PREFIX)] = Lora(down, up)
    assert not lora, f"unknown tensors: {', '.join(lora)}"
    assert bool(by_layer) == bool(card.rank), "no LoRA weights"
    return DraftAdapter(card, embedding_DH, by_layer, head)


def name_base(directory: str | Path, base: str) -> None:
    """Sets the adapter's base to the name under which others can get it."""
    for file, key in ((DRAFT_CARD_FILE, "base"), (_PEFT_CONFIG, "base_model_name_or_path")):
        path = Path(directory) / file
        if path.exists():
            _write_json(path, json.loads(path.read_text(encoding="utf-8")) | {key: base})


def adapter_bytes(directory: str | Path) -> int:
    """Size of the adapter's files."""
    return sum(path.stat().st_size for path in Path(directory).iterdir() if path.is_file())


@dataclass(frozen=True, slots=True)
class LoraProduct:
    """The LoRA of all layers that share an input, as two products."""

    down_IK: Tensor
    up_KO: Tensor

    def inner(self, x_MI: Tensor) -> Tensor:
        """The first product, (M, K)."""
        return torch.mm(x_MI, self.down_IK)

    def as_of(self, device: torch.device, dtype: torch.dtype) -> "LoraProduct":
        """The same on a device, in a dtype."""
        return LoraProduct(self.down_IK.to(device, dtype), self.up_KO.to(device, dtype))


def side_by_side(
    layers: Sequence[Lora | None], outputs: Sequence[int], scale: float
) -> LoraProduct | None:
    """The product of layers with so many outputs; layers without LoRA add no inner size."""
    known = [layer for layer in layers if layer]
    if not known:
        return None
    dtype = known[0].up_OR.dtype
    ups = [
        layer.up_OR * scale if layer else torch.zeros(size, 0, dtype=dtype)
        for layer, size in zip(layers, outputs, strict=True)
    ]
    down_IK = torch.cat([layer.down_RI for layer in known]).t().contiguous()
    return LoraProduct(down_IK, torch.block_diag(*ups).t().contiguous())
