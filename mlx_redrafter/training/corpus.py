"""Token rows to train on: what the target wrote itself, with the author of every token."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlx_redrafter.errors import FormatError, InputError

ASSISTANT = 1  # role of a token that the target wrote as an answer


@dataclass(frozen=True)
class Corpus:
    """One file of rows. R rows, T tokens per row.

    ids (R, T) int32: token ids; role (R, T) uint8: 0 user, 1 assistant, 2 template
    """

    name: str
    ids: npt.NDArray[np.int32]
    role: npt.NDArray[np.uint8]

    @property
    def num_rows(self) -> int:
        return int(self.ids.shape[0])


def read_corpus(path: Path, vocab_size: int) -> Corpus:
    """Read an ``.npz`` file with the arrays ``ids`` and ``role`` of one shape (rows, tokens)."""
    if not path.is_file():
        raise InputError(f"corpus {path} does not exist.")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, role = arrays["ids"], arrays["role"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise FormatError(f"corpus {path} is no .npz file with ids and role: {error}") from None
    if ids.ndim != 2 or ids.shape != role.shape or ids.size == 0:
        raise FormatError(
            f"corpus {path}: ids {ids.shape} and role {role.shape} must be 2-D, equal."
        )
    if ids.dtype.kind not in "ui" or role.dtype.kind not in "ui":
        raise FormatError(f"corpus {path}: ids and role must be integers.")
    if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise FormatError(
            f"corpus {path} has token ids outside 0..{vocab_size - 1}: other tokenizer?"
        )
    return Corpus(path.stem, ids.astype(np.int32), role.astype(np.uint8))


def anchors(
    role: npt.NDArray[np.uint8], known: npt.NDArray[np.bool_], horizon: int
) -> npt.NDArray[np.bool_]:
    """Where the drafter can be trained, and how far ahead: (R, T, horizon) bool.

    role (R, T); known (R, T): the token is in the draft vocabulary.

    At anchor p the drafter reads the target's hidden state at p and token p + 1, and depth i (from
    1) predicts token p + 1 + i. Entry [r, p, i - 1] is true where tokens p + 1 to p + 1 + i all are
    the assistant's, so that no draft crosses a turn's end, and those after p + 1 can be drafted.
    """
    rows, length = role.shape
    written = np.zeros((rows, length + horizon + 1), dtype=np.bool_)
    written[:, :length] = role == ASSISTANT
    draftable = written.copy()
    draftable[:, :length] &= known
    alive = written[:, 1 : length + 1].copy()
    usable = np.zeros((rows, length, horizon), dtype=np.bool_)
    for depth in range(1, horizon + 1):
        alive &= draftable[:, 1 + depth : 1 + depth + length]
        usable[:, :, depth - 1] = alive
    return usable
