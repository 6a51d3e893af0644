"""Which part of each matrix is a rank's: heads and the gated width by rows, what reads them by columns, the vocabulary
by rows of the head.

Where there are more ranks than K/V heads, neighbouring ranks keep the same head. Knows shapes; no files, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serve.model.config import ModelConfig, ModelError


@dataclass(frozen=True)
class Part:
    """``count`` rows (axis 0) or columns (axis 1) of a matrix, from ``start`` on."""

    axis: int
    start: int
    count: int


@dataclass(frozen=True)
class Split:
    """A rank's share of the model ``whole``. Raises ModelError for a number of ranks that does not divide it."""

    whole: ModelConfig
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        for name, size in (
            ("num_attention_heads", self.whole.num_heads),
            ("intermediate_size", self.whole.intermediate_size),
            ("vocab_size", self.whole.vocab_size),
        ):
            if size % self.ranks:
                raise ModelError(f"--tensor-parallel {self.ranks} does not divide {name} {size} of config.json")
        heads = self.whole.num_kv_heads
        if heads % self.ranks and self.ranks % heads:
            raise ModelError(
                f"--tensor-parallel {self.ranks} neither divides num_key_value_heads {heads} of config.json nor is a "
                "multiple of it"
            )

    @property
    def local(self) -> ModelConfig:
        """The model as this rank's layers see it; the vocabulary and the residual stream stay whole."""
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.ranks,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.ranks),
            intermediate_size=self.whole.intermediate_size // self.ranks,
        )

    def queries(self, axis: int = 0) -> Part | None:
        """This rank's query heads; None is all of them, here and below."""
        return self._share(axis, self.whole.num_heads * self.whole.head_dim)

    def keys(self) -> Part | None:
        """This rank's K/V heads, of which several ranks may keep the same one."""
        if self.ranks == 1:
            return None
        count = self.local.num_kv_heads
        first = self.rank * self.whole.num_kv_heads // self.ranks
        return Part(0, first * self.whole.head_dim, count * self.whole.head_dim)

    def inner(self, axis: int = 0) -> Part | None:
        """This rank's part of the gated width."""
        return self._share(axis, self.whole.intermediate_size)

    def vocabulary(self) -> Part | None:
        """This rank's rows of the head."""
        return self._share(0, self.whole.vocab_size)

    def _share(self, axis: int, size: int) -> Part | None:
        if self.ranks == 1:
            return None
        return Part(axis, self.rank * (size // self.ranks), size // self.ranks)
