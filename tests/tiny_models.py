"""Tiny random mlx-lm models whose greedy text does not loop.

Random weights at the usual scale give a model that repeats itself after a few tokens, and on such a
text nearly any bug of a speculative decoder stays invisible. Here the weights are scaled up, which
makes the next token depend on the whole context, and `assert_diverse` refuses a text with a short
period.
"""

import importlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 160
WINDOW = 24

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True)
class Family:
    """One architecture of mlx-lm at toy size.

    `window` is set where layers slide, `experts` for mixtures; `embed` scales the embeddings of
    models that multiply them, so that the residual stream does not drown the layers.
    """

    module: str
    config: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    experts: bool = False
    embed: float = 1.0


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}
_MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_SLIDING = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {"tie_word_embeddings": False}),
    "llama3": Family("llama", {"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500000.0}),
    "llama-linear": Family("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-yarn": Family("llama", {"rope_scaling": _YARN_ROPE, "max_position_embeddings": 256}),
    "mistral": Family("llama", {"num_key_value_heads": 1, "head_dim": 32, "rope_theta": 1e6}),
    "qwen2": Family("qwen2", {"num_key_value_heads": 1}),
    "qwen3": Family(
        "qwen3",
        {
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Family("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-longrope": Family("phi3", {"rope_scaling": _LONG_ROPE}),
    "gemma2": Family("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 4.0}, embed=0.1),
    "granite": Family(
        "granite",
        {
            "logits_scaling": 4.0,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "max_position_embeddings": 512,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": 10000.0,
        },
        embed=0.5,
    ),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True),
    "qwen2_moe": Family("qwen2_moe", _MIXTURE, experts=True),
    "qwen3_moe": Family(
        "qwen3_moe",
        _MIXTURE
        | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        experts=True,
    ),
    "olmo2": Family("olmo2"),
    "glm4": Family(
        "glm4",
        {
            "attention_bias": True,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        },
    ),
    "smollm3": Family("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "llama-window": Family(
        "llama",
        {"layer_types": _SLIDING, "sliding_window": WINDOW},
        window=WINDOW,
    ),
    "cohere2": Family(
        "cohere2",
        {
            "head_dim": 16,
            "logit_scale": 1.0,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
        window=WINDOW,
    ),
    "gemma3_text": Family(
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16.0,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
        window=WINDOW,
        embed=0.15,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING,
        },
        window=WINDOW,
        experts=True,
    ),
    "olmo3": Family(
        "olmo3",
        {
            "max_position_embeddings": 512,
            "sliding_window": WINDOW,
            "rope_theta": 10000.0,
            "layer_types": _SLIDING,
        },
        window=WINDOW,
    ),
}

GAIN = 2.5
DTYPES = ("float32", "bfloat16", "4bit")


def build(name: str, dtype: str = "float32", seed: int = 0, **overrides: Any) -> nn.Module:
    """The same arguments give bit-equal weights: a second call makes the unmodified twin of a
    wrapped model.
    """
    family = FAMILIES[name]
    module = importlib.import_module(f"mlx_lm.models.{family.module}")
    config = _BASE | {"model_type": family.module} | family.config | overrides
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    weights = [
        (key, _draw(key, value, rng, family)) for key, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    if dtype == "4bit":
        nn.quantize(model, group_size=32, bits=4)
    elif dtype != "float32":
        model.set_dtype(getattr(mx, dtype))
    model.eval()
    mx.eval(model.parameters())
    return model


def _draw(key: str, value: mx.array, rng: np.random.Generator, family: Family) -> mx.array:
    noise = mx.array(rng.standard_normal(value.shape).astype(np.float32))
    if value.ndim == 1:  # norm scales (about one), biases, sinks
        # Norms that bound the attention scores or a block's output would undo the scaling of the
        # weights.
        bounds = any(part in key for part in ("q_norm", "k_norm", "post_"))
        centre = 1.0 if key.endswith("weight") else 0.0
        return (centre + 0.3 * noise) * (GAIN if bounds else 1.0)
    if "embed" in key:
        return noise * family.embed
    return GAIN * noise / value.shape[-1] ** 0.5


def has_short_period(tokens: Sequence[int], longest: int = 24) -> bool:
    """True if the last third of the text repeats with a period of at most `longest`."""
    tail = list(tokens[-max(2 * longest, len(tokens) // 3) :])
    return any(tail[p:] == tail[:-p] for p in range(1, longest + 1))


def assert_diverse(tokens: Sequence[int]) -> None:
    assert len(tokens) >= 72, "too short to tell"
    assert not has_short_period(tokens), f"the text loops: {list(tokens[-48:])}"
    assert len(set(tokens)) >= len(tokens) // 4, f"only {len(set(tokens))} distinct tokens"
