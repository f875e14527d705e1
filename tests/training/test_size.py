"""A drafter's size: its cost is counted exactly, and the default keeps it below a tenth."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training.size import (
    DRAFT_STEPS,
    SHARE,
    DrafterSize,
    drafter_cost,
    estimated_share,
    fresh_drafter,
    measure_costs,
    target_cost,
)
from tests import tiny_models
from tests.decoding import harness

# hidden size, layers, inner size, heads, key-value heads, vocabulary, tied, layer parameters
SHAPES = {
    "SmolLM2-135M": (576, 30, 1536, 9, 3, 49152, True),
    "Llama-3.2-1B": (2048, 16, 8192, 32, 8, 128256, True),
    "Llama-3.1-8B": (4096, 32, 14336, 32, 8, 128256, False),
    "Llama-3.3-70B": (8192, 80, 28672, 64, 8, 128256, False),
}


def lazy_target(name: str, dtype: str) -> Target:
    """Of the real size: MLX is lazy, so nothing is allocated."""
    hidden, layers, inner, heads, kv_heads, vocab, tied = SHAPES[name]
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )
    model = llama.Model(args)
    if dtype != "float32":
        model.set_dtype(mx.bfloat16)
    if dtype == "4bit":
        nn.quantize(model, 64, 4)
    return Target(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "4bit"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_four_draft_steps_cost_less_than_a_tenth_of_a_target_step(
    name: str, dtype: str, on_gpu: bool
) -> None:
    target = lazy_target(name, dtype)
    size = DrafterSize.for_target(target, on_gpu)
    step, whole = drafter_cost(size.config(target), target), target_cost(target)
    share = estimated_share(step, whole, on_gpu)
    if on_gpu:
        assert share == DRAFT_STEPS * step.step_bytes / whole.step_bytes
    else:
        assert share == DRAFT_STEPS * step.step_multiply_adds / whole.step_multiply_adds
        assert size.quantization is None, "packed weights are slow there"
    assert share < SHARE
    assert share > 0.6 * SHARE or size.draft_vocab == 16384, "it could be larger"
    assert size.draft_vocab >= 3072
    assert size.exit_dim == target.hidden_size
    assert size.num_draft_layers in (1, 2)


def test_a_target_too_small_for_any_gets_the_smallest() -> None:
    target = harness.target("llama")
    size = DrafterSize.for_target(target)
    assert size == DrafterSize(64, 1, tiny_models.VOCAB, False, None)


def test_a_small_vocabulary_is_drafted_whole() -> None:
    wide = Target(
        tiny_models.build("llama", hidden_size=64, intermediate_size=2048, num_hidden_layers=16)
    )
    size = DrafterSize.for_target(wide)
    assert (size.draft_vocab, size.num_draft_layers) == (tiny_models.VOCAB, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "4bit"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_target_step_reads_every_weight_once(family: str, dtype: str) -> None:
    """qwen3 has its embedding as head, read whole; of llama's embedding a step reads one row."""
    target = harness.target(family, dtype=dtype)
    cost = target_cost(target)
    arrays = dict(tree_flatten(target.model.parameters()))
    held = sum(array.nbytes for array in arrays.values())
    table = sum(a.nbytes for name, a in arrays.items() if "embed_tokens" in name)
    plain = dict(tree_flatten(harness.pristine(family).parameters()))
    assert cost.bytes == held
    assert cost.parameters == sum(array.size for array in plain.values())
    matrices = sum(a.size for n, a in plain.items() if a.ndim == 2 and "embed" not in n)
    rows = tiny_models.VOCAB
    if family == "qwen3":
        assert cost.step_bytes == held
        assert cost.step_multiply_adds == matrices + 64 * rows
    else:
        assert cost.step_bytes == held - table + round(table / rows)
        assert cost.step_multiply_adds == matrices


