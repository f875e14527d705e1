"""The tiny trained target: a real language model of a small language, committed with the tests.

A plugin, named in conftest.py.
"""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """Its folder in MLX format. Load it in float32 on a CPU: that is the fast type there."""
    return Path(__file__).with_name("fixtures") / "tiny_target"
