"""A slot of keys and values for every sequence: place in the slot = position in the sequence.

What lies behind a sequence's cursor is garbage that its next forward overwrites before any row may
look at it, so nothing ever needs to be erased.

Shape suffixes: S slots, C places of a slot, H key-value heads, D head size, B sequences, R rows.
"""

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig


class SlotCache:
    """Contiguous tensors (S, H, C + 1, D) per layer; the last place takes what padding writes."""

    def __init__(
        self, config: PretrainedConfig, slots: int, context: int, device: torch.device, dtype
    ) -> None:
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, heads, context + 1, size)
        layers = range(config.num_hidden_layers)
        self.context = context
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of one slot to another."""
        for tensor in self.keys + self.values:
            tensor[target, :, :length] = tensor[source, :, :length]

    def view(self, first_slot: int, position_BR: Tensor, visible: int) -> "SlotView":
        """The cache of one forward: B slots from `first_slot`, `visible` places of each."""
        return SlotView(self, first_slot, position_BR, visible)


class SlotView(Cache):
    """What transformers' attention calls: write the new rows, get all visible ones back."""

    def __init__(
        self, cache: SlotCache, first_slot: int, position_BR: Tensor, visible: int
    ) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self._slots = slice(first_slot, first_slot + position_BR.shape[0])
        self._row_B1 = torch.arange(position_BR.shape[0], device=position_BR.device)[:, None]
        self._position_BR = position_BR
        self._visible = visible

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args, **_kwargs
    ) -> tuple[Tensor, Tensor]:
        """Store (B, H, R, D) at the rows' positions; return views (B, H, visible, D)."""
        keys = self._cache.keys[layer_idx][self._slots]
        values = self._cache.values[layer_idx][self._slots]
        keys[self._row_B1, :, self._position_BR] = key_states.transpose(1, 2)
        values[self._row_B1, :, self._position_BR] = value_states.transpose(1, 2)
        return keys[:, :, : self._visible], values[:, :, : self._visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places seen; positions are always given, so nothing is derived from it."""
        return self._visible
