"""Names become folders."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_redrafter import registry
from mlx_redrafter.errors import (
    FormatError,
    InputError,
)
from mlx_redrafter.formats.fingerprints import of_target
from mlx_redrafter.hub import DRAFTER_TYPE
from tests import tiny_models
from tests.shop import Shop, folder_with, left

ROOT = Path(__file__).parents[1]


def test_names_that_are_nothing(home: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model nonsense: give one of smollm2-135m"):
        registry.resolve("nonsense")
    with pytest.raises(InputError, match=r"no model ./no/such/folder"):
        registry.resolve("./no/such/folder")
    with pytest.raises(InputError, match="there is no dtype int3: choose one of 4bit, float32"):
        registry.resolve("smollm2-135m", "int3")
    file = tmp_path / "model.gguf"
    file.write_text("")
    with pytest.raises(InputError, match="is a file"):
        registry.resolve(str(file))
    assert left(home) == []


@pytest.fixture
def drafters(shop: Shop, home: Path) -> dict[str, Path]:
    config = {"model_type": DRAFTER_TYPE}
    return {
        "shipped": folder_with(shop.package / "tiny", config, "model.safetensors"),
        "own": folder_with(home / "drafters" / "org--model", config, "model.safetensors"),
    }


def test_the_drafter_of_a_model(drafters: dict[str, Path], shop: Shop, tmp_path: Path) -> None:
    assert registry.resolve_drafter("tiny", "auto") == drafters["shipped"]
    assert registry.resolve_drafter("org/model", "auto") == drafters["own"]
    assert registry.resolve_drafter("org/other", "auto") is None
    assert registry.resolve_drafter("org/other", "tiny") == drafters["shipped"]
    assert registry.resolve_drafter("org/other", str(drafters["own"])) == drafters["own"]
    folder = registry.resolve("tiny", "4bit")
    assert registry.resolve_drafter(str(folder), "auto") == drafters["shipped"]
    local = folder_with(tmp_path / "org--model", None, "model.safetensors")
    assert registry.resolve_drafter(str(local), "auto") == drafters["own"]
    with pytest.raises(InputError, match=r"no drafter nothing: .* org--model"):
        registry.resolve_drafter("tiny", "nothing")
    with pytest.raises(FormatError, match="is not a drafter"):
        registry.resolve_drafter("tiny", str(local))


def test_the_user_s_own_drafter_goes_first(drafters: dict[str, Path], home: Path) -> None:
    own = folder_with(home / "drafters" / "tiny", {"model_type": DRAFTER_TYPE}, "model.safetensors")
    assert registry.resolve_drafter("tiny", "auto") == own


def test_half_a_drafter_is_none(shop: Shop, home: Path) -> None:
    folder_with(home / "drafters" / "tiny", {"model_type": DRAFTER_TYPE})
    folder_with(
        home / "drafters" / ".new.part-1", {"model_type": DRAFTER_TYPE}, "model.safetensors"
    )
    assert registry.resolve_drafter("tiny", "auto") is None
    assert [entry.kind for entry in registry.models()] == ["target"]


def test_the_list(drafters: dict[str, Path], shop: Shop, home: Path) -> None:
    target, own, ours = sorted(
        registry.models(), key=lambda entry: (entry.kind != "target", entry.name)
    )
    assert (target.name, target.source, target.license) == (
        "tiny",
        "PyPI tiny-model 1.0",
        "Apache-2.0",
    )
    assert (target.present, target.path, target.size_bytes, target.formats) == (
        False,
        None,
        None,
        [],
    )
    assert (own.name, own.source, own.path) == ("org--model", "trained here", drafters["own"])
    assert (ours.name, ours.source, ours.path) == ("tiny", "shipped", drafters["shipped"])
    folder = registry.resolve("tiny", "float16")
    target = registry.models()[0]
    size = sum(path.stat().st_size for path in folder.parent.glob("*/*"))
    assert (target.present, target.path, target.size_bytes) == (True, folder.parent, size)
    assert target.formats == ["4bit", "float16"]


def test_the_list_imports_no_mlx() -> None:
    code = (
        "import sys; from mlx_redrafter import registry; registry.models()\n"
        "print({'mlx', 'numpy', 'transformers', 'mlx_lm'} & {*sys.modules} or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "none\n", done.stderr


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../models/tiny", "tiny/", "tiny/4bit", "/", "TINY", "other", "*"]
)
def test_only_shipped_names_are_removed(shop: Shop, home: Path, name: str) -> None:
    folder = registry.resolve("tiny", "4bit")
    folder_with(home / "models" / "other")
    with pytest.raises(InputError, match="no shipped model"):
        registry.remove(name)
    with pytest.raises(InputError, match="only drafters that were trained here"):
        registry.remove_drafter(name)
    assert folder.is_dir()
    assert (home / "models" / "other").is_dir()


def test_drafters_are_removed_only_if_they_were_trained_here(
    drafters: dict[str, Path], shop: Shop, home: Path
) -> None:
    with pytest.raises(InputError, match="part of the package: the drafter tiny"):
        registry.remove_drafter("tiny")
    assert (drafters["shipped"] / "model.safetensors").is_file()
    registry.resolve("tiny", "4bit")
    own = folder_with(home / "drafters" / "tiny", {"model_type": DRAFTER_TYPE}, "model.safetensors")
    registry.remove("tiny")
    assert own.is_dir()  # hours of training are not removed along with a download
    assert registry.remove_drafter("tiny") > 0
    assert not own.exists()
    assert drafters["own"].is_dir()


# --- drafters trained here ------------------------------------------------------------------------


def trained(folder: Path, **target: str) -> Path:
    config = {"model_type": DRAFTER_TYPE, "target": target}
    folder_with(folder, config, "model.safetensors", "README.md")
    (folder / "model.safetensors").write_text(target.get("name", "?"))
    return folder


def fingerprint(seed: int, dtype: str = "float32", **changes: int) -> str:
    return of_target(tiny_models.build("llama", dtype, seed, **changes))


def test_a_registered_drafter_is_found_by_the_weights(home: Path, tmp_path: Path) -> None:
    source = trained(tmp_path / "out", name="org/model", fingerprint=fingerprint(0))
    kept = registry.register_drafter(source, "org/model")
    assert kept == home / "drafters" / "org--model"
    assert {path.name for path in kept.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    found = registry.resolve_drafter
    assert found("org/model", "auto") == kept
    assert found("org/model", "auto", fingerprint(0)) == kept
    for dtype in ("bfloat16", "4bit"):
        assert found("/elsewhere/under-another-name", "auto", fingerprint(0, dtype)) == kept
    assert found("org/model", "auto", fingerprint(1)) is None, "the name alone is not enough"
    assert found("org/other", "auto", fingerprint(1)) is None
    assert found("org/other", "org--model", fingerprint(1)) == kept, "load says that it misfits"


def test_the_model_s_own_name_and_then_the_nearest_go_first(home: Path, tmp_path: Path) -> None:
    print_ = fingerprint(0)
    near = fingerprint(0, "4bit")
    a = registry.register_drafter(trained(tmp_path / "a", fingerprint=near), "a")
    b = registry.register_drafter(trained(tmp_path / "b", fingerprint=print_), "b")
    assert registry.resolve_drafter("a", "auto", print_) == a
    assert registry.resolve_drafter("other", "auto", print_) == b
    assert registry.resolve_drafter("other", "auto", near) == a


def test_a_drafter_without_a_fingerprint_goes_by_its_name(
    drafters: dict[str, Path], home: Path
) -> None:
    assert registry.resolve_drafter("org/model", "auto", fingerprint(0)) == drafters["own"]
    assert registry.resolve_drafter("org/other", "auto", fingerprint(0)) is None


def test_registering_again_replaces_and_an_adapter_s_stays_apart(
    home: Path, tmp_path: Path
) -> None:
    registry.register_drafter(trained(tmp_path / "a", name="first"), "m")
    kept = registry.register_drafter(trained(tmp_path / "b", name="second"), "m")
    assert (kept / "model.safetensors").read_text() == "second"
    tuned = trained(tmp_path / "c", name="m", adapter="law")
    other = registry.register_drafter(tuned, "m", adapter=tmp_path / "law")
    assert other == home / "drafters" / "m+law"
    assert registry.register_drafter(kept, "m") == kept, "in its place already"
    assert {entry.name: entry.target for entry in registry.models() if entry.kind == "drafter"} == {
        "m": "second",
        "m+law": "m + law",
        "smollm2-135m": "smollm2-135m",
    }
    registry.remove_drafter("m+law")
    assert not other.exists()
    assert kept.is_dir()


def test_a_drafter_is_registered_whole_or_not_at_all(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = registry.register_drafter(trained(tmp_path / "a", name="first"), "m")

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry.shutil, "copytree", stopped)
    with pytest.raises(KeyboardInterrupt):
        registry.register_drafter(trained(tmp_path / "b", name="second"), "m")
    assert (kept / "model.safetensors").read_text() == "first"
    assert [path.name for path in kept.parent.iterdir()] == ["m"]
    with pytest.raises(FormatError, match="is not a drafter"):
        registry.register_drafter(folder_with(tmp_path / "model", None, "model.safetensors"), "m")
