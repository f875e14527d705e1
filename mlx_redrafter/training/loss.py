"""How far the drafter's law is from the target's, with hand-written gradients.

On MLX's CPU backend the exponential costs more than the matrix product that feeds it, so each law
is computed once and kept for the gradient.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_LEAST_OVERLAP = 1e-6


@mx.custom_function
def _cross_entropy(logits: mx.array, teacher: mx.array) -> tuple[mx.array, mx.array]:
    """Per-row loss (n,) and the student's law (n, V_d), which the gradient needs again."""
    student = mx.softmax(logits, axis=-1)
    shifted = logits - mx.max(logits, axis=-1, keepdims=True)
    normaliser = -mx.log(mx.max(student, axis=-1))
    return normaliser - (teacher * shifted).sum(axis=-1), student


@_cross_entropy.vjp
def _cross_entropy_gradient(
    primals: tuple[mx.array, mx.array],
    cotangents: tuple[mx.array, mx.array],
    outputs: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array]:
    _, teacher = primals
    _, student = outputs
    slope = cotangents[0][:, None]
    return slope * (student - teacher), mx.zeros_like(teacher)


def soft_cross_entropy(logits: mx.array, teacher: mx.array) -> mx.array:
    """-sum_v p(v) log q(v) per row, (n,). Its gradient in the logits is q - p, as that of the
    Kullback-Leibler divergence is, from which it differs by the teacher's entropy.

    logits (n, V_d) of the drafter; teacher (n, V_d): the target's law, rows sum to 1.
    """
    outputs: Any = _cross_entropy(logits, teacher)
    loss: mx.array = outputs[0]
    return loss


def acceptance_loss(logits: mx.array, teacher: mx.array) -> mx.array:
    """-log sum_v min(p(v), q(v)) per row, (n,): minus the log of the share of drawn tokens that
    a drafter which draws along with the target gets right (LK loss, arXiv 2602.23881)."""
    student = mx.softmax(logits, axis=-1)
    return -mx.log(mx.minimum(teacher, student).sum(axis=-1) + _LEAST_OVERLAP)


def distillation_loss(logits: mx.array, teacher: mx.array, acceptance_weight: float) -> mx.array:
    """The mix of both losses per row, (n,); at weight 0 or 1 only one of them is computed."""
    if acceptance_weight == 0:
        return soft_cross_entropy(logits, teacher)
    if acceptance_weight == 1:
        return acceptance_loss(logits, teacher)
    return (1 - acceptance_weight) * soft_cross_entropy(
        logits, teacher
    ) + acceptance_weight * acceptance_loss(logits, teacher)
