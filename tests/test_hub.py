"""Models that are not shipped: folders and the Hugging Face Hub."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from mlx_redrafter import registry
from mlx_redrafter.errors import (
    CompatibilityError,
    DownloadError,
    FormatError,
)
from mlx_redrafter.hub import DRAFTER_TYPE
from tests.shop import folder_with

ROOT = Path(__file__).parents[1]


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "mine", None, "model.safetensors")
    assert registry.resolve(str(folder), "float32") == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.resolve("~/mine") == folder


def test_local_folders_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"no readable config.json"):
        registry.resolve(str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"no readable config.json"):
        registry.resolve(str(tmp_path / "empty"))
    pickled = folder_with(tmp_path / "pickled", None, "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"lacks model.safetensors"):
        registry.resolve(str(pickled))
    part = folder_with(tmp_path / "part", None, "model-00001-of-00002.safetensors")
    index = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    (part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(FormatError, match=r"lacks model-00002-of-00002.safetensors"):
        registry.resolve(str(part))
    drafter = folder_with(tmp_path / "d", {"model_type": DRAFTER_TYPE}, "model.safetensors")
    with pytest.raises(CompatibilityError, match="is a drafter"):
        registry.resolve(str(drafter))


def test_the_hub_gives_weights_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "snapshot", None, "model.safetensors")
    asked = {}

    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        asked[repo] = allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert registry.resolve("some-one/Model-7B.v2") == folder
    patterns = asked["some-one/Model-7B.v2"]

    def taken(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    assert all(map(taken, ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model"]))
    assert all(map(taken, ["chat_template.jinja", "merges.txt", "qwen.tiktoken"]))
    refused = ["pytorch_model.bin", "model.pt", "weights.pkl", "modeling.py", "x.gguf", "a.ckpt"]
    assert not any(map(taken, refused))


def raises(error: Exception) -> Callable[..., str]:
    def snapshot(*_: object, **__: object) -> str:
        raise error

    return snapshot


def http_error(kind: type[Exception]) -> Exception:
    response = type("Response", (), {"headers": {}, "request": None, "status_code": 404})()
    try:
        return kind("Some trouble\nand its details", response=response)
    except TypeError:
        return kind("Some trouble\nand its details")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (hub_errors.LocalEntryNotFoundError, "cannot be reached"),
        (hub_errors.RepositoryNotFoundError, "neither such a folder nor such a public model"),
        (hub_errors.GatedRepoError, "is gated"),
        (hub_errors.HfHubHTTPError, "cannot fetch a/b.*Some trouble"),
    ],
)
def test_the_hub_s_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raises(http_error(kind)))
    with pytest.raises(DownloadError, match=message) as error:
        registry.resolve("a/b")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_hub_out_of_reach(tmp_path: Path) -> None:
    """For real: nothing listens where the Hub is said to be."""
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "mlx_redrafter", "models", "path", "no-one/nothing"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: no model no-one/nothing: there is no")
    assert "Traceback" not in done.stderr
