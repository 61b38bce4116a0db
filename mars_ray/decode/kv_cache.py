"""Keys and values in pages.

A sequence's table lists its pages. Its row i (real tokens first, then the rows that the step adds)
lies at place i of the table's pages, laid end to end. Everything behind a sequence's cursor is
garbage, which its next forward overwrites before any row may see it. So nothing has to be erased.

`PagePool` has the state of every page, counts and hashes: a page is free, in use (by one or more
sequences), or kept: no sequence uses it, but its content may be needed again. When free pages run
out, kept pages are reused, the longest unused first.

Shape suffixes: X rows, P places of the pool, C places of a table, H key-value heads, D head size.
"""

import hashlib
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from mars_ray.config.decode import EngineConfig
from mars_ray.errors import ConfigError
from mars_ray.model.shape import most_positions, shape_of_config, sliding_window
from mars_ray.provenance import free_on_node

logger = logging.getLogger(__name__)

# The part of the free memory for the cache of an engine whose job says nothing of its size. A node
# without GPUs may have several engines, which start at the same time.
_GPU_SHARE, _CPU_SHARE = 0.6, 0.125
# The most of it that a given context and batch may take.
_MOST_SHARE = 0.9
# A model's context is not made shorter than this for want of memory.
_LEAST_CONTEXT = 1024


def model_context(config: Any) -> int:
    """Most tokens of a prompt and its answer that a model takes in an engine without a sliding
    window."""
    return min(most_positions(config), sliding_window(config) or most_positions(config))


