"""Folders that are there whole or not at all."""

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.machine import paths

_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Give an empty folder beside `final` that takes its place once the block has ended well.

    An older `final` is replaced. On any error the new folder is removed and the old one stays. What
    a killed process left behind is removed by the next call for the same folder.
    """
    final = final.resolve()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary, lock = _create(final)
    except OSError as error:
        raise write_error(error, final.parent) from error
    try:
        yield temporary
        _sync(temporary)
        _replace(temporary, final)
    except BaseException as error:
        refused = _refusal(error, final.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        if refused:
            raise write_error(refused, final.parent) from error
        raise
    finally:
        os.close(lock)


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or would be made."""
    place = folder.expanduser().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def write_error(error: OSError, folder: Path) -> RedrafterError:
    """Say that nothing can be written in `folder`, and what to do about it."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space"
    else:
        remedy = "make it writable"
    return RedrafterError(
        f"cannot write in {folder} ({reason}): {remedy}, or set {paths.VARIABLE} to another folder"
    )


def _refusal(error: BaseException, folder: Path) -> OSError | None:
    """The file system's own refusal, if that is what `error` comes from.

    MLX, NumPy and safetensors report a full disk as errors of their own, without its number.
    """
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        return error
    if isinstance(error, Exception) and not isinstance(error, RedrafterError):
        with suppress(OSError):
            if shutil.disk_usage(folder).free < 2**20:
                return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def _create(final: Path) -> tuple[Path, int]:
    """Make the temporary folder and lock it, which tells it from a left-over."""
    with _locked(final.parent):
        prefix = f".{final.name}.part-"
        for other in final.parent.iterdir():
            if other.name.startswith(prefix) and _is_left_over(other):
                shutil.rmtree(other, ignore_errors=True)
        temporary = final.with_name(prefix + uuid.uuid4().hex[:8])
        temporary.mkdir()
        lock = os.open(temporary, os.O_RDONLY)
        _lock(lock, fcntl.LOCK_EX)
    return temporary, lock


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _is_left_over(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False  # its owner has just moved or removed it
    try:
        return _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)


def _lock(handle: int, mode: int) -> bool:
    """False where another holds it, or where the file system has no locks."""
    try:
        fcntl.flock(handle, mode)
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for path in (*(os.path.join(root, name) for name in files), root):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _replace(new: Path, final: Path) -> None:
    with _locked(final.parent) as parent:
        old = final.with_name(f"{new.name}-old")
        if final.exists():
            final.rename(old)
        try:
            new.rename(final)
        except BaseException:
            if old.exists():
                old.rename(final)
            raise
        os.fsync(parent)
        shutil.rmtree(old, ignore_errors=True)
