"""Read GGUF files of Llama models: check the layout, then name everything as mlx-lm and tokenizers do.

`mx.load` does the reading and keeps Q4_0, Q4_1 and Q8_0 packed (group 32, float16 scales and biases).
It trusts the file, so `read` walks the header first: a file cut short is an error, not a crash.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_redrafter.errors import FormatError

if TYPE_CHECKING:
    import mlx.core as mx

GROUP_SIZE = 32

# Metadata value types: struct code by GGUF number; 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

# Tensor types read here, by GGUF number: (name, values in a block, bytes of a block).
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}

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

# llama.cpp's pre-tokenizers by `tokenizer.ggml.pre`. "smollm" cuts at every digit (\p{N}), then splits as GPT-2 does;
# the digits go first, so that a space before a number stays a token of its own.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
_CONTROL, _USER_DEFINED = 3, 4  # token types that text is searched for before BPE

# Control tokens that end a text besides the file's own eos: the ones that llama.cpp, too, stops at.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>")


@dataclass(frozen=True)
class GGUF:
    """A file as read: metadata as plain Python values, tensors under their GGUF names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, mx.array]

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A metadata value that must be there."""
        if key not in self.metadata:
            raise FormatError(f"{self.path.name} lacks {key}: convert the model to GGUF anew")
        value = self.metadata[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FormatError(
                f"{self.path.name}: {key} is a {type(value).__name__}, not as in GGUF"
            )
        return value


def read(path: Path) -> GGUF:
    """Check and load a GGUF file of a Llama model."""
    import mlx.core as mx

    check(path)
    loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    tensors, metadata = loaded
    file = GGUF(path, {key: _plain(value) for key, value in metadata.items()}, tensors)
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise FormatError(
            f"{path.name} holds a {architecture!r} model: only llama is read from GGUF"
        )
    if file.metadata.get("llama.rope.scaling.type", "none") != "none":
        raise FormatError(f"{path.name} scales its RoPE, which is not read from GGUF")
    return file


def check(path: Path) -> None:
    """Walk the header of a GGUF file and see that every tensor lies inside the file."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise FormatError(f"{path.name} is not a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _walk(path, data)
    except (struct.error, UnicodeDecodeError, OverflowError, ValueError) as error:
        raise FormatError(f"{path.name} is cut short or damaged: fetch it again") from error


