"""The rows of the forward under way that are masks, and what an adapter does to them alone.

Products run inside two operators of torch that its compiler does not look into: which rows are
masks differs from forward to forward. Where CUDA graphs are recorded, all rows are multiplied and a
tensor says whose results count, because a graph's shapes are fixed.

Shape suffixes: N rows of a forward, M rows of masks, D depths, H hidden size, I inputs, O outputs.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from vllm.utils.torch_utils import direct_register_custom_op


class Delta(Protocol):
    """What an adapter adds to the results of a linear layer: two products, K wide between them."""

    @property
    def up_KO(self) -> Tensor:
        """The second factor."""
        ...

    def inner(self, x_MI: Tensor) -> Tensor:
        """The first product, (M, K)."""
        ...


class MaskRows(Protocol):
    """Which rows of the forward under way are masks."""

    def begin(self, places: Sequence[int], depths: Sequence[int]) -> None:
        """Note them before a forward."""
        ...

    def end(self) -> None:
        """From now on no row is a mask."""
        ...

    def add(self, y_NO: Tensor, x_NI: Tensor, delta: Delta) -> None:
        """Add an adapter's part to the results of masks, in place."""
        ...

    def embed(self, y_NH: Tensor, mask_DH: Tensor) -> None:
        """Replace the embeddings of masks, in place."""
        ...


class IndexedRows:
    """Masks by their places: no other row is read or multiplied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: slice | Tensor | None = None
        self._depth_M = torch.empty(0, dtype=torch.long)

    def begin(self, places: Sequence[int], depths: Sequence[int]) -> None:
        self._rows = self._places(places)
        self._depth_M = torch.tensor(depths, dtype=torch.long, device=self._device)

    def _places(self, places: Sequence[int]) -> slice | Tensor | None:
        if not places:
            return None
        first, last = places[0], places[-1]
        if last - first + 1 == len(places):
            return slice(first, last + 1)  # a view is cheaper than a copy, and common: one request
        return torch.tensor(places, dtype=torch.long, device=self._device)

    def end(self) -> None:
        self._rows = None

    def add(self, y_NO: Tensor, x_NI: Tensor, delta: Delta) -> None:
        rows = self._rows
        if rows is None:
            return
        if isinstance(rows, slice):
            y_NO[rows].addmm_(delta.inner(x_NI[rows]), delta.up_KO)
        else:
            y_NO.index_add_(0, rows, torch.mm(delta.inner(x_NI[rows]), delta.up_KO))

    def embed(self, y_NH: Tensor, mask_DH: Tensor) -> None:
        if self._rows is not None:
            y_NH[self._rows] = mask_DH[self._depth_M]


class GatedRows:
    """Masks by a tensor over all rows, whose place in memory never changes."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self._is_mask_N1 = torch.zeros(most_rows, 1, dtype=torch.bool, device=device)
        self._depth_N = torch.zeros(most_rows, dtype=torch.long, device=device)

    def begin(self, places: Sequence[int], depths: Sequence[int]) -> None:
        self.end()
        if places:
            place_M = torch.tensor(places, dtype=torch.long, device=self._depth_N.device)
            self._is_mask_N1[place_M] = True
            self._depth_N[place_M] = torch.tensor(depths, device=self._depth_N.device)

    def end(self) -> None:
        self._is_mask_N1.zero_()

    def add(self, y_NO: Tensor, x_NI: Tensor, delta: Delta) -> None:
        # Between the two products, where a row is shortest. `where` and not a product with 0,
        # which would turn infinities into NaN.
        inner_NK = torch.where(self._is_mask_N1[: len(y_NO)], delta.inner(x_NI), 0)
        y_NO.addmm_(inner_NK, delta.up_KO)

    def embed(self, y_NH: Tensor, mask_DH: Tensor) -> None:
        count = len(y_NH)
        mask_NH = mask_DH[self._depth_N[:count]]
        y_NH.copy_(torch.where(self._is_mask_N1[:count], mask_NH, y_NH))


@dataclass(slots=True)
class Site:
    """Where an adapter acts: on a linear layer's results, or on embeddings; or none does, yet."""

    masks: MaskRows
    delta: Delta | None = None
    mask_DH: Tensor | None = None


# Operators take numbers and tensors only, so sites are known to them by their place here.
_SITES: list[Site] = []


def _add_lora(y: Tensor, x: Tensor, site: int) -> None:
    own = _SITES[site]
    if own.delta is not None:
        own.masks.add(y, x, own.delta)


def _embed_masks(y: Tensor, site: int) -> None:
    own = _SITES[site]
    if own.mask_DH is not None:
        own.masks.embed(y, own.mask_DH)


def _add_lora_shape(y: Tensor, x: Tensor, site: int) -> None:
    """What the compiler runs on shapes: nothing is returned."""


def _embed_masks_shape(y: Tensor, site: int) -> None:
    """What the compiler runs on shapes: nothing is returned."""


_LIBRARY = torch.library.Library("mars_ray", "FRAGMENT")
direct_register_custom_op(
    "add_lora", _add_lora, mutates_args=["y"], fake_impl=_add_lora_shape, target_lib=_LIBRARY
)
direct_register_custom_op(
    "embed_masks",
    _embed_masks,
    mutates_args=["y"],
    fake_impl=_embed_masks_shape,
    target_lib=_LIBRARY,
)


def add_after(module: torch.nn.Module, masks: MaskRows) -> Site:
    """From now on `module`, one of vLLM's linear layers, adds the site's `delta` to the results of
    masks."""
    own, site = Site(masks), len(_SITES)
    _SITES.append(own)

    def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        torch.ops.mars_ray.add_lora(outputs[0], inputs[0], site)

    module.register_forward_hook(hook)
    return own


def embed_after(module: torch.nn.Module, masks: MaskRows) -> Site:
    """From now on `module`, an embedding, gives masks the site's embeddings of their depths."""
    own, site = Site(masks), len(_SITES)
    _SITES.append(own)

    def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        torch.ops.mars_ray.embed_masks(outputs, site)

    module.register_forward_hook(hook)
    return own
