"""ReDrafter speculative decoding on MLX: the same text, faster.

The public names are imported on first use, so that `import mlx_redrafter` stays cheap.
"""

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.machine import blas as _blas

if TYPE_CHECKING:
    from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
    from mlx_redrafter.generate import Generation, generate, stream_generate
    from mlx_redrafter.load import load

__version__ = "0.1.0"

__all__ = [
    "DraftOptions",
    "Generation",
    "RedrafterError",
    "SamplingOptions",
    "__version__",
    "generate",
    "load",
    "stream_generate",
]

_HOMES = {
    "DraftOptions": "mlx_redrafter.decoding.options",
    "Generation": "mlx_redrafter.generate",
    "SamplingOptions": "mlx_redrafter.decoding.options",
    "generate": "mlx_redrafter.generate",
    "load": "mlx_redrafter.load",
    "stream_generate": "mlx_redrafter.generate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _blas.preload()  # once more, to raise here what the import below swallowed
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `load` and `generate` the functions: Python binds the submodules of that name here."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

# Before anything imports mlx. A wrong setting is told on first use and by the command line: an
# import must not fail for it.
with suppress(RedrafterError):
    _blas.preload()
