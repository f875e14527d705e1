"""A fast BLAS for MLX's CPU backend on Linux.

MLX's Linux wheel links the reference BLAS, which is some forty times slower than a tuned one. A
library loaded with global symbol visibility *before* `mlx.core` takes its place, since the dynamic
linker binds to the first definition that it finds.
"""

import ctypes
import os
import re
import site
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mlx_redrafter.errors import InputError

VARIABLE = "MLX_REDRAFTER_BLAS"

_SONAMES = (
    "libopenblasp.so.0",
    "libopenblas.so.0",
    "libopenblaso.so.0",
)  # Fedora's threads, Debian

_loaded: str | None = None
_warned = False


def preload() -> str | None:
    """Load the BLAS that $MLX_REDRAFTER_BLAS asks for; give its name, or None if none was loaded.

    `auto` (the default) takes PyPI's MKL on x86-64, else a system OpenBLAS. The rest are `mkl`,
    `openblas`, `none` and a path. Later calls give the first one's answer.
    """
    global _loaded
    if _loaded or sys.platform != "linux":
        return _loaded
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in ("auto", "mkl", "openblas", "none") and "/" not in choice:
        raise InputError(
            f"${VARIABLE}={choice} is not known: use auto, mkl, openblas, none or a path"
        )
    if choice == "none":
        return None
    if "mlx.core" in sys.modules:
        _warn(
            "mlx was imported before mlx_redrafter, too late to load a fast BLAS: "
            f"import mlx_redrafter first, or set {VARIABLE}=none"
        )
        return None
    for name, library in _candidates(choice):
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            if "/" in choice:
                raise InputError(f"${VARIABLE}: cannot load {choice} ({error})") from None
        else:
            _loaded = name
            return name
    if choice != "auto":
        raise InputError(f"${VARIABLE}={choice}: no such library found; {_remedy(choice)}")
    if not _has_cuda():
        _warn(
            f"no fast BLAS found, MLX will be slow on this CPU: {_remedy(choice)} "
            f"({VARIABLE}=none hides this)"
        )
    return None


def loaded() -> str | None:
    """What took the place of the reference BLAS: "mkl", "openblas" or a path."""
    return _loaded


def _candidates(choice: str) -> Iterator[tuple[str, str]]:
    if "/" in choice:
        yield choice, str(Path(choice).expanduser())
    if choice == "mkl" or (choice == "auto" and os.uname().machine == "x86_64"):
        for library in _mkl_libraries():
            yield "mkl", str(library)
    if choice in ("auto", "openblas"):
        for soname in _SONAMES:
            yield "openblas", soname


def _mkl_libraries() -> Iterator[Path]:
    """PyPI's mkl lies outside the packages, in `lib` of whichever prefix pip installed to."""
    prefixes = [sys.prefix, sys.base_prefix, "/usr/local"]
    if site.ENABLE_USER_SITE:
        prefixes.append(site.getuserbase())
    for prefix in dict.fromkeys(prefixes):
        found = Path(prefix, "lib").glob("libmkl_rt.so*")
        yield from sorted(found, key=_version, reverse=True)


def _version(library: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", library.name)]


def _remedy(choice: str) -> str:
    if choice == "mkl" or (choice == "auto" and os.uname().machine == "x86_64"):
        return "pip install mkl, or apt install libopenblas0-pthread"
    return "apt install libopenblas0-pthread"


def _has_cuda() -> bool:
    """MLX's CUDA build computes elsewhere and needs no BLAS."""
    from importlib import metadata  # costs 25 ms, and is asked only where nothing was found

    for name in ("mlx-cuda-12", "mlx-cuda-13"):
        with suppress(metadata.PackageNotFoundError):
            return bool(metadata.version(name))
    return False


def _warn(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        print(f"warning: {message}", file=sys.stderr)
