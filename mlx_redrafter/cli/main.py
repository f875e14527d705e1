"""The `mlx-redrafter` command: which verbs there are, and what an error looks like.

A verb's module is imported when the verb is called, so that `--help` stays quick.
"""

import errno
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

from mlx_redrafter import __version__
from mlx_redrafter.errors import InputError, RedrafterError
from mlx_redrafter.machine import blas


class Verb(NamedTuple):
    target: str
    """module:name of a function with typer's annotations, or of a typer app with subcommands."""
    help: str


VERBS = {
    "generate": Verb("mlx_redrafter.cli.generate:generate", "Answer one prompt."),
    "chat": Verb("mlx_redrafter.cli.chat:chat", "Talk with a model."),
    "models": Verb("mlx_redrafter.cli.models:app", "List, fetch and remove models and drafters."),
    "train": Verb("mlx_redrafter.cli.train:train", "Distil a drafter from a model."),
}


class _Verbs(TyperGroup):
    """Lists stand-ins, and puts the real command in its place when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)), rest


app = typer.Typer(
    cls=_Verbs,
    help="Decode faster with a small recurrent drafter, with the same text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _stand_in() -> None:
    """Never called: _Verbs replaces it."""


for _name, _verb in VERBS.items():
    app.command(_name, help=_verb.help)(_stand_in)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-redrafter {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    blas.preload()  # once more, to raise here what the import of the package swallowed


def _load(name: str) -> Any:
    module, _, attribute = VERBS[name].target.partition(":")
    try:
        verb = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InputError(f"`{name}` is not part of mlx-redrafter {__version__}: upgrade") from None
    holder = typer.Typer(rich_markup_mode=None)
    if isinstance(verb, typer.Typer):
        holder.add_typer(verb, name=name)
    else:
        holder.command(name)(verb)
    return typer.main.get_group(holder).commands[name]


def main() -> None:
    """Run the command line. The one place where errors become messages and exit codes."""
    try:
        try:
            code = app(prog_name="mlx-redrafter", standalone_mode=False)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except RedrafterError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        if type(error).__name__ != "Abort":  # what typer makes of Ctrl-C
            raise
        sys.exit(130)
    except ImportError as error:
        if "libmlx" not in str(error):
            raise
        _fail("mlx has no backend here: pip install 'mlx-redrafter[cpu]' (or cuda12, cuda13)")
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_stdout()
        if error.errno == errno.EPIPE:
            sys.exit(1)
        _fail(
            f"{error.strerror}{f' ({error.filename})' if error.filename else ''}: free some space"
        )
    except Exception as error:
        # Typer's own errors, told in one line. Their class is private to the copy of click in it.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        _fail(f"{' '.join(error.format_message().split())} (see --help)")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _drop_stdout() -> None:
    """What stdout still holds cannot be written, and Python would try again on its way out."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
