"""The inputs of a step of the paged backend, at fixed addresses, which a CUDA graph remembers.

Shape suffixes: N rows of a forward, padding included, A tiles (`kernels`), S sequences, M pages of
the longest table.
"""

import numpy as np
import torch
from torch import Tensor

from mars_ray.decode.attention.tables import Tables

# The place of a row whose keys and values are not kept.
NOWHERE = -1


class Inputs:
    """The inputs of a step, on the host and on the device, at fixed addresses."""

    def __init__(self, device: torch.device, rows: int, sequences: int, pages: int) -> None:
        sizes = {
            "ids_N": (rows,),
            "position_N": (rows,),
            "place_N": (rows,),
            "own_N": (rows,),
            "clean_N": (rows,),
            "begin_N": (rows,),
            "bits_N": (rows,),
            "order_N": (rows,),
            "is_mask_N": (rows,),
            "tile_A3": (rows, 3),
            "page_SM": (sequences, pages),
        }
        total = sum(int(np.prod(size)) for size in sizes.values())
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=on_cuda)
        self._device = self._host.to(device) if on_cuda else self._host
        self._copied = torch.cuda.Event() if on_cuda else None
        host = dict(_views(self._host, sizes))
        self._arrays = {name: view.numpy() for name, view in host.items()}
        views = dict(_views(self._device, sizes))
        self.ids_N, self.position_N = views["ids_N"], views["position_N"]
        self.place_N, self.own_N = views["place_N"], views["own_N"]
        self.clean_N, self.begin_N = views["clean_N"], views["begin_N"]
        self.bits_N = views["bits_N"]
        self.order_N, self.is_mask_N = views["order_N"], views["is_mask_N"]
        self.tile_A3, self.page_SM = views["tile_A3"], views["page_SM"]

    def rehearse(self, rows: int, tile_rows: int) -> None:
        """Fill with a step of `rows` rows, all of them the first place of one sequence."""
        self._wait()
        self._host.zero_()
        self._arrays["order_N"][:] = np.arange(len(self._arrays["order_N"]))
        self._set_tiles(_tiles([0], [0], [rows], tile_rows))
        self._copy()

    def fill(
        self,
        tables: Tables,
        ids_N: np.ndarray,
        position_N: np.ndarray,
        rows: int,
        page_size: int,
        tile_rows: int,
    ) -> None:
        """Fill with a step; its padding writes nothing, and sees the first place of the first
        sequence."""
        clean_N, begin_N, bits_N = tables.sight()
        columns = {
            "ids_N": ids_N,
            "position_N": position_N,
            "place_N": tables.places(page_size),
            "own_N": tables.index_N,
            "clean_N": clean_N,
            "begin_N": begin_N,
            "bits_N": bits_N,
            "order_N": tables.order_N,
            "is_mask_N": np.arange(len(ids_N)) >= len(ids_N) - tables.masks,
        }
        self._wait()
        real = len(ids_N)
        for name, values in columns.items():
            column = self._arrays[name]
            column[:real] = values
            column[real:rows] = NOWHERE if name == "place_N" else 0
        self._arrays["order_N"][real:rows] = np.arange(real, rows)
        width_S = tables.width_S
        firsts = (width_S.cumsum() - width_S).tolist()
        owners = [*range(len(width_S)), 0]
        self._set_tiles(
            _tiles(owners, [*firsts, real], [*width_S.tolist(), rows - real], tile_rows)
        )
        sequences, pages = tables.page_SM.shape
        self._arrays["page_SM"][:sequences, :pages] = tables.page_SM
        self._copy()

    def _set_tiles(self, tile_A3: np.ndarray) -> None:
        self._arrays["tile_A3"][: len(tile_A3)] = tile_A3
        self._arrays["tile_A3"][len(tile_A3) :, 2] = 0

    def _wait(self) -> None:
        """Wait until the device has copied the last inputs."""
        if self._copied:
            self._copied.synchronize()

    def _copy(self) -> None:
        if self._copied:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record()


def _views(flat: Tensor, sizes: dict[str, tuple[int, ...]]) -> list[tuple[str, Tensor]]:
    parts = flat.split([int(np.prod(size)) for size in sizes.values()])
    return [
        (name, part.view(size)) for (name, size), part in zip(sizes.items(), parts, strict=True)
    ]


def _tiles(owners: list[int], firsts: list[int], widths: list[int], tile_rows: int) -> np.ndarray:
    """Sequence, first row (in `order_N`) and number of rows of each tile, (A, 3)."""
    return np.array(
        [
            (owner, first + offset, min(tile_rows, width - offset))
            for owner, first, width in zip(owners, firsts, widths, strict=True)
            for offset in range(0, width, tile_rows)
        ]
    )
