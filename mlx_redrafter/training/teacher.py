"""What the frozen target says: soft labels over a part of its vocabulary."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.target import Target

_ROWS_AT_ONCE = 256  # of whole-vocabulary logits, where the head is more than a matrix


class Teacher:
    """The target's law over ``tokens`` (V_d,), renormalised.

    Most heads are a matrix, of which only the rows of ``tokens`` are needed. Heads that scale, cap
    or bias their logits (Granite, Gemma 2, Cohere) are asked as a whole.
    """

    def __init__(self, target: Target, tokens: mx.array) -> None:
        self.target = target
        self.tokens = tokens
        self.head = head_rows(target, tokens)
        self.is_matrix = self._matches_the_model()

    def logits(self, hidden: mx.array) -> mx.array:
        """(n, V_d) float32 from target states (n, D) after the final norm."""
        if self.is_matrix:
            return hidden @ self.head.T
        parts = [
            self.target.logits(hidden[i : i + _ROWS_AT_ONCE])[:, self.tokens].astype(mx.float32)
            for i in range(0, hidden.shape[0], _ROWS_AT_ONCE)
        ]
        return mx.concatenate(parts)

    def law(self, hidden: mx.array) -> mx.array:
        """(n, V_d) float32, rows sum to 1."""
        return mx.softmax(self.logits(hidden), axis=-1, precise=True)

    def _matches_the_model(self) -> bool:
        hidden = self.target.hidden_states(self.tokens[None, :4])[0].astype(mx.float32)
        wanted = self.target.logits(hidden)[:, self.tokens].astype(mx.float32)
        error = mx.abs(hidden @ self.head.T - wanted).max()
        return bool((error <= 0.02 * mx.abs(wanted).max()).item())


def head_rows(target: Target, tokens: mx.array) -> mx.array:
    """Rows (n, D) float32 of the target's head, or of its embedding where they are tied."""
    head = getattr(target.model, "lm_head", None)
    if head is None:
        return target.embed(tokens).astype(mx.float32)
    rows = head.weight[tokens]
    if isinstance(head, nn.QuantizedLinear):
        biases = None if head.biases is None else head.biases[tokens]
        rows = mx.dequantize(
            rows, head.scales[tokens], biases, head.group_size, head.bits, mode=head.mode
        )
    return rows.astype(mx.float32)
