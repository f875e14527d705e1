"""The names that `mlx_redrafter` gives, and that they cost nothing until used."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mlx_redrafter

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there() -> None:
    for name in mlx_redrafter.__all__:
        assert not isinstance(getattr(mlx_redrafter, name), ModuleType)
        assert name in dir(mlx_redrafter)


@pytest.mark.parametrize("name", ["load", "generate"])
@pytest.mark.parametrize("first", ["import mlx_redrafter.{}", "mlx_redrafter.{}"])
def test_a_function_wins_over_the_module_of_its_name(name: str, first: str) -> None:
    code = (
        f"import sys, mlx_redrafter; {first.format(name)}\n"
        f"import mlx_redrafter.{name}\n"
        f"assert mlx_redrafter.{name} is sys.modules['mlx_redrafter.{name}'].{name}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mlx_redrafter.nonsense  # noqa: B018


def test_the_package_alone_imports_no_mlx() -> None:
    code = "import sys, mlx_redrafter; print('mlx.core' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "False False\n"
