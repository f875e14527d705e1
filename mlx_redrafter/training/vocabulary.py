"""Which tokens a drafter can draft: the most frequent ones, and enough for any text at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_redrafter.errors import InputError
from mlx_redrafter.text import byte_tokens
from mlx_redrafter.training.corpus import ASSISTANT, Corpus


@dataclass(frozen=True)
class DraftVocabulary:
    """tokens (V_d,) int32: target ids, most frequent first; coverage: the share of what the
    assistant wrote that can be drafted; floor: how many are in whatever their frequency."""

    tokens: npt.NDArray[np.int32]
    coverage: float
    floor: int


def count_tokens(corpora: Iterable[Corpus], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often the assistant wrote each token: (V,)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for corpus in corpora:
        counts += np.bincount(corpus.ids[corpus.role == ASSISTANT], minlength=vocab_size)
    return counts


def draft_vocabulary(counts: npt.NDArray[Any], count: int, tokenizer: Any) -> DraftVocabulary:
    """The ``count`` tokens that were written most often, ``counts`` (V,), the floor among them.

    Ties, and tokens never seen, follow in the order of their ids, which in a BPE vocabulary is
    the order of merges and so roughly of frequency. Raises InputError where the floor has no room.
    """
    vocab_size = counts.shape[0]
    floor = [token for token in floor_tokens(tokenizer) if token < vocab_size]
    if count < min(len(floor), vocab_size) or count < 1:
        raise InputError(
            f"draft_vocab is {count}; it must be at least {max(len(floor), 1)}, for the single "
            "bytes and the ends of a turn."
        )
    by_frequency = np.argsort(-counts, kind="stable")
    rest = by_frequency[~np.isin(by_frequency, floor)]
    chosen = np.concatenate([np.array(floor, dtype=np.int64), rest[: count - len(floor)]])
    tokens = by_frequency[np.isin(by_frequency, chosen)].astype(np.int32)
    coverage = float(counts[tokens].sum() / max(counts.sum(), 1))
    return DraftVocabulary(tokens, coverage, len(floor))


def floor_tokens(tokenizer: Any) -> list[int]:
    """Ids that every draft vocabulary holds: single bytes, in which any script can be written, and
    the ends of a turn. Sorted; a tokenizer that lacks a byte just has fewer."""
    bytes_ = byte_tokens(tokenizer) or _byte_letters(tokenizer)
    return sorted({*bytes_, *_ends(tokenizer)})


def _byte_letters(tokenizer: Any) -> set[int]:
    """A byte-level BPE writes each byte as a letter of its own: GPT-2's table."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab()
    return {vocabulary[letter] for letter in ByteLevel.alphabet() if letter in vocabulary}


def _ends(tokenizer: Any) -> set[int]:
    """mlx-lm's wrapper has a set of them, a bare tokenizer one id or none."""
    found = getattr(tokenizer, "eos_token_ids", None)
    return {found} if isinstance(found, int) else set(found or ())
