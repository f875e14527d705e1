"""Token rows to train on: what the target wrote itself, with the author of every token."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlx_redrafter.errors import FormatError, InputError

USER = 0  # role of a token that a user wrote, or the target in a user's place
ASSISTANT = 1  # role of a token that the target wrote as an answer: the only one trained on
TEMPLATE = 2  # role of a token that the chat template put there
PADDING = 3  # role of what fills a short row


@dataclass(frozen=True)
class Corpus:
    """Rows of tokens. R rows, T tokens per row.

    ids (R, T) int32: token ids; role (R, T) uint8: who wrote each;
    temperature (R,) float16: that of the assistant's turns, NaN where it is not known (all, if left
    out)
    """

    name: str
    ids: npt.NDArray[np.int32]
    role: npt.NDArray[np.uint8]
    temperature: npt.NDArray[np.float16] = field(default_factory=lambda: np.empty(0, np.float16))

    def __post_init__(self) -> None:
        if len(self.temperature) != self.num_rows:
            assert len(self.temperature) == 0, "one temperature a row"
            unknown = np.full(self.num_rows, np.nan, dtype=np.float16)
            object.__setattr__(self, "temperature", unknown)

    @property
    def num_rows(self) -> int:
        return int(self.ids.shape[0])


def read_corpus(path: Path, vocab_size: int) -> Corpus:
    """Read an ``.npz`` file with the arrays ``ids`` and ``role`` of one shape (rows, tokens) and,
    if it has it, ``temp`` (rows,); or all such files of a folder, in the order of their names."""
    if not path.is_dir():
        return _read_file(path, vocab_size)
    files = [_read_file(file, vocab_size) for file in sorted(path.glob("*.npz"))]
    if not files:
        raise InputError(f"corpus {path} has no .npz files.")
    lengths = {corpus.ids.shape[1] for corpus in files}
    if len(lengths) > 1:
        raise FormatError(f"corpus {path} has rows of several lengths: {sorted(lengths)}.")
    return Corpus(
        path.name,
        np.concatenate([corpus.ids for corpus in files]),
        np.concatenate([corpus.role for corpus in files]),
        np.concatenate([corpus.temperature for corpus in files]),
    )


def _read_file(path: Path, vocab_size: int) -> Corpus:
    if not path.is_file():
        raise InputError(f"corpus {path} does not exist.")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, role = arrays["ids"], arrays["role"]
            temperature = arrays["temp"] if "temp" in arrays else np.empty(0)
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
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
    if int(role.max()) > PADDING or int(role.min()) < 0:
        raise FormatError(f"corpus {path}: role must be 0 to {PADDING}.")
    if temperature.size and (temperature.dtype.kind != "f" or temperature.shape != ids.shape[:1]):
        raise FormatError(f"corpus {path}: temp must be one number a row.")
    return Corpus(
        path.stem, ids.astype(np.int32), role.astype(np.uint8), temperature.astype(np.float16)
    )


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
