"""Fingerprints: short names for what must fit together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

_SAMPLE = 16  # values of each tensor: training moves every value a little


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
    samples = []
    for name, array in sorted(tree_flatten(parameters)):
        values = np.array(array.reshape(-1)[:_SAMPLE].astype(mx.float32))
        samples.append((name, array.shape, str(array.dtype), values.tobytes().hex()))
    return of_values(samples)
