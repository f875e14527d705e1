"""A step copies no cache: its memory is flat in the context, beyond the attention scores
themselves.

Memory is measured and not time, which on a busy machine tells nothing. The negative control holds a
view of one buffer, which is what makes MLX copy it, and the measure must see that.
"""

from collections.abc import Callable
from functools import cache
from statistics import median

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.caches import Cache
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.target import Target
from tests import tiny_models
from tests.decoding.harness import device_tree, random_drafter
from tests.decoding.test_families import FIRST, branch

HEADS, HEAD_DIM = 4, 64
BUFFER_ROW = HEADS * HEAD_DIM * 4  # bytes of one layer's keys for one position
SCORE_ROW = HEADS * 4  # bytes of attention scores for one (query, key)
CONTEXTS = (600, 3700)  # neither near the end of a block of 256 rows
STEPS = 7


@cache
def wide_target(family: str) -> Target:
    """Two layers with a KV cache far larger than all else."""
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    return Target(tiny_models.build(family, **shape))


def prompt(rows: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(160, size=rows)]


def transient(step: Callable[[], object]) -> tuple[float, float]:
    """(bytes above the level before, bytes still held afterwards), median over steps."""
    above, held = [], []
    for _ in range(STEPS):
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        step()
        mx.synchronize()
        above.append(mx.get_peak_memory() - before)
        held.append(mx.get_active_memory() - before)
    return median(above), median(held)


def check_flat(used: dict[int, float], rows: int) -> None:
    """Between the two contexts only the scores of `rows` queries may grow (twice: before and after
    softmax).
    """
    short, long = CONTEXTS
    allowed = 2 * rows * SCORE_ROW * (long - short)
    growth = used[long] - used[short]
    assert growth <= allowed, f"{growth / 1e3:.0f} kB more, {allowed / 1e3:.0f} kB for the scores"


def verify_and_compact(family: str, rows: int) -> tuple[Cache, Callable[[], None]]:
    """The costliest step: a branching tree, of which a sibling path is kept."""
    wrapped = wide_target(family)
    kv = wrapped.make_cache()
    wrapped.prefill(mx.array(prompt(rows), mx.int32), kv)

    def step() -> None:
        mx.eval(wrapped.verify(device_tree(FIRST), kv))
        kv.compact(kv.offset, branch())
        mx.eval(kv.arrays)

    step()
    return kv, step


def test_the_measure_sees_one_copied_buffer() -> None:
    used = {}
    for rows in CONTEXTS:
        kv, step = verify_and_compact("llama", rows)

        def holding(kv: Cache = kv, step: Callable[[], None] = step) -> None:
            view = kv[0].keys[..., :4, :]
            mx.eval(view)
            step()
            del view

        used[rows], _ = transient(holding)
    with pytest.raises(AssertionError, match="for the scores"):
        check_flat(used, len(FIRST.tokens))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_verify_and_compact(family: str) -> None:
    used = {}
    for rows in CONTEXTS:
        _, step = verify_and_compact(family, rows)
        used[rows], held = transient(step)
        assert abs(held) < BUFFER_ROW
    check_flat(used, len(FIRST.tokens))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "draft",
    [None, DraftOptions(1, 4, 4), DraftOptions(4, 4, 9)],
    ids=["plain", "chain", "tree"],
)
def test_steps(family: str, draft: DraftOptions | None) -> None:
    used = {}
    for rows in CONTEXTS:
        wrapped = wide_target(family)
        drafter = random_drafter(wrapped) if draft else None
        decoder = Decoder(wrapped, drafter, draft, SamplingOptions())
        decoder.start(prompt(rows))

        def step(decoder: Decoder = decoder) -> None:
            decoder.commit(len(decoder.step().tokens))

        step()
        used[rows], held = transient(step)
        assert abs(held) < BUFFER_ROW, "nothing piles up from step to step"
    check_flat(used, draft.token_budget + 1 if draft else 1)


def test_nbytes_is_what_the_cache_holds() -> None:
    wrapped = wide_target("llama")
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    kv = wrapped.make_cache()
    wrapped.prefill(mx.array(prompt(1000), mx.int32), kv)
    mx.synchronize()
    mx.clear_cache()
    held = mx.get_active_memory() - before
    assert kv.nbytes >= 2 * 2 * BUFFER_ROW * 1000
    assert held == pytest.approx(kv.nbytes, rel=0.02)
