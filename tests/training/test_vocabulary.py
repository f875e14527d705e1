"""What can be drafted: the frequent tokens, and single bytes and ends whatever their frequency."""

from typing import Any

import numpy as np
import pytest

from mlx_redrafter.errors import InputError
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.vocabulary import count_tokens, draft_vocabulary, floor_tokens
from tests import fakes

RARE = "日本語 кот ꙮ 🦊\u0000\n"  # of no corpus here


def counts_of(tokenizer: Any, text: str) -> np.ndarray:
    ids = tokenizer.encode(text)
    return np.bincount(ids, minlength=len(tokenizer.get_vocab()))


def test_only_what_the_assistant_wrote_counts() -> None:
    ids = np.array([[3, 3, 7, 7, 7, 5, 5, 5, 5]], dtype=np.int32)
    role = np.array([[1, 1, 1, 1, 1, 0, 2, 3, 1]], dtype=np.uint8)
    corpus = Corpus("own", ids, role)
    assert count_tokens([corpus, corpus], 9).tolist() == [0, 0, 0, 4, 0, 2, 0, 6, 0]


@pytest.mark.parametrize("make", [fakes.byte_level, fakes.sentencepiece])
def test_the_floor_writes_any_text(make: Any) -> None:
    """With the floor alone, text that was never seen can be spelled byte by byte."""
    tokenizer = make()
    floor = set(floor_tokens(tokenizer))
    assert len(floor) == 256 + len(tokenizer.eos_token_ids)
    assert set(tokenizer.eos_token_ids) <= floor
    spelled = set(tokenizer.encode(RARE, add_special_tokens=False))
    frequent = {tokenizer.convert_tokens_to_ids("\u2581")}  # sentencepiece's space, from the data
    assert spelled - frequent <= floor
    assert len(spelled) > 10


@pytest.mark.parametrize("make", [fakes.byte_level, fakes.sentencepiece])
def test_most_frequent_first_and_the_floor_among_them(make: Any) -> None:
    tokenizer = make()
    counts = counts_of(tokenizer, "the quick the the fox. hello there, hello the")
    floor = floor_tokens(tokenizer)
    found = draft_vocabulary(counts, len(floor) + 3, tokenizer)
    assert found.tokens.dtype == np.int32
    assert len(set(found.tokens.tolist())) == len(floor) + 3 == found.tokens.size
    assert set(floor) <= set(found.tokens.tolist())
    assert found.floor == len(floor)
    order = [(-counts[token], token) for token in found.tokens]
    assert order == sorted(order)
    left_out = sorted(set(range(counts.size)) - set(found.tokens.tolist()))
    others = [token for token in found.tokens if token not in floor]
    assert min(counts[others]) >= max(counts[left_out])
    assert found.coverage == pytest.approx(counts[found.tokens].sum() / counts.sum())
    assert 0 < found.coverage < 1


def test_the_whole_vocabulary_covers_all() -> None:
    tokenizer = fakes.byte_level()
    counts = counts_of(tokenizer, "hello there")
    everything = draft_vocabulary(counts, counts.size, tokenizer)
    assert sorted(everything.tokens.tolist()) == list(range(counts.size))
    assert everything.coverage == 1.0


def test_a_vocabulary_without_text_has_no_share_to_cover() -> None:
    tokenizer = fakes.byte_level()
    counts = np.zeros(len(tokenizer.get_vocab()), dtype=np.int64)
    assert draft_vocabulary(counts, 300, tokenizer).coverage == 0.0


def test_a_bare_tokenizer_and_one_without_an_end() -> None:
    wrapped = fakes.byte_level()
    assert floor_tokens(wrapped._tokenizer) == floor_tokens(wrapped)
    wrapped._tokenizer.eos_token = None
    assert len(floor_tokens(wrapped._tokenizer)) == 256


def test_ids_past_the_model_s_vocabulary_are_left_out() -> None:
    """A tokenizer may know more tokens than the model has rows for."""
    tokenizer = fakes.byte_level()
    few = np.ones(100, dtype=np.int64)
    assert max(draft_vocabulary(few, 100, tokenizer).tokens) == 99


def test_a_count_below_the_floor_is_refused() -> None:
    tokenizer = fakes.byte_level()
    counts = np.ones(len(tokenizer.get_vocab()), dtype=np.int64)
    with pytest.raises(InputError, match="draft_vocab is 256; it must be at least 257"):
        draft_vocabulary(counts, 256, tokenizer)
