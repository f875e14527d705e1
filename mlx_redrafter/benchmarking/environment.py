"""What a figure was measured on and with: without it a figure cannot be compared with another."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_redrafter
from mlx_redrafter.machine import blas

_PACKAGES = ("mlx", "mlx-lm", "mkl")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def describe() -> dict[str, Any]:
    """Machine, versions, BLAS and commit, ready for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "chip": str(mx.device_info().get("device_name", platform.machine())),
            "device": mx.default_device().type.name,
            "cores": _cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_average": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "blas": blas.loaded(),
        "threads": {name: os.environ[name] for name in _THREADS if name in os.environ},
        "commit": _commit(),
    }


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _versions() -> dict[str, str]:
    found = {"mlx-redrafter": mlx_redrafter.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The checkout's commit, with "+" where tracked files differ from it; None outside one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
