"""Beam search with the recurrent drafter: a few likely continuations of (hidden, token)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.tree import Beams, Tree, build_tree

Embed = Callable[[mx.array], mx.array]


class BeamProposer:
    """Proposes one tree per step. Holds no state between steps: the drafter has no KV cache."""

    def __init__(
        self,
        drafter: Drafter,
        embed: Embed,
        options: DraftOptions,
        compiled: bool | None = None,
    ) -> None:
        """``compiled`` None: on a GPU, where launching many small kernels costs more than running
        them. On a CPU mx.compile would call a C++ compiler."""
        self.drafter = drafter
        self.embed = embed
        self.options = options
        # hidden is the same at every draft step, so its half of input_proj is applied once.
        self._halves: tuple[nn.Module, nn.Module] | None = None
        if "input_proj" in drafter:
            size = drafter.config.hidden_size
            weight, packing = drafter.input_proj.weight, drafter.config.quantization
            context, state = _linear(weight[:, :size]), _linear(weight[:, size:])
            if packing is not None and size % packing["group_size"] == 0:
                # Read at every draft step; the other half is not, and would suffer (Drafter._pack).
                state = state.to_quantized(**packing)
            self._halves = (context, state)
            mx.eval(context.parameters(), state.parameters())
        if compiled is None:
            compiled = mx.default_device().type == mx.DeviceType.gpu
        self._draft = mx.compile(self._draft_eagerly) if compiled else self._draft_eagerly

    def __call__(self, hidden: mx.array, token: mx.array) -> Tree:
        """The tree under the root ``token`` (), drafted from ``hidden`` (D,)."""
        budget, chain = self.options.token_budget, self.options.beam_width == 1
        tokens, parents, depths, mask, valid = self._draft(hidden, token)
        depth = budget if chain else min(self.options.beam_length, budget)
        return Tree(tokens, parents, depths, mask, valid, max_depth=depth, chain=chain)

    def _draft_eagerly(self, hidden: mx.array, token: mx.array) -> tuple[mx.array, ...]:
        """The arrays of the tree. Shapes are fixed, so on a GPU this is compiled once."""
        options = self.options
        # In a chain, links past the budget would be drafted in vain.
        length = options.token_budget if options.beam_width == 1 else options.beam_length
        beams = self.search(hidden, token, options.beam_width, length)
        tree = build_tree(token, beams, options.token_budget)
        return tree.tokens, tree.parents, tree.depths, tree.mask, tree.valid

    def search(self, hidden: mx.array, token: mx.array, width: int, length: int) -> Beams:
        """Beam search (paper, section 3.2). hidden (D,), token () -> Beams of (length, width).

        Back-pointers name each entry's parent, so shared prefixes are stored once.
        """
        context = self._context(hidden)
        state: mx.array | None = None
        tokens = token.reshape(1)
        scores = mx.zeros((1,), dtype=mx.float32)
        levels: list[tuple[mx.array, mx.array, mx.array]] = []
        for _ in range(length):
            state = self.drafter.advance(state, self.embed(tokens))
            logits = self.drafter.head(self._features(context, state)).astype(mx.float32)
            if width == 1:
                rows = mx.argmax(logits, axis=-1)
                parents = mx.zeros((1,), dtype=mx.int32)
                # Evaluated only by who reads it: a chain needs no scores.
                scores = scores + mx.minimum(mx.max(logits, axis=-1) - _normaliser(logits), 0)
            else:
                rows, parents, scores = _best(logits, scores, width)
            tokens = self.drafter.target_tokens(rows)
            state = state[parents]
            levels.append((tokens, parents, scores))
        tokens, parents, scores = (mx.stack(list(column)) for column in zip(*levels, strict=True))
        return Beams(tokens, parents, scores)

    def _context(self, hidden: mx.array) -> mx.array:
        """The part of the features that depends on hidden alone, (E,) or (D,)."""
        if self._halves is None:
            return hidden
        return self._halves[0](hidden) + self.drafter.input_proj.bias

    def _features(self, context: mx.array, state: mx.array) -> mx.array:
        if self._halves is None:
            return self.drafter.features(context, state)
        return context + self._halves[1](state)


def _linear(weight: mx.array) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = mx.contiguous(weight)
    return linear


def _normaliser(logits: mx.array) -> mx.array:
    return mx.logsumexp(logits, axis=-1)


def _best(logits: mx.array, scores: mx.array, width: int) -> tuple[mx.array, mx.array, mx.array]:
    """The ``width`` best continuations of the beams, best first, without a sort.

    logits (B, V_d), scores (B,) ->
    head rows, the beams they continue, scores, each (width,)
    Where fewer than ``width`` exist, the rest have score -inf.
    """
    picks = min(width, logits.shape[-1])
    rows, values = _best_of_each_row(logits, picks)  # (B, picks)
    step = mx.minimum(values - _normaliser(logits)[:, None], 0)  # rounding must not raise a score
    joint = (scores[:, None] + step).reshape(-1)
    chosen: list[mx.array] = []
    found: list[mx.array] = []
    for _ in range(width):
        best = mx.argmax(joint)
        chosen.append(best)
        found.append(joint[best])
        joint = mx.put_along_axis(joint, best[None], mx.array(-mx.inf), axis=0)
    index = mx.stack(chosen)
    return rows.reshape(-1)[index], (index // picks).astype(mx.int32), mx.stack(found)


def _best_of_each_row(logits: mx.array, picks: int) -> tuple[mx.array, mx.array]:
    """The ``picks`` largest entries of each row, by repeated argmax: (B, picks) twice."""
    rows: list[mx.array] = []
    values: list[mx.array] = []
    for _ in range(picks):
        best = mx.argmax(logits, axis=-1, keepdims=True)
        rows.append(best)
        values.append(mx.take_along_axis(logits, best, axis=-1))
        logits = mx.put_along_axis(logits, best, mx.array(-mx.inf), axis=-1)
    return mx.concatenate(rows, axis=-1), mx.concatenate(values, axis=-1)
