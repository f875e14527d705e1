"""Small GGUF files, and a slow twin that computes a Llama model straight from one.

Both use the `gguf` package, so that nothing of the code under test is used on the way.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The last two would be used, were digits not cut off first.
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "Ġ Ġ", "Ċ Ċ", "Ġ 4", "4 2"]


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def vocabulary() -> list[str]:
    letters = byte_letters()
    alphabet = [letter for byte, letter in sorted(letters.items()) if byte != 4]  # one is lacking
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def tensors(tied: bool = True, seed: int = 0) -> dict[str, tuple[np.ndarray, Kind]]:
    """Random weights under GGUF's names, and the type that each is stored in."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, kind: Kind) -> tuple[np.ndarray, Kind]:
        return random.normal(0, 2 * columns**-0.5, (rows, columns)).astype(np.float32), kind

    def norm() -> tuple[np.ndarray, Kind]:
        # As in the real file, norms are float32 that float16 holds exactly.
        return random.uniform(0.5, 1.5, HIDDEN).astype(np.float16).astype(np.float32), Kind.F32

    keys = HIDDEN * KV_HEADS // HEADS
    out = {"token_embd": matrix(len(vocabulary()), HIDDEN, Kind.Q8_0), "output_norm": norm()}
    if not tied:
        out["output"] = matrix(len(vocabulary()), HIDDEN, Kind.F16)
    for i in range(LAYERS):
        out |= {
            f"blk.{i}.attn_norm": norm(),
            f"blk.{i}.attn_q": matrix(HIDDEN, HIDDEN, Kind.Q4_1),
            f"blk.{i}.attn_k": matrix(keys, HIDDEN, Kind.Q4_1),
            f"blk.{i}.attn_v": matrix(keys, HIDDEN, Kind.Q4_1),
            f"blk.{i}.attn_output": matrix(HIDDEN, HIDDEN, Kind.Q4_0),
            f"blk.{i}.ffn_norm": norm(),
            f"blk.{i}.ffn_gate": matrix(INNER, HIDDEN, Kind.Q4_1),
            f"blk.{i}.ffn_up": matrix(INNER, HIDDEN, Kind.Q4_1),
            f"blk.{i}.ffn_down": matrix(HIDDEN, INNER, Kind.Q4_1),
        }
    return {f"{name}.weight": value for name, value in out.items()}


def write(
    path: Path,
    weights: dict[str, tuple[np.ndarray, Kind]] | None = None,
    architecture: str = "llama",
    **changes: Any,
) -> Path:
    """Write a small chat model; `changes` set or, with None, leave out metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    tokens = vocabulary()
    metadata: dict[str, Any] = {
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 5000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata |= {name.replace("__", "."): value for name, value in changes.items()}
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for name, value in metadata.items():
        if value is not None:
            add[type(value)](name, value)
    for name, (array, kind) in (tensors() if weights is None else weights).items():
        packed = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Twin:
    """A Llama model in NumPy, on the file's own order of rows: RoPE turns neighbouring pairs."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.weights = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            for tensor in reader.tensors
        }
        get = {name: field.contents() for name, field in reader.fields.items()}
        self.layers = get["llama.block_count"]
        self.heads = get["llama.attention.head_count"]
        self.kv_heads = get["llama.attention.head_count_kv"]
        self.base = get["llama.rope.freq_base"]
        self.eps = get["llama.attention.layer_norm_rms_epsilon"]

    def logits(self, tokens: list[int]) -> np.ndarray:
        """(T,) -> (T, V)"""
        x = self.weights["token_embd.weight"][tokens]
        for i in range(self.layers):
            x = x + self._attend(f"blk.{i}", self._norm(x, f"blk.{i}.attn_norm"))
            y = self._norm(x, f"blk.{i}.ffn_norm")
            gate, up = self._linear(y, f"blk.{i}.ffn_gate"), self._linear(y, f"blk.{i}.ffn_up")
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, f"blk.{i}.ffn_down")
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self._linear(self._norm(x, "output_norm"), head)

    def _attend(self, prefix: str, x: np.ndarray) -> np.ndarray:
        length, width = x.shape
        size = width // self.heads
        q = self._linear(x, f"{prefix}.attn_q").reshape(length, self.heads, size)
        k = self._linear(x, f"{prefix}.attn_k").reshape(length, self.kv_heads, size)
        v = self._linear(x, f"{prefix}.attn_v").reshape(length, self.kv_heads, size)
        q, k = self._rotate(q), self._rotate(k)
        k, v = (np.repeat(a, self.heads // self.kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * size**-0.5
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", scores, v).reshape(length, width)
        return self._linear(mixed, f"{prefix}.attn_output")

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """(T, H, d): turn each pair (2i, 2i + 1) by position * base^(-2i/d)."""
        length, _, size = x.shape
        angles = np.outer(np.arange(length), self.base ** (-np.arange(0, size, 2) / size))
        turn = np.exp(1j * angles).astype(np.complex64)[:, None]
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return x / scale * self.weights[f"{name}.weight"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T
