"""Folders that are there whole or not at all."""

import errno
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_redrafter.errors import InputError, RedrafterError
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
    remedies = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space",
        errno.ENOENT: "it is gone",
        errno.ENOTDIR: "there is a file in its way",
        errno.EEXIST: "there is a file in its way",
    }
    remedy = remedies.get(error.errno or 0, "make it writable")
    if folder.resolve().is_relative_to(paths.home().resolve()):
        other = f"set {paths.VARIABLE} to another folder"
    else:
        other = "name another folder"
    return RedrafterError(f"cannot write in {folder} ({reason}): {remedy}, or {other}")


def check_writable(folder: Path) -> None:
    """Raise RedrafterError where nothing can be written in `folder`, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise write_error(error, folder) from error


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make `folder` and hold it, so that no second run writes there. InputError where one does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not the folder itself: `atomic_folder` locks that for what is made in it.
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_error(error, folder) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another run is using {folder}: wait for it, or name another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


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
