"""The one place that tells caches and RoPE that a tree is being verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from mlx_redrafter.decoding.tree import Tree


class TreeSlot:
    """Holds the tree under verification, and what is derived from it once for all layers.

    Only ``Target.verify`` fills it, for the length of one call. ``tree`` is None in prefill, where
    rows follow one another. ``positions`` (N,) are for RoPE, None where rows have consecutive ones:
    a chain is rotated like any chunk.
    """

    def __init__(self) -> None:
        self.tree: Tree | None = None
        self.positions: mx.array | None = None
        self._base = 0
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    @contextmanager
    def hold(self, tree: Tree, base: int) -> Iterator[None]:
        """Verify ``tree`` with its root at absolute position ``base``."""
        assert self.tree is None, "a tree is already being verified"
        self.tree, self._base = tree, base
        self._places = tree.depths + base
        self.positions = None if tree.chain else self._places
        try:
            yield
        finally:
            self.tree = self.positions = None
            self._masks.clear()

    @property
    def needs_mask(self) -> bool:
        """One mask serves all layers; a single row needs none."""
        return self.tree is not None and self.tree.num_nodes > 1

    def mask(self, first: int, window: int | None) -> mx.array:
        """(N, K) bool over the K = base - first + N keys whose first one has position ``first``.

        Windows go by position (base + depth), never by row: a key is seen where it is an ancestor
        or in the prefix, and fewer than ``window`` positions back.
        """
        key = (first, window)
        if key not in self._masks:
            assert self.tree is not None
            prefix = mx.arange(first, self._base, dtype=mx.int32)
            seen = mx.ones((self.tree.num_nodes, prefix.shape[0]), dtype=mx.bool_)
            mask = mx.concatenate([seen, self.tree.mask], axis=1)
            if window is not None:
                places = mx.concatenate([prefix, self._places])
                mask = mask & (self._places[:, None] - places[None] < window)
            self._masks[key] = mask
        return self._masks[key]
