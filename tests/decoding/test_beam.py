"""beam_search against a NumPy beam search over the NumPy drafter."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.tree import Beams, build_tree
from tests import reference
from tests.decoding.test_drafter import HIDDEN, KINDS, VOCAB, make, oracle, search

Found = tuple[Beams, list[dict[tuple[int, ...], float]]]


def found_and_expected(kind: str, width: int, length: int, seed: int = 0) -> Found:
    rng = np.random.default_rng(seed)
    embedding = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    hidden = rng.standard_normal(HIDDEN).astype(np.float32)
    root = int(rng.integers(VOCAB))
    drafter = make(kind, seed)
    beams = search(drafter, embedding, hidden, root, width, length)
    twin, ids = oracle(drafter, kind, embedding)
    levels = reference.beam_search(
        lambda path: twin.log_q(hidden, (root, *path)), ids, width, length
    )
    return beams, levels


def check(
    beams: Beams, levels: list[dict[tuple[int, ...], float]], width: int, length: int
) -> None:
    arrays = [np.array(a) for a in (beams.tokens, beams.parents, beams.scores)]
    assert all(a.shape == (length, width) for a in arrays)
    assert beams.tokens.dtype == beams.parents.dtype == mx.int32
    assert beams.scores.dtype == mx.float32
    assert (arrays[1] >= 0).all()
    assert (arrays[1] < width).all(), "parents are columns, also of padding"
    assert (arrays[0] >= 0).all()
    assert (arrays[0] < VOCAB).all(), "tokens can be embedded, also of padding"
    slots = reference.beam_paths(*arrays)
    for level, expected in enumerate(levels):
        found = {path: score for score, depth, _, path in slots if depth == level}
        assert found.keys() == expected.keys()
        assert all(found[path] == pytest.approx(expected[path], abs=2e-4) for path in found)
        live = arrays[2][level][: len(found)]
        assert np.isfinite(live).all(), "padding comes last"
        assert (np.diff(live) <= 0).all(), "best first"


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    check(*found_and_expected(kind, 3, 3), 3, 3)


@pytest.mark.parametrize("length", range(1, 9))
def test_lengths(length: int) -> None:
    check(*found_and_expected("default", 2, length), 2, length)


@pytest.mark.parametrize("width", [1, 4, 8, 16])
def test_widths(width: int) -> None:
    check(*found_and_expected("default", width, 3), width, 3)


@pytest.mark.parametrize(
    ("kind", "width"), [("default", VOCAB), ("default", VOCAB + 5), ("reduced", 13)]
)
def test_width_beyond_the_vocabulary(kind: str, width: int) -> None:
    """More beams than draft tokens: level 1 has padding at -inf, later levels fill up."""
    beams, levels = found_and_expected(kind, width, 3)
    rows = KINDS[kind].get("draft_vocab") or VOCAB
    assert np.isneginf(np.array(beams.scores[0])).sum() == width - rows
    check(beams, levels, width, 3)
    tree = build_tree(mx.array(1), beams, 3 * width)
    kept = tree.valid.sum().item() - 1
    assert kept == np.isfinite(np.array(beams.scores)).sum()


def test_reduced_vocabulary_gives_target_ids() -> None:
    drafter = make("reduced")
    assert drafter.draft_tokens is not None
    ids = set(drafter.draft_tokens.tolist())
    beams, _ = found_and_expected("reduced", 3, 4)
    assert set(np.array(beams.tokens).ravel().tolist()) <= ids
    assert max(ids) >= 11, "the fixture must not be the identity"


def test_scores_never_rise_along_a_path() -> None:
    """Also where the head is certain: log q rounds to 0 and must not become positive."""
    drafter = make("default")
    layers = drafter.parameters()
    drafter.load_weights([("lm_head.1.weight", layers["lm_head"][1]["weight"] * 200)], strict=False)
    table = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    beams = search(drafter, table, np.ones(HIDDEN, np.float32), 3, 4, 5)
    scores, parents = np.array(beams.scores), np.array(beams.parents)
    assert (scores[0] <= 0).all()
    for level in range(1, 5):
        assert (scores[level] <= scores[level - 1][parents[level]]).all()


def test_a_nan_hidden_state_drafts_without_harm() -> None:
    """Whatever comes out must still be a tree: tokens in range, parents in range."""
    table = np.zeros((VOCAB, HIDDEN), np.float32)
    beams = search(make("default"), table, np.full(HIDDEN, np.nan, np.float32), 3, 3, 3)
    tree = build_tree(mx.array(3), beams, 6)
    tokens, parents = np.array(tree.tokens), np.array(tree.parents)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert (parents <= np.arange(7)).all()
