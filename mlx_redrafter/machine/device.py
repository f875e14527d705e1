"""What MLX computes on, and in how much memory."""

import os
from contextlib import suppress
from pathlib import Path

# A container's limit on Linux: cgroup v2, v1. Where there is none the file says "max", or is huge.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def default_dtype() -> str:
    """The fast floating-point type: only float32 uses a BLAS on the CPU backend."""
    import mlx.core as mx

    return "bfloat16" if mx.default_device().type == mx.DeviceType.gpu else "float32"


def memory_bytes() -> int:
    """How much memory MLX may use: Metal's working set, a GPU's own, or the machine's."""
    import mlx.core as mx

    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory"):
        if size := info.get(key):
            return int(size)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with suppress(OSError, ValueError):
            total = min(total, int(Path(path).read_text(encoding="ascii")))
    return total
