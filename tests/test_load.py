"""Loading: what fits together is put together, the rest is one clear error."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_redrafter import load as load_function
from mlx_redrafter import registry
from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.errors import CompatibilityError, FormatError, InputError
from mlx_redrafter.load import ModelPair, load
from tests import fakes, tiny_models
from tests.decoding import harness

VOCAB = 320
CONFIG = {"max_position_embeddings": 512, "vocab_size": VOCAB}


def write_model(folder: Path, seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """A tiny llama as mlx-lm writes it."""
    folder.mkdir()
    family = tiny_models.FAMILIES["llama"].config
    config = tiny_models._BASE | {"model_type": "llama"} | family | CONFIG | changes
    if dtype == "4bit":
        config["quantization"] = {"bits": 4, "group_size": 32}
    model = tiny_models.build("llama", dtype, seed, **CONFIG, **changes)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    fakes.byte_level()._tokenizer.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, seed: int = 0, rank: int = 4) -> Path:
    """LoRA as mlx-lm trains it, with dropout, strong enough to change the text."""
    folder.mkdir()
    parameters = {"rank": rank, "scale": 2.0, "dropout": 0.5}
    model = tiny_models.build("llama", **CONFIG)
    linear_to_lora_layers(model, 2, parameters)
    weights = {
        name: mx.random.normal(w.shape, key=mx.random.key(seed + i))
        for i, (name, w) in enumerate(tree_flatten(model.parameters()))
        if name.endswith(("lora_a", "lora_b"))
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_drafter(folder: Path, pair: ModelPair, **changes: Any) -> Path:
    config: dict[str, Any] = {
        "hidden_size": pair.target.hidden_size,
        "vocab_size": VOCAB,
        "exit_dim": pair.target.hidden_size,
        "num_draft_layers": 1,
        "target": {"name": pair.name, "fingerprint": pair.fingerprint},
    }
    harness.make_drafter(config | changes).save(folder)
    return folder


def text_of(pair: ModelPair, count: int = 24) -> list[int]:
    decoder = Decoder(pair.target, pair.drafter, DraftOptions(2, 2, 4))
    return harness.run(decoder, decoder.start([3, 5, 7, 9]), count)[:count]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_the_function_is_the_package_s() -> None:
    assert load_function is load


def test_a_registered_drafter_is_found_for_the_same_weights_elsewhere(
    model: Path, tmp_path: Path
) -> None:
    pair = load(str(model))
    assert pair.drafter is None
    assert pair.drafting_reason == "no drafter is known for this model; train one, or name a folder"
    registry.register_drafter(write_drafter(tmp_path / "out", pair), pair.name)
    assert load(str(model)).drafter is not None
    copy = write_model(tmp_path / "a copy")
    assert load(str(copy)).drafter is not None
    assert load(str(copy), dtype="bfloat16").drafter is not None
    packed = write_model(tmp_path / "packed", dtype="4bit")
    assert load(str(packed)).drafter is not None
    other = write_model(tmp_path / "other", seed=1)
    assert load(str(other)).drafter is None


def test_models_of_one_name_keep_their_own_drafters(tmp_path: Path) -> None:
    """Two folders of the same last name, also a hidden one, with other weights."""
    models = []
    for seed, place in enumerate(("a", "b")):
        (tmp_path / place).mkdir()
        models.append(write_model(tmp_path / place / ".model", seed=seed))
    kept = []
    for number, model in enumerate(models):
        pair = load(str(model), drafter=None)
        drafter = write_drafter(tmp_path / f"out{number}", pair)
        kept.append(registry.register_drafter(drafter, pair.name))
    assert [path.name for path in kept] == ["model", "model-2"]
    assert all(load(str(model)).drafter is not None for model in models)
    again = registry.register_drafter(tmp_path / "out1", str(models[1]))
    assert again == kept[1], "its own is replaced"


def test_another_target_s_drafter_is_one_clear_error(model: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "out", load(str(model), drafter=None))
    other = write_model(tmp_path / "other", seed=1)
    with pytest.raises(CompatibilityError, match=r"was made for other weights than .*other has"):
        load(str(other), str(drafter))
    old = write_drafter(tmp_path / "old", load(str(model), drafter=None), target={"name": "x"})
    assert load(str(other), str(old)).drafter is not None, "an old one says nothing of its target"


@pytest.mark.parametrize("dtype", ["float32", "4bit"])
@pytest.mark.parametrize("embedding", [False, True], ids=["own-head", "tied-embedding"])
def test_a_tied_drafter_gets_the_target_s_head(dtype: str, embedding: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", dtype=dtype, tie_word_embeddings=embedding)
    pair = load(str(model), drafter=None)
    config = DrafterConfig(64, VOCAB, 64, 1, draft_vocab=50, tie_head=True)
    tokens = mx.arange(50, dtype=mx.int32) * 3
    Drafter(config, tokens).save(tmp_path / "tied")
    loaded = load(str(model), str(tmp_path / "tied")).drafter
    assert loaded is not None
    hidden, logits = pair.target.prefill(mx.array([3, 5, 7]), pair.target.make_cache())
    assert loaded._tied_head is not None
    np.testing.assert_allclose(
        np.array(loaded._tied_head(hidden)), np.array(logits[tokens]), atol=1e-3
    )
    assert text_of(load(str(model), str(tmp_path / "tied"))) == text_of(pair)


def test_an_adapter_changes_the_text_and_drafting_does_not(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "law")
    plain = load(str(model), drafter=None)
    tuned = load(str(model), drafter=None, adapter_path=adapter)
    assert tuned.target.supports_trees, tuned.target.reason
    assert sum(isinstance(m, LoRALinear) for _, m in tuned.target.model.named_modules()) > 0
    text = text_of(tuned)
    assert text != text_of(plain)
    drafter = write_drafter(tmp_path / "out", tuned)
    drafted = load(str(model), str(drafter), adapter_path=str(adapter))
    assert drafted.drafter is not None
    assert text_of(drafted) == text
    cast = load(str(model), drafter=None, dtype="bfloat16", adapter_path=adapter)
    assert cast.target.dtype == mx.bfloat16
    assert cast.target.supports_trees


def test_an_adapter_is_part_of_the_fingerprint(model: Path, tmp_path: Path) -> None:
    first, second = write_adapter(tmp_path / "law"), write_adapter(tmp_path / "code", seed=100)
    tuned = load(str(model), adapter_path=first)
    registry.register_drafter(write_drafter(tmp_path / "out", tuned), tuned.name, first)
    assert load(str(model), adapter_path=first).drafter is not None
    assert load(str(model), adapter_path=second).drafter is None
    assert load(str(model)).drafter is None
    with pytest.raises(CompatibilityError, match="or for another adapter"):
        load(str(model), str(tmp_path / "out"), adapter_path=second)


def test_the_self_check_is_made_for_each_adapter(model: Path, tmp_path: Path, home: Path) -> None:
    first, second = write_adapter(tmp_path / "law"), write_adapter(tmp_path / "code", seed=100)
    for adapter in (None, first, second, first, None):
        load(str(model), adapter_path=adapter)
    assert len(list((home / "selfcheck").iterdir())) == 3


def no_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "adapters.safetensors").unlink()


def broken_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def broken_weights(folder: Path) -> None:
    (folder / "adapters.safetensors").write_bytes(b"cut")


def without_rank(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(
        json.dumps({"num_layers": 2, "lora_parameters": {"scale": 1.0}})
    )


def other_rank(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    config["lora_parameters"]["rank"] = 8
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("breakage", "error", "says"),
    [
        (no_config, InputError, "lacks adapter_config.json"),
        (no_weights, InputError, "lacks adapters.safetensors"),
        (broken_config, FormatError, "cannot be read"),
        (broken_weights, CompatibilityError, "does not fit this model, or is broken"),
        (without_rank, CompatibilityError, "rank"),
        (other_rank, CompatibilityError, "does not match"),
    ],
)
def test_a_broken_adapter_is_one_line(
    breakage: Any, error: type[Exception], says: str, model: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "law")
    breakage(adapter)
    with pytest.raises(error, match=says) as found:
        load(str(model), adapter_path=adapter)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


def test_a_missing_adapter_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no adapter in .*nowhere"):
        load(str(model), adapter_path=tmp_path / "nowhere")
