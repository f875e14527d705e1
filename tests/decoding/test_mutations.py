"""Each breakage on purpose must fail the lossless check. A check that cannot fail proves nothing.

The list is closed by `test_the_check_passes_unbroken`, and each mutation names what the check must
say, so that an accident of the patching does not pass for a discovery.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.decoding import loop
from mlx_redrafter.decoding.accept import Walk, accept
from mlx_redrafter.decoding.caches import Cache, TreeKVCache
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.tree import Tree
from tests.decoding.harness import (
    case,
    causal_mask,
    check_lossless,
    sequential_positions,
    target,
)

DRAFT = DraftOptions(beam_width=4, beam_length=4, token_budget=9)
TEXT, COUNT = "differs from the plain text", "drafted tokens were right"
Patch = pytest.MonkeyPatch


def rope_positions(decoder: Decoder, patch: Patch) -> None:
    """Rows get positions base, base + 1, ... instead of base + depth."""
    verify = decoder.target.verify
    patch.setattr(decoder.target, "verify", lambda tree, kv: verify(sequential_positions(tree), kv))


def tree_mask(decoder: Decoder, patch: Patch) -> None:
    """Each node sees all the rows before it, siblings too."""
    verify = decoder.target.verify
    patch.setattr(decoder.target, "verify", lambda tree, kv: verify(causal_mask(tree), kv))


def hidden_off_by_one(decoder: Decoder, patch: Patch) -> None:
    """The text stays right; only the drafts go blind."""
    verify = decoder.target.verify

    def shifted(*args: Any) -> tuple[mx.array, mx.array]:
        states, logits = verify(*args)
        return mx.roll(states, 1, axis=0), logits

    patch.setattr(decoder.target, "verify", shifted)


def logits_off_by_one(decoder: Decoder, patch: Patch) -> None:
    verify = decoder.target.verify

    def shifted(*args: Any) -> tuple[mx.array, mx.array]:
        states, logits = verify(*args)
        return states, mx.roll(logits, 1, axis=0)

    patch.setattr(decoder.target, "verify", shifted)


def compaction_order(decoder: Decoder, patch: Patch) -> None:
    """The accepted keys are kept in their order, the values in reverse."""
    compact = TreeKVCache.compact

    def crossed(self: TreeKVCache, path: list[int]) -> None:
        first = self.offset - self.start + 1  # the root is at its place
        compact(self, path)
        rows = slice(first, first + len(path) - 1)
        assert self.values is not None
        self.values[..., rows, :] = self.values[..., rows, :][..., ::-1, :]

    patch.setattr(TreeKVCache, "compact", crossed)


def compaction_order_in_a_window(decoder: Decoder, patch: Patch) -> None:
    """Keys and values both in reverse. Full attention sums over its rows in any order, a window
    counts them.
    """
    compact = TreeKVCache.compact
    patch.setattr(TreeKVCache, "compact", lambda self, path: compact(self, [path[0], *path[:0:-1]]))


def compaction_of_a_prefix(decoder: Decoder, patch: Patch) -> None:
    """The first rows are kept instead of the accepted ones, as `trim` on a chain would."""
    compact = TreeKVCache.compact
    patch.setattr(TreeKVCache, "compact", lambda self, path: compact(self, [*range(len(path))]))


def compaction_of_one_layer_only(decoder: Decoder, patch: Patch) -> None:
    compact, layers = TreeKVCache.compact, []

    def once(self: TreeKVCache, path: list[int]) -> None:
        layers.append(self)
        compact(self, path if self is layers[0] else [*range(len(path))])

    patch.setattr(TreeKVCache, "compact", once)


def acceptance_of_any_node(decoder: Decoder, patch: Patch) -> None:
    """A node of the right depth and token counts, whoever its parent is."""

    def anywhere(tree: Tree, chosen: mx.array) -> Walk:
        node, path, count, alive = mx.array(0), [mx.array(0)], mx.array(1), mx.array(True)
        for depth in range(1, tree.max_depth + 1):
            hit = (tree.depths == depth) & (tree.tokens == chosen[node]) & tree.valid
            alive = alive & hit.any()
            node = mx.where(alive, mx.argmax(hit), node)
            count = count + alive
            path.append(node)
        nodes = mx.stack(path).astype(mx.int32)
        return Walk(nodes, chosen[nodes], count.astype(mx.int32), node.astype(mx.int32))

    patch.setattr(loop, "accept", anywhere)


def acceptance_unchecked(decoder: Decoder, patch: Patch) -> None:
    """The first child is taken at the root, whatever the target drew."""

    def first_child(tree: Tree, chosen: mx.array) -> Walk:
        trusted = mx.where(mx.arange(chosen.shape[0]) == 0, tree.tokens[1], chosen)
        return accept(tree, trusted)

    patch.setattr(loop, "accept", first_child)


def acceptance_too_strict(decoder: Decoder, patch: Patch) -> None:
    """Padding or not, nothing below the second level is accepted. The text stays right."""

    def shallow(tree: Tree, chosen: mx.array) -> Walk:
        return accept(replace(tree, valid=tree.valid & (tree.depths <= 1)), chosen)

    patch.setattr(loop, "accept", shallow)


def bonus_of_the_root(decoder: Decoder, patch: Patch) -> None:
    """The extra token comes from the root and not from the last accepted node."""

    def wrong(tree: Tree, chosen: mx.array) -> Walk:
        walk = accept(tree, chosen)
        last = mx.arange(walk.tokens.shape[0]) == walk.count - 1
        return replace(walk, tokens=mx.where(last, chosen[0], walk.tokens))

    patch.setattr(loop, "accept", wrong)


def one_row_too_few(decoder: Decoder, patch: Patch) -> None:
    """The cache forgets the last accepted row."""
    compact = Cache.compact
    patch.setattr(
        Cache,
        "compact",
        lambda self, base, path: compact(self, base, path[: max(1, len(path) - 1)]),
    )


def one_row_too_many(decoder: Decoder, patch: Patch) -> None:
    """The cache keeps one row behind the accepted path."""
    compact = Cache.compact
    patch.setattr(Cache, "compact", lambda self, base, path: compact(self, base, [*path, path[-1]]))


def commit_of_one_less(decoder: Decoder, patch: Patch) -> None:
    commit = decoder.commit
    patch.setattr(decoder, "commit", lambda n: commit(max(1, n - 1)))


def noise_by_row(decoder: Decoder, patch: Patch) -> None:
    """Noise keyed by the row and not by the position (no difference for greedy decoding)."""
    choose = decoder.choose

    def wrong(logits: mx.array, tree: Tree, base: int) -> mx.array:
        tree = replace(sequential_positions(tree), max_depth=tree.tokens.shape[0] - 1)
        return choose(logits, tree, base)

    patch.setattr(decoder, "choose", wrong)


MUTATIONS: list[tuple[Callable[[Decoder, Patch], None], str]] = [
    (rope_positions, f"{TEXT}|{COUNT}"),
    (tree_mask, f"{TEXT}|{COUNT}"),
    (hidden_off_by_one, COUNT),
    (logits_off_by_one, f"{TEXT}|{COUNT}"),
    (compaction_order, f"{TEXT}|{COUNT}"),
    (compaction_of_a_prefix, f"{TEXT}|{COUNT}"),
    (compaction_of_one_layer_only, f"{TEXT}|{COUNT}"),
    (acceptance_of_any_node, f"{TEXT}|{COUNT}"),
    (acceptance_unchecked, TEXT),
    (acceptance_too_strict, COUNT),
    (bonus_of_the_root, TEXT),
    (one_row_too_few, "one row per token"),
    (one_row_too_many, "one row per token"),
    (commit_of_one_less, f"{TEXT}|one row per token"),
]


@pytest.mark.parametrize(("mutation", "says"), MUTATIONS, ids=[m.__name__ for m, _ in MUTATIONS])
@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 0.0), ("llama", 1.0), ("gemma3_text", 0.0)]
)
def test_breakage_is_seen(
    mutation: Callable[[Decoder, Patch], None],
    says: str,
    family: str,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(AssertionError, match=says):
        check_lossless(
            case(family, temperature=temperature),
            DRAFT,
            wrapped=target(family),
            arrange=lambda decoder: mutation(decoder, monkeypatch),
        )


def test_wrong_order_in_a_window_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=f"{TEXT}|{COUNT}"):
        check_lossless(
            case("gemma3_text"),
            DRAFT,
            arrange=lambda decoder: compaction_order_in_a_window(decoder, monkeypatch),
        )


def test_wrong_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=f"{TEXT}|{COUNT}"):
        check_lossless(
            case(temperature=1.0), DRAFT, arrange=lambda decoder: noise_by_row(decoder, monkeypatch)
        )


@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 0.0), ("llama", 1.0), ("gemma3_text", 0.0)]
)
def test_the_check_passes_unbroken(family: str, temperature: float) -> None:
    check_lossless(case(family, temperature=temperature), DRAFT)


def test_the_text_alone_sees_the_structural_breakages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the count of accepted tokens: positions, mask and compaction change what is
    emitted.
    """
    from tests.decoding.harness import run, scripted

    for mutation in (rope_positions, tree_mask, compaction_order, compaction_of_a_prefix):
        with monkeypatch.context() as patch:
            known = case()
            decoder, _ = scripted(known, DRAFT)
            mutation(decoder, patch)
            emitted = run(decoder, decoder.start(list(known.prompt)), 96)
            assert emitted[:96] != known.text[:96], mutation.__name__
