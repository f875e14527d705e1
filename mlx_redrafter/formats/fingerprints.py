"""Fingerprints: short names for what must fit together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def of_values(*values: Any) -> str:
    """A fingerprint of JSON-like values."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def of_vocabulary(vocabulary: Mapping[str, int]) -> str:
    """A fingerprint of a tokenizer: two with equal sizes and other tokens differ."""
    return of_values(sorted(vocabulary.items(), key=lambda item: item[1]))
