"""Inputs of the drafter brought to one scale while it is trained.

Hidden states have a few directions that are ten times as wide as the rest, and embeddings are
small. Adam moves every weight alike, so it learns fastest where all inputs are alike. The scaling
is linear and folds into the weights afterwards: the format knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_redrafter.decoding.drafter import Drafter


@dataclass(frozen=True)
class InputScaling:
    """hidden -> (hidden - centre) / spread, embedding -> embedding / size; centre, spread (D,)."""

    centre: mx.array
    spread: mx.array
    size: mx.array

    @classmethod
    def measure(
        cls,
        drafter: Drafter,
        hidden: mx.array,
        embeddings: mx.array,
        total: Callable[[mx.array], mx.array] = lambda sums: sums,
    ) -> InputScaling:
        """From samples of hidden states and embeddings (n, D). Where the drafter has no matrix to
        fold into (no input_proj, no RNN) the input stays as it is. ``total`` adds up the sums of
        several processes, each with samples of its own."""
        size = drafter.config.hidden_size
        centre, spread, scale = mx.zeros((size,)), mx.ones((size,)), mx.array(1.0)
        if "input_proj" in drafter:
            count = total(mx.array(float(hidden.shape[0])))
            centre = total(hidden.sum(axis=0)) / count
            variance = total(mx.square(hidden - centre).sum(axis=0)) / count
            spread = mx.maximum(mx.sqrt(variance), 1e-4)
        if drafter.config.rnn:
            count = total(mx.array(float(embeddings.size)))
            scale = mx.maximum(mx.sqrt(total(mx.square(embeddings).sum()) / count), 1e-6)
        mx.eval(centre, spread, scale)
        return cls(centre, spread, scale)

    def hidden(self, hidden: mx.array) -> mx.array:
        return (hidden - self.centre) / self.spread

    def embedding(self, embedding: mx.array) -> mx.array:
        return embedding / self.size

    def fold(self, drafter: Drafter) -> None:
        """Rewrite the weights, which take scaled inputs, so that they take the raw ones."""
        self._rescale(drafter, -self.centre / self.spread, 1 / self.spread, 1 / self.size)

    def unfold(self, drafter: Drafter) -> None:
        """Rewrite the weights, which take raw inputs, so that they take scaled ones."""
        self._rescale(drafter, self.centre, self.spread, self.size)

    def _rescale(
        self, drafter: Drafter, shift: mx.array, factor: mx.array, embedding_factor: mx.array
    ) -> None:
        """Let the weights take (x - shift) / factor where they took x."""
        size = drafter.config.hidden_size
        if "input_proj" in drafter:
            weight, bias = drafter.input_proj.weight, drafter.input_proj.bias
            context = weight[:, :size]
            drafter.input_proj.bias = bias + context @ shift
            drafter.input_proj.weight = mx.concatenate([context * factor, weight[:, size:]], axis=1)
        if drafter.config.rnn:
            drafter.rnn_w.weight = drafter.rnn_w.weight * embedding_factor
        mx.eval(drafter.parameters())
