"""Read GGUF files of Llama models, and name everything as mlx-lm does.

`mx.load` does the reading and keeps Q4_0, Q4_1 and Q8_0 packed (group 32, float16 scales and
biases). It trusts the file, so the header is walked first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_redrafter.errors import FormatError
from mlx_redrafter.formats import gguf_header

GROUP_SIZE = 32

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|scales|biases)")


@dataclass(frozen=True)
class GGUF:
    """A file as read: metadata as plain Python values, tensors under their GGUF names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, mx.array]

    def get(self, key: str, kind: type) -> Any:
        """A metadata value that must be there."""
        value = self.metadata.get(key)
        if type(value) is not kind:
            found = "nothing" if value is None else f"a {type(value).__name__}"
            raise self.error(f"has {found} for {key}")
        return value

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self.path.name} {what}: it cannot be read as a Llama model in GGUF")


def read(path: Path) -> GGUF:
    """Check and load a GGUF file of a Llama model."""
    gguf_header.check(path)
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise FormatError(f"{path.name} cannot be read: {error}") from error
    tensors, metadata = loaded
    file = GGUF(path, {key: _plain(value) for key, value in metadata.items()}, tensors)
    if (architecture := file.get("general.architecture", str)) != "llama":
        raise file.error(f"holds a {architecture} model")
    if file.metadata.get("llama.rope.scaling.type", "none") != "none":
        raise file.error("scales its RoPE")
    return file


def _plain(value: Any) -> Any:
    """mx.load gives strings, lists of strings, and arrays for numbers."""
    if isinstance(value, mx.array):
        value = value.tolist()
        if isinstance(value, float):  # the shortest decimal: 1e-05, not 9.999999747378752e-06
            value = float(str(np.float32(value)))
    return value


def config(file: GGUF) -> dict[str, Any]:
    """config.json as mlx-lm and transformers read it, special tokens aside."""
    heads = file.get("llama.attention.head_count", int)
    hidden = file.get("llama.embedding_length", int)
    if heads < 1 or hidden % heads:
        raise file.error(f"has {heads} heads for a width of {hidden}")
    if file.metadata.get("llama.rope.dimension_count", hidden // heads) != hidden // heads:
        raise file.error("rotates only a part of each head")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": file.get("llama.feed_forward_length", int),
        "max_position_embeddings": file.get("llama.context_length", int),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": file.get("llama.block_count", int),
        "num_key_value_heads": file.metadata.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": file.get("llama.attention.layer_norm_rms_epsilon", float),
        "rope_theta": file.metadata.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": len(file.get("tokenizer.ggml.tokens", list)),
    }


def weights(file: GGUF) -> dict[str, mx.array]:
    """Weights under mlx-lm's names, packed as in the file, in the shapes that the config tells."""
    settings = config(file)
    heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
    shapes = _shapes(settings)
    out: dict[str, mx.array] = {}
    for name, array in file.tensors.items():
        match = _TENSOR.fullmatch(name)
        layer, part, leaf = match.groups() if match else (None, "", "")
        known = (_GLOBAL_NAMES if layer is None else _LAYER_NAMES).get(part)
        module = known if layer is None else f"model.layers.{int(layer)}.{known}"
        if known is None or module not in shapes:
            raise file.error(f"has a tensor {name}, for which there is no place")
        width = 1 if leaf == "weight" and f"{name[:-7]}.scales" not in file.tensors else GROUP_SIZE
        rows, columns = shapes[module][:-1], shapes[module][-1]
        if array.shape[:-1] != rows or (
            (leaf != "weight" or width == 1) and (array.shape[-1] * width != columns)
        ):
            raise file.error(f"has a tensor {name} of shape {array.shape}, not {shapes[module]}")
        out[f"{module}.{leaf}"] = _unpermute(array, heads[part]) if part in heads else array
    if missing := {f"{module}.weight" for module in shapes} - out.keys():
        raise file.error(f"lacks {len(missing)} tensors, such as {min(missing)}")
    return out


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo GGUF's order of Llama q and k rows.

    GGUF interleaves the two halves of each head, for RoPE on neighbouring pairs; mlx-lm and Hugging
    Face rotate the halves. Only rows move, so packed weights, scales and biases move alike.
    """
    halves = rows.reshape(heads, -1, 2, rows.shape[-1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The unpacked shape of every weight, by module."""
    vocab, hidden, inner = (
        config[key] for key in ("vocab_size", "hidden_size", "intermediate_size")
    )
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{i}.{_LAYER_NAMES[part]}": shape
        for i in range(config["num_hidden_layers"])
        for part, shape in layer.items()
    }
    shapes |= {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, hidden)
    return shapes
