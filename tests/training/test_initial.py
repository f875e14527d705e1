"""A drafter that starts from another one says at first what that one says."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.errors import CompatibilityError
from mlx_redrafter.training.initial import start_from_drafter, start_from_head


def made(blocks: int, tokens: list[int] | None, exit_dim: int = 8) -> Drafter:
    count = None if tokens is None else len(tokens)
    drafter = Drafter(
        DrafterConfig(8, 30, exit_dim, blocks, draft_vocab=count),
        None if tokens is None else mx.array(tokens, dtype=mx.int32),
    )
    drafter.lm_head[-1].weight = mx.random.normal(drafter.lm_head[-1].weight.shape)
    return drafter


def logits(drafter: Drafter) -> np.ndarray:
    hidden, embedding = (mx.random.normal((5, 8), key=mx.random.key(i)) for i in range(2))
    state = drafter.advance(None, embedding)
    found = np.array(drafter.head(drafter.features(hidden, state)))
    if drafter.draft_tokens is None:
        return found
    spread = np.full((5, 30), np.nan, dtype=np.float32)
    spread[:, np.array(drafter.draft_tokens)] = found
    return spread


@pytest.mark.parametrize("exit_dim", [8, 12])
@pytest.mark.parametrize("old", [[4, 9, 2], None])
@pytest.mark.parametrize("new", [[9, 1, 4, 2, 7], None])
def test_it_says_the_same_about_the_tokens_both_have(
    old: list[int] | None, new: list[int] | None, exit_dim: int
) -> None:
    earlier, drafter = made(1, old, exit_dim), made(2, new, exit_dim)
    head = mx.random.normal((drafter.config.head_size, 8))
    start_from_drafter(drafter, earlier, head)
    before, after = logits(earlier), logits(drafter)
    both = ~np.isnan(before) & ~np.isnan(after)
    assert both.any()
    np.testing.assert_allclose(after[both], before[both], atol=1e-5)
    assert np.abs(after[~np.isnan(after)]).max() < 1e3


def test_new_tokens_start_as_the_targets_rows() -> None:
    earlier, drafter = made(1, [4, 9]), made(1, [9, 5])
    head = mx.random.normal((2, 8))
    start_from_drafter(drafter, earlier, head)
    row, wanted = np.array(drafter.lm_head[-1].weight[1]), np.array(head[1])
    assert np.dot(row, wanted) / np.linalg.norm(row) / np.linalg.norm(wanted) > 0.9999


def test_another_network_is_refused() -> None:
    head = mx.zeros((30, 8))
    with pytest.raises(CompatibilityError, match="exit_dim"):
        start_from_drafter(made(1, None), made(1, None, 12), head)
    with pytest.raises(CompatibilityError, match="residual blocks"):
        start_from_drafter(made(1, None), made(2, None), head)


def test_the_head_has_the_usual_size_of_fresh_weights() -> None:
    drafter = Drafter(DrafterConfig(8, 30, 8, 1))
    before = float(mx.square(drafter.lm_head[-1].weight).mean())
    start_from_head(drafter, 50 * mx.random.normal((30, 8)))
    assert float(mx.square(drafter.lm_head[-1].weight).mean()) == pytest.approx(before, rel=1e-3)


def test_it_is_trained_in_float32_whatever_it_starts_from() -> None:
    earlier, drafter = made(1, None), made(1, None)
    earlier.set_dtype(mx.float16)
    start_from_drafter(drafter, earlier, mx.zeros((30, 8)))
    assert {str(weight.dtype) for _, weight in tree_flatten(drafter.parameters())} == {
        "mlx.core.float32"
    }
