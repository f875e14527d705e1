"""What the scripts in benchmarks/ share: options, tables, the JSON report, exit codes.

Light on purpose: `--help` must not load mlx.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from mlx_redrafter.errors import InputError, RedrafterError
from mlx_redrafter.machine import blas

OWN_PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "own.jsonl"


class Script:
    """One benchmark: its options, progress and table on stderr, its report as JSON.

    ``bar`` is the module's docstring of the script: it says what is measured, and is the help.
    """

    def __init__(self, name: str, bar: str) -> None:
        self.name = name
        self.bar = bar
        self.parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}",
            description=bar,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = self.parser.add_argument
        add("--model", default="smollm2-135m", help="name or folder (%(default)s)")
        add("--drafter", default="auto", help="name or folder (%(default)s)")
        add("--dtype", help="float32, bfloat16, float16 or 4bit (default: the machine's)")
        add("--blas", help=f"run under this BLAS: mkl, openblas, none, a path (${blas.VARIABLE})")
        add("--output", type=Path, metavar="FILE", help="JSON report (default: stdout)")

    def add_prompts(self, max_tokens: int, limit: int | None = None) -> None:
        add = self.parser.add_argument
        add(
            "--prompts",
            type=Path,
            default=OWN_PROMPTS,
            metavar="FILE",
            help="JSON lines, own.jsonl",
        )
        add("--limit", type=int, default=limit, help="prompts, spread over the file (%(default)s)")
        add("--max-tokens", type=int, default=max_tokens, help="tokens per answer (%(default)s)")

    def main(self, run: Callable[[argparse.Namespace], int]) -> None:
        """Parse, run, exit: 0, 1 where a bar is missed, 2 for an error that the user can mend."""
        args = self.parser.parse_args()
        try:
            _choose_blas(args.blas)
            sys.exit(run(args))
        except RedrafterError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)

    def report(self, args: argparse.Namespace, results: dict[str, Any]) -> None:
        """Write the JSON report: what was measured, with what, on what."""
        from mlx_redrafter.benchmarking import environment

        settings = {name: _public(value) for name, value in vars(args).items() if name != "output"}
        document = {
            "benchmark": self.name,
            "bar": self.bar.strip(),
            "settings": settings,
            "environment": environment.describe(),
            **results,
        }
        text = json.dumps(document, indent=1, default=_plain) + "\n"
        if args.output is None:
            print(text, end="")
            return
        try:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {args.output} ({error.strerror}).") from None


def say(text: str = "") -> None:
    print(text, file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain table, the first column to the left, the others to the right."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def met(passed: bool | None) -> str:
    """A bar's verdict in words; None where too little was measured to judge."""
    return "not judged" if passed is None else "met" if passed else "MISSED"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _choose_blas(name: str | None) -> None:
    """Start again under another BLAS: it has to be loaded before anything else."""
    if name is not None and os.environ.get(blas.VARIABLE) != name:
        os.environ[blas.VARIABLE] = name
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)
    blas.preload()  # raises here where the environment asks for what is not there


def _public(value: object) -> object:
    """A report names folders and files without their place on this machine."""
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).exists()):
        return Path(value).name
    return value


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} in a report")
