"""What the parts of a step cost on this machine: c(N), draft steps, context (design 4.6).

Every figure is a ratio of calls that were timed in turn. All calls run at the same cache offset:
a verify pass that is not compacted leaves it where it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlx_redrafter.benchmarking.paired import Spread, paired_ratio, time_interleaved
from mlx_redrafter.decoding.caches import Cache
from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.proposers.beam import BeamProposer
from mlx_redrafter.decoding.target import PREFILL_STEP, Target
from mlx_redrafter.decoding.tree import Tree, chain_tree

Call = Callable[[], object]

# The bars of a draft: the options, the rows of the verify pass it is held against, the share.
DRAFT_BARS = (
    (DraftOptions(beam_width=4, beam_length=4, token_budget=7), 8, 0.15),
    (DraftOptions(beam_width=1, beam_length=2, token_budget=2), 1, 0.08),
)


@dataclass(frozen=True)
class RowCost:
    """One verify pass of ``rows`` rows.

    ``c`` is its time relative to one row, for a tree with branches; ``chain_c`` the same for a
    chain, ``mlx_lm_c`` for the unmodified model's own causal chunk.
    """

    rows: int
    seconds: Spread
    c: Spread
    chain_c: Spread
    mlx_lm_c: Spread


@dataclass(frozen=True)
class DraftCost:
    """A beam search held against a verify pass of ``rows`` rows.

    ``share`` is the search alone, what the bar speaks of; ``with_tree`` adds building the tree.
    """

    draft: DraftOptions
    rows: int
    bar: float
    seconds: Spread
    share: Spread
    with_tree: Spread

    @property
    def met(self) -> bool:
        return self.share.median <= self.bar


@dataclass(frozen=True)
class ContextCost:
    """One drafting step, and mlx-lm's passes of as many rows and of one row, at one context.

    ``ratio`` is our step's time over that of mlx-lm's pass of as many rows, pair by pair.
    The ``*_transient`` figures are the most memory (bytes) that a call holds beyond what was held
    before it; a copy of the cache would show there.
    """

    context: int
    cache_bytes: int
    ours: Spread
    mlx_lm_rows: Spread
    mlx_lm_one: Spread
    ratio: Spread
    ours_transient: int
    mlx_lm_transient: int


def branching_tree(tokens: mx.array) -> Tree:
    """A tree of N nodes in which every node has two children: tokens (N,), the root first."""
    count = tokens.shape[0]
    nodes = np.arange(count)
    parents = np.maximum(nodes - 1, 0) // 2
    depths = np.floor(np.log2(nodes + 1)).astype(np.int32)
    mask = np.eye(count, dtype=bool)
    for node in range(1, count):
        mask[node] |= mask[parents[node]]
    return Tree(
        tokens=tokens,
        parents=mx.array(parents.astype(np.int32)),
        depths=mx.array(depths),
        mask=mx.array(mask),
        valid=mx.ones((count,), dtype=mx.bool_),
        max_depth=int(depths.max()),
    )


def row_costs(
    target: Target,
    model: nn.Module,
    prompt: Sequence[int],
    *,
    rows: Sequence[int] = tuple(range(1, 17)),
    repeats: int = 20,
) -> list[RowCost]:
    """c(N) for each N of ``rows`` behind ``prompt``; 1 has to be among them."""
    assert 1 in rows
    cache = target.make_cache()
    target.prefill(mx.array(list(prompt)), cache)
    own = _plain_cache(model, prompt)
    calls: dict[str, Call] = {}
    for count in rows:
        tokens = mx.array([prompt[i % len(prompt)] for i in range(count)], dtype=mx.int32)
        chain = chain_tree(tokens)
        tree = branching_tree(tokens) if count > 1 else chain
        mx.eval(tree.arrays, chain.arrays)
        calls[f"tree {count}"] = verify_call(target, tree, cache)
        calls[f"chain {count}"] = verify_call(target, chain, cache)
        calls[f"mlx-lm {count}"] = chunk_call(model, tokens, own)
    seconds = time_interleaved(calls, repeats=repeats)
    return [
        RowCost(
            rows=count,
            seconds=Spread.of(seconds[f"tree {count}"]),
            c=paired_ratio(seconds, f"tree {count}", "tree 1"),
            chain_c=paired_ratio(seconds, f"chain {count}", "chain 1"),
            mlx_lm_c=paired_ratio(seconds, f"mlx-lm {count}", "mlx-lm 1"),
        )
        for count in rows
    ]


def draft_costs(
    target: Target, drafter: Drafter, prompt: Sequence[int], *, repeats: int = 40
) -> list[DraftCost]:
    """The draft bars: beam searches against the verify passes that they are held against."""
    cache = target.make_cache()
    hidden, logits = target.prefill(mx.array(list(prompt)), cache)
    token = mx.argmax(logits).astype(mx.int32)
    mx.eval(hidden, token)
    assert hidden is not None
    costs = []
    for draft, rows, bar in DRAFT_BARS:
        tokens = mx.array(list(prompt[:rows]), dtype=mx.int32)
        tree = branching_tree(tokens) if rows > 1 else chain_tree(tokens)
        propose = BeamProposer(drafter, target.embed, draft)
        calls = {
            "search": _search_call(propose, hidden, token),
            "propose": _propose_call(propose, hidden, token),
            "verify": verify_call(target, tree, cache),
        }
        seconds = time_interleaved(calls, repeats=repeats)
        costs.append(
            DraftCost(
                draft=draft,
                rows=rows,
                bar=bar,
                seconds=Spread.of(seconds["search"]),
                share=paired_ratio(seconds, "search", "verify"),
                with_tree=paired_ratio(seconds, "propose", "verify"),
            )
        )
    return costs


def context_costs(
    target: Target,
    drafter: Drafter,
    model: nn.Module,
    prompt: Sequence[int],
    *,
    draft: DraftOptions,
    contexts: Sequence[int] = (128, 1024, 2048, 4096),
    repeats: int = 20,
) -> list[ContextCost]:
    """Step time and memory at each of the ``contexts``, which ``prompt`` has to reach."""
    assert max(contexts) <= len(prompt)
    decoder = Decoder(target, drafter, draft)
    cache = target.make_cache()
    own = make_prompt_cache(model)
    done = 0
    costs = []
    for context in sorted(contexts):
        if done:
            assert cache.rewind(done), "the cache cannot go back: give it a full window"
        decoder.start(list(prompt[:context]), cache)
        _feed(model, prompt[done:context], own)
        done = context
        rows = mx.array(list(prompt[: draft.token_budget + 1]), dtype=mx.int32)
        calls = {
            "ours": _step_call(decoder),
            "rows": chunk_call(model, rows, own),
            "one": chunk_call(model, rows[:1], own),
        }
        seconds = time_interleaved(calls, repeats=repeats)
        costs.append(
            ContextCost(
                context=context,
                cache_bytes=cache.nbytes,
                ours=Spread.of(seconds["ours"]),
                mlx_lm_rows=Spread.of(seconds["rows"]),
                mlx_lm_one=Spread.of(seconds["one"]),
                ratio=paired_ratio(seconds, "ours", "rows"),
                ours_transient=_transient(calls["ours"]),
                mlx_lm_transient=_transient(calls["rows"]),
            )
        )
    return costs


def excess_growth(costs: Sequence[ContextCost]) -> tuple[float, float]:
    """How much more our step grows from the first to the last context than mlx-lm's pass does.

    In time, as a share of our step at the first context; in memory, as a share of the whole cache
    at the last context (the copy of one layer is one share in as many as there are layers).
    """
    first, last = costs[0], costs[-1]
    transient = (last.ours_transient - first.ours_transient) - (
        last.mlx_lm_transient - first.mlx_lm_transient
    )
    # From the paired ratio: the contexts are measured one after the other, and the machine's speed
    # may have changed in between.
    extra = [(each.ratio.median - 1) * each.mlx_lm_rows.median for each in (first, last)]
    return (extra[1] - extra[0]) / first.ours.median, transient / last.cache_bytes


def verify_call(target: Target, tree: Tree, cache: Cache) -> Call:
    """A verify pass that leaves the cache's offset where it is."""
    return lambda: mx.eval(*(array for array in target.verify(tree, cache) if array is not None))


