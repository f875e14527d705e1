"""Tree verification equals sequential decoding on every family, and the check would see if it did
not.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.target import Target
from tests import reference, tiny_models
from tests.decoding.harness import (
    causal_mask,
    device_tree,
    pristine,
    sequential_positions,
    target,
)
from tests.tiny_models import FAMILIES, WINDOW

TOLERANCE = 1e-4  # of the largest logit, float32
RNG = np.random.default_rng(7)
TEXT = [int(token) for token in RNG.integers(tiny_models.VOCAB, size=3 * WINDOW)]
FIRST = reference.random_tree(RNG, 9, tiny_models.VOCAB)
SECOND = reference.random_tree(RNG, 6, tiny_models.VOCAB)

# (rows in the cache before the tree): below the window, at its edge, with the tree across the edge,
# past the wrap.
PREFIXES = {None: (37,), WINDOW: (9, WINDOW - 2, WINDOW, 3 * WINDOW - 1)}
CASES = [(name, rows) for name, family in FAMILIES.items() for rows in PREFIXES[family.window]]


@dataclass
class Verified:
    logits: np.ndarray
    states: np.ndarray


def verify(wrapped: Target, prefix: list[int], step_size: int = 16) -> tuple[Verified, Verified]:
    """FIRST after the prefix; then one of its branches, which is no prefix of the rows, is kept and
    SECOND follows.
    """
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(prefix, mx.int32), cache, step_size=step_size)
    first = wrapped.verify(device_tree(FIRST), cache)
    mx.eval(*first)
    cache.compact(cache.offset, branch())
    assert cache.offset == len(prefix) + len(branch())
    second = wrapped.verify(device_tree(SECOND), cache)
    return _host(first), _host(second)


def _host(result: tuple[mx.array, mx.array]) -> Verified:
    states, logits = (np.array(array.astype(mx.float32)) for array in result)
    return Verified(logits, states)


def branch() -> list[int]:
    """Rows of the deepest path of FIRST that does not follow the first rows."""
    paths = [FIRST.ancestors(leaf) for leaf in FIRST.leaves()]
    return max((path for path in paths if path != list(range(len(path)))), key=len)


def expected(family: str, prefix: list[int], tree: reference.HostTree) -> Verified:
    """Each node's path recomputed in full, without a cache, by the unmodified model."""
    model, root = pristine(family), tree.tokens[0]
    texts = [[*prefix, root, *tree.path(node)] for node in range(len(tree.tokens))]
    return Verified(
        np.stack([reference.logits(model, text)[-1] for text in texts]),
        np.stack([reference.states(model, text)[-1] for text in texts]),
    )


def distance(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(found - truth).max() / np.abs(truth).max())


def test_the_fixture_branches() -> None:
    assert len(branch()) >= 3
    assert max(FIRST.depths) >= 3
    assert FIRST.parents != [0, *range(8)]


@pytest.mark.parametrize(("family", "rows"), CASES)
def test_float32_is_exact(family: str, rows: int) -> None:
    prefix = TEXT[:rows]
    kept = [FIRST.tokens[node] for node in branch()]
    first, second = verify(target(family), prefix)
    truth = expected(family, prefix, FIRST)
    assert distance(first.logits, truth.logits) <= TOLERANCE
    assert distance(first.states, truth.states) <= TOLERANCE
    truth = expected(family, prefix + kept, SECOND)
    assert distance(second.logits, truth.logits) <= TOLERANCE, "after a compaction"
    assert distance(second.states, truth.states) <= TOLERANCE, "after a compaction"


@pytest.mark.parametrize("break_tree", [causal_mask, sequential_positions])
@pytest.mark.parametrize("family", FAMILIES)
def test_negative_controls_are_far_off(family: str, break_tree: object) -> None:
    prefix = TEXT[: PREFIXES[FAMILIES[family].window][-1]]
    wrapped = target(family)
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(prefix, mx.int32), cache)
    broken = break_tree(device_tree(FIRST))  # type: ignore[operator]
    found = _host(wrapped.verify(broken, cache))
    assert distance(found.logits, expected(family, prefix, FIRST).logits) > 100 * TOLERANCE


LOW_PRECISION = [
    (name, dtype)
    for name, family in FAMILIES.items()
    for dtype in ("bfloat16", "4bit")
    if not (family.experts and dtype == "bfloat16")  # not implemented in MLX's CPU backend
]


@pytest.mark.parametrize(("family", "dtype"), LOW_PRECISION)
def test_low_precision_is_within_the_models_own_noise(family: str, dtype: str) -> None:
    """The yardstick: one path in a single pass against the same path row by row, both by mlx-lm
    alone.
    """
    prefix = TEXT[: PREFIXES[FAMILIES[family].window][-1]]
    twin = tiny_models.build(family, dtype)
    truth = np.zeros((len(FIRST.tokens), tiny_models.VOCAB), np.float32)
    noise = 0.0
    for leaf in FIRST.leaves():
        path = FIRST.ancestors(leaf)
        tokens = [FIRST.tokens[node] for node in path]
        truth[path] = reference.decode_by_row(twin, mlx_lm_cache(twin), prefix, tokens)
        chunk = reference.decode_by_chunk(twin, mlx_lm_cache(twin), prefix, tokens)
        noise = max(noise, distance(chunk, truth[path]))
    wrapped = Target(tiny_models.build(family, dtype))
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(prefix, mx.int32), cache)
    found = _host(wrapped.verify(device_tree(FIRST), cache)).logits
    broken = _host(wrapped.verify(causal_mask(device_tree(FIRST)), cache)).logits
    error = distance(found, truth)
    assert error <= max(4 * noise, 1e-5), f"noise {noise:.1e}"
    assert distance(broken, truth) > 10 * max(error, 1e-5), "the control must stand out"


def mlx_lm_cache(model: object) -> list[object]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)
