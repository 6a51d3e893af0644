"""KV pages: who holds them, which of them can be reused by content, and which is given up first.

A page is ``page_size`` consecutive positions of one sequence. Full pages of committed tokens are registered under a
hash chain (SHA-256 over the parent's hash, the salt and the token ids; the ids are compared too, so a collision cannot
hand out foreign text). A page that nobody holds stays in the cache until it is needed; the least recently released
goes first. This file knows no tensors: a page is a number, and the target's and the drafter's K/V live at the same
number.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

ROOT = b"foretoken"


@dataclass(frozen=True)
class CachedPage:
    """A registered page: its chain hash, its parent's, and the tokens in it."""

    page_id: int
    chain_hash: bytes
    parent_hash: bytes
    token_ids: tuple[int, ...]


def root_hash(salt: str) -> bytes:
    """Where a chain starts. Requests with different salts never share a page."""
    return hashlib.sha256(ROOT + salt.encode("utf-8")).digest()


def chain_hash(parent: bytes, token_ids: TokenIds[int]) -> bytes:
    """Hash of a full page of ``token_ids`` that follows the page hashed ``parent``."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class PagePool:
    """All pages of the server. Every page is free, held (reference count > 0) or cached (registered and not held)."""

    def __init__(self, num_pages: int, page_size: int, *, reuse: bool = True) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a page pool needs pages and a page size, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.reuse = reuse
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._by_hash: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.releases = 0
        """Times that pages were given back; what has been noted for pages before may not be written after."""

    @property
    def num_available(self) -> int:
        """Pages that an allocation could get now: free ones and cached ones that nobody holds."""
        return len(self._free) + len(self._evictable)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages ``num_tokens`` positions take."""
        return -(-num_tokens // self.page_size)

    def match(self, token_ids: TokenIds[int], salt: str) -> list[CachedPage]:
        """The longest registered chain of full pages at the start of ``token_ids``. Takes no references.

        The last token is never matched: its row must be computed to have logits.
        """
        found: list[CachedPage] = []
        if not self.reuse:
            return found
        parent = root_hash(salt)
        for start in range(0, (len(token_ids) - 1) // self.page_size * self.page_size, self.page_size):
            ids = tuple(token_ids[start : start + self.page_size])
            page = self._by_hash.get(chain_hash(parent, ids))
            if page is None or page.token_ids != ids or page.parent_hash != parent:
                break
            found.append(page)
            parent = page.chain_hash
        return found

    def hold(self, pages: list[CachedPage]) -> None:
        """Add a reference to each matched page, so that it is not evicted."""
        for page in pages:
            self._references[page.page_id] += 1
            self._evictable.pop(page.page_id, None)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` fresh pages with one reference each, or None (and nothing taken) when there are not that many."""
        if count > self.num_available:
            return None
        taken = []
        for _ in range(count):
            page_id = self._free.pop() if self._free else self._evict()
            self._references[page_id] = 1
            taken.append(page_id)
        return taken

    def _evict(self) -> int:
        page_id, _ = self._evictable.popitem(last=False)
        del self._by_hash[self._by_page.pop(page_id).chain_hash]
        return page_id

    def register(self, page_id: int, parent: bytes, token_ids: TokenIds[int]) -> bytes:
        """Make a held, full page findable; returns its chain hash. A second page of equal content stays private."""
        if self._references[page_id] < 1 or len(token_ids) != self.page_size:
            raise ValueError(f"page {page_id} is not a held, full page")
        digest = chain_hash(parent, token_ids)
        if self.reuse and digest not in self._by_hash and page_id not in self._by_page:
            page = CachedPage(page_id, digest, parent, tuple(token_ids))
            self._by_hash[digest] = page
            self._by_page[page_id] = page
        return digest

    def release(self, page_ids: list[int]) -> None:
        """Give up one reference to each page. The end of a chain becomes evictable before its beginning."""
        self.releases += 1
        for page_id in reversed(page_ids):
            if self._references[page_id] < 1:
                raise ValueError(f"page {page_id} released more often than held")
            self._references[page_id] -= 1
            if self._references[page_id]:
                continue
            if page_id in self._by_page:
                self._evictable[page_id] = None
            else:
                self._free.append(page_id)

    def forget(self) -> None:
        """Drop every cached page; held pages stay held and become private."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._by_hash.clear()
        self._by_page.clear()

    def forget_pages(self, pages: Iterable[tuple[int, bytes]]) -> None:
        """Drop registered pages (by id and chain hash; what is registered otherwise by now is left alone) and all that
        continue them, for their contents are not to be trusted. Held pages stay held and become private."""
        following: dict[bytes, list[CachedPage]] = {}
        for page in self._by_hash.values():
            following.setdefault(page.parent_hash, []).append(page)
        doomed = [self._by_hash[digest] for page_id, digest in pages if self._registered_as(page_id, digest)]
        while doomed:
            page = doomed.pop()
            if self._by_hash.pop(page.chain_hash, None) is None:
                continue
            del self._by_page[page.page_id]
            if page.page_id in self._evictable:
                del self._evictable[page.page_id]
                self._free.append(page.page_id)
            doomed += following.get(page.chain_hash, [])

    def _registered_as(self, page_id: int, digest: bytes) -> bool:
        page = self._by_page.get(page_id)
        return page is not None and page.chain_hash == digest

    def check(self, holders: list[list[int]]) -> None:
        """Raise AssertionError unless every page is accounted for: free + cached + held == total.

        ``holders``: the page lists of all sequences alive.
        """
        counts = [0] * self.num_pages
        for pages in holders:
            for page_id in pages:
                counts[page_id] += 1
        if counts != self._references:
            raise AssertionError("page references differ from the pages that sequences hold")
        held = sum(1 for count in counts if count)
        if len(self._free) + len(self._evictable) + held != self.num_pages:
            raise AssertionError(
                f"{len(self._free)} free + {len(self._evictable)} cached + {held} held pages are not {self.num_pages}"
            )
        if len(set(self._free)) != len(self._free) or any(counts[p] for p in self._free):
            raise AssertionError("a free page is listed twice or held")
        if any(counts[p] for p in self._evictable) or any(p not in self._by_page for p in self._evictable):
            raise AssertionError("an evictable page is held or not registered")
        if {page.page_id for page in self._by_hash.values()} != set(self._by_page):
            raise AssertionError("the prefix cache's two indexes disagree")
