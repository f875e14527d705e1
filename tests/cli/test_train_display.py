"""What `train` shows: bars and a table on a terminal, few plain lines elsewhere."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mlx_redrafter.cli.train_display import PLAIN_INTERVAL, TrainDisplay, _duration, _rate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(step: int, steps: int = 1000) -> Any:
    return SimpleNamespace(
        step=step,
        steps=steps,
        loss=5 - step / 1000,
        learning_rate=1e-3 / step,
        seconds=0.5 * step,
        positions=1024 * step,
    )


def validation(step: int, loss: float) -> Any:
    return SimpleNamespace(step=step, loss=loss, agreement=[0.5, 0.25])


@pytest.fixture
def clock() -> Clock:
    return Clock()


def display(clock: Clock, terminal: bool, width: int = 80) -> tuple[TrainDisplay, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=width, height=40, _environ={})
    return TrainDisplay(console, clock), written


def screen(shown: TrainDisplay) -> list[str]:
    """What is on the terminal now, without colours."""
    with shown.console.capture() as capture:
        shown.console.print(shown._render())
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capture.get())
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_plain_lines_come_now_and_then(clock: Clock) -> None:
    shown, written = display(clock, terminal=False)
    with shown:
        report = shown.stage("hidden states", "shards")
        for done in range(0, 101):
            report(done, 100)
            clock.now += 1
    lines = written.getvalue().splitlines()
    assert lines[0] == "hidden states: 0 of 100"
    assert lines[1] == "hidden states: 10 of 100, 1.0 shards/s, 2 min left"
    assert lines[-1] == "hidden states: 100 of 100, done in 2 min"
    assert len(lines) == 100 / PLAIN_INTERVAL + 1
    assert "\x1b" not in written.getvalue()


def test_a_step_that_is_done_at_once_is_one_line(clock: Clock) -> None:
    shown, written = display(clock, terminal=False)
    with shown:
        shown.stage("data", "rows")(8, 8)
    assert written.getvalue() == "data: 8 of 8, done in 0 s\n"


def test_plain_training_tells_loss_rate_and_validation(clock: Clock) -> None:
    shown, written = display(clock, terminal=False, width=40)
    with shown:
        for step in range(501, 541):  # a resumed run: what was done before took no time
            shown.training(progress(step))
            clock.now += 0.5
        shown.validated(validation(540, 3.25))
    lines = written.getvalue().splitlines()
    assert lines == [
        "training: 501 of 1,000, loss 4.499, learning rate 2.0e-06",
        "training: 521 of 1,000, 2,048 positions/s, 4 min left, loss 4.479, learning rate 1.9e-06",
        "validation at step 540: loss 3.250, agreement by depth 0.500, 0.250",
    ]


def test_a_terminal_shows_bars_and_the_last_validations(clock: Clock) -> None:
    shown, written = display(clock, terminal=True)
    with shown:
        report = shown.stage("data", "rows")
        report(0, 64)
        clock.now += 8
        report(64, 64)
        for step in range(1, 21):
            shown.training(progress(step))
            clock.now += 1
            shown.validated(validation(step, 4 - step / 10 if step < 20 else 9.0))
    lines = screen(shown)
    assert re.fullmatch(r"data +\S+ 64 of 64, done in 8 s", lines[0])
    assert re.fullmatch(
        r"training \S+ \S* ?20 of 1,000, 1,024 positions/s, 16 min left", lines[1]
    ), lines[1]
    assert lines[2] == "loss 4.980, learning rate 5.0e-05"
    assert lines[3].split() == ["step", "loss", "depth", "1", "depth", "2", "learning", "rate"]
    assert [line.split()[0] for line in lines[4:]] == [str(step) for step in range(13, 21)]
    assert lines[-2].split() == ["19", "2.100", "0.500", "0.250", "5.3e-05"]
    assert "\x1b[32m" in written.getvalue()  # the best one stands out
    assert written.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_the_terminal_is_given_back_after_an_error(clock: Clock) -> None:
    shown, written = display(clock, terminal=True)
    shown.training(progress(1))
    with pytest.raises(KeyboardInterrupt), shown:
        raise KeyboardInterrupt
    assert written.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_no_markup(clock: Clock, terminal: bool) -> None:
    shown, written = display(clock, terminal)
    with shown:
        shown.stage("[red]rows[/nothing]", "rows")(1, 2)
        shown.note("kept in [bold]folder[/x]")
    assert "[red]rows[/nothing]" in written.getvalue()
    assert "kept in [bold]folder[/x]" in written.getvalue()


def test_skipped_work_stops_counting_after_a_minute(clock: Clock) -> None:
    shown, written = display(clock, terminal=False)
    with shown:
        report = shown.stage("hidden states", "shards")
        for done in range(0, 101):  # there already
            report(done, 200)
        for done in range(101, 111):
            clock.now += 20
            report(done, 200)
    assert written.getvalue().splitlines()[-1].endswith("3.0 shards/min, 30 min left")


def test_figures_in_words() -> None:
    assert _rate(0.05, "shards") == "3.0 shards/min"
    assert _rate(2.25, "rows") == "2.2 rows/s"
    assert _rate(20480.4, "positions") == "20,480 positions/s"
    assert [_duration(s) for s in (0.4, 89, 90, 5000, 7500)] == [
        "0 s",
        "89 s",
        "2 min",
        "83 min",
        "2 h 5 min",
    ]
