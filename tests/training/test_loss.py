"""The loss and its hand-written gradient, against the plain formulas."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.training.loss import soft_cross_entropy, teacher_law


def plain(logits: mx.array, teacher: mx.array) -> mx.array:
    log_student = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return -(teacher * log_student).sum(axis=-1)


def sample(scale: float) -> tuple[mx.array, mx.array, mx.array]:
    logits, labels, weights = (
        mx.random.normal(shape, key=mx.random.key(i))
        for i, shape in enumerate([(5, 11), (5, 11), (5,)])
    )
    return scale * logits, mx.softmax(3 * labels, axis=-1), weights


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_value_and_gradient_equal_the_plain_formula(scale: float) -> None:
    logits, teacher, weights = sample(scale)
    fast, slow = soft_cross_entropy(logits, teacher), plain(logits, teacher)
    np.testing.assert_allclose(np.array(fast), np.array(slow), atol=2e-5, rtol=1e-5)
    slopes = [
        np.array(mx.grad(lambda x, f=f: (weights * f(x, teacher)).sum())(logits))
        for f in (soft_cross_entropy, plain)
    ]
    np.testing.assert_allclose(slopes[0], slopes[1], atol=2e-5)


def test_the_teacher_gets_no_gradient() -> None:
    logits, teacher, _ = sample(1.0)
    slope = mx.grad(lambda t: soft_cross_entropy(logits, t).sum())(teacher)
    assert not np.array(slope).any()


def test_the_loss_is_least_where_the_laws_agree() -> None:
    logits, teacher, _ = sample(1.0)
    best = soft_cross_entropy(mx.log(teacher), teacher)
    assert (np.array(best) < np.array(soft_cross_entropy(logits, teacher))).all()


def test_teacher_law_is_the_softmax_of_the_heads_logits() -> None:
    hidden, head = mx.random.normal((4, 6)), mx.random.normal((9, 6))
    scores = np.array(hidden) @ np.array(head).T
    law = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(
        np.array(teacher_law(hidden, head)), law / law.sum(axis=1, keepdims=True), atol=1e-5
    )
