"""Folding the input scaling into the weights must not change what the drafter says."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.training.inputs import InputScaling


@pytest.mark.parametrize("exit_dim", [8, 16])
@pytest.mark.parametrize("rnn", [True, False])
def test_folding_keeps_the_logits(exit_dim: int, rnn: bool) -> None:
    drafter = Drafter(DrafterConfig(8, 30, exit_dim, 1, rnn=rnn))
    hidden = 5 + 3 * mx.random.normal((40, 8), key=mx.random.key(1))
    embeddings = 0.1 * mx.random.normal((40, 8), key=mx.random.key(2))
    scaling = InputScaling.measure(drafter, hidden, embeddings)

    def logits(hidden: mx.array, embeddings: mx.array) -> np.ndarray:
        state = drafter.advance(None, embeddings)
        state = drafter.advance(state, embeddings[::-1])
        return np.array(drafter.head(drafter.features(hidden, state)))

    scaled = logits(scaling.hidden(hidden), scaling.embedding(embeddings))
    scaling.fold(drafter)
    np.testing.assert_allclose(logits(hidden, embeddings), scaled, atol=1e-4)
    scaling.unfold(drafter)
    again = logits(scaling.hidden(hidden), scaling.embedding(embeddings))
    np.testing.assert_allclose(again, scaled, atol=1e-4)


def test_scaled_inputs_have_unit_spread() -> None:
    drafter = Drafter(DrafterConfig(8, 30, 8, 1))
    hidden = mx.arange(8) * mx.random.normal((400, 8)) + 7
    scaling = InputScaling.measure(drafter, hidden, 0.2 * mx.random.normal((400, 8)))
    scaled = np.array(scaling.hidden(hidden))
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(scaled.std(axis=0)[1:], 1, atol=1e-3)
