"""What the new drafter gives in real decoding on this machine, held against plain decoding.

Every prompt is decoded plainly and with the drafter in turn, in alternating order. Noise is keyed
by position, so that both texts are the same at any temperature, up to floating-point ties.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlx_redrafter.benchmarking.arms import run_ours
from mlx_redrafter.benchmarking.paired import (
    Round,
    Spread,
    arm_rates,
    compare_arms,
    interleave,
    tokens_per_step,
)
from mlx_redrafter.benchmarking.parity import compare, first_difference
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.errors import CompatibilityError, InputError
from mlx_redrafter.load import ModelPair
from mlx_redrafter.training.corpus import ASSISTANT
from mlx_redrafter.training.features import Shard

TEMPERATURES = (0.0, 0.7, 1.0)
MAX_TOKENS = 128
NUM_PROMPTS = 12
_PLAIN, _DRAFTED = "plain", "drafted"
_SHORTEST = 16  # tokens of an answer whose speed says something


class Difference(NamedTuple):
    """Where the drafted text parts from the plain one: tokens from the answer's beginning."""

    prompt: int
    token: int


@dataclass(frozen=True)
class TemperatureProof:
    """What was measured at one temperature.

    ``gain`` is the ratio of tokens per second, drafted to plain, pair by pair and without prefill;
    it and both rates are None where every answer was too short to time. ``defects`` counts
    positions of differing texts that no tie explains; None when sampling, where it is not judged.
    """

    temperature: float
    tokens_per_step: float | None
    gain: Spread | None
    tokens_per_second: Spread | None
    plain_tokens_per_second: Spread | None
    texts: int
    differences: tuple[Difference, ...]
    defects: int | None

    @property
    def equal_texts(self) -> int:
        return self.texts - len(self.differences)


@dataclass(frozen=True)
class Proof:
    draft: DraftOptions
    max_tokens: int
    prompts: int
    results: tuple[TemperatureProof, ...]

    def at(self, temperature: float) -> TemperatureProof | None:
        return next((each for each in self.results if each.temperature == temperature), None)


class _Item(NamedTuple):
    number: int  # also the seed, so that each prompt meets noise of its own
    prompt: list[int]


def prove(
    pair: ModelPair,
    prompts: Sequence[list[int]],
    draft: DraftOptions,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int = MAX_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Proof:
    """Decode ``prompts`` (tokens) with and without ``pair.drafter`` at each temperature.

    ``progress`` is told how many of all pairs are done. Raises InputError without a prompt and
    CompatibilityError where the pair does not draft.
    """
    if not prompts:
        raise InputError("there is no prompt to decode: give some with --prompts.")
    if pair.drafter is None:
        raise CompatibilityError(f"{pair.name} has no drafter: there is nothing to prove.")
    items = {str(number): _Item(number, prompt) for number, prompt in enumerate(prompts)}
    total = len(temperatures) * len(items)
    done = 0
    progress(done, total)
    results = []
    for temperature in temperatures:
        arms = {
            name: lambda item, setting=setting, temperature=temperature: run_ours(
                pair, item.prompt, setting, max_tokens, SamplingOptions(temperature, item.number)
            )
            for name, setting in ((_PLAIN, None), (_DRAFTED, draft))
        }
        rounds = []
        for round_ in interleave(arms, items, warmup=0 if done else 1):
            rounds.append(round_)
            done += 1
            progress(done, total)
        defects = None
        if temperature == 0:
            defects = _defects(pair, prompts, rounds, draft, max_tokens)
        results.append(_summary(temperature, rounds, defects))
    return Proof(draft, max_tokens, len(prompts), tuple(results))


def openings(shards: Sequence[Shard], limit: int = NUM_PROMPTS) -> list[list[int]]:
    """Prompts out of held-out rows: their tokens up to the assistant's first, each opening once,
    spread over the rows. A row that begins with the assistant's gives its first token."""
    found: dict[tuple[int, ...], None] = {}
    for shard in shards:
        for row in range(shard.corpus.num_rows)[shard.rows]:
            written = shard.corpus.role[row] == ASSISTANT
            if written.any():
                end = max(int(written.argmax()), 1)
                found[tuple(shard.corpus.ids[row, :end].tolist())] = None
    every = [list(tokens) for tokens in found]
    count = min(limit, len(every))
    return [every[(2 * i + 1) * len(every) // (2 * count)] for i in range(count)]


def _summary(temperature: float, rounds: Sequence[Round], defects: int | None) -> TemperatureProof:
    runs = [(each.runs[_PLAIN], each.runs[_DRAFTED]) for each in rounds]
    parted = [first_difference(plain.tokens, drafted.tokens) for plain, drafted in runs]
    gain = rate = plain_rate = None
    try:
        gain = compare_arms(rounds, _DRAFTED, _PLAIN, min_tokens=_SHORTEST).spread
        rate, plain_rate = (arm_rates(rounds, arm) for arm in (_DRAFTED, _PLAIN))
    except InputError:
        pass  # every answer was too short: the run's other figures still stand
    return TemperatureProof(
        temperature=temperature,
        tokens_per_step=tokens_per_step(drafted for _, drafted in runs),
        gain=gain,
        tokens_per_second=rate,
        plain_tokens_per_second=plain_rate,
        texts=len(rounds),
        differences=tuple(Difference(i, at) for i, at in enumerate(parted) if at is not None),
        defects=defects,
    )


def _defects(
    pair: ModelPair,
    prompts: Sequence[list[int]],
    rounds: Sequence[Round],
    draft: DraftOptions,
    max_tokens: int,
) -> int:
    """Outside of a tree a wrapped target computes what the unmodified model does, so it can judge
    the texts that differ."""
    ends: Collection[int] = set(pair.tokenizer.eos_token_ids)
    defects = 0
    for prompt, round_ in zip(prompts, rounds, strict=True):
        plain, drafted = (round_.runs[arm].tokens for arm in (_PLAIN, _DRAFTED))
        if first_difference(plain, drafted) is not None:
            defects += compare(
                pair.target.model,
                prompt,
                plain,
                drafted,
                rows=draft.token_budget + 1,
                max_tokens=max_tokens,
                end_tokens=ends,
            ).defects
            pair.target.take_hidden()
    return defects
