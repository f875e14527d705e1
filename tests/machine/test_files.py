import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlx_redrafter.errors import DownloadError, InputError, RedrafterError
from mlx_redrafter.machine import files
from mlx_redrafter.machine.files import alone_in, atomic_folder, check_writable


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_whole(tmp_path: Path) -> None:
    final = tmp_path / "models" / "one"
    with atomic_folder(final) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
        assert folder.parent == final.parent
        assert not final.exists()
    assert (final / "sub" / "a").read_text() == "a"
    assert listing(final.parent) == ["one"]


def test_its_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_folder(tmp_path / "one"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o750


def test_an_older_folder_is_replaced_whole(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with atomic_folder(tmp_path / "one") as folder:
            (folder / name).touch()
    assert listing(tmp_path) == ["one"]
    assert listing(tmp_path / "one") == ["new"]


def test_a_link_to_the_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_folder(tmp_path / "link") as folder:
        (folder / "a").touch()
    assert (tmp_path / "link").is_symlink()
    assert listing(tmp_path / "real") == ["a"]


@pytest.mark.parametrize("error", [DownloadError("broken"), KeyboardInterrupt(), OSError("net")])
def test_an_error_leaves_nothing_and_keeps_the_old(tmp_path: Path, error: BaseException) -> None:
    with atomic_folder(tmp_path / "one") as folder:
        (folder / "old").touch()

    def write() -> None:
        with atomic_folder(tmp_path / "one") as folder:
            (folder / "new").touch()
            raise error

    with pytest.raises(type(error)) as raised:
        write()
    assert raised.value is error
    assert listing(tmp_path) == ["one"]
    assert listing(tmp_path / "one") == ["old"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_REDRAFTER_HOME", str(tmp_path))
    with (
        pytest.raises(RedrafterError, match="free some space, or set MLX_REDRAFTER_HOME"),
        atomic_folder(tmp_path / "one"),
    ):
        raise OSError(number, os.strerror(number))
    assert listing(tmp_path) == []


def test_a_full_disk_is_told_when_the_writer_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: usage._replace(free=4096))
    with (
        pytest.raises(RedrafterError, match="No space left"),
        atomic_folder(tmp_path / "one"),
    ):
        raise RuntimeError("[write] Unable to write 1902944 bytes to file.")
    with pytest.raises(DownloadError, match="wrong hash"), atomic_folder(tmp_path / "one"):
        raise DownloadError("wrong hash")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert "make it writable" in str(files.write_error(read_only, tmp_path))
    with pytest.raises(RedrafterError, match="file"), atomic_folder(tmp_path / "file" / "one"):
        raise AssertionError("never reached")


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mlx_redrafter.machine.files import alone_in, atomic_folder, check_writable\n"
        "with atomic_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').touch()\n"
        "    os._exit(9)\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "one")], cwd=root)
    assert len(listing(tmp_path)) == 1
    with atomic_folder(tmp_path / "other"):
        assert len(listing(tmp_path)) == 2
    with atomic_folder(tmp_path / "one"):
        pass
    assert listing(tmp_path) == ["one", "other"]


def test_two_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def write(number: int) -> None:
        with atomic_folder(tmp_path / "one") as folder:
            together.wait()
            (folder / "a").write_text(str(number))
            (folder / "b").write_text(str(number))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listing(tmp_path) == ["one"]
    assert (tmp_path / "one" / "a").read_text() == (tmp_path / "one" / "b").read_text()


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = files.free_bytes(tmp_path)
    assert free > 0
    assert abs(files.free_bytes(tmp_path / "not" / "yet") - free) < 2**30
    assert not (tmp_path / "not").exists()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """And what is made in the folder meanwhile is not held up."""
    with alone_in(tmp_path / "work"):
        with (
            pytest.raises(InputError, match="another run"),
            alone_in(tmp_path / "work"),
        ):
            pass
        with atomic_folder(tmp_path / "work" / "inside"):
            pass
    with alone_in(tmp_path / "work"):
        pass


def test_what_cannot_be_written_is_told_without_the_home(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RedrafterError, match="name another folder"):
        check_writable(tmp_path / "file" / "x")
    with (
        pytest.raises(RedrafterError, match="a file in its way"),
        alone_in(tmp_path / "file"),
    ):
        pass
