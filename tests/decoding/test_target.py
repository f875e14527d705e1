"""Target: any mlx-lm model through its hooks, against the unmodified model recomputed in full."""

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import CompatibilityError
from tests import reference, tiny_models
from tests.decoding.harness import PROMPT, device_tree, pristine, target

LONG = [int(t) for t in np.random.default_rng(1).integers(tiny_models.VOCAB, size=61)]


def close(found: mx.array, expected: np.ndarray) -> None:
    error = np.abs(np.array(found.astype(mx.float32)) - expected).max()
    assert error <= 1e-4 * np.abs(expected).max(), f"error {error:.2e}"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize(
    ("prompt", "step"),
    [
        (LONG[:1], 2048),
        (LONG[:2], 2048),
        (LONG, 2048),
        (LONG, 7),
        (LONG, 60),
        (LONG, 1),
        ([0] * 9, 4),
    ],
    ids=["one-token", "two", "whole", "sevens", "exact", "ones", "zeros"],
)
def test_prefill(family: str, prompt: list[int], step: int) -> None:
    wrapped = target(family)
    cache = wrapped.make_cache()
    hidden, logits = wrapped.prefill(mx.array(prompt, mx.int32), cache, step_size=step)
    assert hidden.shape == (wrapped.hidden_size,)
    assert logits.shape == (wrapped.vocab_size,)
    close(hidden, reference.states(pristine(family), prompt)[-1])
    close(logits, reference.logits(pristine(family), prompt)[-1])
    assert cache.offset == len(prompt)


def test_prefill_continues_a_cache() -> None:
    wrapped = target("llama")
    cache = wrapped.make_cache()
    for part in (LONG[:20], LONG[20:21], LONG[21:]):
        hidden, logits = wrapped.prefill(mx.array(part, mx.int32), cache, step_size=8)
    close(logits, reference.logits(pristine("llama"), LONG)[-1])
    close(hidden, reference.states(pristine("llama"), LONG)[-1])


def test_hidden_is_after_the_final_norm() -> None:
    """The head applied to the tapped state gives the logits (llama here has a head of its own)."""
    wrapped = target("llama")
    hidden, logits = wrapped.prefill(mx.array(LONG, mx.int32), wrapped.make_cache())
    close(wrapped.model.lm_head(hidden), np.array(logits))


def test_wrapped_model_is_still_the_model() -> None:
    """mlx-lm's own calls and caches see no difference, before and after the engine ran."""
    wrapped, twin = target("llama3"), pristine("llama3")
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(LONG, mx.int32), cache)
    wrapped.verify(device_tree(reference.HostTree([1, 2, 3], [0, 0, 0])), cache)
    assert np.array_equal(reference.logits(wrapped.model, LONG), reference.logits(twin, LONG))
    texts = [
        [int(token) for token, _ in generate_step(mx.array(LONG), model, max_tokens=20)]
        for model in (wrapped.model, twin)
    ]
    assert texts[0] == texts[1]


def test_weights_keep_their_names() -> None:
    names = [
        sorted(k for k, _ in tree_flatten(m.parameters()))
        for m in (target("llama").model, pristine("llama"))
    ]
    assert names[0] == names[1]


def test_second_wrap_raises() -> None:
    model = tiny_models.build("llama")
    Target(model)
    with pytest.raises(CompatibilityError):
        Target(model)


def test_second_model_of_the_class_is_independent() -> None:
    """The tap must not reach other instances of the same class."""
    Target(tiny_models.build("qwen2"))
    other = tiny_models.build("qwen2", seed=1)
    Target(other)
    assert len(reference.decode(tiny_models.build("qwen2", seed=2), PROMPT, 3)) == 3


