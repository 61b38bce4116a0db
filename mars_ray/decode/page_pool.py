"""The state of every page of the cache: counts and hashes, no tensors.

A page is free, in use (by one or more sequences), or kept: no sequence uses it, but its content may
be needed again. When free pages run out, kept pages are reused, the longest unused first.
"""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np


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
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
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

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page


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
