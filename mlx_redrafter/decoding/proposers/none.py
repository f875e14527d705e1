"""No drafting: a tree of the root alone, which makes the loop plain decoding."""

from __future__ import annotations

import mlx.core as mx

from mlx_redrafter.decoding.tree import Tree, chain_tree


def propose_nothing(hidden: mx.array | None, token: mx.array) -> Tree:
    return chain_tree(token.reshape(1).astype(mx.int32))
