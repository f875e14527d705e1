"""Names of models and drafters, and the folders they stand for."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_redrafter import hub, shipped
from mlx_redrafter.errors import FormatError, InputError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.machine import files, paths
from mlx_redrafter.machine.device import default_dtype

_ALIASES = {"quantized": shipped.PACKED}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelEntry:
    """A model or drafter that is shipped or was trained here."""

    name: str
    kind: str
    """target or drafter"""
    description: str | None
    source: str
    license: str | None
    present: bool
    path: Path | None
    """None where it is not here"""
    size_bytes: int | None
    formats: list[str]
    """Of a target: those that are here."""
    target: str | None = None
    """Of a drafter: the model that it was made for, and its adapter."""


def resolve(name_or_path: str, dtype: str | None = None) -> Path:
    """The folder in MLX format of a shipped model, a local folder or a model on the Hub.

    A shipped model is fetched and converted on first use, and `dtype` chooses among its formats
    (None: the fast one on this machine). A model from elsewhere is what it is.
    """
    dtype = _ALIASES.get(dtype or "", dtype)
    known = (shipped.PACKED, *shipped.DTYPES)
    if dtype is not None and dtype not in known:
        raise InputError(f"there is no dtype {dtype}: choose one of {', '.join(known)}")
    models = shipped.catalogue()
    if name_or_path in models:
        return models[name_or_path].folder(dtype or default_dtype())
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return hub.check(path)
    if path.exists():
        raise InputError(f"{name_or_path} is a file: give a folder in MLX format")
    if _HUB_ID.fullmatch(name_or_path):
        return hub.fetch(name_or_path)
    raise InputError(
        f"no model {name_or_path}: give one of {', '.join(models)}, a folder, or owner/name of the "
        "Hugging Face Hub"
    )


def resolve_drafter(model: str, drafter: str, fingerprint: str | None = None) -> Path | None:
    """The folder of a drafter, by name or path; "auto" is the one for `model`, None without one.

    `fingerprint` is the loaded target's: it finds a drafter under whatever name, and passes over
    one of the model's name that was made for other weights.
    """
    drafters = _drafters()
    if drafter == "auto":
        return _automatic(drafters, drafter_name(model), fingerprint)
    path = drafters.get(drafter, Path(drafter).expanduser())
    if not path.is_dir():
        here = ", ".join(drafters) or "none"
        raise InputError(f"no drafter {drafter}: there is no such folder, and of names: {here}")
    if not is_drafter(path):
        raise FormatError(
            f"{path} is not a drafter: it needs model.safetensors and a config.json of the "
            f"model_type {hub.DRAFTER_TYPE}"
        )
    return path


def _automatic(drafters: dict[str, Path], name: str, fingerprint: str | None) -> Path | None:
    """The one of this name, else the one whose target is most like this one."""
    if fingerprint is None:
        return drafters.get(name)
    likeness = {}
    for each, folder in drafters.items():
        theirs = _made_for(folder).get("fingerprint")
        if theirs:
            likeness[each] = fingerprints.similarity(str(theirs), fingerprint)
        else:  # an old one, known by its name alone
            likeness[each] = fingerprints.SAME if each == name else 0.0
    fitting = [each for each, value in likeness.items() if value >= fingerprints.SAME]
    best = max(fitting, key=lambda each: (each == name, likeness[each]), default=None)
    return None if best is None else drafters[best]


def register_drafter(folder: Path, model: str, adapter: Path | None = None) -> Path:
    """Keep a copy of a trained drafter, to be found for `model` from now on; gives its folder.

    It takes the place of an older one for the same target, whole or not at all; one of its name
    for another target stays, and the new one gets a number.
    """
    if not is_drafter(folder):
        raise FormatError(f"{folder} is not a drafter: it cannot be registered")
    name = drafter_name(model)
    if adapter is not None:
        name += f"+{adapter.resolve().name}"
    theirs = str(_made_for(folder).get("fingerprint", ""))
    kept = _trained() / name
    number = 1
    while is_drafter(kept) and not _is_for(kept, theirs):
        number += 1
        kept = _trained() / f"{name}-{number}"
    if folder.resolve() != kept.resolve():
        with files.atomic_folder(kept) as new:
            shutil.copytree(folder, new, dirs_exist_ok=True)
    return kept


def _is_for(folder: Path, fingerprint: str) -> bool:
    """Whether a drafter was made for this target, or does not say for which."""
    theirs = _made_for(folder).get("fingerprint")
    if not theirs or not fingerprint:
        return True
    return fingerprints.similarity(str(theirs), fingerprint) >= fingerprints.SAME


def drafter_name(model: str) -> str:
    """The name that the drafter for a model is kept by: the model's own, without slashes and
    without dots before it, which would hide it."""
    path = Path(model).expanduser()
    if model in shipped.catalogue() or not path.is_dir():
        name = model.replace("/", "--")
    else:
        record = shipped.read_json(path / shipped.RECORD) or {}  # a folder of a shipped model?
        name = str(record.get("name", path.resolve().name))
    return name.lstrip(".") or "model"


def models() -> list[ModelEntry]:
    """All shipped models and all drafters. Reads no weights and imports no mlx."""
    entries = []
    for model in shipped.catalogue().values():
        formats = model.present()
        entries.append(
            ModelEntry(
                name=model.name,
                kind="target",
                description=model.description,
                source=str(model.pin),
                license=model.license,
                present=bool(formats),
                path=model.cache if formats else None,
                size_bytes=shipped.files_size(model.cache) if formats else None,
                formats=formats,
            )
        )
    for name, folder in _drafters().items():
        entries.append(
            ModelEntry(
                name=name,
                kind="drafter",
                description=None,
                target=_target_of(folder),
                source="trained here" if folder.parent == _trained() else "shipped",
                license=None,
                present=True,
                path=folder,
                size_bytes=shipped.files_size(folder),
                formats=[],
            )
        )
    return entries


def remove(name: str) -> int:
    """Remove all that was fetched and made of a shipped model; gives the bytes freed."""
    models = shipped.catalogue()
    if name not in models:
        raise InputError(f"no shipped model {name}: give one of {', '.join(models)}")
    return models[name].remove()


def remove_drafter(name: str) -> int:
    """Remove a drafter that was trained here; gives the bytes freed."""
    folder = _drafters().get(name)
    if folder is None or folder.parent != _trained():
        what = "no drafter" if folder is None else "part of the package: the drafter"
        raise InputError(f"{what} {name}: only drafters that were trained here can be removed")
    size = shipped.files_size(folder)
    shipped.remove_folder(folder)
    return size


def _trained() -> Path:
    return paths.home() / "drafters"


def _drafters() -> dict[str, Path]:
    """Drafters by name. One that was trained here goes before a shipped one."""
    return {
        path.parent.name: path.parent
        for root in (shipped.package_folder(), _trained())
        for path in sorted(root.glob("[!.]*/config.json"))
        if is_drafter(path.parent)
    }


def _made_for(folder: Path) -> dict[str, Any]:
    """What the drafter's config says of its target; empty where it says nothing."""
    target = (shipped.read_json(folder / "config.json") or {}).get("target")
    return target if isinstance(target, dict) else {}


def _target_of(folder: Path) -> str | None:
    parts = [str(part) for key in ("name", "adapter") if (part := _made_for(folder).get(key))]
    return " + ".join(parts) or None


def is_drafter(folder: Path) -> bool:
    config = shipped.read_json(folder / "config.json") or {}
    weights = folder / "model.safetensors"
    return config.get("model_type") == hub.DRAFTER_TYPE and weights.is_file()
