"""The one rule of acceptance: walk the tree with the target's own tokens.

Draw one target token per node, start at the root, step to the child that equals the drawn token,
stop at the first miss. Exact for any tree and any way to draw, because each token is drawn from the
target's law given the emitted prefix, whatever was drafted (SpecInfer's multi-step rule with
point-mass drafts; reference: arXiv 2305.09781).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_redrafter.decoding.tree import Tree


@dataclass(frozen=True)
class Walk:
    """The accepted path, on the device.

    path   (D + 1,) int32: visited nodes, the root first; entries from ``count`` on are padding
    tokens (D + 1,) int32: the token drawn at each visited node; the last valid one is the bonus
    count  () int32: visited nodes = emitted tokens
    last   () int32: the last visited node, whose state predicted the bonus
    """

    path: mx.array
    tokens: mx.array
    count: mx.array
    last: mx.array

    @property
    def packed(self) -> mx.array:
        """(2D + 3,) int32: count, path, tokens - all that the host reads of a step."""
        return mx.concatenate([self.count.reshape(1), self.path, self.tokens])


def accept(tree: Tree, chosen: mx.array) -> Walk:
    """Walk ``tree`` with ``chosen`` (N,), the target's token at every node."""
    if tree.chain:
        return _accept_chain(tree, chosen)
    node = mx.array(0, dtype=mx.int32)
    count = mx.array(1, dtype=mx.int32)
    alive = mx.array(True)
    path = [node]
    for depth in range(1, tree.max_depth + 1):
        hit = (tree.parents == node) & (tree.tokens == chosen[node])
        hit = hit & tree.valid & (tree.depths == depth)
        alive = alive & hit.any()
        node = mx.where(alive, mx.argmax(hit).astype(mx.int32), node)
        count = count + alive.astype(mx.int32)
        path.append(node)
    nodes = mx.stack(path)
    return Walk(path=nodes, tokens=chosen[nodes], count=count, last=node)


def _accept_chain(tree: Tree, chosen: mx.array) -> Walk:
    hits = (tree.tokens[1:] == chosen[:-1]).astype(mx.int32)
    # The root always counts, which also spares mlx 0.32.2 a product over no rows.
    visited = mx.cumprod(mx.concatenate([mx.ones((1,), dtype=mx.int32), hits]))
    count = visited.sum().astype(mx.int32)
    nodes = mx.arange(tree.num_nodes, dtype=mx.int32)
    return Walk(path=nodes, tokens=chosen, count=count, last=count - 1)