def sized(model: PreTrainedModel, spare: int, config: EngineConfig) -> EngineConfig:
    """The configuration with a context, and so with a cache: that of the model if none is given, as
    far as memory holds a sequence of it and `spare` rows more."""
    if config.max_context is not None:
        return config
    each = page_bytes(model.config, config.page_size, model.dtype)
    given = _given_bytes(model, config)
    share = _CPU_SHARE if model.device.type == "cpu" else _GPU_SHARE
    room = int(share * _free_bytes(model.device) if given is None else given) // each
    own = model_context(model.config)
    least = min(own, _LEAST_CONTEXT) if given is None else 8
    context = max(least, min(own, room * config.page_size - spare))
    if context < own:
        logger.warning(
            "contexts of %d tokens, not the model's %d: %d MB of keys and values hold no more; "
            "say otherwise with engine.max_context, cache_bytes or cache_memory_share",
            context,
            own,
            room * each // 1_000_000,
        )
    changes: dict[str, Any] = {"max_context": context}
    if given is None:
        longest = -(-(context + spare) // config.page_size)
        changes["cache_bytes"] = each * max(longest, min(longest * config.max_batch, room))
    else:  # if by a share of what is free: there may be less when the cache is made
        changes |= {"cache_bytes": given, "cache_memory_share": None}
    return config.model_copy(update=changes)


def page_bytes(config: PretrainedConfig, page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page over all layers."""
    shape = shape_of_config(config)
    return 2 * shape.key_size * page_size * shape.layers * dtype.itemsize


def page_count(model: PreTrainedModel, positions: int, config: EngineConfig) -> int:
    """Pages of the cache. Raises ConfigError if they cannot hold a single sequence."""
    longest = -(-positions // config.page_size)
    each = page_bytes(model.config, config.page_size, model.dtype)
    cache_bytes = _given_bytes(model, config)
    if cache_bytes is None:
        most = int(_MOST_SHARE * _free_bytes(model.device)) // each
        return max(longest, min(longest * config.max_batch, most))
    if cache_bytes < longest * each:
        raise ConfigError(
            f"cache_bytes={cache_bytes} is too small: one sequence of "
            f"max_context={config.max_context} needs {longest * each}"
        )
    return cache_bytes // each


def _given_bytes(model: PreTrainedModel, config: EngineConfig) -> int | None:
    """The size of the cache that the configuration says, if it does."""
    if config.cache_memory_share is not None:
        return int(config.cache_memory_share * _free_bytes(model.device))
    return config.cache_bytes


def _free_bytes(device: torch.device) -> float:
    if device.type == "cpu":
        return free_on_node()
    torch.cuda.empty_cache()  # memory that torch holds but does not use is free too
    return torch.cuda.mem_get_info(device)[0]


class PagedCache:
    """The memory: per layer a tensor (places, 2, H, D), keys and values side by side."""

    def __init__(
        self,
        config: PretrainedConfig,
        pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        heads = config.num_key_value_heads
        size = shape_of_config(config).key_size // heads
        self.page_size = page_size
        self.shared_heads = config.num_attention_heads // heads  # query heads of a key head
        # Zeros, not uninitialised memory: a place that no row may see has weight 0, but 0 * NaN is
        # NaN. Memory that is never used is still never touched.
        shape = (config.num_hidden_layers, pages * page_size, 2, heads, size)
        if device.type == "cpu":
            # As the system gives it, memory is zeros and takes no room before it is used; torch
            # would write all of it.
            size = math.prod(shape) * dtype.itemsize
            try:
                memory = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"the system gives no {size:,} bytes for the cache") from error
            self._all = torch.frombuffer(memory, dtype=dtype).view(shape)
        else:
            self._all = torch.zeros(shape, device=device, dtype=dtype)
        self.layers = list(self._all.unbind())
        # The same memory, a row for each page.
        self.pages = [layer.view(pages, -1) for layer in self.layers]

    @cached_property
    def _line(self) -> Tensor:
        """Row r of the windows over it hides the places behind place (places - 1 - r)."""
        seen = self._all.new_zeros(self._all.shape[1])
        return torch.cat([seen, torch.full_like(seen, -torch.inf)])

    def causal(self, index_X: Tensor, places: int) -> Tensor:
        """The bias that attention adds to the scores of rows at these places, (X, places)."""
        most = len(self.layers[0])
        window_PC = self._line.as_strided((most, places), (1, 1))
        return window_PC.index_select(0, most - 1 - index_X)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of places to others, by pairs; the two sets may overlap."""
        from_X, to_X = torch.tensor(moves, device=self._all.device).unbind(1)
        self._all.index_copy_(1, to_X, self._all.index_select(1, from_X))

    @property
    def bytes(self) -> int:
        """Memory that the cache holds."""
        return sum(layer.nbytes for layer in self.layers)


def moved_places(
    pages: Sequence[int], page_size: int, first: int, path: Sequence[int]
) -> list[tuple[int, int]]:
    """From where to where a sequence's keys and values have to move: those of accepted drafts, by
    their numbers (`core.tree`), that do not lie at the places of committed tokens. `first` is its
    first draft's place."""

    def place(index: int) -> int:
        return pages[index // page_size] * page_size + index % page_size

    return [
        (place(first + node - 1), place(first + offset))
        for offset, node in enumerate(path)
        if node != offset + 1
    ]


class PagePool:
    """The pages 0 .. count - 1, each with a reference for every sequence that holds it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._references = [0] * count
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of pages that `take` could give: free and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def in_use(self) -> int:
        """Number of pages that some sequence holds."""
        return self.count - self.available

    @property
    def kept(self) -> int:
        """Number of unused pages whose content is kept."""
        return len(self._kept)

    def take(self, count: int) -> list[int] | None:
        """Take pages with one reference each; if there are too few, take none and return None."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:  # the longest unused of those that are kept
                page, _ = self._kept.popitem(last=False)
                del self._page_of[self._hash_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give back one reference to each page."""
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} is released more often than taken"
            if self._references[page]:
                continue
            if page in self._hash_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, content: bytes) -> None:
        """Let others find a full page by its content; of equal pages the first is the one found."""
        assert self._references[page], f"page {page} is published by nobody"
        if content not in self._page_of and page not in self._hash_of:
            self._page_of[content] = page
            self._hash_of[page] = content

    def share(self, contents: Iterable[bytes]) -> list[int]:
        """Pages of the leading contents that are cached, with one more reference each."""
        pages = []
        for content in contents:
            page = self._page_of.get(content)
            if page is None:
                break
            self._references[page] += 1
            self._kept.pop(page, None)
            pages.append(page)
        return pages

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that every page is in exactly the state that the sequences' tables imply."""
        held = Counter(page for table in tables for page in table)
        for page in range(self.count):
            assert self._references[page] == held[page], (
                f"page {page} has {self._references[page]} references and {held[page]} holders"
            )
        idle = [*self._free, *self._kept]
        assert len(idle) == len(set(idle)), "a page is idle twice"
        assert set(idle) == {page for page in range(self.count) if not held[page]}
        assert {self._page_of[content] for content in self._hash_of.values()} == set(self._hash_of)


def content_hashes(
    tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """A hash for each full page of the tokens, which covers the page and all before it.

    `known` holds the hashes of the first pages, which are not computed again.
    """
    hashes = list(known)
    for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
        page = np.asarray(tokens[start : start + page_size], dtype=np.int64).tobytes()
        before = hashes[-1] if hashes else b""
        hashes.append(hashlib.blake2b(before + page, digest_size=16).digest())
    return hashes
