"""Arms against mlx-lm over a prompt set: tokens per second, ratios, tokens per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_redrafter.benchmarking.arms import MLX_LM
from mlx_redrafter.benchmarking.paired import (
    Arm,
    Ratio,
    Round,
    Spread,
    arm_rates,
    compare_arms,
    interleave,
    tokens_per_step,
)
from mlx_redrafter.benchmarking.prompts import Prompt, chat_tokens
from mlx_redrafter.benchmarking.scripts import say, table


@dataclass(frozen=True)
class Standing:
    """One arm's figures. ``decode`` and ``total`` are its speed over mlx-lm's, pair by pair,
    without and with the prefill; both None for mlx-lm itself."""

    arm: str
    tokens_per_second: Spread
    total_tokens_per_second: Spread
    tokens_per_step: float | None
    decode: Ratio | None
    total: Ratio | None


def race(
    arms: Mapping[str, Arm[list[int]]],
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    repeats: int = 1,
) -> Iterator[Round]:
    """Interleaved rounds over the prompts, told on stderr as they are done."""
    items = {prompt.id: chat_tokens(tokenizer, prompt.text) for prompt in prompts}
    for number, round_ in enumerate(interleave(arms, items, repeats=repeats), 1):
        rates = ", ".join(
            f"{name} {run.rate() or 0.0:.1f}" for name, run in sorted(round_.runs.items())
        )
        say(f"{number}/{len(items) * repeats} {round_.item}: {rates} tokens/s")
        yield round_


def standings(rounds: Sequence[Round], min_tokens: int = 16) -> list[Standing]:
    """Every arm's figures, in the arms' order."""

    def ratio(arm: str, measure: Any) -> Ratio | None:
        if arm == MLX_LM:
            return None
        return compare_arms(rounds, arm, MLX_LM, measure=measure, min_tokens=min_tokens)

    names = sorted(rounds[0].runs, key=rounds[0].order.index)
    return [
        Standing(
            arm=name,
            tokens_per_second=arm_rates(rounds, name),
            total_tokens_per_second=arm_rates(rounds, name, measure="total"),
            tokens_per_step=tokens_per_step(each.runs[name] for each in rounds),
            decode=ratio(name, "decode"),
            total=ratio(name, "total"),
        )
        for name in names
    ]


def standings_table(found: Sequence[Standing]) -> str:
    rows: list[list[object]] = []
    for each in found:
        row: list[object] = [each.arm, f"{each.tokens_per_second.median:.1f}"]
        row += [f"{each.total_tokens_per_second.median:.1f}", each.tokens_per_step]
        for ratio in (each.decode, each.total):
            row.append(None if ratio is None else ratio.spread)
        if each.decode is None:
            row += [each.tokens_per_second.n, None]
        else:
            row += [each.decode.spread.n, each.decode.different_texts]
        rows.append(row)
    columns = ["arm", "tok/s", "with prefill", "tok/step", "x mlx-lm [quartiles]"]
    return table([*columns, "with prefill", "pairs", "texts apart"], rows)


def rounds_report(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """The raw figures of every round, without the token ids."""
    return [
        {
            "prompt": each.item,
            "order": each.order,
            "runs": {
                name: {
                    "tokens": len(run.tokens),
                    "seconds": run.times[-1] if run.times else None,
                    "first_token_s": run.times[0] if run.times else None,
                    "tokens_per_second": run.rate(),
                    "tokens_per_step": run.stats.tokens_per_step if run.stats else None,
                }
                for name, run in each.runs.items()
            },
        }
        for each in rounds
    ]
