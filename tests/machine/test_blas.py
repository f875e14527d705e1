import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_redrafter.errors import InputError
from mlx_redrafter.machine import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs another BLAS")


class Linker:
    """Stands in for the dynamic linker: knows which libraries exist and what was asked for."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.asked: list[str] = []

    def __call__(self, library: str, mode: int = 0) -> None:
        self.asked.append(library)
        if library not in self.present:
            raise OSError(f"{library}: cannot open shared object file")
        assert mode == ctypes.RTLD_GLOBAL


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Linker:
    linker = Linker()
    monkeypatch.setattr(blas, "_loaded", None)
    monkeypatch.setattr(blas, "_warned", False)
    monkeypatch.setattr(blas, "_has_cuda", lambda: False)
    monkeypatch.setattr(blas.os, "uname", lambda: type("Uname", (), {"machine": "x86_64"}))
    monkeypatch.setattr(ctypes, "CDLL", linker)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(blas.site, "ENABLE_USER_SITE", False)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv(blas.VARIABLE, raising=False)
    return linker


def install_mkl(linker: Linker, prefix: Path, versions: tuple[int, ...] = (3,)) -> str:
    (prefix / "lib").mkdir()
    for version in versions:
        library = prefix / "lib" / f"libmkl_rt.so.{version}"
        library.touch()
        linker.present.add(str(library))
    return str(prefix / "lib" / f"libmkl_rt.so.{max(versions)}")


def test_auto_prefers_the_newest_mkl_beside_python(linker: Linker, tmp_path: Path) -> None:
    newest = install_mkl(linker, tmp_path, (2, 10, 9))
    linker.present.add("libopenblas.so.0")
    assert blas.preload() == "mkl"
    assert linker.asked == [newest]
    assert blas.loaded() == "mkl"
    assert blas.preload() == "mkl"
    assert linker.asked == [newest]


def test_auto_takes_openblas_where_mkl_is_absent_or_broken(linker: Linker, tmp_path: Path) -> None:
    linker.present.discard(install_mkl(linker, tmp_path))
    linker.present.add("libopenblas.so.0")
    assert blas.preload() == "openblas"


def test_auto_leaves_mkl_alone_on_other_processors(
    linker: Linker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_mkl(linker, tmp_path)
    linker.present.add("libopenblas.so.0")
    monkeypatch.setattr(blas.os, "uname", lambda: type("Uname", (), {"machine": "aarch64"}))
    assert blas.preload() == "openblas"


def test_a_machine_without_one_is_told_once(
    linker: Linker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert blas.preload() is None
    assert blas.preload() is None
    captured = capsys.readouterr()
    assert captured.err.count("warning: no fast BLAS found") == 1
    assert "libopenblas0-pthread" in captured.err
    assert captured.out == ""


def test_cuda_needs_none(
    linker: Linker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "_has_cuda", lambda: True)
    assert blas.preload() is None
    assert capsys.readouterr().err == ""


def test_too_late_is_told(
    linker: Linker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    linker.present.add("libopenblas.so.0")
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    assert blas.preload() is None
    assert "import mlx_redrafter first" in capsys.readouterr().err
    assert linker.asked == []


def test_none_is_silent(
    linker: Linker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(blas.VARIABLE, "none")
    linker.present.add("libopenblas.so.0")
    assert blas.preload() is None
    assert linker.asked == []
    assert capsys.readouterr().err == ""


def test_a_path_is_loaded_as_it_is(linker: Linker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(blas.VARIABLE, "/opt/libfast.so")
    linker.present.add("/opt/libfast.so")
    assert blas.preload() == "/opt/libfast.so"


@pytest.mark.parametrize("choice", ["mkl", "openblas", "/nowhere/lib.so", "atlas", "MKL"])
def test_what_cannot_be_had_is_an_error(
    linker: Linker, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(blas.VARIABLE, choice)
    with pytest.raises(InputError, match=choice):
        blas.preload()
    assert blas.loaded() is None


def test_a_wrong_setting_fails_on_use_and_not_on_import() -> None:
    code = "import mlx_redrafter\ntry: mlx_redrafter.load\nexcept Exception as e: print(type(e))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={blas.VARIABLE: "atlas"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert found.stdout == "<class 'mlx_redrafter.errors.InputError'>\n"


def test_mlx_computes_with_the_library_loaded() -> None:
    """MKL's front library opens the part that computes on the first call, and not before."""
    if blas.loaded() != "mkl":
        pytest.skip(f"the BLAS loaded here is {blas.loaded()}, not mkl")
    code = (
        "import mlx_redrafter, mlx.core as mx\n"
        "maps = lambda: 'libmkl_core' in open('/proc/self/maps').read()\n"
        "mx.set_default_device(mx.cpu)\n"
        "before = maps()\n"
        "mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))\n"
        "print(before, maps())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False True\n", found.stderr
