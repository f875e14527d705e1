"""`mlx-redrafter models`: list, fetch and remove models and drafters."""

import dataclasses
import json
from typing import Annotated

import typer

from mlx_redrafter import registry, shipped
from mlx_redrafter.errors import InputError

app = typer.Typer(help="List, fetch and remove models and drafters.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List shipped models and trained drafters, or do what the command says."""
    if context.invoked_subcommand:
        if as_json:
            raise InputError("--json belongs to the list: leave out the command or the option")
        return
    entries = registry.models()
    if as_json:
        typer.echo(
            json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2, default=str)
        )
        return
    rows = [("NAME", "KIND", "SOURCE", "SIZE", "HERE", "FOR")]
    for entry in entries:
        here = ", ".join(entry.formats) or "yes" if entry.present else "no"
        size = "-" if entry.size_bytes is None else _megabytes(entry.size_bytes)
        rows.append((entry.name, entry.kind, entry.source, size, here, entry.target or ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@app.command()
def path(
    name: Annotated[
        str, typer.Argument(help="A shipped name, a folder, or owner/name of the Hub.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of a shipped model: float32, bfloat16, float16, or 4bit as shipped. "
            "Default: the fast one on this machine.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the folder of a model in MLX format; fetch it if it is not here."""
    if dtype and name not in shipped.catalogue():
        raise InputError("--dtype chooses a format of a shipped model: leave it out for others")
    typer.echo(registry.resolve(name, dtype))


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help="The name of a shipped model.")],
    drafter: Annotated[
        bool, typer.Option("--drafter", help="The name is that of a drafter trained here.")
    ] = False,
) -> None:
    """Remove a model's fetched files, in all formats."""
    freed = registry.remove_drafter(name) if drafter else registry.remove(name)
    typer.echo(f"removed {name}: {_megabytes(freed)} freed")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
