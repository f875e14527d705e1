"""What every verb shares: lazy verbs, messages, exit codes, start-up time."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import mlx_redrafter
from mlx_redrafter.cli import main as cli
from mlx_redrafter.errors import FormatError

ROOT = Path(__file__).parents[1]
RAISED: list[BaseException] = []

fake_app = typer.Typer()


@fake_app.command()
def first(count: int = 1) -> None:
    print(count)


@fake_app.command()
def second() -> None:
    """The second."""


def fake_verb(name: str = "world") -> None:
    """Says hello."""
    if RAISED:
        raise RAISED.pop()
    print(f"hello {name}")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx-redrafter", *args])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        code = stop.value.code
        return int(code or 0), *capsys.readouterr()

    for verb, target in [("chat", "fake_verb"), ("models", "fake_app")]:
        monkeypatch.setitem(cli.VERBS, verb, cli.Verb(f"{__name__}:{target}", "x"))
    monkeypatch.setitem(cli.VERBS, "train", cli.Verb("mlx_redrafter.cli.nowhere:train", "x"))
    return run


def start(*args: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlx_redrafter", *args]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload, no-any-return]


def test_help_lists_the_verbs_without_their_modules(run: Callable[..., tuple]) -> None:
    for args in (["--help"], ["-h"]):
        code, out, err = run(*args)
        assert (code, err) == (0, "")
        assert out.startswith("Usage: mlx-redrafter ")
        assert all(f"  {verb} " in out for verb in cli.VERBS)


def test_version(run: Callable[..., tuple]) -> None:
    assert run("--version") == (0, f"mlx-redrafter {mlx_redrafter.__version__}\n", "")


def test_a_function_is_a_verb(run: Callable[..., tuple]) -> None:
    assert run("chat", "--name", "you") == (0, "hello you\n", "")
    code, out, _ = run("chat", "-h")
    assert code == 0
    assert out.startswith("Usage: mlx-redrafter chat ")
    assert "Says hello." in out


def test_an_app_is_a_verb_with_subcommands(run: Callable[..., tuple]) -> None:
    assert run("models", "first", "--count", "3") == (0, "3\n", "")
    code, out, _ = run("models", "--help")
    assert code == 0
    assert "The second." in out
    assert "--install-completion" not in out


@pytest.mark.parametrize(
    "args", [["cht"], ["chat", "--no-such"], ["models", "first", "--count", "x"]]
)
def test_wrong_use_is_told_in_one_line(run: Callable[..., tuple], args: list[str]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_verb_that_is_not_there_fails_only_when_called(run: Callable[..., tuple]) -> None:
    code, out, err = run("train", "--any")
    assert (code, out) == (2, "")
    assert err.startswith("error: `train` is not part of mlx-redrafter")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FormatError("x.gguf is cut short"), 2, "error: x.gguf is cut short\n"),
        (OSError(errno.ENOSPC, "No space", "f"), 2, "error: No space (f): free some space\n"),
        (ImportError("libmlx.so: cannot open shared object file"), 2, "error: mlx has no backend"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
    ],
)
def test_errors_become_messages(
    run: Callable[..., tuple],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(cli, "_drop_stdout", lambda: None)
    RAISED.append(error)
    found, out, err = run("chat")
    assert (found, out) == (code, "")
    assert err.startswith(message)
    assert err.count("\n") <= 1


@pytest.mark.parametrize("error", [ZeroDivisionError("defect"), ModuleNotFoundError("x", name="x")])
def test_a_defect_stays_a_traceback(
    run: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    RAISED.append(error)
    monkeypatch.setattr(sys, "argv", ["mlx-redrafter", "chat"])
    with pytest.raises(type(error)):
        cli.main()


def test_a_wrong_blas_is_told_by_a_verb_and_not_by_help() -> None:
    if sys.platform != "linux":
        pytest.skip("the setting has a meaning only on Linux")
    environment = {**os.environ, "MLX_REDRAFTER_BLAS": "atlas"}
    code = (
        "import sys; from mlx_redrafter.cli import main as cli\n"
        "cli.VERBS['chat'] = cli.Verb('builtins:print', '')\n"
        "sys.argv[0] = 'x'; cli.main()\n"
    )
    command = [sys.executable, "-c", code]
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    helped = subprocess.run([*command, "--help"], **options)
    assert (helped.returncode, helped.stderr) == (0, "")
    called = subprocess.run([*command, "chat"], **options)
    assert called.returncode == 2
    assert called.stderr.startswith("error: $MLX_REDRAFTER_BLAS=atlas is not known")


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("--help", stdout=writing)
    os.close(writing)
    _, err = process.communicate()
    assert (process.returncode, err) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_told() -> None:
    with open("/dev/full", "w") as full:
        process = start("--help", stdout=full)
        _, err = process.communicate()
    assert process.returncode == 2
    assert err == "error: No space left on device: free some space\n"


def cpu_seconds(*args: str) -> float:
    """The least CPU time that Python takes for these arguments, of five runs."""

    def children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(5):
        before = children()
        subprocess.run([sys.executable, *args], cwd=ROOT, check=True, capture_output=True)
        times.append(children() - before)
    return min(times)


def test_help_is_quick() -> None:
    found = cpu_seconds("-m", "mlx_redrafter", "--help")
    assert found < 0.4
    assert found < 2 * cpu_seconds("-c", "import typer")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from mlx_redrafter.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    heavy = ("mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "rich", "prompt_toolkit")
    assert found.returncode == 0
    assert not [name for name in heavy if repr(name) in found.stderr]
