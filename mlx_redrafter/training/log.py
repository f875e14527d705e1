"""The log of a run: one JSON object a line, kept through kills and resumes.

Every line has ``event``: "start", "resume", "data", "features", "step", "validation", "acceptance",
"proof" or "end". Lines of training carry ``step``, which tells what a resumed run will write again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mlx_redrafter.errors import FormatError, InputError

Event = dict[str, Any]
_BEGINNING = '{"event": '  # of every line; tells a cut one from a file that is no log


class TrainingLog:
    """Appends events to a file, each handed to the system before ``write`` returns.

    A last line that a kill cut short is dropped when the file is opened again. Raises InputError
    where the file cannot be written and FormatError where it is something else than a log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._replace(read_log(path))
            else:
                self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write the log {path} ({error.strerror}): name another file."
            ) from None

    def write(self, event: str, values: Any = None, **more: Any) -> None:
        """Append one event; ``values`` is a mapping or a dataclass. What JSON cannot say (NaN,
        infinity) becomes null."""
        line = {"event": event, **_mapping(values), **more}
        self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
        self._file.flush()

    def begin(self, run: str, **more: Any) -> None:
        """Write "start", unless the log ends in the middle of the same ``run``, which goes on."""
        last = [e for e in read_log(self.path) if e["event"] in ("start", "end")][-1:]
        if not last or last[0]["event"] == "end" or last[0].get("run") != run:
            self.write("start", run=run, **more)

    def truncate(self, step: int) -> None:
        """Drop what the last run in it wrote after ``step``: resumed from its checkpoint, it writes
        that anew. Runs before its "start" stay as they are."""
        events = read_log(self.path)
        starts = [i for i, event in enumerate(events) if event["event"] == "start"]
        begin = starts[-1] if starts else 0
        kept = [e for i, e in enumerate(events) if i < begin or e.get("step", 0) <= step]
        if len(kept) < len(events):
            self._replace(kept)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _replace(self, events: list[Event]) -> None:
        """Put ``events`` in the file's place and go on behind them."""
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            partial.write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")
            os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)
        if hasattr(self, "_file"):
            self._file.close()
        self._file = self.path.open("a", encoding="utf-8")


def read_log(path: Path) -> list[Event]:
    """The events of a log, in order. A last line without its line break, which a kill leaves, is
    left out; anything else that is no event raises FormatError."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot read the log {path} ({error.strerror}).") from None
    *lines, cut = text.split("\n")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise _foreign(path, number)
        events.append(event)
    if not cut.startswith(_BEGINNING[: len(cut)]):
        raise _foreign(path, len(lines) + 1)
    return events


def _foreign(path: Path, line: int) -> FormatError:
    return FormatError(
        f"{path} is no training log (line {line}): move it away, or name another file."
    )


def _mapping(values: Any) -> Mapping[str, Any]:
    if values is None:
        return {}
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return dataclasses.asdict(values)
    assert isinstance(values, Mapping), type(values)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
