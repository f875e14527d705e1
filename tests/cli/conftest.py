"""Run a verb in this process, on a model pair that plays scripts."""

import importlib
import io
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from mlx_redrafter.cli import main as cli
from tests.fakes import byte_level, fake_pair

load_module = importlib.import_module("mlx_redrafter.load")


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_level()


@pytest.fixture
def pair(tokenizer: Any) -> Any:
    return fake_pair(tokenizer)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pair: Any
) -> Callable[..., Result]:
    """`run("generate", ..., stdin=b"")`: exit code, stdout, stderr."""
    loaded: list[dict[str, Any]] = []

    def load(**given: Any) -> Any:
        loaded.append(given)
        return pair

    monkeypatch.setattr(load_module, "load", load)

    def run(*args: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["mlx-redrafter", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        sys.stdout.flush()
        return Result(int(stop.value.code or 0), *capfd.readouterr())

    run.loaded = loaded  # type: ignore[attr-defined]
    return run
