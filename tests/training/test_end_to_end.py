"""From nothing to a drafter that pays, by the command line; killed on the way with the same result.

About two minutes on one core, so it is slow.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.generate import generate
from mlx_redrafter.load import ModelPair, load
from mlx_redrafter.training.log import Event, read_log
from tests.fixtures import tiny_language
from tests.training import commands

pytestmark = pytest.mark.slow

BUDGET = 4
DATA = ["--tokens", 6000, "--row-length", 128, "--rows-per-shard", 16]
TRAINING = ["--batch", 128, "--epochs", 8, "--learning-rate", 3e-3, "--proof-prompts", 2]
_PATIENCE = 60  # seconds until a step must have shown itself


@pytest.fixture(scope="module")
def options(tiny_target: Path) -> list[object]:
    model = ["--model", tiny_target, "--dtype", "float32"]
    return [*model, *DATA, *TRAINING, "--token-budget", BUDGET]


@pytest.fixture(scope="module")
def home_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def uninterrupted(
    options: list[object], home_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("uninterrupted") / "drafter"
    commands.train(home_folder, *options, "--output", output)
    return output


def killed_when(reached: Callable[[], bool], command: list[str], home: Path) -> None:
    """Start the command and kill it, whatever it is doing, once ``reached``."""
    process = subprocess.Popen(
        command,
        env=commands.environment(home),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.nice(10),  # so that it is seen in time
    )
    try:
        end = time.monotonic() + _PATIENCE
        while not reached():
            assert process.poll() is None, process.communicate()[1][-2000:]
            assert time.monotonic() < end, "the step did not come"
            time.sleep(0.002)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def count(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


def steps_done(log: Path) -> int:
    return max((event.get("step", 0) for event in events(log)), default=0)


def events(log: Path) -> list[Event]:
    return read_log(log) if log.exists() else []


def test_killed_in_each_part_it_goes_on_to_the_same_weights(
    options: list[object], uninterrupted: Path, home_folder: Path, tmp_path: Path
) -> None:
    output, work = tmp_path / "drafter", tmp_path / "drafter.work"
    data, features, checkpoint, log = (
        work / name for name in ("data", "features", "checkpoint/state.json", "log.jsonl")
    )
    command = [*commands.COMMAND, "train", *map(str, [*options, "--output", output])]

    killed_when(lambda: count(data, "rows-*.npz") >= 2, command, home_folder)
    rows = {path: path.read_bytes() for path in data.glob("rows-*.npz")}
    assert not features.exists()

    killed_when(lambda: count(features, "[!.]*") >= 1, command, home_folder)
    assert rows.items() <= {path: path.read_bytes() for path in data.glob("rows-*.npz")}.items()
    assert count(data, "rows-*.npz") > len(rows)
    assert not events(log)

    killed_when(lambda: steps_done(log) >= 10, command, home_folder)
    assert not checkpoint.exists()

    killed_when(
        lambda: checkpoint.exists() and events(log)[-1]["event"] == "step", command, home_folder
    )
    assert not output.exists()

    commands.train(home_folder, *options, "--output", output)
    log = output / "log.jsonl"
    (resumed,) = (event["step"] for event in events(log) if event["event"] == "resume")
    assert resumed > 0
    steps = [event["step"] for event in events(log) if event["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert not work.exists()
    for name in ("model.safetensors", "config.json"):
        assert (output / name).read_bytes() == (uninterrupted / name).read_bytes()


@pytest.fixture(scope="module")
def pair(uninterrupted: Path, tiny_target: Path, home_folder: Path) -> ModelPair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_REDRAFTER_HOME", str(home_folder))
        found = load(str(tiny_target), dtype="float32")  # registered: it needs no name
    assert found.drafter is not None
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_pays_and_the_text_is_the_target_s(pair: ModelPair, temperature: float) -> None:
    emitted, steps = 0, 0
    for seed, turn in enumerate(tiny_language.questions(seed=202, number=24)):
        sampling = SamplingOptions(temperature, seed)
        plain = generate(pair, turn.user, sampling=sampling, draft=None)
        drafted = generate(
            pair,
            turn.user,
            sampling=sampling,
            draft=DraftOptions.fitting(token_budget=BUDGET),
        )
        assert drafted.text == plain.text
        assert drafted.tokens == plain.tokens
        emitted += drafted.stats.emitted - 1
        steps += drafted.stats.steps
    assert emitted / steps >= 1.5
