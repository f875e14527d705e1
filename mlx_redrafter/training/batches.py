"""Which rows make which batch, known before any hidden state is read, so that training can stop
and go on anywhere; and the batch itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_redrafter.training.corpus import anchors
from mlx_redrafter.training.features import Shard

_POOL_ROWS = 256  # of the shards that are shuffled together and in memory at once

Rows = list[tuple[int, int]]
"""Rows by (index of the shard, row in it)."""


@dataclass(frozen=True)
class Batch:
    """n anchors and, per depth i = 1..horizon, what to predict.

    hidden (n, D); tokens (n, horizon): g_0 and the tokens up to depth horizon - 1;
    states (q, D): target states of all predicted positions, each once;
    label_rows (n, horizon): their row in ``states``; usable (n, horizon) float32
    """

    hidden: mx.array
    tokens: mx.array
    states: mx.array
    label_rows: mx.array
    usable: mx.array


class Batches:
    """Cuts ``shards`` into batches of about ``size`` anchors.

    known (V,) bool: the tokens that can be drafted; horizon: depths trained.
    """

    def __init__(
        self, shards: list[Shard], known: npt.NDArray[np.bool_], horizon: int, size: int
    ) -> None:
        self.shards = shards
        self.known = known
        self.horizon = horizon
        self.size = size
        self.counts = [self._usable(shard)[:, :, 0].sum(axis=1) for shard in shards]
        self._hidden: dict[int, npt.NDArray[np.float16]] = {}

    @property
    def num_anchors(self) -> int:
        return int(sum(count.sum() for count in self.counts))

    def epoch(self, seed: int, number: int) -> list[Rows]:
        """The batches of one pass over all anchors, a function of its arguments alone. Rows of a
        few shards are shuffled together; a row's anchors stay together, since they share labels."""
        random = np.random.default_rng([seed, number])
        order = random.permutation(len(self.shards))
        pooled = self._pooled
        batches: list[Rows] = []
        for start in range(0, len(order), pooled):
            pool = [
                (int(shard), row)
                for shard in order[start : start + pooled]
                for row in range(len(self.counts[shard]))
            ]
            pending: Rows = []
            count = 0
            for i in random.permutation(len(pool)):
                shard, row = pool[i]
                if self.counts[shard][row] == 0:
                    continue
                pending.append((shard, row))
                count += int(self.counts[shard][row])
                if count >= self.size:
                    batches.append(pending)
                    pending, count = [], 0
            if pending:
                batches.append(pending)
        return batches

    @property
    def _pooled(self) -> int:
        """How many shards make a pool."""
        return max(1, _POOL_ROWS // max(map(len, self.counts)))

    def count(self, rows: Rows) -> int:
        """Anchors in ``rows``."""
        return sum(int(self.counts[shard][row]) for shard, row in rows)

    def load(self, rows: Rows) -> Batch:
        """``rows`` as arrays. Keeps the hidden states of the shards it was last asked for."""
        wanted = {shard for shard, _ in rows}
        if len(self._hidden) > self._pooled:  # of a pool that has been gone through
            self._hidden = {i: h for i, h in self._hidden.items() if i in wanted}
        for shard in wanted - self._hidden.keys():
            self._hidden[shard] = self.shards[shard].hidden()
        usable = {shard: self._usable(self.shards[shard]) for shard in wanted}
        return make_batch(
            (self._hidden[shard][row], self._ids(shard)[row], usable[shard][row])
            for shard, row in rows
        )

    def _ids(self, shard: int) -> npt.NDArray[np.int32]:
        return self.shards[shard].corpus.ids[self.shards[shard].rows]

    def _usable(self, shard: Shard) -> npt.NDArray[np.bool_]:
        known = self.known[shard.corpus.ids[shard.rows]]
        return anchors(shard.corpus.role[shard.rows], known, self.horizon)


Row = tuple[npt.NDArray[np.float16], npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Hidden states (T, D), token ids (T,) and usable anchors (T, horizon) of one row."""


def make_batch(rows: Iterable[Row]) -> Batch:
    """Rows, with at least one anchor between them, as a batch. They are laid end to end; no
    usable anchor looks past its row."""
    hiddens, tokens, usables = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    (anchor,) = np.nonzero(usables[:, 0])
    used = usables[anchor]
    depths = np.arange(1, usables.shape[1] + 1)
    # Where a depth is not usable, point it at depth 1, which always is.
    labels = np.where(used, anchor[:, None] + depths, anchor[:, None] + 1)
    positions, label_rows = np.unique(labels, return_inverse=True)
    hidden = hiddens.astype(np.float32)
    return Batch(
        hidden=mx.array(hidden[anchor]),
        tokens=mx.array(tokens[labels]),
        states=mx.array(hidden[positions]),
        label_rows=mx.array(label_rows.reshape(labels.shape).astype(np.int32)),
        usable=mx.array(used.astype(np.float32)),
    )