def _walk(path: Path, data: mmap.mmap) -> None:
    size, at = len(data), 4

    def take(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize("<" + code)
        return int(value)

    def text() -> str:
        nonlocal at
        length = take("Q")
        if length > size - at:
            raise ValueError("string past the end")
        at += length
        return data[at - length : at].decode()

    def skip(kind: int) -> int:
        nonlocal at
        if kind in _SCALARS:
            return take(_SCALARS[kind])
        if kind == _STRING:
            text()
        elif kind == _ARRAY:
            inner, length = take("I"), take("Q")
            if inner in _SCALARS:
                at += length * struct.calcsize("<" + _SCALARS[inner])
            elif inner == _STRING and length <= size:
                for _ in range(length):
                    text()
            else:
                raise ValueError("unknown array")
        else:
            raise ValueError("unknown value type")
        return 0

    version = take("I")
    if version not in (2, 3):
        raise FormatError(f"{path.name} is GGUF version {version}: only 2 and 3 are read")
    num_tensors, num_values = take("Q"), take("Q")
    alignment = 32
    for _ in range(num_values):
        key = text()
        value = skip(take("I"))
        if key == "general.alignment":
            alignment = value
    if alignment <= 0 or alignment & (alignment - 1):
        raise ValueError("alignment is not a power of two")
    end = 0
    for _ in range(num_tensors):
        name = text()
        shape = [take("Q") for _ in range(take("I"))]
        kind, offset = take("I"), take("Q")
        if kind not in _TENSOR_TYPES:
            known = ", ".join(known for known, _, _ in _TENSOR_TYPES.values())
            raise FormatError(
                f"{path.name}: {name} is of type {kind}, which is not read (only {known})"
            )
        _, values, nbytes = _TENSOR_TYPES[kind]
        if not shape or shape[0] % values or offset % alignment:
            raise ValueError("tensor shape or offset")
        end = max(end, offset + prod(shape) // values * nbytes)
    start = -(-at // alignment) * alignment
    if start + end > size:
        raise ValueError("tensor past the end")


def _plain(value: Any) -> Any:
    """mx.load gives strings, lists of strings, and arrays for numbers."""
    if isinstance(value, (str, list)):
        return value
    values = value.tolist()
    # A float32 is written as the shortest decimal that names it: 1e-05, not 9.999999747378752e-06.
    return float(f"{values:.7g}") if isinstance(values, float) else values


def config(file: GGUF) -> dict[str, Any]:
    """config.json as mlx-lm and transformers read it."""

    def number(key: str) -> int:
        return int(file.get(f"llama.{key}", int))

    heads = number("attention.head_count")
    hidden = number("embedding_length")
    rope = file.metadata.get("llama.rope.dimension_count", hidden // heads)
    if rope * heads != hidden:
        raise FormatError(
            f"{file.path.name}: partial RoPE ({rope} of a head) is not read from GGUF"
        )
    tokens = tokenizer_ids(file)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": tokens["bos"],
        "eos_token_id": end_ids(file),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": number("block_count"),
        "num_key_value_heads": int(file.metadata.get("llama.attention.head_count_kv", heads)),
        "pad_token_id": tokens["pad"],
        "rms_norm_eps": file.get("llama.attention.layer_norm_rms_epsilon", float),
        "rope_theta": float(file.metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": len(file.get("tokenizer.ggml.tokens", list)),
    }


def weights(file: GGUF) -> dict[str, mx.array]:
    """Weights under mlx-lm's names, packed as in the file, checked against the config's shapes."""
    shapes = config(file)
    heads = {"attn_q": shapes["num_attention_heads"], "attn_k": shapes["num_key_value_heads"]}
    out: dict[str, mx.array] = {}
    for name, array in file.tensors.items():
        match = _TENSOR.fullmatch(name)
        layer, part, leaf = match.groups() if match else (None, "", "")
        known = (_GLOBAL_NAMES if layer is None else _LAYER_NAMES).get(part)
        if known is None or (layer and int(layer) >= shapes["num_hidden_layers"]):
            raise FormatError(f"{file.path.name}: a Llama model has no place for tensor {name}")
        prefix = known if layer is None else f"model.layers.{layer}.{known}"
        out[f"{prefix}.{leaf}"] = _unpermute(array, heads[part]) if part in heads else array
    _check_shapes(file, out, shapes)
    return out


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo GGUF's order of Llama q and k rows.

    GGUF interleaves the two halves of each head (for RoPE on neighbouring pairs); mlx-lm and Hugging Face rotate the
    halves. Only rows move, so packed weights, scales and biases move alike.
    """
    shape = rows.shape
    if shape[0] % (2 * heads):
        raise FormatError("q or k projection does not divide into heads: the GGUF file is damaged")
    return rows.reshape(heads, shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(shape)


def _check_shapes(file: GGUF, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        expected["lm_head"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes = {
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
        for part, shape in shapes.items():
            expected[f"model.layers.{layer}.{_LAYER_NAMES[part]}"] = shape
    for name, shape in expected.items():
        weight, scales = weights.get(f"{name}.weight"), weights.get(f"{name}.scales")
        if weight is None:
            raise FormatError(f"{file.path.name} lacks the tensor for {name}: fetch it again")
        actual = (
            weight.shape if scales is None else (*scales.shape[:-1], scales.shape[-1] * GROUP_SIZE)
        )
        if tuple(actual) != shape:
            raise FormatError(f"{file.path.name}: {name} has shape {actual}, not {shape}")


def tokenizer_ids(file: GGUF) -> dict[str, int | None]:
    """Ids of the special tokens by role."""
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        role: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()
    }


def end_ids(file: GGUF) -> list[int]:
    """All ids that end a text: the file's eos first, then end-of-turn and known control tokens."""
    tokens = file.get("tokenizer.ggml.tokens", list)
    types = file.get("tokenizer.ggml.token_type", list)
    ids = [file.get("tokenizer.ggml.eos_token_id", int)]
    ids += [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    ids += [i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_TOKENS]
    return list(dict.fromkeys(i for i in ids if i is not None))


def tokenizer(file: GGUF) -> dict[str, dict[str, Any]]:
    """The tokenizer's files by name: tokenizer.json, tokenizer_config.json, generation_config.json."""
    model = file.get("tokenizer.ggml.model", str)
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise FormatError(
            f"{file.path.name}: tokenizer {model!r} with pre-tokenizer {pre!r} is not read from GGUF"
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    types: list[int] = file.get("tokenizer.ggml.token_type", list)
    merges = [merge.split(" ") for merge in file.get("tokenizer.ggml.merges", list)]
    ids = tokenizer_ids(file)
    damaged = (
        len(types) != len(tokens)
        or len(set(tokens)) != len(tokens)
        or any(len(merge) != 2 for merge in merges)
        or any(i is not None and i >= len(tokens) for i in (*ids.values(), *end_ids(file)))
    )
    if damaged:
        raise FormatError(f"{file.path.name}: the tokenizer is damaged: fetch the file again")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] == _CONTROL,
        }
        for i, token in enumerate(tokens)
        if types[i] in (_CONTROL, _USER_DEFINED)
    ]
    named = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", False))
    if add_bos:
        raise FormatError(f"{file.path.name}: a tokenizer that adds a BOS is not read from GGUF")
    settings: dict[str, Any] = {
        # Not the model's own GPT2Tokenizer: transformers 5 rebuilds that class from vocabulary and merges alone and
        # so forgets the digits. This one takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "additional_special_tokens": [token["content"] for token in added if token["special"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get("llama.context_length", int),
    }
    if template := file.metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                # A byte that the vocabulary lacks is dropped. An unknown token here would be an end token.
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": merges,
            },
        },
        "tokenizer_config.json": settings,
        "generation_config.json": {
            "bos_token_id": ids["bos"],
            "eos_token_id": end_ids(file),
            "pad_token_id": ids["pad"],
        },
    }