def test_of_experts_only_those_in_use_are_read() -> None:
    target = harness.target("qwen3_moe")
    arrays = dict(tree_flatten(target.model.parameters()))
    experts = sum(array.nbytes for array in arrays.values() if array.ndim == 3)
    table = sum(a.nbytes for name, a in arrays.items() if "embed_tokens" in name)
    cost = target_cost(target)
    expected = cost.bytes - experts / 2 - table * (1 - 1 / tiny_models.VOCAB)
    assert experts > 0
    assert cost.step_bytes == pytest.approx(expected, abs=2)


CASES: list[dict[str, Any]] = [
    {},
    {"num_draft_layers": 2, "draft_vocab": 96},
    {"exit_dim": 128},
    {"exit_dim": 32},
    {"quantization": {"bits": 4, "group_size": 32}},
    {"quantization": {"bits": 8, "group_size": 64}, "draft_vocab": 96},
    {"tie_head": True},
    {"tie_head": True, "draft_vocab": 96, "quantization": {"bits": 4, "group_size": 64}},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "4bit"])
def test_the_drafter_is_counted_as_it_is_written(
    case: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    target = harness.target("llama", dtype=dtype)
    values = {"exit_dim": 64, "num_draft_layers": 1, "draft_vocab": tiny_models.VOCAB} | case
    config = DrafterSize(**values).config(target)
    drafter = fresh_drafter(config, target)
    cost = drafter_cost(config, target)
    assert cost.parameters == drafter.num_parameters
    own = sum(array.nbytes for _, array in tree_flatten(drafter.parameters()))
    tied = drafter._tied_head
    rows = 0 if tied is None else sum(a.nbytes for _, a in tree_flatten(tied.parameters()))
    assert cost.bytes == pytest.approx(own + rows, abs=2)
    drafter.save(tmp_path, dtype=mx.float16)
    stored = mx.load(str(tmp_path / "model.safetensors"))
    del stored["draft_tokens"]
    written = drafter_cost(config, target, mx.float16).bytes - rows
    assert sum(array.nbytes for array in stored.values()) == pytest.approx(written, abs=2)


def test_a_draft_step_is_counted_by_hand() -> None:
    """D 64, E 32, one block, 96 rows, float32: recurrence, half of input_proj, block, head."""
    target = harness.target("llama")
    cost = drafter_cost(DrafterSize(32, 1, 96).config(target), target)
    products = 2 * 64 * 64 + 32 * 64 + 32 * 32 + 96 * 32
    biases = 64 + 32 + 32
    assert cost.step_multiply_adds == products
    assert cost.step_bytes == 4 * (products + biases + 64)
    assert cost.parameters == products + biases + 32 * 64


def test_costs_are_measured_in_turn() -> None:
    target = harness.target("llama")
    small = fresh_drafter(DrafterSize(64, 1, 96).config(target), target)
    draft, step = measure_costs(target, small, repeats=5, context=16)
    assert 0 < draft < 0.1
    assert 0 < step < 0.5
    before = target.prefill(mx.array([3, 5]), target.make_cache())[1]
    large = fresh_drafter(DrafterSize(2048, 8, 160).config(target), target)
    slow, _ = measure_costs(target, large, repeats=5, context=16)
    assert slow > 5 * draft
    after = target.prefill(mx.array([3, 5]), target.make_cache())[1]
    assert mx.array_equal(before, after).item(), "measuring leaves the target as it was"


def test_a_size_names_itself_and_refuses_what_the_format_refuses() -> None:
    size = DrafterSize(64, 1, 96, True, {"bits": 4, "group_size": 64})
    assert str(size) == "exit_dim 64, 1 residual block, the target's head of 96 tokens, 4 bits"
    assert str(DrafterSize(64, 2, 96)) == (
        "exit_dim 64, 2 residual blocks, its own head of 96 tokens"
    )
    target = harness.target("llama")
    with pytest.raises(RedrafterError, match="with tie_head it must be"):
        DrafterSize(32, 1, 96, tie_head=True).config(target)
    assert DrafterSize(64, 1, 10**6).config(target).draft_vocab == tiny_models.VOCAB
