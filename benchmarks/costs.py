"""Cost bars: what verify passes, draft steps, long contexts and memory cost on this machine.

rows     c(N), the time of a verify pass of N rows relative to one, N = 1..16. No bar.
draft    Bars: four draft steps at W = 4 cost at most 15 % of a verify pass of 8 rows, two steps at
         W = 1 at most 8 % of one row.
context  Bars: up to 4,096 tokens our step grows no more than mlx-lm's pass of as many rows does:
         by at most 10 % of a step in time, and in memory by at most half a layer's cache (a copy of
         any layer's cache would be a whole one).
memory   Bar: peak memory at most mlx-lm's plus the drafter plus 10 %, as MLX counts it and as the
         system does; each arm in a process of its own.

Times are medians of interleaved repeats. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
from typing import Any

from mlx_redrafter.benchmarking.scripts import Script, met, say, table

PARTS = ("rows", "draft", "context", "memory")
GROWTH_BAR = 0.10

script = Script("costs", __doc__)
add = script.parser.add_argument
add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
add("--repeats", type=int, default=20, help="repeats of every call (%(default)s)")
add("--prefix", type=int, default=128, help="context of rows and draft (%(default)s)")
add("--contexts", type=int, nargs="+", default=[128, 1024, 2048, 4096], help="%(default)s")
add("--setting", default="1,2,2", metavar="W,L,BUDGET", help="of context, memory (%(default)s)")
add("--memory-context", type=int, default=1024, help="prompt tokens of memory (%(default)s)")
add("--max-tokens", type=int, default=128, help="answer tokens of memory (%(default)s)")


def run(args: argparse.Namespace) -> int:
    from mlx_redrafter.benchmarking import arms
    from mlx_redrafter.benchmarking.prompts import filler, read_prompts
    from mlx_redrafter.benchmarking.scripts import OWN_PROMPTS

    setting = arms.parse_setting(args.setting)
    contest = arms.load_contest(args.model, args.drafter, args.dtype)
    longest = max(args.prefix, args.memory_context, *args.contexts)
    text = filler(contest.tokenizer, read_prompts(OWN_PROMPTS), longest)
    results: dict[str, Any] = {}
    verdicts: dict[str, bool] = {}
    if "rows" in args.parts:
        results["rows"] = _rows(args, contest, text)
    if "draft" in args.parts:
        results["draft"] = _draft(args, contest, text, verdicts)
    if "context" in args.parts:
        results["context"] = _context(args, contest, text, setting, verdicts)
    if "memory" in args.parts:
        results["memory"] = _memory(args, text, setting, verdicts)
    script.report(args, {"met": verdicts, "results": results})
    return 0 if all(verdicts.values()) else 1


def _rows(args: argparse.Namespace, contest: Any, text: list[int]) -> Any:
    from mlx_redrafter.benchmarking.costs import row_costs

    costs = row_costs(contest.pair.target, contest.model, text[: args.prefix], repeats=args.repeats)
    say(f"\nc(N) behind {args.prefix} tokens")
    rows = [
        [each.rows, f"{each.seconds.median * 1e3:.1f}", each.c, each.chain_c, each.mlx_lm_c]
        for each in costs
    ]
    say(table(["N", "ms", "c(N), tree [quartiles]", "chain", "mlx-lm's own chunk"], rows))
    return costs


def _draft(
    args: argparse.Namespace, contest: Any, text: list[int], verdicts: dict[str, bool]
) -> Any:
    from mlx_redrafter.benchmarking.arms import setting_name
    from mlx_redrafter.benchmarking.costs import draft_costs

    pair = contest.pair
    costs = draft_costs(pair.target, pair.drafter, text[: args.prefix], repeats=2 * args.repeats)
    rows: list[list[object]] = []
    for each in costs:
        name = setting_name(each.draft)
        verdicts[f"draft {name}"] = each.met
        bar = f"{each.bar} {met(each.met)}"
        milliseconds = f"{each.seconds.median * 1e3:.2f}"
        rows.append([name, each.rows, milliseconds, each.share, each.with_tree, bar])
    say("\nBeam search against a verify pass")
    say(table(["W,L,budget", "rows", "ms", "share [quartiles]", "with the tree", "bar"], rows))
    return costs


def _context(
    args: argparse.Namespace,
    contest: Any,
    text: list[int],
    setting: Any,
    verdicts: dict[str, bool],
) -> Any:
    from mlx_redrafter.benchmarking.costs import context_costs, excess_growth

    costs = context_costs(
        contest.pair.target,
        contest.pair.drafter,
        contest.model,
        text,
        draft=setting,
        contexts=args.contexts,
        repeats=args.repeats,
    )
    rows = [
        [
            each.context,
            *(f"{s.median * 1e3:.1f}" for s in (each.ours, each.mlx_lm_rows, each.mlx_lm_one)),
            each.ratio,
            f"{each.cache_bytes / 1e6:.1f}",
            f"{each.ours_transient / 1e6:.2f}",
            f"{each.mlx_lm_transient / 1e6:.2f}",
        ]
        for each in costs
    ]
    passing = f"mlx-lm, {setting.token_budget + 1} rows, ms"
    say(f"\nStep at {args.setting} by context")
    columns = ["context", "step, ms", passing, "1 row, ms", "step / pass [quartiles]"]
    say(table([*columns, "cache MB", "transient MB", "mlx-lm's"], rows))
    time_growth, memory_growth = excess_growth(costs)
    memory_bar = 0.5 / len(contest.model.layers)
    verdicts["context time"] = time_growth <= GROWTH_BAR
    verdicts["context memory"] = memory_growth <= memory_bar
    for name, growth, bar in (
        ("time", time_growth, GROWTH_BAR),
        ("memory", memory_growth, memory_bar),
    ):
        verdict = met(verdicts[f"context {name}"])
        say(f"growth beyond mlx-lm's, {name}: {growth:+.4f} (bar: {bar:.4f}, {verdict})")
    return {"costs": costs, "excess_time": time_growth, "excess_memory": memory_growth}


def _memory(
    args: argparse.Namespace, text: list[int], setting: Any, verdicts: dict[str, bool]
) -> Any:
    from mlx_redrafter.benchmarking.memory import MemoryJob, allowed, measure_peak

    draft = (setting.beam_width, setting.beam_length, setting.token_budget)
    peaks = {}
    for name, chosen in (("mlx-lm", None), ("ours", draft)):
        job = MemoryJob(
            model=args.model,
            drafter=args.drafter,
            dtype=args.dtype,
            prompt=text[: args.memory_context],
            max_tokens=args.max_tokens,
            draft=chosen,
        )
        peaks[name] = measure_peak(job)
    ours, theirs = peaks["ours"], peaks["mlx-lm"]
    rows: list[list[object]] = []
    for name, mine, other in (
        ("arrays", ours.mlx_bytes, theirs.mlx_bytes),
        ("process", ours.process_bytes, theirs.process_bytes),
    ):
        limit = allowed(other, ours.drafter_bytes)
        verdicts[f"memory {name}"] = mine <= limit
        sizes = [f"{size / 1e6:.0f}" for size in (other, ours.drafter_bytes, mine, limit)]
        rows.append([name, *sizes, met(mine <= limit)])
    say(f"\nPeak memory, MB, {args.memory_context} + {args.max_tokens} tokens")
    say(table(["counted by", "mlx-lm", "drafter", "ours", "bar", ""], rows))
    return peaks


if __name__ == "__main__":
    script.main(run)
