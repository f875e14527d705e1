"""The tie classifier: planted wrong tokens are defects, planted near-ties are ties."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.benchmarking.parity import (
    NOISE_FACTOR,
    SMALLEST_DELTA,
    Position,
    Verdict,
    compare,
    first_difference,
    judge_text,
    same_end,
    wrong_ending,
)
from mlx_redrafter.errors import InputError
from tests.tiny_models import build

VOCAB = 50
PROMPT = [3, 1, 4, 1, 5]
END = 7


class History:
    """A layer cache that remembers the tokens themselves."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def state(self) -> list[mx.array]:
        return []


class TableModel:
    """Logits are a random function of the whole history, with near-ties and noise planted.

    near_ties: {text index: (token, how far below the best it scores)}
    noise:     what a pass of several rows adds to the logit of token 0
    """

    def __init__(
        self, near_ties: dict[int, tuple[int, float]] | None = None, noise: float = 0.0
    ) -> None:
        self.near_ties = near_ties or {}
        self.noise = noise

    def make_cache(self) -> list[History]:
        return [History()]

    def __call__(self, tokens: mx.array, cache: list[History]) -> mx.array:
        rows = []
        for token in tokens[0].tolist():
            cache[0].tokens.append(token)
            row = self.row(cache[0].tokens)
            row[0] += self.noise * (tokens.shape[1] > 1)
            rows.append(row)
        return mx.array(np.stack(rows))[None]

    def row(self, history: list[int]) -> np.ndarray:
        row = np.random.default_rng(history).normal(size=VOCAB).astype(np.float32) * 3
        row[0] = row[END] = -20.0
        index = len(history) - len(PROMPT)
        if index in self.near_ties:
            token, margin = self.near_ties[index]
            row[token] = row.max() - margin
        return row

    def greedy(self, count: int, forced: dict[int, int] | None = None) -> list[int]:
        """Greedy text, with some tokens forced on the way."""
        tokens: list[int] = []
        for index in range(count):
            best = int(self.row(PROMPT + tokens).argmax())
            tokens.append((forced or {}).get(index, best))
        return tokens


def check(model: Any, reference: list[int], candidate: list[int], rows: int = 3) -> Any:
    return compare(model, PROMPT, reference, candidate, rows=rows, max_tokens=20, end_tokens={END})


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_equal_runs_are_identical_at_every_position(rows: int) -> None:
    model = TableModel()
    text = model.greedy(20)
    result = check(model, text, text, rows)
    assert result.same_text
    assert result.reference is None
    assert [p.index for p in result.candidate.positions] == list(range(20))
    assert [p.token for p in result.candidate.positions] == text
    assert result.count(Verdict.IDENTICAL) == 20
    assert result.defects == 0


@pytest.mark.parametrize("index", [0, 1, 9, 19])
def test_planted_wrong_token_is_a_defect(index: int) -> None:
    model = TableModel()
    reference = model.greedy(20)
    candidate = model.greedy(20, forced={index: 10 + (reference[index] == 10)})
    result = check(model, reference, candidate)
    assert result.first_difference == index
    assert [p.index for p in result.candidate.having(Verdict.DEFECT)] == [index]
    assert result.reference.having(Verdict.DEFECT) == []
    assert result.defects == 1


def test_wrong_tokens_after_the_first_difference_are_found() -> None:
    """Here the first difference is a tie; looking no further would pass the run."""
    model = TableModel(near_ties={4: (11, 5e-4)})
    reference = model.greedy(20)
    candidate = model.greedy(20, forced={4: 11, 12: 13, 17: 13})
    result = check(model, reference, candidate)
    assert result.first_difference == 4
    assert [p.index for p in result.candidate.having(Verdict.TIE)] == [4]
    assert [p.index for p in result.candidate.having(Verdict.DEFECT)] == [12, 17]


def test_wrong_token_that_both_runs_share_is_a_defect() -> None:
    model = TableModel()
    text = model.greedy(20, forced={8: 2})
    assert check(model, text, text).defects == 1


def test_planted_near_tie_is_a_tie_with_its_margin() -> None:
    model = TableModel(near_ties={6: (11, 5e-4)})
    reference, candidate = model.greedy(20), model.greedy(20, forced={6: 11})
    assert reference != candidate
    result = check(model, reference, candidate)
    assert result.count(Verdict.TIE) == 1
    assert result.defects == 0
    tie = result.candidate.positions[6]
    assert tie.verdict is Verdict.TIE
    assert tie.best == reference[6]
    assert tie.margin == pytest.approx(5e-4, rel=0.01)


@pytest.mark.parametrize(
    ("margin", "noise", "verdict"),
    [
        (0.9 * SMALLEST_DELTA, 0.0, Verdict.TIE),
        (1.1 * SMALLEST_DELTA, 0.0, Verdict.DEFECT),
        (0.9 * NOISE_FACTOR * 0.05, 0.05, Verdict.TIE),
        (1.1 * NOISE_FACTOR * 0.05, 0.05, Verdict.DEFECT),
    ],
)
def test_delta_follows_the_measured_noise(margin: float, noise: float, verdict: Verdict) -> None:
    model = TableModel(near_ties={6: (11, margin)}, noise=noise)
    result = check(model, model.greedy(20), model.greedy(20, forced={6: 11}))
    position = result.candidate.positions[6]
    assert position.noise == pytest.approx(noise, abs=1e-5)
    assert position.verdict is verdict


