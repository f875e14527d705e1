"""Shared fixtures. The package comes first: it loads the BLAS that mlx takes over on Linux."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx_redrafter  # noqa: F401

_PLUGINS = ["conftest_builtin", "conftest_tiny_target"]
pytest_plugins = [f"tests.{n}" for n in _PLUGINS if Path(__file__).with_name(f"{n}.py").exists()]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own cache folder."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("MLX_REDRAFTER_HOME", str(folder))
    return folder
