"""Several processes that train one drafter: started by ``mlx.launch``, on one Mac or on more.

They share no files. The first one reads and writes the data, the checkpoint and the output; the
others get from it what they need.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlx_redrafter.training.checkpoint import TrainingState
from mlx_redrafter.training.corpus import Corpus

Tree = TypeVar("Tree")


class Workers:
    """This process among its peers; alone without a ``group``."""

    def __init__(self, group: mx.distributed.Group | None = None) -> None:
        self._group = group
        self.count = 1 if group is None else int(group.size())
        self.rank = 0 if group is None else int(group.rank())

    @classmethod
    def launched(cls) -> Workers:
        """Those that ``mlx.launch`` started, or this process alone."""
        group = mx.distributed.init()
        return cls(group if group.size() > 1 else None)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def owns(self, shard: int) -> bool:
        """Whether this process works on a shard, by its index."""
        return shard % self.count == self.rank

    def sum(self, tree: Tree) -> Tree:
        """A tree of arrays, each summed over the processes."""
        if self._group is None:
            return tree
        summed: Tree = tree_map(lambda x: mx.distributed.all_sum(x, group=self._group), tree)
        mx.eval(summed)
        return summed

    def share(self, saved: TrainingState | None, fresh: TrainingState) -> TrainingState | None:
        """The first process's ``saved`` state, on all; ``fresh`` gives the shapes."""
        if self._group is None:
            return saved
        values = None
        if self.is_first and saved is not None:
            values = {**saved.values, "trees": sorted(saved.arrays)}
        values = self._share_values(values)
        if values is None:
            return None
        trees = {}
        for name in values.pop("trees"):
            like = fresh.optimizer if name == "optimizer" else fresh.weights
            mine = like if saved is None else saved.arrays[name]
            trees[name] = self.sum(mine if self.is_first else tree_map(mx.zeros_like, mine))
        return TrainingState(**values, **trees)

    def share_corpora(self, corpora: Sequence[Corpus]) -> list[Corpus]:
        """The first process's corpora, on all; the others give none."""
        if self._group is None:
            return list(corpora)
        shapes = [(corpus.name, *corpus.ids.shape) for corpus in corpora]
        shared = []
        for index, (name, rows, length) in enumerate(self._share_values(shapes)):
            arrays = {"ids": np.int32, "role": np.uint8}
            found: dict[str, Any] = {}
            for field, kind in arrays.items():
                mine = np.zeros((rows, length), dtype=kind)
                if self.is_first:
                    mine = getattr(corpora[index], field)
                found[field] = np.array(self.sum(mx.array(mine.astype(np.int32)))).astype(kind)
            temperature = np.zeros(rows, dtype=np.float32)
            if self.is_first and corpora[index].temperature is not None:
                temperature = corpora[index].temperature.astype(np.float32)
            elif self.is_first:
                temperature[:] = np.nan
            found["temperature"] = np.array(self.sum(mx.array(temperature))).astype(np.float16)
            shared.append(Corpus(name, **found))
        return shared

    def _share_values(self, values: Any) -> Any:
        """What JSON can say, from the first process."""
        data = json.dumps(values).encode() if self.is_first else b""
        size = int(self.sum(mx.array(len(data))))
        mine = np.zeros(size, dtype=np.int32)
        if self.is_first:
            mine[:] = np.frombuffer(data, dtype=np.uint8)
        return json.loads(bytes(np.array(self.sum(mx.array(mine))).astype(np.uint8)))
