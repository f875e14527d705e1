"""The weights that training starts from: the target's own head, or an earlier drafter."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.errors import CompatibilityError


def start_from_head(drafter: Drafter, head: mx.array) -> None:
    """Give the drafter the target's own head, ``head`` (V_d, D), scaled to the usual size of fresh
    weights: what remains to be learned is where to move the hidden state to."""
    if drafter.config.tie_head:
        return  # it is the target's own already
    fresh = drafter.lm_head[-1].weight
    drafter.lm_head[-1].weight = head * (_size(fresh) / _size(head))
    mx.eval(drafter.parameters())


def check_start(config: DrafterConfig, old: DrafterConfig) -> None:
    """Raise CompatibilityError where a drafter of ``config`` cannot start from one of ``old``."""
    for name in ("hidden_size", "vocab_size", "exit_dim", "rnn", "tie_head"):
        if getattr(config, name) != getattr(old, name):
            raise CompatibilityError(
                f"the drafter to start from has {name} {getattr(old, name)}, the new one "
                f"{getattr(config, name)}: give the same, or start anew."
            )
    if config.num_draft_layers < old.num_draft_layers:
        raise CompatibilityError(
            f"the drafter to start from has {old.num_draft_layers} residual blocks, the new one "
            f"only {config.num_draft_layers}: give as many, or start anew."
        )


def start_from_drafter(drafter: Drafter, earlier: Drafter, head: mx.array) -> None:
    """Give the drafter the weights of an ``earlier`` one for the same target.

    It may have more residual blocks, which then change nothing at first, and other draft tokens:
    new ones start as the target's rows, ``head`` (V_d, D), scaled to the size of the others.
    Raises CompatibilityError where the networks differ otherwise.
    """
    config, old = drafter.config, earlier.config
    check_start(config, old)
    for name in ("rnn_u", "rnn_w", "input_proj"):
        if name in drafter:
            drafter[name].update(earlier[name].parameters())
    for index, block in enumerate(drafter.lm_head[: config.num_draft_layers]):
        if index < old.num_draft_layers:
            block.update(earlier.lm_head[index].parameters())
        else:
            block.linear.weight = mx.zeros_like(block.linear.weight)
            block.linear.bias = mx.zeros_like(block.linear.bias)
    if not config.tie_head:
        drafter.lm_head[-1].weight = _head(drafter, earlier, head)
    drafter.set_dtype(mx.float32)  # whatever the earlier one was loaded in: Adam needs the range
    mx.eval(drafter.parameters())


def _head(drafter: Drafter, earlier: Drafter, head: mx.array) -> mx.array:
    """Rows for the drafter's tokens: the earlier drafter's where it has them."""
    rows = np.full(drafter.config.vocab_size, -1)
    rows[_tokens(earlier)] = np.arange(earlier.config.head_size)
    found = rows[_tokens(drafter)]
    learned = earlier.lm_head[-1].weight.astype(mx.float32)
    if drafter.config.exit_dim == drafter.config.hidden_size:
        known = mx.array(np.flatnonzero(found >= 0))
        size = _size(learned) / _size(head[known]) if known.size else _size(learned) / _size(head)
        fresh = head * size
    else:
        fresh = drafter.lm_head[-1].weight
    kept = mx.array(found >= 0)[:, None]
    return mx.where(kept, learned[mx.array(np.maximum(found, 0))], fresh)


def _tokens(drafter: Drafter) -> np.ndarray:
    if drafter.draft_tokens is None:
        return np.arange(drafter.config.vocab_size)
    return np.array(drafter.draft_tokens)


def _size(rows: mx.array) -> mx.array:
    return mx.sqrt(mx.square(rows).mean())
