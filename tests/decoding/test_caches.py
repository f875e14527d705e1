"""Tree caches: what is kept after compaction and rewinds is what a fresh prefill of the kept text
gives.
"""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.caches import Cache
from mlx_redrafter.decoding.target import Target
from tests import reference, tiny_models
from tests.decoding.harness import device_tree, pristine, target
from tests.tiny_models import WINDOW

VOCAB = tiny_models.VOCAB


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(VOCAB, size=count)]


def prefilled(wrapped: Target, text: list[int], step_size: int = 64) -> Cache:
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(text, mx.int32), cache, step_size=step_size)
    return cache


def keep(wrapped: Target, cache: Cache, tree: reference.HostTree, node: int) -> list[int]:
    """Verify the tree and keep the path to the node; the kept tokens, the root first."""
    mx.eval(wrapped.verify(device_tree(tree), cache))
    path = tree.ancestors(node)
    cache.compact(cache.offset, path)
    return [tree.tokens[n] for n in path]


def check(family: str, wrapped: Target, cache: Cache, text: list[int]) -> None:
    """The cache stands for `text`: both a tree and a plain row after it are right."""
    assert cache.offset == len(text)
    tree = reference.HostTree([7, 9, 11], [0, 0, 0])
    _, logits = wrapped.verify(device_tree(tree), cache)
    expected = [
        reference.logits(pristine(family), [*text, 7, *path])[-1] for path in ([], [9], [11])
    ]
    error = np.abs(np.array(logits) - np.stack(expected)).max() / np.abs(expected).max()
    assert error <= 1e-4, f"error {error:.1e} after {len(text)} rows"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_random_rounds(family: str) -> None:
    """Trees of changing sizes, random paths, from an almost empty cache to beyond three windows."""
    rng, wrapped = np.random.default_rng(3), target(family)
    text = tokens(3)
    cache = prefilled(wrapped, text)
    while len(text) < 3 * WINDOW + 10:
        tree = reference.random_tree(rng, int(rng.integers(1, 12)), VOCAB)
        text += keep(wrapped, cache, tree, int(rng.integers(len(tree.tokens))))
        if rng.random() < 0.3:
            check(family, wrapped, cache, text)
    check(family, wrapped, cache, text)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("rows", [245, 249, 255, 256, 257, 510, 526])
def test_across_a_buffers_end(family: str, rows: int) -> None:
    """Buffers grow by blocks of 256 rows, and a window's front is dropped in blocks: a tree lies
    across.
    """
    wrapped, text = target(family), tokens(rows)
    cache = prefilled(wrapped, text)
    for seed in range(3):
        tree = reference.random_tree(np.random.default_rng(seed), 12, VOCAB)
        text += keep(wrapped, cache, tree, tree.leaves()[-1])
    check(family, wrapped, cache, text)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_tree_as_large_as_the_window(family: str) -> None:
    wrapped, text = target(family), tokens(30)
    cache = prefilled(wrapped, text)
    tree = reference.random_tree(np.random.default_rng(1), WINDOW + 9, VOCAB, depth=8)
    text += keep(wrapped, cache, tree, max(tree.leaves(), key=lambda leaf: tree.depths[leaf]))
    check(family, wrapped, cache, text)


def test_the_whole_chain_is_kept() -> None:
    wrapped, text = target("llama"), tokens(20)
    cache = prefilled(wrapped, text)
    tree = reference.HostTree(tokens(6, seed=1), [0, 0, 1, 2, 3, 4])
    text += keep(wrapped, cache, tree, 5)
    check("llama", wrapped, cache, text)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rewind(family: str) -> None:
    """Back by up to a turn, decode on, back again; beyond what a window keeps it says so."""
    wrapped, text = target(family), tokens(200)
    cache = prefilled(wrapped, text)
    rng = np.random.default_rng(5)
    for back in (1, 7, 60):
        assert cache.rewind(len(text) - back)
        text = text[:-back]
        check(family, wrapped, cache, text)
        for _ in range(4):
            tree = reference.random_tree(rng, 8, VOCAB)
            text += keep(wrapped, cache, tree, tree.leaves()[0])
        check(family, wrapped, cache, text)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rewind_far_back_is_right_or_refused(family: str) -> None:
    """From 900 rows back by any distance: never a wrong cache. Full attention always can."""
    wrapped, text = target(family), tokens(900)
    refused = 0
    for left in (899, 880, 700, 640, 600, 500, 100, 1):
        cache = prefilled(wrapped, text)
        if cache.rewind(left):
            check(family, wrapped, cache, text[:left])
        else:
            refused += 1
    assert (refused > 0) == (family == "gemma3_text")


def test_rewind_to_nothing() -> None:
    wrapped = target("gemma3_text")
    cache = prefilled(wrapped, tokens(20))
    assert cache.rewind(0)
    text = tokens(12, seed=4)
    wrapped.prefill(mx.array(text, mx.int32), cache)
    check("gemma3_text", wrapped, cache, text)


def test_a_windows_rows_stay_bounded() -> None:
    """Rows of the sliding layer at any time: the window, the block kept for rewinds, a block to
    fill, a tree.
    """
    wrapped = Target(tiny_models.build("gemma3_text"))
    cache = prefilled(wrapped, tokens(40))
    rng = np.random.default_rng(0)
    most = 0
    while cache.offset < 1800:
        tree = reference.random_tree(rng, 12, VOCAB, depth=9)
        keep(wrapped, cache, tree, max(tree.leaves(), key=lambda leaf: tree.depths[leaf]))
        most = max(most, cache[0].nbytes)
    row = 2 * 2 * 16 * 4  # keys and values, two heads of 16, float32
    assert most <= (WINDOW + 3 * 256 + 12) * row
    assert cache[1].nbytes >= 1800 * row, "the full layer keeps all"


def test_a_windows_rows_stay_bounded_in_prefill() -> None:
    wrapped = Target(tiny_models.build("gemma3_text"))
    cache = prefilled(wrapped, tokens(3000), step_size=128)
    assert cache[0].nbytes <= (WINDOW + 3 * 256 + 128) * 2 * 2 * 16 * 4


def test_caches_of_one_target_are_independent() -> None:
    wrapped = target("llama")
    texts = [tokens(20, seed=1), tokens(35, seed=2)]
    caches = [prefilled(wrapped, text) for text in texts]
    rng = np.random.default_rng(0)
    for _ in range(4):
        for cache, text in zip(caches, texts, strict=True):
            tree = reference.random_tree(rng, 7, VOCAB)
            text += keep(wrapped, cache, tree, tree.leaves()[-1])
    for cache, text in zip(caches, texts, strict=True):
        check("llama", wrapped, cache, text)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_low_precision_caches_keep_the_models_type(family: str) -> None:
    """Not the head's: a 4-bit head is uint32."""
    for dtype, expected in (("bfloat16", mx.bfloat16), ("4bit", mx.float32)):
        cache = prefilled(Target(tiny_models.build(family, dtype)), tokens(9))
        assert {array.dtype for array in cache.arrays} == {expected}
