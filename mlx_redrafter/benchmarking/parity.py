"""Are two runs the same, up to floating-point ties? Every position gets a verdict (design 4.4).

One pass with N rows and N passes with one row are the same mathematics in different arithmetic, so
two honest runs may part where two tokens score almost alike. What "almost" means is measured here,
on the same text, with the *unmodified* model in both modes: a bug in the tree, the cache or the
walk of the drafting run cannot widen its own tolerance.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.errors import InputError

SMALLEST_DELTA = 1e-3
NOISE_FACTOR = 3.0

# (logits (N, V) float32, absolute position (N,) of the token each row chooses) -> scores (N, V)
Scores = Callable[[mx.array, mx.array], mx.array]


class Verdict(StrEnum):
    IDENTICAL = "identical"  # the token is the best of the one-row scores
    TIE = "tie"  # it is not, but scores within delta of the best
    DEFECT = "defect"


@dataclass(frozen=True)
class Position:
    """The verdict on one token of a text.

    ``margin`` is how far the token scores below ``best``, the argmax of the one-row scores;
    ``noise`` the largest difference between the one-row and the N-row scores of this position.
    """

    index: int
    token: int
    best: int
    margin: float
    noise: float

    @property
    def delta(self) -> float:
        return max(SMALLEST_DELTA, NOISE_FACTOR * self.noise)

    @property
    def verdict(self) -> Verdict:
        if not math.isfinite(self.margin) or not math.isfinite(self.noise):
            return Verdict.DEFECT
        if self.token == self.best:
            return Verdict.IDENTICAL
        return Verdict.TIE if self.margin <= self.delta else Verdict.DEFECT


@dataclass(frozen=True)
class TextReport:
    """The verdicts on every token of one text."""

    positions: tuple[Position, ...]

    def having(self, verdict: Verdict) -> list[Position]:
        return [position for position in self.positions if position.verdict is verdict]

    @property
    def noise(self) -> float:
        return max((position.noise for position in self.positions), default=0.0)


@dataclass(frozen=True)
class Comparison:
    """A candidate run held against a reference run of the same prompt.

    ``reference`` is None where both texts are the same, since one report then serves for both.
    ``wrong_ending`` tells what is wrong with where a run ended, which no token can show.
    """

    first_difference: int | None
    candidate: TextReport
    reference: TextReport | None
    wrong_ending: str | None

    @property
    def reports(self) -> list[TextReport]:
        return [report for report in (self.candidate, self.reference) if report is not None]

    def unique(self, verdict: Verdict | None = None) -> list[Position]:
        """Positions of both texts (with this verdict); the part that they share comes once."""
        shared = self.first_difference or 0
        positions = list(self.candidate.positions)
        if self.reference is not None:
            positions += [each for each in self.reference.positions if each.index >= shared]
        return [each for each in positions if verdict in (None, each.verdict)]

    def count(self, verdict: Verdict) -> int:
        return len(self.unique(verdict))

    @property
    def num_positions(self) -> int:
        return len(self.unique())

    @property
    def same_text(self) -> bool:
        return self.first_difference is None

    @property
    def defects(self) -> int:
        return self.count(Verdict.DEFECT) + (self.wrong_ending is not None)


def compare(
    model: nn.Module,
    prompt: Sequence[int],
    reference: Sequence[int],
    candidate: Sequence[int],
    *,
    rows: int,
    max_tokens: int,
    end_tokens: Collection[int] = (),
    scores: Scores | None = None,
    score_same: bool = True,
) -> Comparison:
    """Classify every position of both runs.

    ``score_same`` False spares the passes over a text that both runs agree on: the reference is
    then taken as the one-row choice at every position, and no noise is measured.

    ``model`` is the unmodified mlx-lm model; ``rows`` the rows of the candidate's verify pass. A
    run that stopped on an end token carries that token last.
    """
    problems = [
        f"{name}: {problem}"
        for name, tokens in (("reference", reference), ("candidate", candidate))
        if (problem := wrong_ending(tokens, max_tokens, end_tokens)) is not None
    ]
    difference = first_difference(reference, candidate)

    def judge(tokens: Sequence[int]) -> TextReport:
        if difference is None and not score_same:
            return TextReport(tuple(Position(i, t, t, 0.0, 0.0) for i, t in enumerate(tokens)))
        return judge_text(model, prompt, tokens, rows=rows, scores=scores)

    return Comparison(
        first_difference=difference,
        candidate=judge(candidate),
        reference=None if difference is None else judge(reference),
        wrong_ending="; ".join(problems) or None,
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two texts differ, the end of the shorter one included."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def wrong_ending(tokens: Sequence[int], max_tokens: int, end_tokens: Collection[int]) -> str | None:
    """A run ends at its first end token or at ``max_tokens``, neither before nor after."""
    ends = [index for index, token in enumerate(tokens) if token in end_tokens]
    if len(tokens) > max_tokens:
        return f"{len(tokens)} tokens, more than the {max_tokens} allowed"
    if ends and ends[0] != len(tokens) - 1:
        return f"{len(tokens) - 1 - ends[0]} tokens after the end token"
    if not ends and len(tokens) < max_tokens:
        return f"stopped after {len(tokens)} of {max_tokens} tokens without an end token"
    return None


def same_end(
    reference: Sequence[int], candidate: Sequence[int], end_tokens: Collection[int]
) -> list[int]:
    """The candidate with the reference's end token, where both end at the same place.

    Ours does not give the end token out; which of several it was makes no difference to a user.
    """
    both = len(reference) == len(candidate) > 0
    if both and reference[-1] in end_tokens and candidate[-1] in end_tokens:
        return [*candidate[:-1], reference[-1]]
    return list(candidate)


def judge_text(
    model: nn.Module,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    rows: int,
    prefill_step: int = 2048,
    scores: Scores | None = None,
) -> TextReport:
    """Feed one text to both modes and give a verdict on every token of it.

    ``scores`` turns logits into what the token is the argmax of: the perturbed scores when
    sampling; the logits themselves (the default) when greedy.
    """
    if not prompt:
        raise InputError("The prompt is empty; parity needs at least one prompt token.")
    if rows < 1:
        raise InputError(f"rows is {rows}; a verify pass has at least one row.")
    one_cache = make_prompt_cache(model)
    _prefill(model, prompt[:-1], one_cache, prefill_step)
    many_cache = copy.deepcopy(one_cache)

    inputs = [prompt[-1], *tokens[:-1]]
    positions: list[Position] = []
    for start in range(0, len(tokens), rows):
        chunk = inputs[start : start + rows]
        at = mx.arange(len(prompt) + start, len(prompt) + start + len(chunk))
        one = mx.concatenate([_logits(model, [token], one_cache) for token in chunk])
        many = _logits(model, chunk, many_cache)
        if scores is not None:
            one, many = scores(one, at), scores(many, at)
        positions += _judge_rows(one, many, tokens[start : start + len(chunk)], start)
    return TextReport(tuple(positions))


def _judge_rows(one: mx.array, many: mx.array, tokens: Sequence[int], start: int) -> list[Position]:
    """Verdicts from the one-row and the N-row scores (n, V) of n positions."""
    best = mx.argmax(one, axis=-1)
    top = one.max(axis=-1)
    got = mx.take_along_axis(one, mx.array(list(tokens))[:, None], axis=-1)[:, 0]
    # A token that both modes rule out has no difference: -inf - -inf is not a number.
    ruled_out = (one == -mx.inf) & (many == -mx.inf)
    noise = mx.where(ruled_out, 0.0, mx.abs(one - many)).max(axis=-1)
    columns: list[Any] = [array.tolist() for array in (best, top - got, noise)]
    return [
        Position(start + index, token, *values)
        for index, (token, *values) in enumerate(zip(tokens, *columns, strict=True))
    ]


def _prefill(model: nn.Module, tokens: Sequence[int], cache: list[Any], step: int) -> None:
    """As mlx-lm splits it, so that the reference run's cache is reproduced bit by bit."""
    for start in range(0, len(tokens), step):
        model(mx.array([tokens[start : start + step]]), cache=cache)
        mx.eval([layer.state for layer in cache])


def _logits(model: nn.Module, tokens: Sequence[int], cache: list[Any]) -> mx.array:
    """(n, V) float32. Evaluated at once: pending passes would hold on to every cache between."""
    logits = model(mx.array([tokens]), cache=cache)[0].astype(mx.float32)
    mx.eval(logits)
    return logits
