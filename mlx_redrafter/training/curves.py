"""The curves of a training log as one picture: loss, agreement, learning rate, acceptance."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_redrafter.errors import InputError, RedrafterError
from mlx_redrafter.training.log import Event, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

INSTALL = "matplotlib is not installed: pip install 'mlx-redrafter[plot]'"
_INCHES, _DPI = (12, 9), 100  # 1200 x 900 pixels
_TRAINING, _VALIDATION, _RATE = "#4477aa", "#cc3311", "#117733"
_INK, _GRID = "#333333", "#dddddd"
_MOST_POINTS = 2000  # of a line; more only make the file slow to draw


def draw(log: Path, picture: Path) -> None:
    """Draw ``log`` as the PNG ``picture``. It appears whole or not at all.

    Raises RedrafterError where matplotlib is missing and InputError where the log has no step.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise RedrafterError(f"the curves cannot be drawn: {INSTALL}.") from None
    events = read_log(log)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout=layout)
    FigureCanvasAgg(figure)
    _fill(figure, events, log)
    partial = picture.with_name(f".{picture.name}.{os.getpid()}")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(partial, format="png")
        os.replace(partial, picture)
    except OSError as error:
        raise InputError(f"cannot write {picture} ({error.strerror}).") from None
    finally:
        partial.unlink(missing_ok=True)


def _fill(figure: Figure, events: Sequence[Event], log: Path) -> None:
    steps = [event for event in events if event["event"] == "step"]
    validations = [event for event in events if event["event"] == "validation"]
    replays = [event for event in events if event["event"] == "acceptance"]
    if not steps:
        raise InputError(f"{log} has no step of training: there is no curve to draw.")
    left: FigureBase = figure
    right: FigureBase | None = None
    if replays:
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[3, 1.1])[0]
    loss, agreement, rate = left.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 3, 1.3]}
    )
    resumed = sorted({event["step"] for event in events if event["event"] == "resume"} - {0})
    for axes in (loss, agreement, rate):
        _tidy(axes)
        for step in resumed:
            axes.axvline(step, color=_GRID, linestyle="--", zorder=0.5)
    _draw_loss(loss, steps, validations)
    _draw_agreement(agreement, validations)
    rate.plot(*_line(steps, "learning_rate"), color=_RATE)
    rate.set_ylim(bottom=0)
    rate.set_title("learning rate", loc="left")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rate.set_xlabel("step" + (", dashed where the run was resumed" if resumed else ""))
    rate.set_xlim(0, max(event["step"] for event in steps) * 1.08)  # room for the labels of lines
    if right is not None:
        _draw_acceptance(right.subplots(), replays[-1])


def _draw_loss(axes: Axes, steps: Sequence[Event], validations: Sequence[Event]) -> None:
    at, values = _line(steps, "loss")
    axes.plot(at, values, color=_TRAINING, alpha=0.25, linewidth=0.8)
    axes.plot(at, _smooth(values), color=_TRAINING, label="training, smoothed")
    tested = _line(validations, "loss")
    if np.isfinite(tested[1]).any():
        axes.plot(*tested, "o-", color=_VALIDATION, markersize=4, label="held-out rows")
        best = int(np.nanargmin(tested[1]))
        axes.annotate(
            f"{tested[1][best]:.3f}",
            (tested[0][best], tested[1][best]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=_VALIDATION,
        )
    # The first steps are far above all others and would flatten the rest.
    shown = np.concatenate([values[len(values) // 50 :], tested[1]])
    shown = shown[np.isfinite(shown)]
    if shown.size:
        low, high = shown.min(), np.quantile(shown, 0.995)
        room = 0.08 * max(high - low, 1e-3)
        axes.set_ylim(low - room, high + room)
    axes.set_title("loss", loc="left")
    axes.legend(frameon=False, loc="upper right")


def _draw_agreement(axes: Axes, validations: Sequence[Event]) -> None:
    axes.set_title("agreement of the first choice with the target's, by depth", loc="left")
    axes.set_ylim(0, 1)
    tested = [event for event in validations if event.get("agreement")]
    if not tested:
        axes.text(0.5, 0.5, "not measured", ha="center", color=_INK, transform=axes.transAxes)
        return
    at = [event["step"] for event in tested]
    depths = min(len(event["agreement"]) for event in tested)
    lines = np.array([event["agreement"][:depths] for event in tested], dtype=float)
    top = float(np.nanmax(lines, initial=0.0))
    axes.set_ylim(0, min(1.0, 1.15 * top + 0.02))
    ends = _apart(lines[-1], 0.06 * axes.get_ylim()[1])
    for depth in range(depths):
        colour = _shade(depth, depths)
        axes.plot(at, lines[:, depth], "o-", color=colour, markersize=4)
        axes.annotate(
            f"{depth + 1}: {lines[-1, depth]:.2f}",
            (at[-1], ends[depth]),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def _draw_acceptance(axes: Axes, event: Event) -> None:
    """Bars: the share of steps that accepted at least so many drafted tokens."""
    overall, draft = event["overall"], event["draft"]
    shares = overall["by_position"]
    _tidy(axes)
    axes.grid(False, axis="x")
    places = range(1, len(shares) + 1)
    bars = axes.bar(places, shares, color=_TRAINING, width=0.7)
    axes.bar_label(bars, [f"{share:.2f}" for share in shares], padding=2, color=_INK)
    axes.set_ylim(0, min(1.0, 1.2 * max(shares) + 0.05))
    axes.set_xticks(list(places))
    axes.set_xlabel("drafted tokens accepted, at least")
    axes.set_title(
        f"acceptance on held-out text\nW {draft['beam_width']}, L {draft['beam_length']}, "
        f"token budget {draft['token_budget']}:\n{overall['tokens_per_step']:.2f} tokens per step",
        loc="left",
    )


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.tick_params(colors=_INK)
    axes.grid(True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _line(events: Sequence[Event], name: str) -> tuple[Any, Any]:
    """Steps and values (n,); null is a gap."""
    if len(events) > _MOST_POINTS:
        events = [*events[:: -(-len(events) // _MOST_POINTS)], events[-1]]
    steps = np.array([event["step"] for event in events], dtype=float)
    return steps, np.array([event.get(name) for event in events], dtype=float)


def _smooth(values: Any) -> Any:
    """Mean over a fiftieth of the line around each point, less at its ends."""
    half = max(2, len(values) // 100)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    number = counts[high] - counts[low]
    return np.where(number > 0, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan)


def _apart(values: Any, gap: float) -> Any:
    """The values moved up where they are nearer to one another than ``gap``."""
    placed = np.array(values, dtype=float)
    order = np.argsort(placed)
    for lower, upper in pairwise(order):
        placed[upper] = max(placed[upper], placed[lower] + gap)
    return placed


def _shade(depth: int, depths: int) -> tuple[float, float, float]:
    """Dark for depth 1, lighter with each depth."""
    share = depth / max(depths - 1, 1)
    dark, light = (0.16, 0.11, 0.42), (0.86, 0.45, 0.20)
    red, green, blue = (a + share * (b - a) for a, b in zip(dark, light, strict=True))
    return red, green, blue
