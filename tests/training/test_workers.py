"""Two processes on this machine train as one does with twice the batch, by the command line."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from mlx_redrafter.training.corpus import ASSISTANT, TEMPLATE, USER
from mlx_redrafter.training.log import read_log
from tests.fixtures import tiny_language
from tests.training import commands

pytestmark = pytest.mark.slow  # seven processes

BATCH = 64  # of each of two processes
ROWS, LENGTH, FILES = 48, 96, 6
_LAUNCH = Path(sys.executable).with_name("mlx.launch")


@pytest.fixture(scope="module")
def options(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """All but the batch and the output. The text is the language's own: nothing is generated."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_target)
    folder = tmp_path_factory.mktemp("corpus")
    chosen: list[object] = ["--model", tiny_target, "--dtype", "float32"]
    ids, role = (np.array(values) for values in zip(*_rows(tokenizer, ROWS), strict=True))
    for i, part in enumerate(np.split(np.arange(ROWS), FILES)):
        path = folder / f"rows-{i}.npz"
        np.savez(path, ids=ids[part].astype(np.int32), role=role[part].astype(np.uint8))
        chosen += ["--corpus", path]
    training = ["--horizon", 2, "--epochs", 3, "--learning-rate", 3e-3, "--validations", 4]
    return [*chosen, *training, "--proof-prompts", 0, "--no-register"]


def _rows(tokenizer: Any, number: int) -> list[tuple[list[int], list[int]]]:
    random = Random(5)
    rows = []
    for _ in range(number):
        ids: list[int] = []
        role: list[int] = []
        for turn in islice(tiny_language.turns(random), 20):
            for text, author in (
                ("<|start|>user\n", TEMPLATE),
                (f"{turn.user}<|end|>", USER),
                ("\n<|start|>assistant\n", TEMPLATE),
                (f"{turn.assistant}<|end|>", ASSISTANT),
                ("\n", TEMPLATE),
            ):
                tokens = tokenizer.encode(text, add_special_tokens=False)
                ids += tokens
                role += [author] * len(tokens)
        rows.append((ids[:LENGTH], role[:LENGTH]))
    return rows


@pytest.fixture(scope="module")
def home_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def two(
    options: list[object], home_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    output = tmp_path_factory.mktemp("two") / "drafter"
    launched = launch(home_folder, *options, "--batch", BATCH, "--output", output)
    finish(launched, output)
    assert not output.with_name("drafter.work").exists()
    return weights(output)


def launch(home: Path, *options: object) -> subprocess.Popen[str]:
    """`train` in two processes, as a group of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ring = ["-n", "2", "--backend", "ring", "--starting-port", str(port)]
    return subprocess.Popen(
        [str(_LAUNCH), *ring, "--", *commands.COMMAND, "train", *map(str, options)],
        env=commands.environment(home),
        stdin=subprocess.PIPE,  # it polls it: one at its end would keep it busy
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(launched: subprocess.Popen[str], output: Path) -> None:
    try:
        text, _ = launched.communicate(timeout=120)
    finally:
        kill(launched)
    assert output.exists(), text[-2000:]  # the exit code tells nothing of the processes


def kill(launched: subprocess.Popen[str]) -> None:
    """End the launcher and all that it started, at once."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(launched.pid, signal.SIGKILL)
    launched.communicate()


def weights(folder: Path) -> dict[str, np.ndarray]:
    arrays = mx.load(str(folder / "model.safetensors"))
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference of any weight."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_two_processes_are_one_with_twice_the_batch(
    options: list[object], two: dict[str, np.ndarray], home_folder: Path, tmp_path: Path
) -> None:
    alone = {}
    for batch in (2 * BATCH, BATCH):
        output = tmp_path / str(batch)
        commands.train(home_folder, *options, "--batch", batch, "--output", output)
        alone[batch] = weights(output)
    assert np.array_equal(two["draft_tokens"], alone[2 * BATCH]["draft_tokens"])
    assert distance(two, alone[2 * BATCH]) < 1e-3
    assert distance(two, alone[BATCH]) > 1e-2


def test_two_killed_processes_go_on_to_the_same_weights(
    options: list[object], two: dict[str, np.ndarray], home_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    command = [*options, "--batch", BATCH, "--output", output]
    checkpoint = tmp_path / "drafter.work" / "checkpoint" / "state.json"
    launched = launch(home_folder, *command)
    try:
        end = time.monotonic() + 60
        while not checkpoint.exists():
            assert launched.poll() is None
            assert time.monotonic() < end, "no checkpoint came"
            time.sleep(0.005)
    finally:
        kill(launched)
    assert not output.exists()

    finish(launch(home_folder, *command), output)
    (resumed,) = (e["step"] for e in read_log(output / "log.jsonl") if e["event"] == "resume")
    assert resumed > 0
    assert distance(two, weights(output)) == 0
