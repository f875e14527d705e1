"""Hidden states of the frozen target over a corpus, cached on disk in shards.

A shard is written under a temporary name and renamed, so an interrupted run goes on where it
stopped, and several processes can share the work (``part``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import FormatError
from mlx_redrafter.training.corpus import Corpus

ROWS_PER_SHARD = 64
_ROWS_AT_ONCE = 8
_CHUNK = 96  # tokens per pass: short chunks skip most of the scores above the diagonal


@dataclass(frozen=True)
class Shard:
    """``rows`` of a corpus and the file with their hidden states (rows, T, D) float16."""

    corpus: Corpus
    rows: slice
    path: Path

    def hidden(self) -> npt.NDArray[np.float16]:
        try:
            arrays = mx.load(str(self.path))
            assert isinstance(arrays, dict)
            hidden = np.array(arrays["hidden"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise FormatError(
                f"{self.path} is broken ({error}); delete it and run again."
            ) from None
        if hidden.shape[:2] != self.corpus.ids[self.rows].shape:
            raise FormatError(f"{self.path} belongs to another corpus; delete it and run again.")
        return hidden


def shards(corpora: list[Corpus], folder: Path) -> list[Shard]:
    return [
        Shard(
            corpus,
            slice(start, min(start + ROWS_PER_SHARD, corpus.num_rows)),
            folder / f"{corpus.name}-{start // ROWS_PER_SHARD:05d}.safetensors",
        )
        for corpus in corpora
        for start in range(0, corpus.num_rows, ROWS_PER_SHARD)
    ]


def extract(
    target: Target,
    wanted: list[Shard],
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the missing shards; of these only every n-th from the i-th, for ``part`` = (i, n)."""
    index, parts = part
    mine = wanted[index::parts]
    for done, shard in enumerate(mine):
        progress(done, len(mine))
        if shard.path.exists():
            continue
        hidden = mx.concatenate(list(_hidden(target, shard.corpus.ids[shard.rows])))
        shard.path.parent.mkdir(parents=True, exist_ok=True)
        partial = shard.path.with_name(f".{shard.path.stem}.{os.getpid()}.safetensors")
        try:
            mx.save_safetensors(str(partial), {"hidden": hidden})
            os.replace(partial, shard.path)
        finally:
            partial.unlink(missing_ok=True)
    progress(len(mine), len(mine))


def _hidden(target: Target, ids: npt.NDArray[np.int32]) -> Iterator[mx.array]:
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        rows = mx.array(ids[start : start + _ROWS_AT_ONCE])
        yield target.hidden_states(rows, _CHUNK).astype(mx.float16)
