"""Sampling with drafts follows the target's law: three tokens of a six-token vocabulary, all 216
texts enumerated.
"""

from functools import cache
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.proposers.beam import BeamProposer
from mlx_redrafter.decoding.target import Target
from tests import reference, tiny_models
from tests.decoding.harness import random_drafter
from tests.decoding.test_choose import assert_law

VOCAB, LENGTH = 6, 3
PROMPT = [1, 4, 0, 2]
TEXTS = list(product(range(VOCAB), repeat=LENGTH))
Law = dict[tuple[int, ...], np.ndarray]  # prefix -> probabilities of the next token


@cache
def tiny_target() -> Target:
    return Target(tiny_models.build("llama", vocab_size=VOCAB))


@cache
def law(temperature: float) -> Law:
    """p(next | prompt, prefix), by full recompute."""
    model = tiny_models.build("llama", vocab_size=VOCAB)
    rows: Law = {}
    for length in range(LENGTH):
        for prefix in product(range(VOCAB), repeat=length):
            scores = reference.logits(model, [*PROMPT, *prefix])[-1].astype(np.float64)
            weights = np.exp((scores - scores.max()) / temperature)
            rows[prefix] = weights / weights.sum()
    return rows


def joint(temperature: float) -> np.ndarray:
    rows = law(temperature)
    return np.array([np.prod([rows[text[:i]][text[i]] for i in range(LENGTH)]) for text in TEXTS])


def drawn(temperature: float, draft: DraftOptions, seeds: range) -> tuple[np.ndarray, int]:
    """How often each text came out over the seeds, and how many drafted tokens were accepted on the
    way.
    """
    counts, accepted = np.zeros(len(TEXTS)), 0
    drafter = random_drafter(tiny_target())
    kept = tiny_target().make_cache()
    tiny_target().prefill(mx.array(PROMPT, mx.int32), kept)
    for seed in seeds:
        sampling = SamplingOptions(temperature=temperature, seed=seed)
        decoder = Decoder(tiny_target(), drafter, draft, sampling)
        kept.rewind(len(PROMPT) - 1)
        text = [decoder.start(PROMPT, kept)]
        while len(text) < LENGTH:
            step = decoder.step()
            decoder.commit(len(step.tokens))
            text += step.tokens
            accepted += step.num_accepted
        counts[TEXTS.index(tuple(text[:LENGTH]))] += 1
    return counts, accepted


@pytest.mark.parametrize(
    ("temperature", "width", "length", "seeds"),
    [(0.5, 6, 1, 900), (1.0, 6, 1, 900), (1.5, 6, 1, 900), (1.0, 6, 2, 300), (1.5, 1, 3, 300)],
)
def test_three_tokens(temperature: float, width: int, length: int, seeds: int) -> None:
    """Six beams hold every first token, so that a drafted token is accepted in each step."""
    draft = DraftOptions(beam_width=width, beam_length=length, token_budget=width * length)
    counts, accepted = drawn(temperature, draft, range(seeds))
    assert accepted >= (seeds if width == VOCAB else seeds // 20), "the draft must matter"
    assert_law(counts, joint(temperature))


@cache
def draft_paths(first: int) -> list[tuple[int, ...]]:
    """All kept beams after the first token, from the real drafter and the real hidden state."""
    wrapped = tiny_target()
    hidden, _ = wrapped.prefill(mx.array(PROMPT, mx.int32), wrapped.make_cache())
    proposer = BeamProposer(random_drafter(wrapped), wrapped.embed, DraftOptions())
    beams = proposer.search(hidden, mx.array(first), 3, 2)
    arrays = (np.array(a) for a in (beams.tokens, beams.parents, beams.scores))
    return reference.best_prefixes(*arrays, 6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_the_check_sees_a_draw_per_beam_row(temperature: float) -> None:
    """Negative control: the rule that this design forbids. Each beam draws for itself, the longest
    match wins.

    Simulated with the enumerated law and the same drafts; only the acceptance differs.
    """
    rows, rng = law(temperature), np.random.default_rng(0)
    counts = np.zeros(len(TEXTS))

    def draw(prefix: tuple[int, ...]) -> int:
        return int(rng.choice(VOCAB, p=rows[prefix]))

    for _ in range(900):
        first = draw(())
        best: tuple[int, ...] = ()
        for beam in (path for path in draft_paths(first) if len(path) == 2):
            text = [first]
            for token in beam:
                text.append(draw(tuple(text)))
                if text[-1] != token:
                    break
            best = max(best, tuple(text), key=len)
        text = list(best)
        while len(text) < LENGTH:
            text.append(draw(tuple(text)))
        counts[TEXTS.index(tuple(text[:LENGTH]))] += 1
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(counts, joint(temperature))


def test_the_check_passes_the_law_itself() -> None:
    """And the control's own frame is sound: draws from the enumerated law pass."""
    counts = np.random.default_rng(0).multinomial(900, joint(1.0)).astype(float)
    assert_law(counts, joint(1.0))
