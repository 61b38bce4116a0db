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

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.utils.torch_utils import direct_register_custom_op

from mars_ray.model.draft_adapter import LoraProduct


class SummedProduct(LoraProduct):
    """A product of a layer that is cut by its inputs: each rank has a part of the first sum."""

    def inner(self, x_MI: Tensor) -> Tensor:
        return tensor_model_parallel_all_reduce(super().inner(x_MI))


class IndexedRows:
    """Masks by their places: no other row is read or multiplied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: slice | Tensor | None = None
        self._depth_M = torch.empty(0, dtype=torch.long)

    def begin(self, places: Sequence[int], depths: Sequence[int]) -> None:
        """Note which rows of the next forward are masks."""
        self._rows = None
        if places:
            first, last = places[0], places[-1]
            if last - first + 1 == len(places):
                # A view is cheaper than a copy, and common: one request.
                self._rows = slice(first, last + 1)
            else:
                self._rows = torch.tensor(places, dtype=torch.long, device=self._device)
        self._depth_M = torch.tensor(depths, dtype=torch.long, device=self._device)

    def end(self) -> None:
        """From now on no row is a mask."""
        self._rows = None

    def add(self, y_NO: Tensor, x_NI: Tensor, delta: LoraProduct) -> None:
        """Add an adapter's part to the results of masks, in place."""
        rows = self._rows
        if rows is None:
            return
        if isinstance(rows, slice):
            y_NO[rows].addmm_(delta.inner(x_NI[rows]), delta.up_KO)
        else:
            y_NO.index_add_(0, rows, torch.mm(delta.inner(x_NI[rows]), delta.up_KO))

    def embed(self, y_NH: Tensor, mask_DH: Tensor) -> None:
        """Replace the embeddings of masks, in place."""
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

    def add(self, y_NO: Tensor, x_NI: Tensor, delta: LoraProduct) -> None:
        # Between the two products, where a row is shortest. `where` and not a product with 0,
        # which would turn infinities into NaN.
        inner_NK = torch.where(self._is_mask_N1[: len(y_NO)], delta.inner(x_NI), 0)
        y_NO.addmm_(inner_NK, delta.up_KO)

    def embed(self, y_NH: Tensor, mask_DH: Tensor) -> None:
        count = len(y_NH)
        mask_NH = mask_DH[self._depth_N[:count]]
        y_NH.copy_(torch.where(self._is_mask_N1[:count], mask_NH, y_NH))


MaskRows = IndexedRows | GatedRows


@dataclass(slots=True)
class Site:
    """Where an adapter acts: on a linear layer's results, or on embeddings; or none does, yet."""

    masks: MaskRows
    delta: LoraProduct | None = None
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


_LIBRARY = torch.library.Library("mars_ray", "FRAGMENT")
# On shapes, which the compiler runs, they do nothing.
direct_register_custom_op(
    "add_lora", _add_lora, mutates_args=["y"], fake_impl=lambda *_: None, target_lib=_LIBRARY
)
direct_register_custom_op(
    "embed_masks", _embed_masks, mutates_args=["y"], fake_impl=lambda *_: None, target_lib=_LIBRARY
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
