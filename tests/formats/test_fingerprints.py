"""One fingerprint for a model in all its types, another for any other model or adapter."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter.decoding.target import Target
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.formats.fingerprints import SAME, of_adapter, of_target, similarity
from tests import tiny_models

FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_moe")


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, int], str]:
    return {
        (family, dtype, seed): of_target(tiny_models.build(family, dtype, seed))
        for family in FAMILIES
        for dtype in (*tiny_models.DTYPES, "float16")
        for seed in (0, 1)
    }


def test_the_same_weights_in_any_type_are_the_same_target(
    found: dict[tuple[str, str, int], str],
) -> None:
    for (family, dtype, seed), fingerprint in found.items():
        likeness = similarity(fingerprint, found[family, "float32", seed])
        assert likeness > (0.95 if dtype == "4bit" else 0.9999), (family, dtype)


def test_other_weights_or_another_family_are_another_target(
    found: dict[tuple[str, str, int], str],
) -> None:
    for (family, dtype, seed), one in found.items():
        for (other_family, _, other_seed), other in found.items():
            if (family, seed) != (other_family, other_seed):
                assert similarity(one, other) < 0.6, (family, dtype, other_family)


def test_other_sizes_are_another_target() -> None:
    small = of_target(tiny_models.build("llama"))
    assert similarity(small, of_target(tiny_models.build("llama", num_hidden_layers=3))) == 0.0
    assert similarity(small, of_target(tiny_models.build("llama", vocab_size=161))) == 0.0


def test_it_is_one_short_line_and_does_not_change() -> None:
    model = tiny_models.build("llama")
    first = of_target(model)
    assert first == of_target(model) == of_target(tiny_models.build("llama"))
    assert len(first) < 256
    assert set(first) <= set("0123456789abcdef-")
    Target(model)  # wraps in place
    assert of_target(model) == first


def test_the_nearest_of_two_fine_tunes_can_be_told() -> None:
    base, near = tiny_models.build("llama"), tiny_models.build("llama")
    for _, module in near.named_modules():
        if isinstance(module, nn.Linear):
            noise = mx.random.normal(module.weight.shape, key=mx.random.key(module.weight.size))
            module.weight += 0.03 * mx.std(module.weight) * noise
    ours, theirs = of_target(base), of_target(near)
    assert SAME < similarity(ours, theirs) < similarity(ours, ours)
    assert similarity(ours, ours) == pytest.approx(1.0)


def write_adapter(folder: Path, scale: float, value: float) -> Path:
    folder.mkdir()
    config = {"num_layers": 1, "lora_parameters": {"rank": 2, "scale": scale, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"data": str(folder)}))
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"a": mx.array([value])})
    return folder


def test_an_adapter_makes_another_target(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    plain = of_target(model)
    cases = {"one": (1.0, 1.0), "same": (1.0, 1.0), "scaled": (2.0, 1.0), "other": (1.0, 1.001)}
    found = {
        name: of_target(model, of_adapter(write_adapter(tmp_path / name, *values)))
        for name, values in cases.items()
    }
    assert found["one"] == found["same"]
    for name in ("scaled", "other"):
        assert similarity(found["one"], found[name]) == 0.0
    assert similarity(plain, found["one"]) == similarity(found["one"], plain) == 0.0
    assert similarity(found["one"], found["same"]) == pytest.approx(1.0)


@pytest.mark.parametrize("broken", ["", "-", "abc", "0123-zz", "0123-00", "0123", "a-b-c-d"])
def test_what_is_no_fingerprint_matches_nothing(broken: str) -> None:
    good = of_target(tiny_models.build("llama"))
    structure = good.split("-")[0]
    for text in (broken, f"{structure}-{broken}", structure, good[:-4]):
        assert similarity(text, good) == similarity(good, text) == 0.0


def test_of_values_and_vocabulary() -> None:
    assert fingerprints.of_values(1, {"a": 2, "b": 3}) == fingerprints.of_values(
        1, {"b": 3, "a": 2}
    )
    assert fingerprints.of_vocabulary({"a": 0, "b": 1}) != fingerprints.of_vocabulary(
        {"a": 1, "b": 0}
    )


def test_exact_weights_are_told_apart() -> None:
    def of(model: nn.Module) -> str:
        return fingerprints.of_weights(model.parameters())

    prints = [of(tiny_models.build("llama", dtype)) for dtype in tiny_models.DTYPES]
    prints.append(of(tiny_models.build("llama", seed=1)))
    tuned = tiny_models.build("llama")
    tuned.layers[1].mlp.up_proj.weight += 1e-4
    prints.append(of(tuned))
    assert len(set(prints)) == len(prints)
    assert of(tiny_models.build("llama")) == prints[0]
    assert fingerprints.of_weights({"a": mx.zeros(3)}) != fingerprints.of_weights(
        {"b": mx.zeros(3)}
    )
