"""The metric formulas."""

import json

import pytest

from mlx_redrafter.decoding.stats import GenerationStats


def test_figures_of_an_answer():
    stats = GenerationStats(prompt_tokens=20, cached_tokens=5, prefill_s=0.5, emitted=1)
    for kept, accepted in ((3, 2), (1, 0), (3, 2), (4, 3)):
        stats.count_step(kept, accepted, seconds=0.25)
    assert stats.emitted == 12
    assert stats.steps == 4
    assert stats.acceptance_histogram == {2: 2, 0: 1, 3: 1}
    assert stats.accepted == 7
    assert stats.tokens_per_step == pytest.approx(11 / 4)
    assert stats.tokens_per_second == pytest.approx(11.0)
    assert stats.prompt_tokens_per_second == pytest.approx(30.0)
    # Every step that was not cut gives its accepted tokens and one of the target's own.
    assert stats.emitted == 1 + stats.accepted + stats.steps


@pytest.mark.parametrize(("kept", "accepted"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_a_cut_step_counts_only_what_was_kept(kept, accepted):
    stats = GenerationStats(emitted=1)
    stats.count_step(kept, num_accepted=3, seconds=0.1)
    assert stats.acceptance_histogram == {accepted: 1}
    assert stats.tokens_per_step == kept


def test_an_answer_without_a_step_has_no_rates():
    figures = GenerationStats(emitted=1).to_dict()
    assert figures["tokens_per_step"] is None
    assert figures["tokens_per_second"] is None
    assert figures["prompt_tokens_per_second"] is None


def test_the_dictionary_is_plain_json():
    stats = GenerationStats(emitted=1, seed=2**63, drafting="off (no drafter)")
    stats.count_step(10, 9, 1.0)
    stats.count_step(3, 2, 1.0)
    figures = json.loads(json.dumps(stats.to_dict()))
    assert figures == stats.to_dict()
    assert list(figures["acceptance_histogram"].items()) == [("2", 1), ("9", 1)]
    wanted = "prompt_tokens emitted steps tokens_per_step acceptance_histogram ttft_s"
    assert {*wanted.split(), "tokens_per_second", "drafting", "seed"} <= set(figures)
