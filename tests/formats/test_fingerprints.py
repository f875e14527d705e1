"""Weights that differ a little have another fingerprint."""

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.formats import fingerprints
from tests import tiny_models


def test_weights_are_told_apart() -> None:
    def of(model: nn.Module) -> str:
        return fingerprints.of_weights(model.parameters())

    prints = [of(tiny_models.build("llama", dtype)) for dtype in tiny_models.DTYPES]
    prints.append(of(tiny_models.build("llama", seed=1)))
    tuned = tiny_models.build("llama")
    tuned.layers[1].mlp.up_proj.weight += 1e-4
    prints.append(of(tuned))
    assert len(set(prints)) == len(prints)
    assert of(tiny_models.build("llama")) == prints[0]
    assert fingerprints.of_weights({"a": mx.zeros(3)}) != fingerprints.of_weights(
        {"b": mx.zeros(3)}
    )
