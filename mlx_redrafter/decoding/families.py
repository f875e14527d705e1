"""Which model families need care or cannot verify trees, and why. Data only.

Everything else is accepted if its caches can hold a tree and the self-check passes (selfcheck.py).
"""

from __future__ import annotations

# RoPE modules of mlx-lm that go by another name than "...RoPE" or "...RotaryEmbedding".
ROPE_NAMES = ("RoPE", "RotaryEmbedding")

# RoPE modules whose angles depend on the length seen so far: rows of one tree would disagree.
UNSUPPORTED_ROPE = {
    "DynamicNTKScalingRoPE": "its RoPE scaling (dynamic NTK) changes with the length",
    "DynamicNTKAlphaRoPE": "its RoPE scaling (dynamic NTK) changes with the length",
}

# Modules that look like RoPE by name and leave positions alone.
NOT_ROPE = ("NoPE",)

UNSUPPORTED_FAMILIES = {
    "llama4": "it builds its chunked attention masks itself, past the cache",
    "llama4_text": "it builds its chunked attention masks itself, past the cache",
    "ministral3": "it scales queries by row, not by position",
}
