"""The load-time proof: it passes what is exact, on every family and type, and refuses the rest."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import nanochat

from mlx_redrafter.decoding import selfcheck
from mlx_redrafter.decoding.caches import TreeKVCache, TreeSlot
from mlx_redrafter.decoding.target import Target, TreeRoPE
from tests import tiny_models
from tests.decoding.harness import target
from tests.tiny_models import FAMILIES

CASES = [
    (name, dtype)
    for name, family in FAMILIES.items()
    for dtype in tiny_models.DTYPES
    if not (family.experts and dtype == "bfloat16")  # not implemented in MLX's CPU backend
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_passes_what_is_exact(family: str, dtype: str) -> None:
    """No false alarm, below a window and past it."""
    verdict = selfcheck.check(target(family, dtype=dtype), 64)
    assert verdict.reason is None
    assert len(verdict.measured) == (2 if FAMILIES[family].window else 1)


@pytest.mark.parametrize("family", ["llama3", "gemma3_text"])
def test_all_prefix_lengths(family: str) -> None:
    verdict = selfcheck.check(target(family), 8192, original_context=64)
    assert verdict.reason is None
    prefixes = {measured.prefix for measured in verdict.measured}
    assert prefixes >= {8, 67, 1030, 4100}
    assert all(measured.tree < measured.wrong_mask for measured in verdict.measured)


def test_a_short_context_is_respected() -> None:
    measured = selfcheck.check(target("llama"), 512).measured
    assert all(m.prefix + 8 <= 512 for m in measured)


def positions_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TreeRoPE, "__call__", lambda self, x, offset=0: self.rope(x, offset=offset))


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    call = TreeRoPE.__call__

    def late(self: TreeRoPE, x: mx.array, offset: Any = 0) -> mx.array:
        slot, positions = self._slot, self._slot.positions
        slot.positions = None if positions is None else positions + (positions > positions[0])
        try:
            return call(self, x, offset)
        finally:
            slot.positions = positions

    patch.setattr(TreeRoPE, "__call__", late)


def mask_ignored(patch: pytest.MonkeyPatch) -> None:
    make_mask = TreeSlot.mask
    patch.setattr(TreeSlot, "mask", lambda self, *args: mx.ones_like(make_mask(self, *args)))


def prefix_hidden(patch: pytest.MonkeyPatch) -> None:
    """The first row of the prefix is masked for tree nodes."""
    make_mask = TreeSlot.mask

    def without_first(self: TreeSlot, *args: Any) -> mx.array:
        mask = make_mask(self, *args)
        return mask & (mx.arange(mask.shape[1]) > 0)

    patch.setattr(TreeSlot, "mask", without_first)


def rows_misplaced(patch: pytest.MonkeyPatch) -> None:
    """Incoming rows are written in reverse."""
    write = TreeKVCache._write

    def reverse(self: TreeKVCache, position: int, keys: mx.array, values: mx.array) -> None:
        write(self, position, keys[..., ::-1, :], values)

    patch.setattr(TreeKVCache, "_write", reverse)


@pytest.mark.parametrize(
    "broken",
    [positions_ignored, positions_off_by_one, mask_ignored, prefix_hidden, rows_misplaced],
    ids=lambda broken: broken.__name__,
)
@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("gemma3_text", "bfloat16")])
def test_refuses_a_broken_engine(
    broken: Callable[[pytest.MonkeyPatch], None],
    family: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = Target(tiny_models.build(family, dtype))
    broken(monkeypatch)
    verdict = selfcheck.check(fresh, 64)
    assert verdict.reason is not None
    assert "\n" not in verdict.reason


def test_refuses_positions_that_bypass_the_modules() -> None:
    """nanochat rotates by a function, so that no RoPE module is there to be wrapped."""
    arguments = {
        "model_type": "nanochat",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "max_position_embeddings": 256,
        "intermediate_size": 96,
    }
    model = nanochat.Model(nanochat.ModelArgs.from_dict(arguments))
    keys = iter(mx.random.split(mx.random.key(0), 100))
    weights = [
        (k, 0.2 * mx.random.normal(v.shape, key=next(keys)))
        for k, v in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    assert selfcheck.check(Target(model), 64).reason is not None


def test_a_refused_target_runs_plain() -> None:
    fresh = Target(tiny_models.build("llama"))
    fresh.run_plain("because")
    assert not fresh.supports_trees
    assert fresh.reason == "because"
