"""Cost measurements run on a tiny model: which calls are compared, and what a copy would show."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.benchmarking import costs
from mlx_redrafter.benchmarking.costs import ContextCost, excess_growth
from mlx_redrafter.benchmarking.memory import allowed
from mlx_redrafter.benchmarking.paired import Spread
from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.target import Target
from tests.tiny_models import VOCAB, build

PROMPT = np.random.default_rng(0).integers(VOCAB, size=300).tolist()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build("llama"))


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return Drafter(DrafterConfig(64, VOCAB, 64, 1))


def test_branching_tree() -> None:
    tree = costs.branching_tree(mx.arange(6))
    assert tree.parents.tolist() == [0, 0, 0, 1, 1, 2]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2]
    ancestors = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]
    assert [np.flatnonzero(row).tolist() for row in np.array(tree.mask)] == ancestors
    assert not tree.chain
    assert tree.max_depth == 2


def test_row_costs_leave_every_cache_where_it_was(target: Target) -> None:
    cache = target.make_cache()
    target.prefill(mx.array(PROMPT[:20]), cache)
    tree = costs.branching_tree(mx.array(PROMPT[:5], dtype=mx.int32))
    for _ in range(3):
        costs.verify_call(target, tree, cache)()
    assert cache.offset == 20
    found = costs.row_costs(target, build("llama"), PROMPT[:20], rows=(1, 3), repeats=3)
    assert [each.rows for each in found] == [1, 3]
    assert found[0].c.median == found[0].chain_c.median == found[0].mlx_lm_c.median == 1.0
    assert found[1].c.n == 3


def test_draft_costs_measure_the_bars(target: Target, drafter: Drafter) -> None:
    four, two = costs.draft_costs(target, drafter, PROMPT[:20], repeats=3)
    assert (four.draft.beam_width, four.draft.beam_length, four.rows, four.bar) == (4, 4, 8, 0.15)
    assert (two.draft.beam_width, two.draft.beam_length, two.rows, two.bar) == (1, 2, 1, 0.08)
    assert four.share.n == two.share.n == 3


def test_context_costs_reach_every_context(target: Target, drafter: Drafter) -> None:
    found = costs.context_costs(
        target,
        drafter,
        build("llama"),
        PROMPT,
        draft=DraftOptions(2, 2, 3),
        contexts=(200, 40, 100),
        repeats=2,
    )
    assert [each.context for each in found] == [40, 100, 200]
    assert all(each.ours_transient > 0 for each in found)


def cost(context: int, ours: float, theirs: float, transient: int) -> ContextCost:
    spread = [Spread(value, value, value, 1) for value in (ours, theirs)]
    ratio = Spread(ours / theirs, ours / theirs, ours / theirs, 1)
    return ContextCost(context, 100 * context, *spread, spread[0], ratio, transient, 50)


def test_excess_growth_is_what_attention_does_not_explain() -> None:
    time, memory = excess_growth([cost(1, 2.0, 1.0, 60), cost(10, 2.5, 1.3, 160)])
    assert time == pytest.approx(0.1)
    assert memory == pytest.approx(0.1)


def test_memory_bar() -> None:
    assert allowed(1000, 100) == pytest.approx(1210)
