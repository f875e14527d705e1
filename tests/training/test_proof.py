"""Real decoding with and without a drafter, in pairs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_redrafter.benchmarking.paired import TimedRun
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.stats import GenerationStats
from mlx_redrafter.errors import CompatibilityError, InputError
from mlx_redrafter.load import ModelPair
from mlx_redrafter.training import proof as module
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.features import Shard
from mlx_redrafter.training.proof import Difference, openings, prove
from tests.decoding import harness
from tests.fakes import byte_level

DRAFT = DraftOptions(2, 2, 3)
PROMPTS = [[3, 7, 30], [4, 9], [5, 2, 2, 80]]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """A tiny target, whose ids are all below the tokenizer's."""
    target = harness.target("llama")
    drafter = harness.random_drafter(target)
    return ModelPair(target, drafter, byte_level(), "tiny", context_length=512, config={})


def test_real_decoding_gives_equal_texts_and_figures(pair: ModelPair) -> None:
    seen = []
    found = prove(
        pair,
        PROMPTS,
        DRAFT,
        temperatures=(0.0, 1.0),
        max_tokens=24,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(done, 6) for done in range(7)]
    assert (found.draft, found.max_tokens, found.prompts) == (DRAFT, 24, 3)
    assert [each.temperature for each in found.results] == [0.0, 1.0]
    for each in found.results:
        assert each.tokens_per_step is not None
        assert 1 <= each.tokens_per_step < 3
        assert (each.texts, each.equal_texts, each.differences) == (3, 3, ())
    greedy = found.at(0.0)
    assert greedy is not None
    assert greedy.defects == 0
    assert greedy.gain is not None
    assert greedy.gain.n == 3
    assert found.results[1].defects is None
    assert found.at(0.5) is None


Call = tuple[int, int, float, bool]  # first token of the prompt, seed, temperature, drafted


def scripted(monkeypatch: pytest.MonkeyPatch, plain: list[int], drafted: list[int]) -> list[Call]:
    """Plain decoding takes 1 s a token, drafted 1 s for two."""
    calls: list[Call] = []

    def run(
        pair: Any, prompt: list[int], draft: Any, max_tokens: int, sampling: SamplingOptions
    ) -> TimedRun:
        calls.append((prompt[0], sampling.seed, sampling.temperature, draft is not None))
        tokens, pace = (drafted, 0.5) if draft else (plain, 1.0)
        stats = GenerationStats(emitted=len(tokens), steps=max(1, len(tokens) // 2))
        return TimedRun(tuple(tokens), tuple(1 + pace * i for i in range(len(tokens))), stats)

    monkeypatch.setattr(module, "run_ours", run)
    return calls


def test_pairs_are_interleaved_with_the_same_seed(
    monkeypatch: pytest.MonkeyPatch, pair: ModelPair
) -> None:
    text = list(range(1, 25))
    calls = scripted(monkeypatch, text, text)
    found = prove(pair, PROMPTS, DRAFT, temperatures=(0.7, 1.0), max_tokens=24)
    assert calls[:2] == [(3, 0, 0.7, False), (3, 0, 0.7, True)]  # the warm-up
    assert calls[2:8] == [
        (3, 0, 0.7, False),
        (3, 0, 0.7, True),
        (4, 1, 0.7, True),
        (4, 1, 0.7, False),
        (5, 2, 0.7, True),
        (5, 2, 0.7, False),
    ]
    assert len(calls) == 14
    for each in found.results:
        assert each.gain is not None
        assert each.gain.median == pytest.approx(2.0)
        assert each.tokens_per_second is not None
        assert each.tokens_per_second.median == pytest.approx(2.0)
        assert each.plain_tokens_per_second is not None
        assert each.plain_tokens_per_second.median == pytest.approx(1.0)


def test_differing_texts_are_told_and_judged(
    monkeypatch: pytest.MonkeyPatch, pair: ModelPair
) -> None:
    """Random texts are nothing that this model says, so no tie explains them."""
    plain = [*range(1, 25)]
    scripted(monkeypatch, plain, [*plain[:5], 99, *plain[6:]])
    found = prove(pair, PROMPTS[:2], DRAFT, temperatures=(0.0, 0.7), max_tokens=24)
    for each in found.results:
        assert each.differences == (Difference(0, 5), Difference(1, 5))
        assert each.equal_texts == 0
    assert found.results[0].defects
    assert found.results[1].defects is None


def test_short_answers_give_no_gain_but_the_rest(
    monkeypatch: pytest.MonkeyPatch, pair: ModelPair
) -> None:
    scripted(monkeypatch, [1, 2, 3, 4], [1, 2, 3, 4])
    (found,) = prove(pair, PROMPTS, DRAFT, temperatures=(0.0,)).results
    assert found.gain is None
    assert found.tokens_per_second is None
    assert found.tokens_per_step == pytest.approx(1.5)


def test_what_cannot_be_proved_is_refused(pair: ModelPair) -> None:
    with pytest.raises(InputError, match="no prompt"):
        prove(pair, [], DRAFT)
    bare = ModelPair(pair.target, None, pair.tokenizer, "bare", 512, {})
    with pytest.raises(CompatibilityError, match="bare has no drafter"):
        prove(bare, PROMPTS, DRAFT)


def test_openings_are_what_comes_before_the_first_answer() -> None:
    ids = np.array(
        [[1, 2, 3, 4], [1, 2, 9, 9], [6, 7, 8, 9], [5, 5, 5, 5], [4, 3, 2, 1]], dtype=np.int32
    )
    role = np.array(
        [[0, 2, 1, 1], [0, 2, 1, 0], [1, 1, 1, 1], [0, 0, 2, 0], [0, 0, 0, 1]], dtype=np.uint8
    )
    corpus = Corpus("own", ids, role)
    parts = [Shard(corpus, slice(0, 3), Path()), Shard(corpus, slice(3, 5), Path())]
    assert openings(parts) == [[1, 2], [6], [4, 3, 2]]
    assert openings(parts[1:]) == [[4, 3, 2]]
    assert openings(parts, limit=1) == [[6]]
    assert openings([]) == []
