"""One token per node: the target's argmax, or a draw with noise keyed by absolute position.

The token at position t is argmax(log p_t / T + gumbel(key)), key = (hash of the seed, t). One
Gumbel vector belongs to one position and is shared by all nodes at that depth, so the text is a
function of (prompt, seed) alone: drafting on or off, any tree and any budget give the same tokens,
up to ties (design 4.4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import mlx.core as mx

from mlx_redrafter.decoding.options import SamplingOptions
from mlx_redrafter.decoding.tree import Tree

# (logits (N, V), tree, position of the root) -> tokens (N,) int32
Chooser = Callable[[mx.array, Tree, int], mx.array]


def make_chooser(sampling: SamplingOptions) -> Chooser:
    """How to choose the token that follows each node of a tree."""
    if sampling.temperature == 0.0:
        return _greedy
    digest = hashlib.sha256(sampling.seed.to_bytes(8, "little")).digest()
    stream = int.from_bytes(digest[:4], "little")

    def choose(logits: mx.array, tree: Tree, root_position: int) -> mx.array:
        noise = mx.stack(
            [
                position_noise(stream, root_position + 1 + depth, logits.shape[-1])
                for depth in range(tree.max_depth + 1)
            ]
        )
        scores = logits.astype(mx.float32) / sampling.temperature + noise[tree.depths]
        return mx.argmax(scores, axis=-1).astype(mx.int32)

    return choose


def position_noise(stream: int, position: int, vocab_size: int) -> mx.array:
    """The Gumbel vector (V,) float32 of one absolute position in the text."""
    key = mx.array([stream, position], dtype=mx.uint32)
    return mx.random.gumbel((vocab_size,), dtype=mx.float32, key=key)


def _greedy(logits: mx.array, tree: Tree, root_position: int) -> mx.array:
    return mx.argmax(logits, axis=-1).astype(mx.int32)
