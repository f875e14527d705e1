"""What is written is a folder that mlx-lm loads by itself, and computes what the GGUF file says."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlx_redrafter.conversion import gguf
from tests.formats import gguf_files as files

TOKENS = [1, 70, 71, 72, 3, 200, 250, 9, 120, 121, 2, 33]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("4bit")
    gguf.write_packed(source, folder, "float16")
    return folder


@pytest.fixture(scope="module")
def unpacked(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for dtype in ("float32", "bfloat16", "float16"):
        folders[dtype] = tmp_path_factory.mktemp(dtype)
        gguf.write_unpacked(packed, folders[dtype], dtype)
    return folders


def logits(folder: Path, tokens: list[int] = TOKENS) -> np.ndarray:
    model, _ = mlx_lm.load(str(folder))
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def test_float32_computes_what_the_file_says(source: Path, unpacked: dict[str, Path]) -> None:
    expected = files.Twin(source).logits(TOKENS)
    assert np.abs(expected).max() > 1
    assert np.abs(logits(unpacked["float32"]) - expected).max() < 1e-4


def test_rows_left_in_ggufs_order_compute_something_else(
    source: Path, unpacked: dict[str, Path]
) -> None:
    """The negative control of the test above: half-split RoPE on interleaved rows."""
    model, _ = mlx_lm.load(str(unpacked["float32"]))
    for layer in model.layers:
        attention = layer.self_attn
        for part, heads in (
            (attention.q_proj, files.HEADS),
            (attention.k_proj, files.KV_HEADS),
        ):
            weight = part.weight
            rows = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2)
            part.weight = rows.reshape(weight.shape)
    found = np.array(model(mx.array([TOKENS]))[0])
    expected = files.Twin(source).logits(TOKENS)
    assert np.abs(found - expected).max() > 0.1
    for layer in model.layers:
        layer.self_attn.rope.traditional = True
    assert np.abs(np.array(model(mx.array([TOKENS]))[0]) - expected).max() < 1e-4


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("dtype", "most"), [("float16", 0.02), ("bfloat16", 0.2)])
def test_narrow_types_are_the_rounded_weights(
    unpacked: dict[str, Path], dtype: str, most: float
) -> None:
    exact: Any = mx.load(str(unpacked["float32"] / "model.safetensors"))
    rounded: Any = mx.load(str(unpacked[dtype] / "model.safetensors"))
    assert exact.keys() == rounded.keys()
    for name, array in exact.items():
        assert mx.array_equal(array.astype(getattr(mx, dtype)), rounded[name])
    assert 0 < difference(logits(unpacked[dtype]), logits(unpacked["float32"])) < most


@pytest.mark.parametrize(("dtype", "most"), [("float16", 0.02), ("float32", 1e-5)])
def test_packed_stays_packed(
    source: Path, unpacked: dict[str, Path], tmp_path: Path, dtype: str, most: float
) -> None:
    gguf.write_packed(source, tmp_path, dtype)
    model, _ = mlx_lm.load(str(tmp_path))
    embedding, layer = model.model.embed_tokens, model.layers[0]
    assert (embedding.bits, embedding.group_size) == (8, 32)
    assert (layer.self_attn.q_proj.bits, layer.mlp.down_proj.group_size) == (4, 32)
    # Scales and norms alike, or activations would be of the wider type.
    assert model(mx.array([TOKENS])).dtype == getattr(mx, dtype)
    assert difference(logits(tmp_path), logits(unpacked["float32"])) < most


def test_the_packed_config_is_the_least(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert config["eos_token_id"] == [2, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_unpacked_folders_are_of_one_type(unpacked: dict[str, Path], dtype: str) -> None:
    config = json.loads((unpacked[dtype] / "config.json").read_text())
    assert "quantization" not in config
    assert config["torch_dtype"] == dtype
    weights: Any = mx.load(str(unpacked[dtype] / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {getattr(mx, dtype)}


def test_a_model_without_packed_weights(tmp_path: Path) -> None:
    weights = {name: (array, files.Kind.F32) for name, (array, _) in files.tensors().items()}
    source = files.write(tmp_path / "plain.gguf", weights)
    folder, float32 = tmp_path / "folder", tmp_path / "float32"
    folder.mkdir()
    float32.mkdir()
    gguf.write_packed(source, folder, "float32")
    gguf.write_unpacked(folder, float32, "float32")
    assert "quantization" not in json.loads((folder / "config.json").read_text())
    assert np.abs(logits(float32) - files.Twin(source).logits(TOKENS)).max() < 1e-4


def test_equal_input_gives_equal_bytes(
    source: Path, packed: Path, unpacked: dict[str, Path], tmp_path: Path
) -> None:
    """Also from another process, whose hashes are salted otherwise."""
    code = (
        "import sys; from pathlib import Path; from mlx_redrafter.conversion import gguf\n"
        "source, *folders = map(Path, sys.argv[1:])\n"
        "gguf.write_packed(source, folders[0], 'float16')\n"
        "gguf.write_unpacked(folders[0], folders[1], 'float32')"
    )
    again = [tmp_path / "packed", tmp_path / "float32"]
    for folder in again:
        folder.mkdir()
    command = [sys.executable, "-c", code, *map(str, (source, *again))]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    for old, new in zip((packed, unpacked["float32"]), again, strict=True):
        assert {path.name: path.read_bytes() for path in old.iterdir()} == {
            path.name: path.read_bytes() for path in new.iterdir()
        }


def test_the_tokenizer_loads_and_renders(unpacked: dict[str, Path]) -> None:
    _, tokenizer = mlx_lm.load(str(unpacked["float32"]))
    assert tokenizer.eos_token_ids == {0, 2}
    assert type(tokenizer.detokenizer).__name__ == "BPEStreamingDetokenizer"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello 42\x04"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello 42<|im_end|>\n"
    assert ids[0] == 1
    assert ids[-2] == 2
    assert tokenizer.encode("\x04") == []  # not the unknown token, which would end the text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KB where one can be mounted; elsewhere MLX is told to fail alike."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if mounted:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        return
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_: object) -> None:
            raise RuntimeError("[write] Unable to write 302941 bytes to file.")

        patch.setattr(mx, "save_safetensors", fail)
        yield folder


def test_a_full_disk(packed: Path, small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        gguf.write_unpacked(packed, small_disk, "float32")
