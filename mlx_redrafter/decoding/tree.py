"""The tree that one verify pass checks: beams merged along their shared prefixes.

Letters for shapes: W beam width, L beam length, N nodes of the tree (root included).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_redrafter.errors import InputError


@dataclass(frozen=True)
class Beams:
    """What a beam search found. One entry is one (parent, token), so this already is a prefix tree.

    tokens  (L, W) int32: target token ids
    parents (L, W) int32: the parent's index in the level above (level 0: always 0, the root)
    scores  (L, W) float32: joint log-probability of the path; -inf marks padding
    """

    tokens: mx.array
    parents: mx.array
    scores: mx.array


@dataclass(frozen=True)
class Tree:
    """N nodes; node 0 is the root (the last emitted token); parents come before children.

    tokens  (N,) int32
    parents (N,) int32: node index of the parent; the root's is 0
    depths  (N,) int32: 0 for the root
    mask    (N, N) bool: mask[i, j] is true where node j is node i or an ancestor of it
    valid   (N,) bool: false for padding, which is never accepted
    chain   True where node i + 1 is the only child of node i: no branches, no padding
    """

    tokens: mx.array
    parents: mx.array
    depths: mx.array
    mask: mx.array
    valid: mx.array
    max_depth: int
    chain: bool = False

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def arrays(self) -> list[mx.array]:
        """What a verify pass waits for: of a chain only the tokens, its shape is known."""
        if self.chain:
            return [self.tokens]
        return [self.tokens, self.parents, self.depths, self.mask, self.valid]


def chain_tree(tokens: mx.array) -> Tree:
    """The tree of one beam: tokens (N,), the root first. N = 1 is plain decoding."""
    nodes = mx.arange(tokens.shape[0], dtype=mx.int32)
    return Tree(
        tokens=tokens,
        parents=mx.maximum(nodes - 1, 0),
        depths=nodes,
        mask=nodes[:, None] >= nodes[None],
        valid=mx.ones(tokens.shape, dtype=mx.bool_),
        max_depth=tokens.shape[0] - 1,
        chain=True,
    )


def build_tree(token: mx.array, beams: Beams, token_budget: int) -> Tree:
    """Keep the ``token_budget`` best nodes of the beams under the root ``token`` ().

    A joint log-probability never rises along a path, and ties go to the lower depth-major index, so
    the parent of a kept node is kept. The nodes are ordered without a sort: the best chain first
    (then a commit mostly keeps a prefix of the rows), the others by rank.

    Returns a tree of N = token_budget + 1 nodes. Raises InputError where the beams have fewer.
    """
    length, width = beams.tokens.shape
    count = length * width
    if not 1 <= token_budget <= count:
        raise InputError(f"token_budget is {token_budget}; the beams have {count} nodes.")
    root = token.reshape(1).astype(mx.int32)
    if width == 1:
        return chain_tree(mx.concatenate([root, beams.tokens[:token_budget, 0].astype(mx.int32)]))

    index = mx.arange(count, dtype=mx.int32)
    scores = beams.scores.reshape(-1).astype(mx.float32)
    depths = index // width + 1
    # The parent of entry (t, w) is entry (t - 1, parents[t, w]); -1 stands for the root.
    parents = mx.where(depths == 1, -1, (depths - 2) * width + beams.parents.reshape(-1))
    rank = (_beats(scores) | _ties(scores, index)).astype(mx.int32).sum(axis=1)
    chain = _best_chain(scores, parents, depths, length)

    # Slot of each entry: chain entries by depth, then the kept others by rank. Root is slot 0.
    kept = rank < token_budget
    on_chain = chain & kept
    others = kept & ~chain
    before = (rank[None] < rank[:, None]) & others[None]
    slot = mx.where(on_chain, depths, 1 + on_chain.sum() + before.astype(mx.int32).sum(axis=1))
    slot = mx.where(kept, slot, 0)
    entry = mx.argmax(slot[None] == mx.arange(1, token_budget + 1)[:, None], axis=1)

    parent_slot = mx.where(parents[entry] < 0, 0, slot[mx.maximum(parents[entry], 0)])
    zero = mx.zeros((1,), dtype=mx.int32)
    node_parents = mx.concatenate([zero, parent_slot.astype(mx.int32)])
    return Tree(
        tokens=mx.concatenate([root, beams.tokens.reshape(-1)[entry].astype(mx.int32)]),
        parents=node_parents,
        depths=mx.concatenate([zero, depths[entry]]),
        mask=_ancestors(node_parents, min(length, token_budget)),
        valid=mx.concatenate([mx.array([True]), mx.isfinite(scores[entry])]),
        max_depth=min(length, token_budget),
    )


def _beats(scores: mx.array) -> mx.array:
    """(M, M) bool: entry [i, j] is true where j scores higher than i."""
    return scores[None] > scores[:, None]


def _ties(scores: mx.array, index: mx.array) -> mx.array:
    """(M, M) bool: entry [i, j] is true where j ties with i and comes first."""
    return (scores[None] == scores[:, None]) & (index[None] < index[:, None])


def _best_chain(scores: mx.array, parents: mx.array, depths: mx.array, length: int) -> mx.array:
    """(M,) bool: the path that takes the best child at every node, from the root down.

    The best child of a kept node may itself not be kept; the walk then ends there.
    """
    index = mx.arange(scores.shape[0], dtype=mx.int32)
    current = mx.array(-1, dtype=mx.int32)
    chain = mx.zeros(scores.shape, dtype=mx.bool_)
    alive = mx.array(True)
    for depth in range(1, length + 1):
        children = (parents == current) & (depths == depth) & alive
        alive = children.any()
        current = mx.argmax(mx.where(children, scores, -mx.inf)).astype(mx.int32)
        # With all children at -inf the argmax may be no child at all.
        alive = alive & children[current]
        chain = chain | ((index == current) & alive)
    return chain


def _ancestors(parents: mx.array, max_depth: int) -> mx.array:
    """(N, N) bool: itself and its ancestors, for each node. The root's parent is the root."""
    nodes = mx.arange(parents.shape[0], dtype=mx.int32)
    current, mask = nodes, nodes[:, None] == nodes[None]
    for _ in range(max_depth):
        current = parents[current]
        mask = mask | (current[:, None] == nodes[None])
    return mask
