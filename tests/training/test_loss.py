"""The loss and its hand-written gradient, against the plain formulas."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.training.loss import acceptance_loss, distillation_loss, soft_cross_entropy


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


def test_acceptance_loss_is_minus_the_log_of_the_overlap() -> None:
    logits, teacher, _ = sample(1.0)
    p, x = np.array(teacher), np.array(logits)
    q = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    expected = -np.log(np.minimum(p, q).sum(axis=1))
    np.testing.assert_allclose(np.array(acceptance_loss(logits, teacher)), expected, atol=1e-4)
    equal = acceptance_loss(mx.log(teacher), teacher)
    np.testing.assert_allclose(np.array(equal), 0, atol=1e-4)


def test_a_step_down_the_acceptance_loss_raises_the_overlap() -> None:
    logits, teacher, _ = sample(1.0)
    slope = mx.grad(lambda x: acceptance_loss(x, teacher).sum())(logits)
    after = acceptance_loss(logits - 0.1 * slope, teacher)
    assert (np.array(after) < np.array(acceptance_loss(logits, teacher))).all()


def test_the_mix_has_both_ends() -> None:
    logits, teacher, _ = sample(1.0)
    soft, overlap = soft_cross_entropy(logits, teacher), acceptance_loss(logits, teacher)
    for weight in (0.0, 0.25, 1.0):
        mixed = np.array(distillation_loss(logits, teacher, weight))
        expected = (1 - weight) * np.array(soft) + weight * np.array(overlap)
        np.testing.assert_allclose(mixed, expected, atol=1e-5)
