"""Key-value caches of one layer that can hold the rows of a tree until it is decided.

Both speak mlx-lm's cache protocol (``make_mask``, ``offset``, ``update_and_fetch``, ``state``).
Rows of a verify pass are written behind ``offset``, which moves only in ``compact``.
H key-value heads, K head size.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlx_redrafter.decoding.caches.slot import TreeSlot

_BLOCK = 256  # rows by which a buffer grows and a window's front is dropped


class TreeKVCache:
    """All rows from position 0 on."""

    def __init__(self, slot: TreeSlot) -> None:
        self.slot = slot
        self.offset = 0
        self.start = 0  # position of the buffer's first row
        self.keys: mx.array | None = None  # (B, H, rows, K); B = 1 where trees are verified
        self.values: mx.array | None = None
        self._incoming: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows at ``offset``; give all rows that they may attend to."""
        first = self._first_visible()
        end = self.offset + keys.shape[2]
        self._make_room(keys, values)
        self._write(self.offset, keys, values)
        tree = self.slot.tree
        if tree is None:
            self.offset = end
        elif not tree.chain:
            # Kept apart until the commit: gathering from the buffer itself would keep it alive
            # while it is written, and so copy all of it.
            self._incoming = (keys, values)
        assert self.keys is not None
        assert self.values is not None
        rows = slice(first - self.start, end - self.start)
        return self.keys[..., rows, :], self.values[..., rows, :]

    def compact(self, path: list[int]) -> None:
        """Keep the rows of the accepted path (node indices, the root first); drop the others."""
        kept = next((i for i, node in enumerate(path) if node != i), len(path))
        if kept < len(path):
            assert self._incoming is not None
            rows = mx.array(path[kept:])
            keys, values = (mx.take(array, rows, axis=2) for array in self._incoming)
            self._write(self.offset + kept, keys, values)
        self._incoming = None
        self.offset += len(path)

    def rewind(self, offset: int) -> bool:
        """Forget the rows from position ``offset`` on; False where older ones are gone already."""
        assert offset <= self.offset
        self.offset = offset
        return True

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.slot.needs_mask:
            return self.slot.mask(self._first_visible(), window_size)
        mask: mx.array | str | None = create_attention_mask(
            rows, self.offset, return_array, window_size
        )
        return mask

    @property
    def state(self) -> tuple[mx.array, ...]:
        if self.keys is None or self.values is None:
            return ()
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.state)

    def empty(self) -> bool:
        return self.keys is None

    def _first_visible(self) -> int:
        return 0

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        """Grow the buffers by whole blocks, as rarely as mlx-lm does."""
        needed = self.offset - self.start + keys.shape[2]
        have = 0 if self.keys is None else self.keys.shape[2]
        if needed <= have:
            return
        used = self.offset - self.start
        size = -(-(needed - used) // _BLOCK) * _BLOCK
        self.keys = _grown(self.keys, keys, used, size)
        self.values = _grown(self.values, values, used, size)

    def _write(self, position: int, keys: mx.array, values: mx.array) -> None:
        assert self.keys is not None
        assert self.values is not None
        rows = slice(position - self.start, position - self.start + keys.shape[2])
        self.keys[..., rows, :] = keys
        self.values[..., rows, :] = values


class WindowedTreeCache(TreeKVCache):
    """The last rows of a layer with a sliding window, in temporal order.

    Keeps the window and a block more, so that short rewinds need no prefill; drops in blocks.
    """

    def __init__(self, slot: TreeSlot, window: int) -> None:
        super().__init__(slot)
        self.window = window

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        window = min(window_size or self.window, self.window)
        first = self._first_visible()
        if self.slot.needs_mask:
            return self.slot.mask(first, window)
        if rows == 1 and window == self.window and not return_array:
            return None  # just the window's rows are fetched
        if self.offset + rows - first <= window and not return_array:
            return None if rows == 1 else "causal"
        queries = mx.arange(self.offset, self.offset + rows)[:, None]
        keys = mx.arange(first, self.offset + rows)[None]
        return (keys <= queries) & (queries - keys < window)

    def rewind(self, offset: int) -> bool:
        if self.start > 0 and offset - self.window + 1 < self.start:
            return False
        return super().rewind(offset)

    def _first_visible(self) -> int:
        """Position of the oldest key that the next row sees."""
        return max(self.start, self.offset - self.window + 1)

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        keep_from = self.offset - self.window - _BLOCK
        if self.keys is not None and keep_from - self.start >= _BLOCK:
            assert self.values is not None
            rows = slice(keep_from - self.start, self.offset - self.start)
            self.keys = self.keys[..., rows, :]
            self.values = self.values[..., rows, :]
            self.start = keep_from
        super()._make_room(keys, values)


def _grown(buffer: mx.array | None, like: mx.array, used: int, size: int) -> mx.array:
    """``buffer``'s first ``used`` rows and ``size`` empty ones after them."""
    batch, heads, _, width = like.shape
    empty = mx.zeros((batch, heads, size, width), dtype=like.dtype)
    return empty if buffer is None else mx.concatenate([buffer[..., :used, :], empty], axis=2)


LayerCache = Any  # TreeKVCache, or one of mlx-lm's own where a model runs plain