def chunk_call(model: nn.Module, tokens: mx.array, cache: list[Any]) -> Call:
    """mlx-lm's own pass over as many rows, undone after."""

    def call() -> None:
        mx.eval(model(tokens[None], cache=cache))
        trim_prompt_cache(cache, tokens.shape[0])

    return call


def _search_call(propose: BeamProposer, hidden: mx.array, token: mx.array) -> Call:
    options = propose.options

    def call() -> None:
        beams = propose.search(hidden, token, options.beam_width, options.beam_length)
        # A chain's scores are read by nobody, and so never computed.
        mx.eval(beams.tokens, *([] if options.beam_width == 1 else [beams.parents, beams.scores]))

    return call


def _propose_call(propose: BeamProposer, hidden: mx.array, token: mx.array) -> Call:
    return lambda: mx.eval(propose(hidden, token).arrays)


def _step_call(decoder: Decoder) -> Call:
    def call() -> None:
        decoder.commit(len(decoder.step().tokens))
        mx.synchronize()  # the next beams are queued already; another call must not pay for them

    return call


def _transient(call: Call, repeats: int = 3) -> int:
    """Bytes that a call holds at its peak beyond those held before it; the median of a few."""
    peaks = []
    for _ in range(repeats):
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        call()
        peaks.append(mx.get_peak_memory() - held)
    return int(statistics.median(peaks))


def _plain_cache(model: nn.Module, prompt: Sequence[int]) -> list[Any]:
    cache = make_prompt_cache(model)
    _feed(model, prompt, cache)
    return cache


def _feed(model: nn.Module, tokens: Sequence[int], cache: list[Any]) -> None:
    for start in range(0, len(tokens), PREFILL_STEP):
        model(mx.array([list(tokens[start : start + PREFILL_STEP])]), cache=cache)
        mx.eval([layer.state for layer in cache])
