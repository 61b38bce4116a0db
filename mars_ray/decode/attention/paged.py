"""Steps on a GPU: our own kernels around attention, and a CUDA graph for every number of rows.

At these sizes a GPU finishes an operation sooner than Python can launch the next one. A graph holds
all operations of a forward, so only the contents of memory may change from step to step. Rows are
therefore padded to one of a few numbers, and a step's inputs, at fixed addresses that the graph
remembers, go to the device in one copy.

Shape suffixes: N rows of a forward, padding included, A tiles and S shares (`kernels`), in `Inputs`
S sequences, M pages of the longest table, T heads of queries, keys and values together (query heads
in what attention gives), D head size, Z hidden size.
"""

import os
import time
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars_ray.decode.adapter import FusedAdapter, Gated
from mars_ray.decode.attention.dense import DenseBackend
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.fused_model import FusedModel, Turn
from mars_ray.decode.kv_cache import PagedCache

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


# Sizes of a program (`kernels`). A tile has as many rows as fit, each with its query heads.
_BLOCK_C = 64
_LEAST = 16  # the rows that a matrix unit multiplies
_TILE_ROWS = 9  # a step of `verified` at block size 4
_MOST_M = 64  # more do not fit into registers
_MOST_SHARES = 64
_LARGE = 8192  # size of a program's result above which it gets more warps
# Most rows of a forward in a graph; larger forwards run as on other devices (`dense`).
_MOST_ROWS = 1024


