"""The cache of a whole model: a list of layer caches, as mlx-lm's models expect it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_redrafter.decoding.caches.layers import TreeKVCache, WindowedTreeCache
from mlx_redrafter.decoding.caches.slot import TreeSlot

__all__ = ["Cache", "TreeKVCache", "TreeSlot", "WindowedTreeCache", "unsupported_layer"]


class Cache(list[Any]):
    """Layer caches and one ``offset``: the number of positions that are kept.

    The layers are ours (``trees``), or mlx-lm's own for a model that can only run plain.
    """

    def __init__(self, layers: list[Any], slot: TreeSlot, trees: bool) -> None:
        super().__init__(_tree_layer(layer, slot) if trees else layer for layer in layers)
        self.slot = slot
        self.trees = trees
        self.offset = 0
        self._written = 0

    def wrote(self, rows: int, final: bool) -> None:
        """Count ``rows`` that a forward pass has written at ``offset``; final ones are kept."""
        self._written = self.offset + rows
        if final:
            self.offset = self._written

    def compact(self, base: int, path: list[int]) -> None:
        """Keep a verify pass's accepted rows: ``path`` (node indices, the root first)."""
        assert base == self.offset, "rows were kept out of order"
        if self.trees:
            for layer in self:
                layer.compact(path)
        self.offset += len(path)

    def rewind(self, offset: int) -> bool:
        """Forget positions from ``offset`` on. False where that needs rows that are gone: the
        cache is then of no further use, and the text must be prefilled into a new one."""
        if self.trees:
            done = all(layer.rewind(offset) for layer in self)
        else:
            surplus = self._written - offset
            done = surplus == 0 or all(layer.is_trimmable() for layer in self)
            if done and surplus:
                for layer in self:
                    layer.trim(surplus)
        self.offset = self._written = offset
        return done

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self for array in layer.state if isinstance(array, mx.array)]

    @property
    def nbytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self)


def unsupported_layer(layers: list[Any]) -> str | None:
    """The name of the first layer cache that cannot hold a tree; None where all can."""
    for layer in layers:
        plain = type(layer) is KVCache
        windowed = type(layer) is RotatingKVCache and layer.keep == 0
        if not (plain or windowed):
            return type(layer).__name__
    return None


def _tree_layer(layer: Any, slot: TreeSlot) -> TreeKVCache:
    if type(layer) is RotatingKVCache:
        return WindowedTreeCache(slot, layer.max_size)
    return TreeKVCache(slot)
