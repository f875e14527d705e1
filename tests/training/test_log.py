"""The log survives kills and resumes, and never eats a file that is none of ours."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_redrafter.errors import FormatError, InputError
from mlx_redrafter.training.log import TrainingLog, read_log


@dataclass(frozen=True)
class Progress:
    step: int
    loss: float


def steps(path: Path) -> list[int]:
    return [event["step"] for event in read_log(path)]


def test_each_event_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    with TrainingLog(path) as log:
        log.write("start", {"model": "a\nb"})
        log.write("step", Progress(1, 2.5), positions=64)
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"event": "start", "model": "a\nb"},
            {"event": "step", "step": 1, "loss": 2.5, "positions": 64},
        ]


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with TrainingLog(path) as log:
        log.write("validation", {"loss": float("nan"), "agreement": [0.5, float("inf")], 0.7: "t"})
    assert read_log(path) == [
        {"event": "validation", "loss": None, "agreement": [0.5, None], "0.7": "t"}
    ]


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_line_cut_by_a_kill_is_forgotten(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.jsonl"
    with TrainingLog(path) as log:
        for step in (1, 2):
            log.write("step", Progress(step, 1.0))
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps(path) == [1]
    with TrainingLog(path) as log:
        log.write("step", Progress(2, 1.0))
    assert steps(path) == [1, 2]


def test_a_cut_inside_a_character_is_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "start"}\n{"event": "\xc3')
    assert read_log(path) == [{"event": "start"}]


def test_truncating_drops_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with TrainingLog(path) as log:
        log.write("data", {"rows": 3})
        for step in range(1, 6):
            log.write("step", Progress(step, 1.0))
        log.write("validation", {"step": 5})
        log.truncate(3)
        log.write("resume", {"step": 3})
        log.write("step", Progress(4, 2.0))
    assert [(event["event"], event.get("step")) for event in read_log(path)] == [
        ("data", None),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("resume", 3),
        ("step", 4),
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize(
    "text", ["my notes\nmore\n", "{no line break", '[1]\n{"event": "start"}\n', '{"a": 1}\n']
)
def test_another_file_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(FormatError, match="line 1"):
        TrainingLog(path)
    assert path.read_text() == text


def test_what_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        TrainingLog(tmp_path / "file" / "log.jsonl")
    with pytest.raises(InputError, match="cannot read"):
        read_log(tmp_path / "none.jsonl")


def test_a_run_that_goes_on_starts_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for run, step in (("a", 1), ("a", 2), ("b", 1), ("b", 2)):
        with TrainingLog(path) as log:
            log.begin(run)
            log.write("step", step=step)
    with TrainingLog(path) as log:
        log.truncate(1)
        log.write("end")
        log.begin("b")
    told = [(e["event"], e.get("run", e.get("step"))) for e in read_log(path)]
    assert told == [
        ("start", "a"),
        ("step", 1),
        ("step", 2),
        ("start", "b"),
        ("step", 1),
        ("end", None),
        ("start", "b"),
    ]
