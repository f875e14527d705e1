"""The picture of a log: its size, what it shows, and what it says where it cannot be drawn."""

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_redrafter.errors import InputError, RedrafterError
from mlx_redrafter.training import curves
from mlx_redrafter.training.log import TrainingLog

figure_module = pytest.importorskip("matplotlib.figure")
image = pytest.importorskip("matplotlib.image")

ACCEPTANCE = {
    "draft": {"beam_width": 3, "beam_length": 4, "token_budget": 7},
    "overall": {"tokens_per_step": 2.13, "by_position": [0.56, 0.32, 0.17, 0.08]},
}


def write(path: Path, steps: int = 40, *, whole: bool = True) -> Path:
    with TrainingLog(path) as log:
        log.write("start", {"model": "tiny"})
        for step in range(1, steps + 1):
            log.write("step", step=step, loss=3 + 2 / step, learning_rate=1e-3 / step)
            if whole and step % 10 == 0:
                log.write("validation", step=step, loss=4 + 2 / step, agreement=[0.5, 0.4])
        if whole:
            log.write("resume", step=20)
            log.write("acceptance", ACCEPTANCE)
    return path


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class Kept(figure_module.Figure):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(figure_module, "Figure", Kept)
    return made


def lines(axes: Any) -> list[list[tuple[float, float]]]:
    found = [[tuple(point) for point in np.column_stack(each.get_data())] for each in axes.lines]
    return [each for each in found if len({x for x, _ in each}) > 1]


def test_draws_every_curve(tmp_path: Path, figures: list[Any]) -> None:
    picture = tmp_path / "new" / "curves.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curves.draw(write(tmp_path / "log.jsonl"), picture)
    pixels = image.imread(picture)
    assert pixels.shape[:2] == (900, 1200)
    assert pixels[..., :3].std() > 0.05  # not blank
    assert [each.name for each in picture.parent.iterdir()] == ["curves.png"]

    loss, agreement, rate, acceptance = figures[0].axes
    raw, _smoothed, tested = lines(loss)
    assert raw[4] == (5, 3.4)
    assert tested[0] == (10, 4.2)
    assert lines(agreement) == [[(10 * i, a) for i in range(1, 5)] for a in (0.5, 0.4)]
    assert lines(rate)[0][1] == (2, 5e-4)
    assert [bar.get_height() for bar in acceptance.patches] == [0.56, 0.32, 0.17, 0.08]
    assert "2.13 tokens per step" in acceptance.get_title(loc="left")


def test_smoothing_is_a_mean_that_ignores_gaps() -> None:
    values = np.array([1.0, 2, 3, np.nan, 5, 6, 7])
    assert curves._smooth(values).tolist() == [2.0, 2.0, 2.75, 4.0, 5.25, 6.0, 6.0]
    assert np.isnan(curves._smooth(np.full(9, np.nan))).all()


def test_labels_do_not_lie_on_one_another() -> None:
    assert curves._apart(np.array([0.5, 0.49, 0.2]), 0.05).tolist() == pytest.approx(
        [0.54, 0.49, 0.2]
    )


@pytest.mark.parametrize("values", [{}, {"loss": None, "agreement": [None]}])
def test_a_log_with_gaps_is_drawn(tmp_path: Path, values: dict[str, Any]) -> None:
    path = write(tmp_path / "log.jsonl", 1, whole=False)
    with TrainingLog(path) as log:
        log.write("step", step=2, loss=float("nan"), learning_rate=1e-3)
        log.write("validation", values, step=2)
    curves.draw(path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_long_log_is_thinned_but_for_its_end() -> None:
    events = [{"event": "step", "step": step, "loss": 1.0} for step in range(1, 10_001)]
    steps, _ = curves._line(events, "loss")
    assert len(steps) < 2100
    assert (steps[0], steps[-1]) == (1, 10_000)


def test_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "log.jsonl", 0)
    with pytest.raises(InputError, match="no step"):
        curves.draw(path, tmp_path / "curves.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RedrafterError, match=r"pip install 'mlx-redrafter\[plot\]'"):
        curves.draw(path, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
