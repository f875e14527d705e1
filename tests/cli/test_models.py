"""`mlx-redrafter models`: what it prints, where, and with which exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter.hub import DRAFTER_TYPE
from tests.shop import Shop, folder_with

Run = Callable[..., Any]


def test_the_list(run: Run, shop: Shop, home: Path) -> None:
    assert run("models") == (
        0,
        "NAME  KIND    SOURCE               SIZE  HERE  FOR\n"
        "tiny  target  PyPI tiny-model 1.0  -     no\n",
        "",
    )
    folder = Path(run("models", "path", "tiny", "--dtype", "float32").out.strip())
    config = {"model_type": DRAFTER_TYPE, "target": {"name": "tiny", "adapter": "law"}}
    folder_with(shop.package / "tiny", config, "model.safetensors")
    size = sum(path.stat().st_size for path in folder.parent.glob("*/*")) / 1e6
    lines = run("models").out.splitlines()
    assert (
        lines[1].split() == f"tiny target PyPI tiny-model 1.0 {size:.1f} MB 4bit, float32".split()
    )
    assert lines[2].split()[:3] == ["tiny", "drafter", "shipped"]
    assert lines[2].split()[-4:] == ["yes", "tiny", "+", "law"]


def test_the_list_as_json(run: Run, shop: Shop, home: Path) -> None:
    expected = {
        "name": "tiny",
        "kind": "target",
        "description": "A model for tests",
        "source": "PyPI tiny-model 1.0",
        "license": "Apache-2.0",
        "present": False,
        "path": None,
        "size_bytes": None,
        "formats": [],
        "target": None,
    }
    assert json.loads(run("models", "--json").out) == [expected]
    run("models", "path", "tiny", "--dtype", "4bit")
    folder = home / "models" / "tiny"
    expected |= {"present": True, "path": str(folder), "formats": ["4bit"]}
    expected["size_bytes"] = sum(path.stat().st_size for path in folder.glob("*/*"))
    assert json.loads(run("models", "--json").out) == [expected]


def test_a_path_is_all_there_is_on_stdout(run: Run, shop: Shop, home: Path) -> None:
    first = run("models", "path", "tiny", "--dtype", "bfloat16")
    folder = home / "models" / "tiny" / "bfloat16"
    assert (first.code, first.out) == (0, f"{folder}\n")
    assert first.err.splitlines()[0] == "tiny: downloading PyPI tiny-model 1.0 (0 MB)"
    assert run("models", "path", "tiny", "--dtype", "bfloat16") == (0, f"{folder}\n", "")
    default = Path(run("models", "path", "tiny").out.strip())
    assert default.name in ("float32", "bfloat16")
    quantized = run("models", "path", "tiny", "--dtype", "quantized")
    assert quantized.out == f"{folder.with_name('4bit')}\n"


def test_remove(run: Run, shop: Shop, home: Path) -> None:
    run("models", "path", "tiny", "--dtype", "4bit")
    code, out, err = run("models", "rm", "tiny")
    assert (code, err) == (0, "")
    assert out.startswith("removed tiny: ")
    assert out.endswith(" MB freed\n")
    assert not (home / "models" / "tiny").exists()
    folder_with(home / "drafters" / "mine", {"model_type": DRAFTER_TYPE}, "model.safetensors")
    assert run("models", "rm", "mine", "--drafter").code == 0
    assert not (home / "drafters" / "mine").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["path", "nonsense"], "error: no model nonsense: give one of tiny, a folder, or"),
        (["path", "tiny", "--dtype", "int3"], "error: there is no dtype int3: choose one of"),
        (["rm", "tiny"], "error: tiny is not here: there is nothing to remove"),
        (["rm", "../tiny"], "error: no shipped model ../tiny: give one of tiny"),
        (["rm", "tiny", "--drafter"], "error: no drafter tiny: only drafters that were"),
        (["--json", "path", "tiny"], "error: --json belongs to the list"),
    ],
)
def test_errors_are_one_line(
    run: Run, shop: Shop, home: Path, args: list[str], message: str
) -> None:
    code, out, err = run("models", *args)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert not list(home.rglob("*.safetensors"))


def test_dtype_is_for_shipped_models(run: Run, shop: Shop, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "mine", None, "model.safetensors")
    assert run("models", "path", str(folder)).out == f"{folder}\n"
    found = run("models", "path", str(folder), "--dtype", "float32")
    assert found.code == 2
    assert "--dtype chooses a format of a shipped model" in found.err
