"""Where the package keeps what it fetches, converts, trains and measures."""

import os
from pathlib import Path

from mlx_redrafter.errors import InputError

VARIABLE = "MLX_REDRAFTER_HOME"


def home() -> Path:
    """$MLX_REDRAFTER_HOME, or ~/.cache/mlx-redrafter. Nothing is created."""
    folder = os.environ.get(VARIABLE) or "~/.cache/mlx-redrafter"
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError:
        raise InputError(f"no home folder for {folder}: set {VARIABLE} to a full path") from None
