"""build_tree against the brute force over all prefixes of all beams."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.tree import Beams, Tree, build_tree
from tests import reference
from tests.reference import HostTree

ROOT = 7


def random_beams(
    seed: int, width: int, length: int, vocab: int = 40, padding: float = 0.0, grid: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Beams as a beam search gives them: best first in each level, joint scores that never rise
    along a path.

    `padding` is the share of slots at -inf, `grid` rounds the scores so that they tie.
    """
    rng = np.random.default_rng(seed)
    tokens = np.zeros((length, width), np.int32)
    parents = np.zeros((length, width), np.int32)
    scores = np.full((length, width), -np.inf, np.float32)
    above = [0.0]
    for level in range(length):
        live = max(1, round(width * (1 - padding)))
        slots: dict[tuple[int, int], float] = {}
        while len(slots) < min(live, len(above) * vocab):
            parent, token = int(rng.integers(len(above))), int(rng.integers(vocab))
            drop = rng.exponential(1.0)
            slots[parent, token] = above[parent] - (round(drop / grid) * grid if grid else drop)
        best = sorted(slots.items(), key=lambda item: -item[1])
        for column, ((parent, token), score) in enumerate(best):
            tokens[level, column], parents[level, column] = token, parent
            scores[level, column] = score
        above = [float(s) for s in scores[level] if np.isfinite(s)]
    return tokens, parents, scores


def build(beams: tuple[np.ndarray, np.ndarray, np.ndarray], budget: int) -> Tree:
    tokens, parents, scores = beams
    made = Beams(tokens=mx.array(tokens), parents=mx.array(parents), scores=mx.array(scores))
    return build_tree(mx.array(ROOT), made, budget)


def host(tree: Tree) -> HostTree:
    return HostTree(tree.tokens.tolist(), tree.parents.tolist())


def kept_paths(tree: Tree) -> list[tuple[int, ...]]:
    lists, valid = host(tree), tree.valid.tolist()
    return [lists.path(node) for node in range(1, len(valid)) if valid[node]]


SHAPES = [(1, 1), (1, 5), (2, 3), (3, 4), (4, 4), (4, 8), (6, 2), (8, 3)]


@pytest.mark.parametrize(("width", "length"), SHAPES)
def test_keeps_the_best_prefixes(width: int, length: int) -> None:
    for seed in range(3):
        beams = random_beams(seed, width, length)
        for budget in sorted({1, 2, width, (width * length + 1) // 2, width * length}):
            if budget <= width * length:
                tree = build(beams, budget)
                assert tree.tokens.shape == (budget + 1,)
                paths = kept_paths(tree)
                assert len(set(paths)) == len(paths), "one node is one (parent, token)"
                assert set(paths) == set(reference.best_prefixes(*beams, budget))


@pytest.mark.parametrize(("width", "length"), SHAPES)
def test_structure(width: int, length: int) -> None:
    for seed in range(3):
        budget = max(1, width * length // 2)
        tree = build(random_beams(seed, width, length, padding=0.3), budget)
        lists = host(tree)  # asserts that parents come before children
        assert lists.tokens[0] == ROOT
        assert lists.parents[0] == 0
        assert tree.valid[0].item()
        valid = np.array(tree.valid)
        assert (np.array(tree.depths)[valid] == np.array(lists.depths)[valid]).all()
        mask = np.array(tree.mask)
        assert mask.dtype == np.bool_, "an additive mask is not skipped by the attention kernels"
        assert (mask[valid] == lists.mask()[valid] * valid[None]).all()
        assert mask.any(axis=1).all(), "an empty row is NaN in softmax"
        assert tree.depths.dtype == tree.tokens.dtype == tree.parents.dtype == mx.int32
        assert isinstance(tree.max_depth, int)
        assert max(lists.depths) <= tree.max_depth <= length


def test_padding_is_dropped_and_never_valid() -> None:
    for seed in range(5):
        beams = random_beams(seed, 5, 3, padding=0.6)
        live = len(reference.beam_paths(*beams))
        tree = build(beams, 15)
        assert tree.valid.sum().item() == 1 + live
        assert set(kept_paths(tree)) == set(reference.best_prefixes(*beams, 15))
        assert int(tree.depths.max().item()) <= 3


def test_all_padding_leaves_the_root() -> None:
    empty = np.zeros((3, 4), np.int32)
    tree = build((empty, empty, np.full((3, 4), -np.inf, np.float32)), 6)
    assert tree.valid.tolist() == [True] + [False] * 6
    assert np.array(tree.mask)[0].tolist() == [True] + [False] * 6


@pytest.mark.parametrize("seed", range(6))
def test_ties_keep_the_tree_connected(seed: int) -> None:
    """With scores on a coarse grid many nodes tie with their parents; `kept_paths` fails on an
    orphan.
    """
    beams = random_beams(seed, 4, 4, grid=1.0)
    slots = reference.beam_paths(*beams)
    assert len({slot[0] for slot in slots}) < len(slots) - 4, "the fixture must tie"
    for budget in range(1, 17):
        assert set(kept_paths(build(beams, budget))) == set(reference.best_prefixes(*beams, budget))


def test_certain_drafts_tie_at_zero() -> None:
    """log q = 0 along a whole path: all its nodes score the same as the root's first child."""
    tokens = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    parents = np.array([[0, 0], [0, 0], [0, 1]], np.int32)
    scores = np.array([[0, -5], [0, -5], [0, -5]], np.float32)
    assert kept_paths(build((tokens, parents, scores), 3)) == [(1,), (1, 3), (1, 3, 5)]
    assert set(kept_paths(build((tokens, parents, scores), 2))) == {(1,), (1, 3)}


def test_best_chain_comes_first() -> None:
    """Following the best kept child from the root gives rows 1, 2, 3, ...: most commits keep a
    prefix.
    """
    for seed in range(12):
        beams = random_beams(seed, 4, 4)
        score = {path: value for value, *_, path in reference.beam_paths(*beams)}
        tree = build(beams, 9)
        lists = host(tree)
        node, row = 0, 0
        while children := [n for n in range(1, 10) if lists.parents[n] == node]:
            node, row = max(children, key=lambda n: score[lists.path(n)]), row + 1
            assert node == row, f"the best chain leaves the prefix at depth {row}: {lists}"


def test_width_one_is_a_chain() -> None:
    tree = build(random_beams(0, 1, 5), 5)
    assert tree.chain
    assert tree.parents.tolist() == [0, 0, 1, 2, 3, 4]
    assert tree.depths.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array(tree.mask).tolist() == np.tril(np.ones((6, 6), bool)).tolist()


def test_worked_example() -> None:
    """Root A; beams B C | B D | E F: `B` is shared by two beams and becomes one node."""
    tokens = np.array([[11, 14], [12, 13]], np.int32)
    parents = np.array([[0, 0], [0, 0]], np.int32)
    scores = np.array([[-0.1, -2.0], [-0.3, -0.7]], np.float32)
    tree = build((tokens, parents, scores), 4)
    assert set(kept_paths(tree)) == {(11,), (11, 12), (11, 13), (14,)}
    assert kept_paths(tree)[:2] == [(11,), (11, 12)]
    assert set(kept_paths(build((tokens, parents, scores), 3))) == {(11,), (11, 12), (11, 13)}


def test_larger_budget_only_adds() -> None:
    beams = random_beams(3, 4, 4)
    trees = [set(kept_paths(build(beams, budget))) for budget in range(1, 17)]
    assert all(small < large for small, large in pairwise(trees))
