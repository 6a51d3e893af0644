"""From how many rows on the library's product of a prefill chunk gives a row the same bits whatever stands beside it.

A library may split the sum of a small product over processors, and then adds in another order than in a large one
(cuBLAS does on an H200: 256 rows of a 2,560 x 9,728 matrix; from 500 rows on every count has the same bits). Nobody
promises where that ends, so it is tried at the start, on the card that serves. Chunks with fewer rows are padded to
that many; with no such count the bits of a prompt depend on its company, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

COMPARED_ROWS = 256
"""Rows compared at once: what a comparison of thousands would take counts in the peak of a load."""
TRIED_ROWS = (17, 33, 64, 100, 128, 192, 240, 256, 320, 384, 448, 512, 640, 768, 1000, 1024, 1536, 2048, 3000, 4096)
"""Row counts whose bits are compared; odd ones because a library looks at alignment too."""

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LibraryRows:
    """By matrix shape [N, K]: rows that a product needs at least. Empty: nothing was tried."""

    least: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def tried(cls, weights: Iterable[Tensor], product: Product = F.linear) -> LibraryRows:
        """Tries every shape among ``weights`` [N, K] (16-bit, or of 8-bit floats with a ``product`` of such) once.
        Shapes with no safe count are left out."""
        found: dict[tuple[int, int], int | None] = {}
        for weight in weights:
            shape = (weight.shape[0], weight.shape[1])
            if shape not in found:
                found[shape] = least_rows(weight, product)
        unsafe = [shape for shape, rows in found.items() if rows is None]
        if unsafe:
            log.warning("the bits of a prompt depend on its company: products of %s do on this card", unsafe)
        return cls({shape: rows for shape, rows in found.items() if rows is not None})

    def padded(self, x: Tensor, outputs: int) -> Tensor | None:
        """x [T, K] with as many zero rows behind it as the product with [outputs, K] needs; None where its shape was
        not tried or has no safe count."""
        least = self.least.get((outputs, x.shape[1]))
        if least is None:
            return None
        return F.pad(x, (0, 0, 0, least - x.shape[0])) if x.shape[0] < least else x


@torch.inference_mode()
def least_rows(weight: Tensor, product: Product = F.linear) -> int | None:
    """The least of TRIED_ROWS from which on all of them give a row the bits that the most gives it, at the beginning of
    the rows and at their end; None when not even the last two agree."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(TRIED_ROWS[-1], weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    want = product(x, weight)
    safe = None
    for rows in reversed(TRIED_ROWS[:-1]):
        if not (_equal(product(x[:rows], weight), want[:rows]) and _equal(product(x[-rows:], weight), want[-rows:])):
            break
        safe = rows
    return safe


def _equal(one: Tensor, other: Tensor) -> bool:
    pairs = zip(torch.split(one, COMPARED_ROWS), torch.split(other, COMPARED_ROWS), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