@pytest.mark.parametrize("dtype", tiny_models.DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_embed_gives_raw_rows(family: str, dtype: str) -> None:
    wrapped = Target(tiny_models.build(family, dtype))
    tokens = mx.array([[0, 5], [159, 5]])
    found = wrapped.embed(tokens)
    assert found.shape == (2, 2, wrapped.hidden_size)
    expected = tiny_models.build(family, dtype).model.embed_tokens(tokens)
    assert mx.array_equal(found.astype(mx.float32), expected.astype(mx.float32)).item()


@pytest.mark.parametrize("dtype", tiny_models.DTYPES)
def test_sizes(dtype: str) -> None:
    wrapped = Target(tiny_models.build("llama", dtype))
    assert (wrapped.hidden_size, wrapped.vocab_size) == (64, tiny_models.VOCAB)
    assert wrapped.supports_trees
    assert wrapped.reason is None


def test_verify_leaves_the_offset() -> None:
    wrapped = target("llama")
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(LONG, mx.int32), cache)
    tree = device_tree(reference.HostTree([1, 2, 3], [0, 0, 0]))
    states, logits = wrapped.verify(tree, cache)
    assert states.shape == (3, wrapped.hidden_size)
    assert logits.shape == (3, wrapped.vocab_size)
    assert cache.offset == len(LONG)


def test_verify_of_the_root_alone() -> None:
    wrapped = target("llama")
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(LONG[:-1], mx.int32), cache)
    states, logits = wrapped.verify(device_tree(reference.HostTree(LONG[-1:], [0])), cache)
    close(logits, reference.logits(pristine("llama"), LONG)[-1:])
    close(states, reference.states(pristine("llama"), LONG)[-1:])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_dropped_verify_leaves_no_trace(family: str) -> None:
    """Interrupted after verify, before compact: the next verify stands in the same place."""
    wrapped = target(family)
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(LONG[:40], mx.int32), cache)
    wrapped.verify(device_tree(reference.HostTree([9, 9, 9, 9], [0, 0, 1, 1])), cache)
    _, logits = wrapped.verify(device_tree(reference.HostTree(LONG[40:43], [0, 0, 1])), cache)
    close(logits, reference.logits(pristine(family), LONG[:43])[-3:])


UNFIT: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent": (
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 16,
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "state_size": 8,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": (0.0, 100.0),
            "time_step_rank": "auto",
        },
    ),
    "chunked": (
        "llama4_text",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "vocab_size": 128,
            "intermediate_size": 48,
            "intermediate_size_mlp": 48,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "no_rope_layers": [1, 1],
            "use_qk_norm": True,
        },
    ),
    "hybrid": (
        "lfm2",
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 32,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "intermediate_size": 48,
            "layer_types": ["conv", "full_attention"],
        },
    ),
}


def unfit(kind: str) -> nn.Module:
    """A model whose cache cannot hold a tree. The same weights each time."""
    name, config = UNFIT[kind]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": name} | config))
    rng = np.random.default_rng(0)
    weights = []
    for key, value in tree_flatten(model.parameters()):
        noise = mx.array(rng.standard_normal(value.shape).astype(np.float32))
        scale = 2.0 / value.shape[-1] ** 0.5 if value.ndim > 1 else 0.3
        weights.append((key, scale * noise + (1.0 if "norm" in key else 0.0)))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("kind", UNFIT)
def test_unfit_models_run_plain_with_a_reason(kind: str) -> None:
    model = unfit(kind)
    cache = make_prompt_cache(model)
    expected = reference._feed(model, cache, list(PROMPT))[-1]
    wrapped = Target(unfit(kind))
    assert not wrapped.supports_trees
    assert wrapped.reason
    assert "\n" not in wrapped.reason
    _, logits = wrapped.prefill(mx.array(PROMPT, mx.int32), wrapped.make_cache())
    close(logits, expected)


def test_a_head_inside_the_stack_is_refused_or_left_out() -> None:
    """gpt_neox: the module that owns the layers applies the head, too."""
    module = importlib.import_module("mlx_lm.models.gpt_neox")
    arguments = {
        "model_type": "gpt_neox",
        "max_position_embeddings": 256,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "layer_norm_eps": 1e-5,
        "vocab_size": tiny_models.VOCAB,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.5,
    }
    wrapped = Target(module.Model(module.ModelArgs.from_dict(arguments)))
    hidden, _ = wrapped.prefill(mx.array(PROMPT, mx.int32), wrapped.make_cache())
    assert not wrapped.supports_trees or hidden.shape == (wrapped.hidden_size,)


def test_dynamic_rope_is_refused_with_the_reason() -> None:
    scaling = {"type": "dynamic", "factor": 2.0}
    model = tiny_models.build("llama", rope_scaling=scaling, max_position_embeddings=64)
    wrapped = Target(model)
    assert not wrapped.supports_trees
    assert "rope" in str(wrapped.reason).lower()
