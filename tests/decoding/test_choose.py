"""Keyed noise: one Gumbel vector a position, the right law, and nothing but (seed, position,
logits) matters.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.choose import make_chooser
from mlx_redrafter.decoding.options import SamplingOptions
from mlx_redrafter.decoding.tree import chain_tree

VOCAB = 50


def choose(
    temperature: float,
    seed: int,
    logits: np.ndarray,
    positions: list[int],
    dtype: mx.Dtype = mx.float32,
) -> list[int]:
    """One row of logits for each absolute position: the rows hang below a root just before the
    first of them.
    """
    first = min(positions)
    tree = replace(
        chain_tree(mx.zeros((len(positions),), mx.int32)),
        depths=mx.array([position - first for position in positions], mx.int32),
        max_depth=max(positions) - first,
        chain=False,
    )
    chooser = make_chooser(SamplingOptions(temperature=temperature, seed=seed))
    tokens = chooser(mx.array(logits).astype(dtype), tree, first - 1)
    assert tokens.shape == (len(positions),)
    assert tokens.dtype == mx.int32
    return tokens.tolist()


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, VOCAB)).astype(np.float32) * 2


def test_greedy_is_argmax() -> None:
    logits = rows(20)
    assert choose(0.0, 5, logits, list(range(1, 21))) == logits.argmax(axis=1).tolist()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, [9, 30]] = 4
    assert choose(0.0, 0, logits, [3, 4]) == [9, 9]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_a_row_alone_gives_what_it_gives_in_a_batch(temperature: float) -> None:
    logits = rows(12)
    positions = [7, 8, 8, 8, 9, 9, 10, 11, 300, 301, 900, 1]
    together = choose(temperature, 3, logits, positions)
    alone = [choose(temperature, 3, logits[i : i + 1], [positions[i]])[0] for i in range(12)]
    assert together == alone


def test_nodes_at_one_depth_share_the_noise() -> None:
    logits = np.repeat(rows(1), 64, axis=0)
    assert len(set(choose(1.0, 3, logits, [9] * 64))) == 1
    assert len(set(choose(1.0, 3, logits, list(range(1, 65))))) > 8


def test_seed_reproduces_and_matters() -> None:
    logits, positions = rows(64), list(range(1, 65))
    assert choose(1.0, 1, logits, positions) == choose(1.0, 1, logits, positions)
    assert choose(1.0, 1, logits, positions) != choose(1.0, 2, logits, positions)


def test_noise_is_float32_also_for_bfloat16_logits() -> None:
    """In bfloat16 the noise has 8 bits: most draws of a flat law would tie and fall on the first
    token.
    """
    flat = np.zeros((400, VOCAB), np.float32)
    positions = list(range(1, 401))
    assert choose(1.0, 0, flat, positions, mx.bfloat16) == choose(1.0, 0, flat, positions)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_law_over_positions(temperature: float) -> None:
    """Chi-square of one logit row drawn at many positions against its softmax."""
    _check_law(temperature, seeds=[11], positions=6000)


def test_law_over_seeds() -> None:
    """The same, one position under many consecutive seeds: seeds 0, 1, 2 must not be related."""
    _check_law(1.0, seeds=list(range(1500)), positions=1)


def test_chi_square_has_power() -> None:
    """Negative control: draws at temperature 1 against the law of temperature 1.15."""
    with pytest.raises(AssertionError, match="chi-square"):
        _check_law(1.0, seeds=[11], positions=6000, claimed=1.15)


def _check_law(
    temperature: float, seeds: list[int], positions: int, claimed: float | None = None
) -> None:
    row = rows(1)[0, :12]
    drawn = np.zeros(12)
    batch = np.repeat(row[None], positions, axis=0)
    for seed in seeds:
        tokens = choose(temperature, seed, batch, list(range(1, positions + 1)))
        drawn += np.bincount(tokens, minlength=12)
    law = np.exp(row / (claimed or temperature))
    assert_law(drawn, law / law.sum())


def assert_law(drawn: np.ndarray, law: np.ndarray) -> None:
    """Pearson's chi-square, cells below 5 draws pooled; five standard deviations of room."""
    expected = law * drawn.sum()
    rare = expected < 5
    drawn = np.append(drawn[~rare], drawn[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    statistic = ((drawn[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    limit = freedom + 5 * (2 * freedom) ** 0.5
    assert statistic < limit, f"chi-square {statistic:.1f} over {freedom} cells, limit {limit:.1f}"


def test_successive_positions_are_independent() -> None:
    """Chi-square of the pairs (draw at t, draw at t + 1) of a flat law over six tokens."""
    tokens = choose(1.0, 4, np.zeros((7200, 6), np.float32), list(range(1, 7201)))
    pairs = np.array(tokens[:-1]) * 6 + np.array(tokens[1:])
    assert_law(np.bincount(pairs, minlength=36).astype(float), np.full(36, 1 / 36))
