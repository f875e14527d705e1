"""The target's head as a matrix, for soft labels over a part of the vocabulary."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import CompatibilityError


def head_rows(target: Target, tokens: mx.array) -> mx.array:
    """Rows (n, D) of the target's head, so that logits = hidden @ rows.T for ``tokens`` (n,).

    Raises CompatibilityError where the head is more than a matrix (scaled, capped, biased).
    """
    head = getattr(target.model, "lm_head", None)
    if head is None:
        rows = target.embed(tokens)
    else:
        rows = head.weight[tokens]
        if isinstance(head, nn.QuantizedLinear):
            biases = None if head.biases is None else head.biases[tokens]
            rows = mx.dequantize(
                rows, head.scales[tokens], biases, head.group_size, head.bits, mode=head.mode
            )
    rows = rows.astype(mx.float32)
    logits = target.model(tokens[None, :2])[0]
    hidden = target.take_hidden()
    assert hidden is not None
    found = hidden[0].astype(mx.float32) @ rows.T
    error = mx.abs(found - logits[:, tokens].astype(mx.float32)).max()
    if (error > 0.02 * mx.abs(found).max()).item():
        raise CompatibilityError(
            "this family's head scales or caps its logits, which training cannot follow yet."
        )
    return rows
