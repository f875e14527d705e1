"""Load-time proof that tree verification is exact on this model and this machine.

On random key-value prefixes a small tree is verified and compared with decoding each of its paths
one row at a time. The error must be no larger than what the model itself shows between a chunk and
single rows, and two negative controls (wrong positions, wrong mask) must be far off, or the check
would be blind. The prefix lengths sit where attention kernels change on Metal.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.caches import Cache, TreeKVCache, WindowedTreeCache
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.decoding.tree import Tree, chain_tree

VERSION = 1  # of the check: raise it when the check changes, to measure anew

_SHORT = 8
_KERNEL_LENGTHS = (1030, 4100)
_PARENTS = [0, 0, 1, 2, 0, 4, 1, 4]
_DEPTHS = [0, 1, 2, 3, 1, 2, 2, 2]
_CHAIN = 4  # the first nodes are one path

OWN_ERRORS = 4.0  # how often the model's own error the tree's may be
CONTROL_SHARE = 0.1  # how much of a negative control's error it may be
_ROUNDING = 64  # a floor: so many times the type's spacing at the largest logit


@dataclass(frozen=True)
class Measured:
    """Largest differences of logits at one prefix length."""

    prefix: int
    tree: float  # tree against single rows
    own: float  # chunk against single rows
    floor: float
    wrong_positions: float
    wrong_mask: float


@dataclass(frozen=True)
class Verdict:
    """``reason`` is None where trees are exact."""

    reason: str | None
    measured: list[Measured]


def check(target: Target, context_length: int, original_context: int | None = None) -> Verdict:
    """Measure at all prefix lengths that fit the context; stop at the first failure.

    original_context: the length that RoPE scaling starts from, where the model has one.
    """
    measured: list[Measured] = []
    for prefix in _prefixes(target, context_length, original_context):
        result = _measure(target, prefix)
        measured.append(result)
        if not result.tree <= max(OWN_ERRORS * result.own, result.floor):  # refuses NaN, too
            return Verdict(
                f"self-check: at {prefix} tokens a tree's logits are off by {result.tree:.2g}, "
                f"a plain chunk's by {result.own:.2g}",
                measured,
            )
        controls = min(result.wrong_positions, result.wrong_mask)
        # Among many keys one wrong key hardly shows, so the controls count on a short prefix.
        if prefix == _SHORT and not result.tree <= CONTROL_SHARE * controls:
            return Verdict(
                f"self-check: a tree's logits are off by {result.tree:.2g}, and with wrong "
                f"positions or mask by only {controls:.2g}",
                measured,
            )
    return Verdict(None, measured)


def _prefixes(target: Target, context_length: int, original_context: int | None) -> list[int]:
    windows = {
        layer.window for layer in target.make_cache() if isinstance(layer, WindowedTreeCache)
    }
    lengths = {*_KERNEL_LENGTHS, *(window + 3 for window in windows)}
    if original_context:
        lengths.add(original_context + 3)
    room = context_length - len(_PARENTS)
    return [_SHORT, *sorted(length for length in lengths if _SHORT < length <= room)]


def _measure(target: Target, prefix: int) -> Measured:
    tree = _tree(target.vocab_size)
    chain = chain_tree(tree.tokens[:_CHAIN])
    cache = _random_cache(target, prefix)
    rows = len(_PARENTS)
    positions = dataclasses.replace(tree, depths=mx.arange(rows, dtype=mx.int32))
    order = mx.arange(rows)
    causal = dataclasses.replace(tree, mask=order[:, None] >= order[None])

    reference = _one_by_one(target, tree, cache)
    verified = _logits(target, tree, cache)
    chunk = _logits(target, chain, cache)
    largest = _number(mx.abs(reference).max())
    return Measured(
        prefix=prefix,
        tree=_difference(verified, reference),
        own=_difference(chunk, reference[:_CHAIN]),
        floor=_ROUNDING * float(mx.finfo(target.dtype).eps) * largest,
        wrong_positions=_difference(_logits(target, positions, cache), reference),
        wrong_mask=_difference(_logits(target, causal, cache), reference),
    )


def _tree(vocab_size: int) -> Tree:
    parents = mx.array(_PARENTS, dtype=mx.int32)
    ancestors = [[node] for node in range(len(_PARENTS))]
    for node in range(1, len(_PARENTS)):
        ancestors[node] += ancestors[_PARENTS[node]]
    mask = [[j in ancestors[i] for j in range(len(_PARENTS))] for i in range(len(_PARENTS))]
    spread = mx.arange(1, len(_PARENTS) + 1) * 7919  # a prime: distinct tokens all over V
    return Tree(
        tokens=(spread % vocab_size).astype(mx.int32),
        parents=parents,
        depths=mx.array(_DEPTHS, dtype=mx.int32),
        mask=mx.array(mask),
        valid=mx.ones(parents.shape, dtype=mx.bool_),
        max_depth=max(_DEPTHS),
    )


def _random_cache(target: Target, prefix: int) -> Cache:
    """A cache that holds ``prefix`` positions of noise with the spread of the model's own rows."""
    cache = target.make_cache()
    target.prefill(_tree(target.vocab_size).tokens, cache)
    key = mx.random.key(prefix)
    for layer in cache:
        assert isinstance(layer, TreeKVCache)
        used = layer.offset
        assert layer.keys is not None
        assert layer.values is not None
        window = getattr(layer, "window", prefix)
        layer.start = max(0, prefix - window - len(_PARENTS))
        key, *keys = mx.random.split(key, 3)
        layer.keys, layer.values = (
            _noise_like(buffer[..., :used, :], prefix - layer.start, noise)
            for buffer, noise in zip((layer.keys, layer.values), keys, strict=True)
        )
        layer.offset = prefix
    cache.offset = prefix
    mx.eval(cache.arrays)
    return cache


def _noise_like(rows: mx.array, length: int, key: mx.array) -> mx.array:
    batch, heads, _, width = rows.shape
    wide = rows.astype(mx.float32)
    spread, centre = mx.std(wide, axis=2, keepdims=True), mx.mean(wide, axis=2, keepdims=True)
    noise = mx.random.normal((batch, heads, length, width), key=key)
    return (noise * spread + centre).astype(rows.dtype)


def _one_by_one(target: Target, tree: Tree, cache: Cache) -> mx.array:
    """Logits (N, V) of every node, each path decoded one row at a time."""
    base = cache.offset
    logits: list[Any] = [None] * tree.num_nodes
    for leaf in (node for node in range(tree.num_nodes) if node not in _PARENTS[1:]):
        path = [leaf]
        while path[0] != 0:
            path.insert(0, _PARENTS[path[0]])
        for node in path:
            one = chain_tree(tree.tokens[node : node + 1])
            logits[node] = _logits(target, one, cache)
            cache.compact(cache.offset, [0])
        assert cache.rewind(base)
    return mx.concatenate(logits)


def _logits(target: Target, tree: Tree, cache: Cache) -> mx.array:
    _, logits = target.verify(tree, cache)
    logits = logits.astype(mx.float32)
    mx.eval(logits)
    return logits


def _difference(one: mx.array, other: mx.array) -> float:
    return _number(mx.abs(one - other).max())


def _number(value: Any) -> float:
    return float(value)