def test_noise_elsewhere_does_not_excuse_a_position() -> None:
    positions = [Position(0, 1, 1, 0.0, 9.0), Position(1, 1, 2, 0.5, 0.0)]
    assert [p.verdict for p in positions] == [Verdict.IDENTICAL, Verdict.DEFECT]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_defects(bad: float) -> None:
    assert Position(0, 1, 1, bad, 0.0).verdict is Verdict.DEFECT
    assert Position(0, 1, 1, 0.0, bad).verdict is Verdict.DEFECT


def test_ruled_out_tokens_leave_the_noise_finite() -> None:
    def scores(logits: mx.array, at: mx.array) -> mx.array:
        return mx.where(mx.arange(VOCAB) == 0, -mx.inf, logits)

    model = TableModel()
    report = judge_text(model, PROMPT, model.greedy(9), rows=3, scores=scores)
    assert len(report.having(Verdict.IDENTICAL)) == 9


def test_perturbed_scores_judge_a_sampled_text() -> None:
    """Keyed noise by absolute position: the sampled text is identical under its own scores only."""

    def scores(logits: mx.array, at: mx.array) -> mx.array:
        noise = [np.random.default_rng(int(t)).gumbel(size=VOCAB) for t in at.tolist()]
        return logits / 4 + mx.array(np.stack(noise).astype(np.float32))

    model = TableModel()
    text: list[int] = []
    while len(text) < 12:
        history = PROMPT + text
        text.append(int(scores(mx.array(model.row(history)), mx.array([len(history)])).argmax()))
    assert (
        len(judge_text(model, PROMPT, text, rows=3, scores=scores).having(Verdict.IDENTICAL)) == 12
    )
    assert judge_text(model, PROMPT, text, rows=3).having(Verdict.DEFECT)


def test_shared_part_counts_once() -> None:
    """A tie that both runs took before they part is one tie."""
    model = TableModel(near_ties={2: (11, 1e-4), 6: (12, 1e-4)})
    reference = model.greedy(20, forced={2: 11})
    candidate = model.greedy(20, forced={2: 11, 6: 12})
    assert check(model, reference, candidate).count(Verdict.TIE) == 2


@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        ([1] * 20, None),
        ([1, 2, END], None),
        ([1, 2], "without an end token"),
        ([], "without an end token"),
        ([1, END, 2], "1 tokens after the end token"),
        ([1, END, END], "1 tokens after the end token"),
        ([1] * 21, "more than the 20 allowed"),
    ],
)
def test_where_a_run_may_end(tokens: list[int], part: str | None) -> None:
    problem = wrong_ending(tokens, 20, {END})
    assert problem is None if part is None else part in problem


def test_run_cut_short_is_a_defect_although_each_token_is_right() -> None:
    model = TableModel()
    text = model.greedy(20)
    result = check(model, text, text[:15])
    assert result.count(Verdict.DEFECT) == 0
    assert result.defects == 1
    assert result.first_difference == 15


def test_same_end() -> None:
    assert same_end([1, 2, 8], [1, 2, 9], {8, 9}) == [1, 2, 8]
    assert same_end([1, 2, 8], [1, 9], {8, 9}) == [1, 9]
    assert same_end([1, 2, 3], [1, 2, 9], {8, 9}) == [1, 2, 9]
    assert same_end([], [], {8, 9}) == []


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_empty_prompt_and_no_rows_are_refused() -> None:
    with pytest.raises(InputError, match="prompt"):
        judge_text(TableModel(), [], [1], rows=2)
    with pytest.raises(InputError, match="rows"):
        judge_text(TableModel(), PROMPT, [1], rows=0)


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-3), ("bfloat16", 2.0)])
def test_real_caches(dtype: str, noise: float) -> None:
    """On an mlx-lm model: both modes see the same prefix, and a foreign token stands out."""
    model = build("llama", dtype)
    cache = make_prompt_cache(model)
    logits, text = model(mx.array([PROMPT]), cache=cache), []
    while len(text) < 24:
        text.append(int(logits[0, -1].argmax().item()))
        logits = model(mx.array([text[-1:]]), cache=cache)
    report = judge_text(model, PROMPT, text, rows=4, prefill_step=2)
    assert report.having(Verdict.DEFECT) == []
    assert report.noise < noise
    wrong = [*text[:10], (text[10] + 80) % 160, *text[11:]]
    assert 10 in [p.index for p in judge_text(model, PROMPT, wrong, rows=4).having(Verdict.DEFECT)]


def test_best_token_is_that_of_the_one_row_scores() -> None:
    """Here the pass of several rows favours token 0 everywhere."""
    model = TableModel(noise=50.0)
    report = judge_text(model, PROMPT, model.greedy(9), rows=3)
    assert len(report.having(Verdict.IDENTICAL)) == 9
    assert report.noise == pytest.approx(50.0)
