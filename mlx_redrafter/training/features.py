"""Hidden states of the frozen target over a corpus, kept on disk in shards or computed again.

A shard is written under a temporary name and renamed, so an interrupted run goes on where it
stopped, and several processes can share the work (``part``).
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import FormatError
from mlx_redrafter.machine.files import write_error
from mlx_redrafter.training.corpus import Corpus

ROWS_PER_SHARD = 64
BYTES_PER_VALUE = 2  # float16
_ROWS_AT_ONCE = 8
_CHUNK = 96  # tokens per pass: short chunks skip most of the scores above the diagonal


@dataclass(frozen=True)
class Shard:
    """``rows`` of a corpus and the file with their hidden states (rows, T, D) float16.

    ``target`` computes them where there is no file.
    """

    corpus: Corpus
    rows: slice
    path: Path
    target: Target | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.corpus.ids[self.rows].size)

    def hidden(self) -> npt.NDArray[np.float16]:
        if self.target is not None and not self.path.exists():
            return np.array(_hidden(self.target, self.corpus.ids[self.rows]))
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


def shards(
    corpora: list[Corpus],
    folder: Path,
    target: Target | None = None,
    made_by: str = "",
    rows_per_shard: int = ROWS_PER_SHARD,
) -> list[Shard]:
    """All rows of the corpora, ``rows_per_shard`` at a time.

    ``made_by`` is the target's fingerprint. It and the tokens are part of a file's name, so that
    hidden states of another text or of another model are never taken for these.
    """
    return [
        Shard(
            corpus,
            rows,
            folder / f"{corpus.name}-{index:05d}-{_digest(corpus.ids[rows], made_by)}.safetensors",
            target,
        )
        for corpus in corpora
        for index, start in enumerate(range(0, corpus.num_rows, rows_per_shard))
        for rows in [slice(start, min(start + rows_per_shard, corpus.num_rows))]
    ]


def extract(
    target: Target,
    wanted: list[Shard],
    part: tuple[int, int] = (0, 1),
    budget_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the missing shards; of these only every n-th from the i-th, for ``part`` = (i, n).

    Of the shards, as many of the first ones as fit in ``budget_bytes`` (None: all). ``progress``
    gets tokens done and tokens in all.
    """
    index, parts = part
    mine = _within(wanted, budget_bytes, target.hidden_size)[index::parts]
    total = sum(shard.num_tokens for shard in mine)
    done = 0
    for shard in mine:
        progress(done, total)
        done += shard.num_tokens
        if shard.path.exists():
            continue
        _write(shard.path, _hidden(target, shard.corpus.ids[shard.rows]))
    progress(total, total)


def _digest(ids: npt.NDArray[np.int32], made_by: str) -> str:
    text = hashlib.sha256(np.ascontiguousarray(ids).tobytes())
    text.update(repr((ids.shape, made_by)).encode())
    return text.hexdigest()[:12]


def _within(wanted: list[Shard], budget_bytes: int | None, width: int) -> list[Shard]:
    if budget_bytes is None:
        return wanted
    kept, used = [], 0
    for shard in wanted:
        used += shard.num_tokens * width * BYTES_PER_VALUE
        if used > budget_bytes:
            break
        kept.append(shard)
    return kept


def _write(path: Path, hidden: mx.array) -> None:
    partial = path.with_name(f".{path.stem}.{os.getpid()}.safetensors")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(partial), {"hidden": hidden})
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # MLX reports a full disk as a RuntimeError
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise write_error(error if isinstance(error, OSError) else full, path.parent) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _hidden(target: Target, ids: npt.NDArray[np.int32]) -> mx.array:
    parts = []
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        rows = mx.array(ids[start : start + _ROWS_AT_ONCE])
        parts.append(target.hidden_states(rows, _CHUNK).astype(mx.float16))
        mx.eval(parts[-1])
    return mx.concatenate(parts)
