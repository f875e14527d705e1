"""The tree walk against a walk on the host."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.accept import accept
from tests import reference
from tests.decoding.harness import device_tree
from tests.reference import HostTree


def walk(tree: HostTree, chosen: list[int], padding: int = 0) -> tuple[list[int], list[int]]:
    """(path, tokens) of the engine, cut to what counts. `count` is the number of tokens, bonus
    included.
    """
    result = accept(device_tree(tree, padding), mx.array(chosen + [0] * padding, mx.int32))
    count = int(result.count.item())
    width = max(tree.depths) + 1
    assert result.path.shape[0] >= width
    assert result.tokens.shape[0] >= width
    path = result.path.tolist()
    assert all(0 <= node < len(tree.tokens) + padding for node in path), "padding must be a row"
    return path[:count], result.tokens.tolist()[:count]


@pytest.mark.parametrize("nodes", [1, 2, 4, 9, 16])
def test_random_trees(nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    reached = set()
    for _ in range(25):
        tree = reference.random_tree(rng, nodes, vocab=12)
        chosen = [int(t) for t in rng.integers(12, size=nodes)]
        goal = int(rng.integers(nodes))  # lead the walk there, else it mostly stops at the root
        for node in tree.ancestors(goal)[1:]:
            chosen[tree.parents[node]] = tree.tokens[node]
        expected = reference.walk(tree, chosen)
        assert walk(tree, chosen) == expected
        reached.add(len(expected[1]))
    assert len(reached) > 1 or nodes == 1


def test_rejected_at_the_root_still_emits_one_token() -> None:
    tree = HostTree([5, 1, 2, 3], [0, 0, 0, 1])
    assert walk(tree, [9, 3, 3, 3]) == ([0], [9])


def test_a_child_of_another_node_does_not_count() -> None:
    """The target's token after the root is 3. Node 3 is a 3, but below node 1."""
    tree = HostTree([5, 1, 2, 3], [0, 0, 0, 1])
    assert walk(tree, [3, 3, 3, 3]) == ([0], [3])


def test_sibling_path() -> None:
    tree = HostTree([5, 1, 1, 2, 8], [0, 0, 1, 0, 3])
    assert walk(tree, [2, 0, 0, 8, 4]) == ([0, 3, 4], [2, 8, 4])


def test_whole_chain_and_bonus() -> None:
    tree = HostTree([5, 1, 2, 3], [0, 0, 1, 2])
    assert walk(tree, [1, 2, 3, 4]) == ([0, 1, 2, 3], [1, 2, 3, 4])


def test_padding_is_never_accepted() -> None:
    """Padding nodes repeat the root's token below the root, and the target wants just that."""
    tree = HostTree([5, 1], [0, 0])
    assert walk(tree, [5, 7], padding=3) == ([0], [5])


def test_token_zero_is_a_token() -> None:
    tree = HostTree([0, 0, 0], [0, 0, 1])
    assert walk(tree, [0, 0, 0]) == ([0, 1, 2], [0, 0, 0])
    assert walk(tree, [0, 0, 0], padding=2) == ([0, 1, 2], [0, 0, 0])
