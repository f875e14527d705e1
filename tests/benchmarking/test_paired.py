"""Paired timing: order, warm-up, rates and the arithmetic of ratios."""

from collections import Counter
from collections.abc import Callable

import pytest

from mlx_redrafter.benchmarking.paired import (
    Round,
    Spread,
    TimedRun,
    alternating,
    arm_rates,
    compare_arms,
    interleave,
    paired_ratio,
    time_interleaved,
    tokens_per_step,
)
from mlx_redrafter.decoding.stats import GenerationStats
from mlx_redrafter.errors import InputError


def run(
    count: int, rate: float, prefill: float = 1.0, per_step: int = 1, token: int = 5
) -> TimedRun:
    """A run whose first token arrives after the prefill, then ``per_step`` tokens at a time."""
    times = [prefill]
    for index in range(count - 1):
        times.append(prefill + (index // per_step + 1) * per_step / rate)
    return TimedRun((5,) * count, tuple(times))


def test_spread() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([2.5]) == Spread(2.5, 2.5, 2.5, 1)
    with pytest.raises(InputError):
        Spread.of([])


@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_decode_rate_leaves_out_prefill(per_step: int) -> None:
    timed = run(17, rate=20.0, prefill=3.0, per_step=per_step)
    assert timed.rate() == pytest.approx(20.0)
    assert timed.rate(measure="total") == pytest.approx(17 / (3.0 + 16 / 20))
    assert timed.rate(count=9) == pytest.approx(20.0)


def test_tokens_that_came_with_the_prefill_do_not_count_as_decoded() -> None:
    timed = TimedRun((1, 2, 3, 4), (1.0, 1.0, 2.0, 3.0))
    assert timed.rate() == pytest.approx(1.0)


def test_nothing_to_measure() -> None:
    assert TimedRun((), ()).rate() is None
    assert TimedRun((1,), (0.5,)).rate() is None
    assert TimedRun((1,), (0.5,)).rate(measure="total") == pytest.approx(2.0)


def test_two_arms_go_back_and_forth() -> None:
    orders = ["".join(alternating("AB", number)) for number in range(4)]
    assert orders == ["AB", "BA", "BA", "AB"]


@pytest.mark.parametrize("arms", ["A", "AB", "ABC", "ABCDE"])
def test_every_arm_has_every_place_equally_often(arms: str) -> None:
    places = Counter(
        (place, name)
        for number in range(2 * len(arms))
        for place, name in enumerate(alternating(arms, number))
    )
    assert set(places.values()) == {2}
    assert len(places) == len(arms) ** 2


def test_interleave_warms_up_once_and_records_every_round() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str) -> Callable[[int], TimedRun]:
        def call(item: int) -> TimedRun:
            calls.append((name, item))
            return run(20, rate=10.0)

        return call

    rounds = list(interleave({"a": arm("a"), "b": arm("b")}, {"x": 1, "y": 2}, repeats=2, warmup=1))
    assert calls[:2] == [("a", 1), ("b", 1)]  # the warm-up
    assert [(r.item, r.order) for r in rounds] == [
        ("x", ("a", "b")),
        ("y", ("b", "a")),
        ("x", ("b", "a")),
        ("y", ("a", "b")),
    ]
    assert [name for name, _ in calls[2:]] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    with pytest.raises(InputError):
        next(interleave({}, {"x": 1}))
    with pytest.raises(InputError):
        next(interleave({"a": arm("a")}, {}))


def rounds_of(pairs: list[tuple[TimedRun, TimedRun]]) -> list[Round]:
    return [
        Round(str(index), ("ours", "theirs"), {"ours": ours, "theirs": theirs})
        for index, (ours, theirs) in enumerate(pairs)
    ]


def test_ratio_is_the_median_of_pairs_not_a_ratio_of_medians() -> None:
    rounds = rounds_of(
        [
            (run(33, 20.0), run(33, 10.0)),
            (run(33, 60.0), run(33, 50.0)),
            (run(33, 100.0), run(33, 90.0)),
        ]
    )
    ratio = compare_arms(rounds, "ours", "theirs")
    assert ratio.spread.median == pytest.approx(1.2)
    assert ratio.spread.n == 3
    assert ratio.values == pytest.approx((2.0, 1.2, 10 / 9))
    assert arm_rates(rounds, "ours").median == pytest.approx(60.0)


def test_different_lengths_are_cut_to_the_shorter() -> None:
    """The longer run slows down later on; that must not count against the shorter one."""
    fast = run(33, 20.0)
    slow_end = TimedRun((*fast.tokens, 9), (*fast.times, 1000.0))
    ratio = compare_arms(rounds_of([(slow_end, fast)]), "ours", "theirs")
    assert ratio.values == pytest.approx((1.0,))
    assert ratio.different_texts == 1


def test_short_answers_are_dropped_and_counted() -> None:
    rounds = rounds_of([(run(5, 20.0), run(5, 10.0)), (run(33, 30.0), run(33, 10.0))])
    ratio = compare_arms(rounds, "ours", "theirs", min_tokens=16)
    assert ratio.values == pytest.approx((3.0,))
    assert ratio.dropped == 1
    with pytest.raises(InputError):
        compare_arms(rounds[:1], "ours", "theirs", min_tokens=16)


def test_tokens_per_step_weighs_steps() -> None:
    def stats(emitted: int, steps: int) -> TimedRun:
        return TimedRun((), (), GenerationStats(emitted=emitted, steps=steps))

    assert tokens_per_step([stats(31, 10), stats(11, 10), TimedRun((), ())]) == pytest.approx(2.0)
    assert tokens_per_step([stats(1, 0)]) is None


def test_time_interleaved_counts_and_pairs() -> None:
    calls: list[str] = []
    seconds = time_interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=4, warmup=1
    )
    assert "".join(calls) == "ab" + "abbabaab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}
    spread = paired_ratio({"a": [2.0, 9.0, 8.0], "b": [1.0, 3.0, 2.0]}, "a", "b")
    assert spread == Spread(3.0, 2.5, 3.5, 3)
