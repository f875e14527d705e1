"""The programs that are timed against each other: mlx-lm, and ours with and without drafting."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm

from mlx_redrafter import registry
from mlx_redrafter.benchmarking.paired import Arm, TimedRun
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.errors import CompatibilityError, InputError
from mlx_redrafter.generate import stream_generate
from mlx_redrafter.load import CAST_DTYPES, ModelPair, load

MLX_LM = "mlx-lm"
NO_DRAFT = "no-draft"


@dataclass(frozen=True)
class Contest:
    """Ours and mlx-lm's own copy of the same folder, unmodified, in one process."""

    folder: Path
    pair: ModelPair
    model: nn.Module
    tokenizer: Any

    @property
    def end_tokens(self) -> set[int]:
        return set(self.tokenizer.eos_token_ids)

    def mlx_lm(self, max_tokens: int) -> Arm[list[int]]:
        return lambda prompt: _run_mlx_lm(self, prompt, max_tokens)

    def ours(self, draft: DraftOptions | None, max_tokens: int) -> Arm[list[int]]:
        """``draft`` None is plain decoding, as with --no-draft."""
        return lambda prompt: run_ours(self.pair, prompt, draft, max_tokens)


def load_contest(model: str, drafter: str | None, dtype: str | None) -> Contest:
    """Load both. CompatibilityError where there is nothing to compare."""
    folder = registry.resolve(model, dtype)
    pair = load(model, drafter, dtype)
    if drafter is not None and pair.drafter is None:
        raise CompatibilityError(f"{model} does not draft: {pair.drafting_reason}.")
    return Contest(folder, pair, *load_mlx_lm(folder, dtype))


def load_mlx_lm(folder: Path, dtype: str | None) -> tuple[nn.Module, Any]:
    """mlx-lm's own model and tokenizer, in the type that `load` gives ours."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    if dtype in CAST_DTYPES:
        model.set_dtype(getattr(mx, dtype))
    return model, tokenizer


def parse_setting(text: str) -> DraftOptions:
    """ "W,L,BUDGET", or the budget alone: width and length are then chosen to fit."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return DraftOptions.fitting(token_budget=numbers[0])
    if len(numbers) == 3:
        return DraftOptions(*numbers)
    raise InputError(f"setting {text!r}: give W,L,BUDGET (as 1,2,2), or the budget alone.")


def setting_name(draft: DraftOptions) -> str:
    return f"{draft.beam_width},{draft.beam_length},{draft.token_budget}"


def _run_mlx_lm(contest: Contest, prompt: list[int], max_tokens: int) -> TimedRun:
    tokens: list[int] = []
    times: list[float] = []
    start = time.perf_counter()
    for response in mlx_lm.stream_generate(
        contest.model, contest.tokenizer, prompt, max_tokens=max_tokens
    ):
        tokens.append(int(response.token))
        times.append(time.perf_counter() - start)
    return TimedRun(tuple(tokens), tuple(times))


def run_ours(
    pair: ModelPair,
    prompt: list[int],
    draft: DraftOptions | None,
    max_tokens: int,
    sampling: SamplingOptions | None = None,
) -> TimedRun:
    """One answer of ours; ``draft`` None is plain decoding, ``sampling`` None is greedy."""
    tokens: list[int] = []
    times: list[float] = []
    stats = None
    moment = 0.0
    start = time.perf_counter()
    for segment in stream_generate(
        pair, prompt, max_tokens=max_tokens, draft=draft, sampling=sampling or SamplingOptions()
    ):
        moment = time.perf_counter() - start
        tokens += segment.tokens
        times += [moment] * len(segment.tokens)
        stats = segment.stats
    assert stats is not None
    if draft is not None and stats.drafting != "on":
        raise CompatibilityError(f"drafting is {stats.drafting}: there is nothing to measure.")
    if stats.emitted > len(tokens):  # the end token is counted, but not given out as mlx-lm does
        tokens.append(pair.tokenizer.eos_token_id)
        times.append(moment)
    return TimedRun(tuple(tokens), tuple(times), stats)