class PagedBackend(DenseBackend):
    """Runs forwards as CUDA graphs, as far as they are not too large. Not thread-safe. A graph
    needs the memory of a forward of its number of rows; all graphs share that of the largest."""

    name = "triton"

    def __init__(
        self,
        runner: FusedModel,
        cache: PagedCache,
        rows: int,
        sequences: int,
        positions: int,
    ) -> None:
        """Prepare for steps of at most `rows` and `sequences`, each of at most `positions`;
        nothing may be `missing`."""
        # Imported here, because Triton is not installed everywhere.
        from mars_ray.decode.attention import kernels

        super().__init__(runner, cache)
        self._kernels: Any = kernels
        self._sequences = sequences
        self._tile_rows = _block_rows(cache) // cache.shared_heads
        self._rows = padded_row_counts(min(_MOST_ROWS, rows))
        pages = -(-positions // cache.page_size)
        self._inputs = Inputs(runner.device, self._rows[-1], sequences, pages)
        # Graphs by number of rows, and whether an adapter makes the masks.
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._stream, self._processors = None, torch.get_num_threads()
        if runner.device.type == "cuda":
            # One for the graphs alone, since a matrix product's workspace belongs to a stream.
            self._stream = torch.cuda.Stream()
            properties = torch.cuda.get_device_properties(runner.device)
            self._processors = properties.multi_processor_count

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels and record the graphs. Overwrites the first place of the cache."""
        # Largest first, so that the others reuse its memory.
        for rows in reversed(self._rows):
            self._inputs.rehearse(rows, self._tile_rows)
            for has_masks in {False, self.runner.adapter is not None}:
                self._run(rows, has_masks)

    def set_adapter(self, adapter: FusedAdapter | None) -> None:
        """Set the adapter for masks from the next forward on. Graphs recorded with another one are
        recorded again when they are needed."""
        self.runner.adapter = adapter
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}

    def forward(self, tables: Tables, ids_N: np.ndarray, position_N: np.ndarray) -> None:
        """Run the rows through the model."""
        rows = len(ids_N)
        if rows > self._rows[-1]:
            super().forward(tables, ids_N, position_N)
            return
        padded = next(count for count in self._rows if count >= rows)
        self._inputs.fill(tables, ids_N, position_N, padded, self.cache.page_size, self._tile_rows)
        self._hidden_NZ = self._run(padded, bool(tables.masks and self.runner.adapter))[:rows]

    def _run(self, rows: int, has_masks: bool) -> Tensor:
        if self.runner.device.type != "cuda":
            return self._forward(rows, has_masks)
        key = rows, has_masks
        if key not in self._graphs:
            self._graphs[key] = self._record(rows, has_masks)
        started = time.perf_counter()
        graph, hidden_NZ = self._graphs[key]
        graph.replay()
        self.runner.seconds += time.perf_counter() - started
        return hidden_NZ

    def _record(self, rows: int, has_masks: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record a forward, after one that is not recorded: an operation's first-time work cannot
        be."""
        assert self._stream
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._forward(rows, has_masks)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # A replay needs no memory from before, so all graphs may use the same. Results are kept
        # separately, and read before the next step.
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            hidden_NZ = self._forward(rows, has_masks)
        return graph, hidden_NZ

    def _forward(self, rows: int, has_masks: bool) -> Tensor:
        inputs = self._inputs
        ids_N, position_N = inputs.ids_N[:rows], inputs.position_N[:rows]
        masks = Gated(inputs.is_mask_N[:rows, None] > 0) if has_masks else None
        return self.runner.hidden_states(ids_N, position_N, self._attend, masks)

    def _attend(self, layer: int, qkv_NTD: Tensor, turn: Turn, scale: float) -> Tensor:
        """Rotate queries and keys, store keys and values, and attend: (N, query heads * D). Only
        the number of rows is fixed, whatever the inputs say about them."""
        inputs, cache = self._inputs, self.cache.layers[layer]
        key_heads, size = cache.shape[2:]
        rows, heads, _ = qkv_NTD.shape
        query_heads = heads - 2 * key_heads
        cos_N1D, sin_N1D = turn
        self._kernels.turn_and_store[rows, heads](
            qkv_NTD,
            cos_N1D,
            sin_N1D,
            cache,
            inputs.place_N,
            cos_N1D.stride(0),
            QUERY_HEADS=query_heads,
            KEY_HEADS=key_heads,
            SIZE=size,
        )
        # At most so many; tiles without rows end at once. All are full when one sequence has many
        # rows.
        tiles = min(rows, self._sequences + rows // self._tile_rows + 1)
        full_tiles = -(-rows // self._tile_rows)
        shares = _shares(full_tiles * key_heads, self._processors)
        out_NTD = qkv_NTD.new_empty(rows, query_heads, size)
        part_SNTD = log_sum_SNT = out_NTD
        if shares > 1:
            part_SNTD = qkv_NTD.new_empty((shares, rows, query_heads, size), dtype=torch.float32)
            log_sum_SNT = part_SNTD.new_empty(shares, rows, query_heads)
        block_rows = _block_rows(self.cache)
        self._kernels.attend_tile[tiles, key_heads, shares](
            qkv_NTD,
            cache,
            part_SNTD,
            log_sum_SNT,
            inputs.tile_A3,
            inputs.order_N,
            inputs.own_N,
            inputs.clean_N,
            inputs.begin_N,
            inputs.bits_N,
            inputs.page_SM,
            qkv_NTD.stride(0),
            inputs.page_SM.stride(0),
            rows,
            scale,
            KEY_HEADS=key_heads,
            SHARED=query_heads // key_heads,
            SIZE=size,
            PAGE=self.cache.page_size,
            SHARES=shares,
            BLOCK_M=block_rows,
            BLOCK_C=_BLOCK_C,
            num_warps=8 if block_rows * size > _LARGE else 4,
        )
        if shares > 1:
            lines = rows * query_heads
            self._kernels.join_shares[lines,](
                part_SNTD, log_sum_SNT, out_NTD, lines, SHARES=shares, SIZE=size
            )
        return out_NTD.view(rows, query_heads * size)


def missing(cache: PagedCache) -> str | None:
    """Why the kernels cannot be used; None if they can."""
    size = cache.layers[0].shape[-1]
    if size < _LEAST or size & (size - 1):
        return f"its head size must be a power of two from {_LEAST} on, and is {size}"
    if not find_spec("triton"):
        return "the package triton is not installed; it comes with torch for CUDA"
    if cache.layers[0].device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return "the device is a CPU (TRITON_INTERPRET=1 runs the kernels there, slowly)"
    return None


def padded_row_counts(most: int) -> list[int]:
    """The numbers of rows that have a graph: from 16 on at most a quarter apart."""
    counts = [1, 2, 4]
    while counts[-1] < most:
        step = max(4, 1 << (counts[-1].bit_length() - 3))
        counts.append(counts[-1] + step)
    return counts


def _block_rows(cache: PagedCache) -> int:
    """Rows of a program, query heads counted: a power of two, as matrix units need."""
    shared = cache.shared_heads
    most = max(_MOST_M, _power_of_two(shared))
    return max(_LEAST, min(most, _power_of_two(_TILE_ROWS * shared)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _shares(programs: int, processors: int) -> int:
    """Number of shares of each sequence's places that gives two programs per processor."""
    shares = 1
    while shares < _MOST_SHARES and programs * shares < 2 * processors:
        shares *= 2
    return shares
