"""Paired, interleaved timing: the only kind of speed-up figure this project gives.

Two programs timed one after the other differ by whatever else the machine did meanwhile. Here every
prompt is run by every arm in turn, in an order that alternates, and the figure is the median of the
per-prompt ratios, with its quartiles.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from mlx_redrafter.benchmarking.parity import first_difference
from mlx_redrafter.decoding.stats import GenerationStats
from mlx_redrafter.errors import InputError

Item = TypeVar("Item")
Measure = Literal["decode", "total"]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of ``n`` values."""

    median: float
    lower_quartile: float
    upper_quartile: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise InputError("No value was measured; give more prompts or more tokens.")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, len(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.lower_quartile:.3f}, {self.upper_quartile:.3f}]"


@dataclass(frozen=True)
class TimedRun:
    """Tokens of one run and when each of them arrived, in seconds since the call.

    Tokens that arrived together carry the same time. ``stats`` is None where an arm has none.
    """

    tokens: tuple[int, ...]
    times: tuple[float, ...]
    stats: GenerationStats | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.times), (len(self.tokens), len(self.times))

    def rate(self, count: int | None = None, measure: Measure = "decode") -> float | None:
        """Tokens per second over the first ``count`` tokens (all by default).

        "decode" leaves out the prefill and what arrived with it, "total" starts at the call. None
        where nothing is left to measure.
        """
        count = len(self.tokens) if count is None else min(count, len(self.tokens))
        if count == 0:
            return None
        start, first = 0.0, 0
        if measure == "decode":
            start = self.times[0]
            first = sum(moment == start for moment in self.times)
        elapsed = self.times[count - 1] - start
        return (count - first) / elapsed if count > first and elapsed > 0 else None


Arm = Callable[[Item], TimedRun]


@dataclass(frozen=True)
class Round:
    """One item run once by every arm; ``order`` is the order they ran in."""

    item: str
    order: tuple[str, ...]
    runs: dict[str, TimedRun]


@dataclass(frozen=True)
class Ratio:
    """How much faster one arm is than another, pair by pair.

    ``different_texts`` counts pairs whose texts part (at a tie, or at a defect: `parity` tells);
    ``dropped`` pairs with too few tokens in common to give a rate.
    """

    spread: Spread
    values: tuple[float, ...]
    different_texts: int
    dropped: int


def interleave(
    arms: Mapping[str, Arm[Item]],
    items: Mapping[str, Item],
    *,
    repeats: int = 1,
    warmup: int = 1,
) -> Iterator[Round]:
    """Run every item through every arm, in alternating order; yield each round as it is done.

    The first item is run ``warmup`` times by every arm before anything is recorded.
    """
    if not arms or not items:
        raise InputError("Nothing to measure: give at least one arm and one prompt.")
    first = next(iter(items.values()))
    for _ in range(warmup):
        for arm in arms.values():
            arm(first)
    number = 0
    for _ in range(repeats):
        for name, item in items.items():
            order = alternating(list(arms), number)
            runs = {}
            for arm_name in order:
                gc.collect()  # so that no arm pays for another one's garbage
                runs[arm_name] = arms[arm_name](item)
            yield Round(name, order, runs)
            number += 1


def alternating(names: Sequence[str], number: int) -> tuple[str, ...]:
    """The order of round ``number``. Two arms go AB, BA, BA, AB; more also take turns in front."""
    shift = number // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return tuple(reversed(order)) if number % 2 else tuple(order)


def compare_arms(
    rounds: Sequence[Round],
    candidate: str,
    baseline: str,
    *,
    measure: Measure = "decode",
    min_tokens: int = 16,
) -> Ratio:
    """Ratios of tokens per second, over the same prompt and the same number of tokens.

    Where two texts have different lengths (they parted at a tie), both are cut to the shorter.
    """
    values: list[float] = []
    different = dropped = 0
    for round_ in rounds:
        ours, theirs = round_.runs[candidate], round_.runs[baseline]
        different += first_difference(ours.tokens, theirs.tokens) is not None
        count = min(len(ours.tokens), len(theirs.tokens))
        ours_rate, theirs_rate = ours.rate(count, measure), theirs.rate(count, measure)
        if count < min_tokens or ours_rate is None or theirs_rate is None:
            dropped += 1
        else:
            values.append(ours_rate / theirs_rate)
    return Ratio(Spread.of(values), tuple(values), different, dropped)


def arm_rates(rounds: Sequence[Round], arm: str, *, measure: Measure = "decode") -> Spread:
    """Tokens per second of one arm over all rounds."""
    rates = [round_.runs[arm].rate(measure=measure) for round_ in rounds]
    return Spread.of([rate for rate in rates if rate is not None])


def tokens_per_step(runs: Iterable[TimedRun]) -> float | None:
    """Over all runs together: a long answer counts for more. None where no run has steps."""
    stats = [run.stats for run in runs if run.stats is not None]
    steps = sum(each.steps for each in stats)
    if not steps:
        return None
    return sum((each.tokens_per_step or 0.0) * each.steps for each in stats) / steps


def time_interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each call, ``repeats`` times over, in alternating order.

    A call has to wait for its own result (`mx.eval`): MLX would only queue it otherwise.
    """
    for _ in range(warmup):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats):
        for name in alternating(list(calls), number):
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def paired_ratio(seconds: Mapping[str, Sequence[float]], of: str, to: str) -> Spread:
    """The ratio of two calls' times, repeat by repeat."""
    return Spread.of([a / b for a, b in zip(seconds[of], seconds[to], strict=True)])
