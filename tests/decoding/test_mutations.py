"""Each breakage on purpose must fail the lossless check. A check that cannot fail proves nothing."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.decoding import loop
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions
from tests.decoding.harness import (
    case,
    causal_mask,
    check_lossless,
    sequential_positions,
    target,
)

DRAFT = DraftOptions(beam_width=4, beam_length=4, token_budget=9)
Patch = pytest.MonkeyPatch
Mutation = Callable[[Decoder, Patch], None]


def rope_positions(decoder: Decoder, patch: Patch) -> None:
    """Rows get positions base, base + 1, ... instead of base + depth."""
    verify = decoder.target.verify
    patch.setattr(
        decoder.target, "verify", lambda tree, cache: verify(sequential_positions(tree), cache)
    )


def tree_mask(decoder: Decoder, patch: Patch) -> None:
    verify = decoder.target.verify
    patch.setattr(decoder.target, "verify", lambda tree, cache: verify(causal_mask(tree), cache))


def hidden_off_by_one(decoder: Decoder, patch: Patch) -> None:
    """Logits stay right, so the text stays right; only the drafts go blind."""
    verify = decoder.target.verify

    def shifted(*args: Any) -> tuple[mx.array, mx.array]:
        states, logits = verify(*args)
        return mx.roll(states, 1, axis=0), logits

    patch.setattr(decoder.target, "verify", shifted)


MUTATIONS: dict[str, Mutation] = {
    "rope positions": rope_positions,
    "tree mask": tree_mask,
    "hidden off by one": hidden_off_by_one,
}


def test_the_check_passes_unbroken() -> None:
    check_lossless(case(), DRAFT)


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_breakage_is_seen(
    name: str, family: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = case(family, temperature=temperature)
    with pytest.raises(AssertionError):
        check_lossless(
            known,
            DRAFT,
            wrapped=target(family),
            arrange=lambda decoder: MUTATIONS[name](decoder, monkeypatch),
        )


assert loop
