"""What `train` shows while it runs, on stderr: bars and a table, or plain lines now and then."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from mlx_redrafter.training import trainer

PLAIN_INTERVAL = 10.0  # seconds between two lines of one step of the work
_VALIDATIONS = 8  # the last ones, in the table
_REFRESH = 4  # times a second
_BAR_WIDTH = 14  # leaves room for the figures in 80 columns
_RECENT = 60.0  # seconds that a rate is taken over


class TrainDisplay:
    """Use as a context. On a terminal it redraws itself; elsewhere each line is written once.

    ``clock`` gives seconds, for tests.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self.console,
            auto_refresh=False,
        )
        self._paces: dict[str, _Pace] = {}
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        self._latest: trainer.Progress | None = None
        self._validations: list[tuple[trainer.Validation, trainer.Progress | None]] = []
        self._live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render, console=self.console, refresh_per_second=_REFRESH
            )

    def __enter__(self) -> TrainDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def stage(self, name: str, unit: str) -> Callable[[int, int], None]:
        """A bar for one step of the work: call what this gives with (done, total) in ``unit``."""
        return lambda done, total: self._advance(name, done, total, done, unit)

    def training(self, progress: trainer.Progress) -> None:
        """After every step of training."""
        self._latest = progress
        self._advance("training", progress.step, progress.steps, progress.positions, "positions")

    def validated(self, validation: trainer.Validation) -> None:
        """A row in the table, with the learning rate of the step before."""
        self._validations.append((validation, self._latest))
        if self._live is None:
            agreement = ", ".join(f"{share:.3f}" for share in validation.agreement)
            self.note(
                f"validation at step {validation.step}: loss {validation.loss:.3f}, "
                f"agreement by depth {agreement}"
            )

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(Text(text), soft_wrap=True)

    def _advance(self, name: str, done: int, total: int, amount: int, unit: str) -> None:
        """``amount`` is what the rate counts, in ``unit``."""
        now = self._clock()
        pace = self._paces.setdefault(name, _Pace())
        figures = f"{done:,} of {total:,}{pace.words(now, done, total, amount, unit)}"
        if self._live is None:
            if name == "training":
                figures += f", {self._losses()}"
            self._say(name, figures, now, finished=done >= total)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, figures=figures)
        self._bars.update(self._tasks[name], completed=done, total=total, figures=figures)

    def _losses(self) -> str:
        assert self._latest is not None
        return f"loss {self._latest.loss:.3f}, learning rate {self._latest.learning_rate:.1e}"

    def _say(self, name: str, figures: str, now: float, finished: bool) -> None:
        """The first line, the last one, and one now and then between."""
        last = self._said.get(name, -math.inf)
        if finished and last < math.inf:
            self._said[name] = math.inf
        elif now - last < PLAIN_INTERVAL:
            return
        else:
            self._said[name] = now
        self.note(f"{name}: {figures}")

    def _render(self) -> Group:
        parts: list[RenderableType] = [self._bars]
        if self._latest is not None:
            parts.append(Text(self._losses()))
        if self._validations:
            parts.append(self._table())
        return Group(*parts)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        depths = len(self._validations[-1][0].agreement)
        columns = ["step", "loss", *(f"depth {i}" for i in range(1, depths + 1)), "learning rate"]
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        best = min(validation.loss for validation, _ in self._validations)
        for validation, progress in self._validations[-_VALIDATIONS:]:
            table.add_row(
                f"{validation.step:,}",
                f"{validation.loss:.3f}",
                *(f"{share:.3f}" for share in validation.agreement),
                "" if progress is None else f"{progress.learning_rate:.1e}",
                style="green" if validation.loss == best else "",
            )
        return table


class _Pace:
    """Speed over the last minute: what an earlier run did, and is skipped, soon counts no more."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._began: float | None = None

    def words(self, now: float, done: int, total: int, amount: int, unit: str) -> str:
        """Rate and time left; nothing before there is a rate."""
        if self._began is None:
            self._began = now
        self._seen.append((now, done, amount))
        while len(self._seen) > 2 and self._seen[1][0] < now - _RECENT:
            self._seen.popleft()
        if done >= total:
            return f", done in {_duration(now - self._began)}"
        then, done_then, amount_then = self._seen[0]
        if now <= then or done <= done_then:
            return ""
        left = (total - done) * (now - then) / (done - done_then)
        return f", {_rate((amount - amount_then) / (now - then), unit)}, {_duration(left)} left"


def _rate(per_second: float, unit: str) -> str:
    if per_second < 1:
        return f"{60 * per_second:.1f} {unit}/min"
    return f"{per_second:,.{0 if per_second >= 10 else 1}f} {unit}/s"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
