"""GGUF files are read as what they are, or refused with the reason."""

import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf as reference
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlx_redrafter.errors import FormatError
from mlx_redrafter.formats import gguf, gguf_header
from tests.formats import gguf_files as files


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_the_config(small: Path) -> None:
    assert gguf.config(gguf.read(small)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(files.vocabulary()),
    }


def test_every_weight_is_the_one_that_was_written(small: Path) -> None:
    weights = gguf.weights(gguf.read(small))
    modules = {name.rpartition(".")[0] for name in weights}
    assert modules == {
        "model.embed_tokens",
        "model.norm",
        *(
            f"model.layers.{i}.{part}"
            for i in range(files.LAYERS)
            for part in [
                "input_layernorm",
                *(f"self_attn.{x}_proj" for x in "qkvo"),
                "post_attention_layernorm",
                *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
            ]
        ),
    }
    stored = {name: (array, kind) for name, (array, kind) in files.tensors().items()}
    pairs = {
        "model.embed_tokens": ("token_embd", 8),
        "model.layers.1.self_attn.v_proj": ("blk.1.attn_v", 4),
        "model.layers.0.self_attn.o_proj": ("blk.0.attn_output", 4),
        "model.layers.1.mlp.gate_proj": ("blk.1.ffn_gate", 4),
        "model.layers.0.mlp.up_proj": ("blk.0.ffn_up", 4),
        "model.layers.1.mlp.down_proj": ("blk.1.ffn_down", 4),
        "model.layers.0.post_attention_layernorm": ("blk.0.ffn_norm", 32),
        "model.layers.1.input_layernorm": ("blk.1.attn_norm", 32),
        "model.norm": ("output_norm", 32),
    }
    for module, (name, bits) in pairs.items():
        array, kind = stored[f"{name}.weight"]
        packed = reference.quants.quantize(array, kind)
        expected = reference.quants.dequantize(packed, kind)
        assert np.array_equal(unpack(weights, module, bits), expected), module


def unpack(weights: dict[str, mx.array], module: str, bits: int) -> np.ndarray:
    weight = weights[f"{module}.weight"]
    if bits == 32:
        return np.array(weight)
    scales, biases = (
        weights[f"{module}.{leaf}"].astype(mx.float32) for leaf in ("scales", "biases")
    )
    return np.array(mx.dequantize(weight, scales, biases, group_size=32, bits=bits))


@pytest.mark.parametrize(("part", "heads"), [("q", files.HEADS), ("k", files.KV_HEADS)])
def test_q_and_k_rows_are_put_back(small: Path, part: str, heads: int) -> None:
    """GGUF's row 2i of a head is row i of it, and row 2i + 1 is row i + d/2."""
    weights = gguf.weights(gguf.read(small))
    array, kind = files.tensors()[f"blk.1.attn_{part}.weight"]
    stored = reference.quants.dequantize(reference.quants.quantize(array, kind), kind)
    found = unpack(weights, f"model.layers.1.self_attn.{part}_proj", 4)
    size = len(stored) // heads
    for head in range(heads):
        for row in range(size):
            expected = stored[head * size + (2 * row if row < size // 2 else 2 * row - size + 1)]
            assert np.array_equal(found[head * size + row], expected)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    path = files.write(tmp_path / "untied.gguf", files.tensors(tied=False))
    file = gguf.read(path)
    assert gguf.config(file)["tie_word_embeddings"] is False
    assert gguf.weights(file)["lm_head.weight"].dtype == mx.float16


@pytest.mark.parametrize("part", [0.0001, 0.01, 0.3, 0.7, 0.95, 0.9999])
def test_a_file_cut_short(small: Path, tmp_path: Path, part: float) -> None:
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(FormatError, match=r"cut.gguf is (cut short|not a GGUF)"):
        gguf_header.check(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4" + b"\0" * 64, "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 64, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + b"\xff" * 64, "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 62), "cut short"),
    ],
)
def test_what_is_no_gguf(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message):
        gguf.read(path)


def test_damage_anywhere_in_the_header_is_no_crash(small: Path, tmp_path: Path) -> None:
    data = bytearray(small.read_bytes())
    header = len(data) - sum(
        reference.quants.quantize(array, kind).nbytes for array, kind in files.tensors().values()
    )
    random = np.random.default_rng(0)
    path = tmp_path / "x.gguf"
    for _ in range(300):
        damaged = bytearray(data)
        for at in random.integers(0, header, 3):
            damaged[at] = random.integers(256)
        path.write_bytes(damaged)
        with suppress(FormatError):
            gguf_header.check(path)


Weights = dict[str, tuple[np.ndarray, Kind]]


def without(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.pop(name) and None


def with_(name: str, shape: tuple[int, ...], kind: Kind = Kind.F32) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: (np.zeros(shape, np.float32), kind)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("blk.1.ffn_up.weight"), "lacks 1 tensors, such as model.layers.1.mlp.up_proj"),
        (without("token_embd.weight"), "lacks 1 tensors"),
        (with_("blk.2.attn_norm.weight", (64,)), "blk.2.attn_norm.weight, for which"),
        (with_("blk.0.attn_q.bias", (64,)), "blk.0.attn_q.bias, for which"),
        (with_("rope_freqs.weight", (8,)), "rope_freqs.weight, for which"),
        (with_("blk.0.attn_norm.weight", (32,)), r"of shape \(32,\), not \(64,\)"),
        (with_("blk.0.attn_v.weight", (64, 64)), r"of shape \(64, 64\), not \(32, 64\)"),
        (with_("blk.0.ffn_up.weight", (96, 32), Kind.Q4_1), "blk.0.ffn_up"),
        (with_("blk.0.ffn_up.weight", (96, 64), Kind.BF16), "of a type that is not read"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, change: Callable[[Weights], None], message: str
) -> None:
    weights = files.tensors()
    change(weights)
    path = files.write(tmp_path / "odd.gguf", weights)
    with pytest.raises(FormatError, match=message):
        gguf.weights(gguf.read(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "scales its RoPE"),
        ({"llama__rope__dimension_count": 8}, "rotates only a part"),
        ({"llama__block_count": None}, "has nothing for llama.block_count"),
        ({"llama__block_count": "2"}, "has a str for llama.block_count"),
        ({"llama__attention__head_count": 5}, "has 5 heads for a width of 64"),
        ({"llama__attention__head_count": 0}, "has 0 heads"),
    ],
)
def test_metadata_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = files.write(tmp_path / "odd.gguf", **changes)
    with pytest.raises(FormatError, match=re.escape(message)):
        gguf.config(gguf.read(path))


def test_another_architecture(tmp_path: Path) -> None:
    path = files.write(tmp_path / "odd.gguf", architecture="qwen2")
    with pytest.raises(FormatError, match="holds a qwen2 model"):
        gguf.read(path)
