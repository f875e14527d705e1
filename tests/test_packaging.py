"""What is built holds all that is needed elsewhere."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MODELS = sorted(path.relative_to(ROOT) for path in ROOT.glob("models/*/*") if path.is_file())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_there_are_models() -> None:
    assert MODELS


def test_the_wheel_holds_the_package_and_the_models(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in MODELS:
            assert archive.read(f"mlx_redrafter/{path}") == (ROOT / path).read_bytes()
    assert "mlx_redrafter/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mlx_redrafter"}
    assert not [name for name in names if "__pycache__" in name]


def test_the_source_archive_is_complete(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for path in ["LICENSE", "README.md", "Makefile", "tests/test_packaging.py", *map(str, MODELS)]:
        assert path in names
    assert not [name for name in names if name.startswith((".venv", ".git/"))]


def test_the_wheel_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(target), str(wheel)], check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import json, mlx_redrafter\n"
        "from mlx_redrafter import registry\n"
        "models = [(entry.name, entry.kind) for entry in registry.models()]\n"
        "print(json.dumps([mlx_redrafter.__file__, models]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    origin, models = json.loads(found.stdout)
    assert Path(origin).is_relative_to(target)
    assert ["smollm2-135m", "target"] in models
    help_ = [str(target / "bin" / "mlx-redrafter"), "--version"]
    environment = {"PYTHONPATH": str(target)}
    shown = subprocess.run(help_, env=environment, check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("mlx-redrafter ")
