"""Fingerprints: short names for what must fit together.

A target's is one line: a hash of its tensors' names and shapes, a sketch of its weights, and a hash
of the adapter where there is one, joined by dashes. The sketch is compared by angle and not by
equality, for rounding to 16 or 4 bits moves every value a little, and no grid is so coarse that all
stay on their side of it. A fine-tune that stays as near to its base as 4 bits do counts as the same
target: drafts are as exact, and fit nearly as well; where several drafters match, the nearest is
taken. An adapter always tells.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the registry compares fingerprints without mlx and numpy
    import mlx.core as mx
    import mlx.nn as nn

SAME = 0.8  # cosine of two sketches: 0.99 between 16 and 4 bits, below 0.5 between two models

_MATRICES = 12  # sampled from the first to the last, by name
_ROWS = 8  # of each
_PROJECTIONS = 4  # of each: random signs, so that each is about normal
_SCALE = 1024  # of a sketch's numbers as 16-bit integers
_SAMPLE = 16  # values of each tensor: training moves every value a little
_ADAPTER_KEYS = ("fine_tune_type", "num_layers", "lora_parameters")


def of_values(*values: Any) -> str:
    """A fingerprint of JSON-like values."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def of_vocabulary(vocabulary: Mapping[str, int]) -> str:
    """A fingerprint of a tokenizer: two with equal sizes and other tokens differ."""
    return of_values(sorted(vocabulary.items(), key=lambda item: item[1]))


def of_weights(parameters: Any) -> str:
    """A fingerprint of a model's weights (a tree of arrays): names, shapes, types and the first
    values of each, so that it costs no pass over all of them and yet a fine-tune differs."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten

    samples = []
    for name, array in sorted(tree_flatten(parameters)):
        values = np.array(array.reshape(-1)[:_SAMPLE].astype(mx.float32))
        samples.append((name, array.shape, str(array.dtype), values.tobytes().hex()))
    return of_values(samples)


def of_target(model: nn.Module, adapter: str | None = None) -> str:
    """A fingerprint of a model as mlx-lm loads it, in any type and packing, before an adapter is
    applied; ``adapter`` is that one's own fingerprint."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    matrices: list[tuple[str, nn.Module]] = []
    for name, module in sorted(model.named_modules(), key=lambda item: item[0]):
        for leaf, shape in _shapes(module):
            shapes.append((f"{name}.{leaf}", shape))
            if leaf == "weight" and len(shape) == 2:
                matrices.append((name, module))
    count = min(_MATRICES, len(matrices))
    chosen = [matrices[i * (len(matrices) - 1) // max(count - 1, 1)] for i in range(count)]
    numbers = [number for name, module in chosen for number in _project(name, module)]
    sketch = "".join(f"{number & 0xFFFF:04x}" for number in numbers)
    return "-".join(part for part in (of_values(shapes)[:16], sketch, adapter) if part)


def of_adapter(folder: Path) -> str:
    """A fingerprint of mlx-lm's adapter files: any other training gives another one."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    with (folder / "adapters.safetensors").open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return of_values({key: config.get(key) for key in _ADAPTER_KEYS}, digest)[:16]


def similarity(one: str, other: str) -> float:
    """From -1 to 1; at least ``SAME`` where both are of the same target."""
    (structure, sketch, adapter), (other_structure, other_sketch, other_adapter) = (
        (*text.split("-"), "", "")[:3] for text in (one, other)
    )
    if (structure, adapter) != (other_structure, other_adapter):
        return 0.0
    try:
        a, b = _numbers(sketch), _numbers(other_sketch)
        length = math.hypot(*a) * math.hypot(*b)
        return sum(x * y for x, y in zip(a, b, strict=True)) / length if length else 0.0
    except ValueError:
        return 0.0  # of no version that we know


def _numbers(sketch: str) -> list[int]:
    words = [int(sketch[i : i + 4], 16) for i in range(0, len(sketch), 4)]
    return [word - 0x10000 if word & 0x8000 else word for word in words]


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a module's own arrays, as if nothing were packed."""
    packed = "scales" in module
    found = []
    for leaf, array in sorted(module.items()):
        if not hasattr(array, "shape") or leaf.startswith("_"):
            continue
        if packed and leaf in ("scales", "biases"):
            continue
        shape = tuple(array.shape)
        if packed and leaf == "weight":
            shape = (*shape[:-1], shape[-1] * 32 // module.bits)
        found.append((leaf, shape))
    return found


def _project(name: str, module: nn.Module) -> list[int]:
    import numpy as np

    rows = _sampled_rows(module)
    values = np.array(rows, dtype=np.float64).reshape(-1)
    count = values.size * _PROJECTIONS
    stream = hashlib.shake_256(name.encode()).digest(-(-count // 8))  # the same on any machine
    bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8))[:count]
    signs = 2.0 * bits.reshape(_PROJECTIONS, -1) - 1.0
    projected = signs @ values / max(float(np.linalg.norm(values)), 1e-30)
    limit = 2**15 - 1
    return [int(number) for number in np.clip(np.rint(_SCALE * projected), -limit, limit)]


def _sampled_rows(module: nn.Module) -> mx.array:
    """A few rows, from the first to the last, unpacked, float32."""
    import mlx.core as mx

    last = module.weight.shape[0] - 1
    index = mx.array([i * last // (_ROWS - 1) for i in range(_ROWS)])
    rows = module.weight[index]
    if "scales" in module:
        biases = module.biases[index] if "biases" in module else None
        rows = mx.dequantize(
            rows, module.scales[index], biases, module.group_size, module.bits, mode=module.mode
        )
    return rows.astype(mx.float32)
