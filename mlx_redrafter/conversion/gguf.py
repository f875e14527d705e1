"""Write GGUF models as folders that mlx-lm loads: packed as shipped, or unpacked to one float type."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.errors import FormatError
from mlx_redrafter.formats import gguf

FLOAT_TYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def write_stored(source: Path, folder: Path) -> None:
    """Write a GGUF file into `folder` in MLX format, packed weights bit for bit as in the file."""
    file = gguf.read(source)
    weights = gguf.weights(file)
    quantization = _quantization(weights)
    # Float weights take the type of the scales, or activations would be computed in float32.
    weights = {
        name: array.astype(mx.float16) if array.dtype == mx.float32 else array
        for name, array in weights.items()
    }
    config = gguf.config(file)
    if quantization:
        config["quantization"] = quantization
    config["torch_dtype"] = "float16"
    _write_weights(folder, weights)
    _write_json(folder / "config.json", config)
    for name, content in gguf.tokenizer(file).items():
        _write_json(folder / name, content)


def write_unpacked(stored: Path, folder: Path, dtype: str) -> None:
    """Derive the folder of one float type from the stored one: the same files, weights dequantised."""
    config = json.loads((stored / "config.json").read_text())
    quantization = config.pop("quantization", {})
    loaded: Any = mx.load(str(stored / "model.safetensors"))
    weights: dict[str, mx.array] = loaded
    out: dict[str, mx.array] = {}
    for name, array in weights.items():
        module, _, leaf = name.rpartition(".")
        if f"{module}.scales" not in weights:
            out[name] = array.astype(FLOAT_TYPES[dtype])
        elif leaf == "weight":
            setting = quantization.get(module, quantization)
            full = mx.dequantize(
                array,
                weights[f"{module}.scales"].astype(mx.float32),
                weights[f"{module}.biases"].astype(mx.float32),
                group_size=setting["group_size"],
                bits=setting["bits"],
            )
            out[name] = full.astype(FLOAT_TYPES[dtype])
    config["torch_dtype"] = dtype
    _write_weights(folder, out)
    _write_json(folder / "config.json", config)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(stored / name, folder / name)


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """config.json's `quantization`: the most common width for all, an entry for each other module."""
    bits: dict[str, int] = {}
    for name, scales in weights.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "scales":
            packed = weights[f"{module}.weight"].shape[-1]
            bits[module] = packed * 32 // (scales.shape[-1] * gguf.GROUP_SIZE)
    if not bits:
        return {}
    widths = sorted(bits.values())
    common = max(widths, key=widths.count)
    settings: dict[str, Any] = {"group_size": gguf.GROUP_SIZE, "bits": common}
    for module, width in sorted(bits.items()):
        if width != common:
            settings[module] = {"group_size": gguf.GROUP_SIZE, "bits": width}
    return settings


def _write_weights(folder: Path, weights: dict[str, mx.array]) -> None:
    """Write model.safetensors in the order of names, so that equal weights give equal files."""
    path = folder / "model.safetensors"
    needed = sum(array.nbytes for array in weights.values())
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    try:
        mx.save_safetensors(str(path), dict(sorted(weights.items())), {"format": "mlx"})
    except RuntimeError as error:  # MLX does not say why a write failed
        raise OSError(errno.EIO, str(error), str(path)) from error
    if path.stat().st_size <= needed:
        raise FormatError(f"{path.name} was not written whole: free some disk space and try again")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
