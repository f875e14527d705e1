"""On a GPU the draft step is compiled; it must give the very same tree."""

import mlx.core as mx
import pytest

from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.proposers.beam import BeamProposer
from tests.decoding import harness


@pytest.mark.slow  # on a CPU mx.compile starts a C++ compiler
@pytest.mark.parametrize("draft", [DraftOptions(1, 3, 3), DraftOptions(3, 3, 7)])
def test_the_compiled_draft_equals_the_eager_one(draft: DraftOptions) -> None:
    target = harness.target("llama")
    drafter = harness.random_drafter(target)
    eager, compiled = (
        BeamProposer(drafter, target.embed, draft, compiled=compiled) for compiled in (False, True)
    )
    for seed in range(3):
        hidden = mx.random.normal((target.hidden_size,), key=mx.random.key(seed))
        token = mx.array(seed + 5)
        for one, other in zip(
            eager(hidden, token).arrays, compiled(hidden, token).arrays, strict=True
        ):
            assert mx.array_equal(one, other)
