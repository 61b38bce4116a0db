"""Steps of few rows on a GPU: one kernel for attention, and a CUDA graph for every number of rows.

At these sizes a GPU finishes an operation sooner than Python can ask for the next one. A graph
holds all operations of a forward, so nothing about it may change from step to step but what stands
in memory: rows are padded up to one of a few numbers, and what a step is about goes to the device
in one copy. Prompts have many rows and run as everywhere (`dense`).

Shape suffixes: N rows of a forward, padding included, A tiles (`kernels`), S sequences, M pages of
the longest table, T query heads, H key-value heads, D head size, Z hidden size.
"""

import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars_ray.decode.attention.dense import NARROW, DenseBackend
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.decode.runner import Runner

# Of a program (`kernels`). A tile has as many rows as fit, each with its query heads.
_BLOCK_C = 64
_LEAST = 16  # what a matrix unit multiplies
_TILE_ROWS = 9  # a step of `verified` at block size 4
_MOST_SHARES = 16
# Of one forward in a graph; what has more runs as everywhere.
_MOST_ROWS = 1024


class PagedBackend:
    """Not thread-safe. Memory: a graph holds what a forward of its number of rows needs, and all
    graphs share that of the largest."""

    def __init__(self, runner: Runner, cache: PagedCache, sequences: int, positions: int) -> None:
        """For so many sequences of at most so many positions, if nothing is `missing`."""
        # Here, for Triton is not installed everywhere.
        from mars_ray.decode.attention import kernels

        self._kernels = kernels
        self.runner = runner
        self.cache = cache
        self._dense = DenseBackend(runner, cache)
        self._sequences = sequences
        self._tile_rows = _block_rows(cache) // cache.shared_heads
        self._rows = padded_row_counts(min(_MOST_ROWS, sequences * NARROW))
        self._inputs = _Inputs(
            runner.device, self._rows[-1], sequences, -(-positions // cache.page_size)
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels and record the graphs. Overwrites the first page of the cache."""
        self._inputs.clear()
        # Largest first: the others find its memory.
        for rows in reversed(self._rows):
            self._run(rows)
        for pages in self.cache.pages:
            pages[0].zero_()  # attention had nothing to do: what it gave may be anything

    def hidden_states(self, tables: Tables, ids_N: np.ndarray, position_N: np.ndarray) -> Tensor:
        """Last hidden states, (N, Z), without the padding."""
        rows = len(ids_N)
        if rows > self._rows[-1] or tables.width_S.max() > NARROW:
            return self._dense.hidden_states(tables, ids_N, position_N)
        padded = next(count for count in self._rows if count >= rows)
        self._inputs.fill(tables, ids_N, position_N, padded, self.cache.page_size, self._tile_rows)
        return self._run(padded)[:rows]

    def _run(self, rows: int) -> Tensor:
        if self.runner.device.type != "cuda":
            return self._forward(rows)
        if rows not in self._graphs:
            self._graphs[rows] = self._record(rows)
        started = time.perf_counter()
        graph, hidden_NZ = self._graphs[rows]
        graph.replay()
        self.runner.seconds += time.perf_counter() - started
        return hidden_NZ

    def _record(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Runs once before: what an operation does when it is first used cannot be recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only one graph's results are needed at a time, so all may lie in the same memory.
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            hidden_NZ = self._forward(rows)
        return graph, hidden_NZ

    def _forward(self, rows: int) -> Tensor:
        inputs = self._inputs
        attention = _PagedAttention(
            self._kernels,
            self.cache,
            inputs,
            rows,
            tiles=min(rows, self._sequences + rows // self._tile_rows + 1),
            block_rows=_block_rows(self.cache),
            processors=_processors(self.runner.device),
        )
        ids_N, position_N = inputs.ids_N[:rows], inputs.position_N[:rows]
        return self.runner.hidden_states(ids_N, position_N, attention)


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
    """The numbers of rows that have a graph: an eighth apart at least, and all of them up to 2."""
    counts = [1, 2, 4]
    while counts[-1] < most:
        step = max(4, 1 << (counts[-1].bit_length() - 3))
        counts.append(counts[-1] + step)
    return counts


class _Inputs:
    """What a step is about, on the host and on the device, at addresses that stay."""

    def __init__(self, device: torch.device, rows: int, sequences: int, pages: int) -> None:
        sizes = {
            "ids_N": (rows,),
            "position_N": (rows,),
            "place_N": (rows,),
            "own_N": (rows,),
            "clean_N": (rows,),
            "begin_N": (rows,),
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
        self.tile_A3, self.page_SM = views["tile_A3"], views["page_SM"]

    def clear(self) -> None:
        """Rows of nobody: attention has nothing to do."""
        self._wait()
        self._host.zero_()
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
        """A step's; its padding repeats the first row, and writes what that writes."""
        clean_N, begin_N = tables.sight()
        columns = {
            "ids_N": ids_N,
            "position_N": position_N,
            "place_N": tables.places(page_size),
            "own_N": tables.index_N,
            "clean_N": clean_N,
            "begin_N": begin_N,
        }
        self._wait()
        for name, values in columns.items():
            column = self._arrays[name]
            column[: len(values)] = values
            column[len(values) : rows] = values[0]
        tile_A3 = _tiles(tables, rows, tile_rows)
        self._arrays["tile_A3"][: len(tile_A3)] = tile_A3
        self._arrays["tile_A3"][len(tile_A3) :, 2] = 0
        sequences, pages = tables.page_SM.shape
        self._arrays["page_SM"][:sequences, :pages] = tables.page_SM
        self._copy()

    def _wait(self) -> None:
        """Until the device has what was written here last."""
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


def _tiles(tables: Tables, rows: int, tile_rows: int) -> np.ndarray:
    """Sequence, first row and number of rows of each tile; the padding is of the first sequence."""
    real = len(tables.owner_N)
    firsts, widths = [*tables.first_S.tolist(), real], [*tables.width_S.tolist(), rows - real]
    owners = [*range(len(tables.width_S)), 0]
    return np.array(
        [
            (owner, first + offset, min(tile_rows, width - offset))
            for owner, first, width in zip(owners, firsts, widths, strict=True)
            for offset in range(0, width, tile_rows)
        ]
    )


@dataclass(frozen=True, slots=True)
class _PagedAttention:
    """Of so many rows, whatever the inputs say about them."""

    kernels: Any
    cache: PagedCache
    inputs: _Inputs
    rows: int
    tiles: int
    block_rows: int
    processors: int

    def attend(self, layer: int, query_NTD: Tensor, kv_N2HD: Tensor, scale: float) -> Tensor:
        """Store the rows' keys and values, then attend: (N, T * D)."""
        inputs, cache = self.inputs, self.cache.layers[layer]
        cache.index_copy_(0, inputs.place_N[: self.rows], kv_N2HD)
        rows, query_heads, size = query_NTD.shape
        key_heads = kv_N2HD.shape[2]
        shares = _shares(self.tiles * key_heads, self.processors)
        out_NTD = query_NTD.new_empty(rows, query_heads, size)
        part_SNTD = log_sum_SNT = out_NTD
        if shares > 1:
            part_SNTD = query_NTD.new_empty((shares, rows, query_heads, size), dtype=torch.float32)
            log_sum_SNT = part_SNTD.new_empty(shares, rows, query_heads)
        self.kernels.attend_tile[self.tiles, key_heads, shares](
            query_NTD,
            cache,
            part_SNTD,
            log_sum_SNT,
            inputs.tile_A3,
            inputs.own_N,
            inputs.clean_N,
            inputs.begin_N,
            inputs.page_SM,
            query_NTD.stride(0),
            inputs.page_SM.stride(0),
            rows,
            scale,
            KEY_HEADS=key_heads,
            SHARED=query_heads // key_heads,
            SIZE=size,
            PAGE=self.cache.page_size,
            SHARES=shares,
            BLOCK_M=self.block_rows,
            BLOCK_C=_BLOCK_C,
        )
        if shares > 1:
            lines = rows * query_heads
            self.kernels.join_shares[lines,](
                part_SNTD, log_sum_SNT, out_NTD, lines, SHARES=shares, SIZE=size
            )
        return out_NTD.view(rows, query_heads * size)


def _block_rows(cache: PagedCache) -> int:
    """Rows of a program, query heads counted: a power of two, as matrix units want it."""
    return max(_LEAST, 1 << (_TILE_ROWS * cache.shared_heads - 1).bit_length())


def _shares(programs: int, processors: int) -> int:
    """Into how many each sequence's places are cut, so that there are two programs a processor."""
    shares = 1
    while shares < _MOST_SHARES and programs * shares < 2 * processors:
        shares *= 2
    return shares


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()
