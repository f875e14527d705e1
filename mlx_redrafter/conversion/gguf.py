"""Write GGUF models as folders that mlx-lm loads: packed as they are, or unpacked to floats."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.formats import gguf, gguf_tokenizer


def write_packed(source: Path, folder: Path, dtype: str) -> None:
    """Write a GGUF file in MLX format; packed weights stay bit for bit what they are.

    `dtype` is the type of scales and norms, and with them of all that is computed: float16 as in
    the file, or float32 for MLX's CPU backend, where float16 takes 40 times as long.
    """
    file = gguf.read(source)
    weights = gguf.weights(file)
    config = {
        **gguf.config(file),
        **gguf_tokenizer.special_ids(file),
        "torch_dtype": dtype,
    }
    if quantization := _quantization(weights):
        config["quantization"] = quantization
    for name, content in zip(gguf_tokenizer.FILES, gguf_tokenizer.contents(file), strict=True):
        _write_json(folder / name, content)
    for name, array in weights.items():
        if mx.issubdtype(array.dtype, mx.floating):
            weights[name] = array.astype(getattr(mx, dtype))
    _write_model(folder, config, weights)


def write_unpacked(packed: Path, folder: Path, dtype: str) -> None:
    """Write the same model with its weights unpacked to `dtype`: float32, bfloat16 or float16."""
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    quantization = config.pop("quantization", {})
    weights: Any = mx.load(str(packed / "model.safetensors"))
    unpacked = {}
    for name, array in weights.items():
        module, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            continue
        if f"{module}.scales" in weights:
            array = mx.dequantize(
                array,
                weights[f"{module}.scales"].astype(mx.float32),
                weights[f"{module}.biases"].astype(mx.float32),
                **quantization.get(module, {key: quantization[key] for key in _PACKING}),
            )
        unpacked[name] = array.astype(getattr(mx, dtype))
    for name in gguf_tokenizer.FILES:
        shutil.copyfile(packed / name, folder / name)
    _write_model(folder, {**config, "torch_dtype": dtype}, unpacked)


_PACKING = ("group_size", "bits")


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """config.json's entry: the most common width, and a line for each module of another."""
    bits = {}
    for name, scales in weights.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "scales":
            packed = weights[f"{module}.weight"].shape[-1]
            bits[module] = packed * 32 // (scales.shape[-1] * gguf.GROUP_SIZE)
    if not bits:
        return {}
    widths = sorted(bits.values())
    common = max(widths, key=widths.count)
    others = {module: width for module, width in sorted(bits.items()) if width != common}
    return {
        "group_size": gguf.GROUP_SIZE,
        "bits": common,
        **{
            module: {"group_size": gguf.GROUP_SIZE, "bits": width}
            for module, width in others.items()
        },
    }


def _write_model(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    _write_json(folder / "config.json", config)
    path = folder / "model.safetensors"
    try:
        mx.save_safetensors(str(path), weights, {"format": "mlx"})
    except RuntimeError as error:
        if "[write]" not in str(error):
            raise
        # MLX does not say why a write failed; of all causes a full disk is the common one.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
