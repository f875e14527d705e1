"""Shared fixtures. Importing the package comes first: it loads the BLAS that mlx takes over on Linux."""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx_redrafter  # noqa: F401  isort: skip

import numpy as np
import pytest

_PLUGINS = ["tests.conftest_builtin"]
pytest_plugins = [name for name in _PLUGINS if Path(__file__).with_name(f"{name[6:]}.py").exists()]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own cache folder."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("MLX_REDRAFTER_HOME", str(folder))
    return folder


@pytest.fixture
def rng() -> Callable[[int], np.random.Generator]:
    return np.random.default_rng
