"""Soft-label cross-entropy between the target's and the drafter's next-token laws."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def teacher_law(hidden: mx.array, head: mx.array) -> mx.array:
    """The target's law over the draft vocabulary, renormalised: (n, V_d) float32.

    hidden (n, D): target states; head (V_d, D): rows of the target's head.
    """
    return mx.softmax(hidden @ head.T, axis=-1, precise=True)


@mx.custom_function
def _cross_entropy(logits: mx.array, teacher: mx.array) -> tuple[mx.array, mx.array]:
    """Per-row loss (n,) and the student's law (n, V_d), which the gradient needs again: on a CPU
    the exponential is the dearest part."""
    student = mx.softmax(logits, axis=-1)
    shifted = logits - mx.max(logits, axis=-1, keepdims=True)
    normaliser = -mx.log(mx.max(student, axis=-1))
    return normaliser - (teacher * shifted).sum(axis=-1), student


@_cross_entropy.vjp
def _gradient(
    primals: tuple[mx.array, mx.array],
    cotangents: tuple[mx.array, mx.array],
    outputs: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array]:
    _, teacher = primals
    _, student = outputs
    slope = cotangents[0][:, None]
    return slope * (student - teacher), mx.zeros_like(teacher)


def soft_cross_entropy(logits: mx.array, teacher: mx.array) -> mx.array:
    """-sum_v p(v) log q(v) per row, (n,). Its gradient in the logits is q - p.

    logits (n, V_d) of the drafter; teacher (n, V_d): the target's law, rows sum to 1.
    """
    outputs: Any = _cross_entropy(logits, teacher)
    loss: mx.array = outputs[0]
    return loss
