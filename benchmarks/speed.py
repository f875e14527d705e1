"""Speed bar: ours over mlx_lm.stream_generate, same process, same BLAS, interleaved pairs.

Arms: mlx-lm, ours without drafting, ours with each setting given. Every prompt is run by every arm
in alternating order; the figure is the median of the per-prompt ratios of decoded tokens per
second, with quartiles, over the same number of tokens. The ratio with the prefill stands beside it.

Bars, judged from 10 pairs on: the best setting at least 1.1, without drafting at least 0.97. Run it
once for each BLAS (--blas mkl, --blas openblas). Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse

from mlx_redrafter.benchmarking.scripts import Script, met, say

DRAFT_BAR, PLAIN_BAR, JUDGED_FROM = 1.1, 0.97, 10

script = Script("speed", __doc__)
script.add_prompts(max_tokens=128)
script.parser.add_argument(
    "--settings",
    nargs="*",
    default=["1,2,2"],
    metavar="W,L,BUDGET",
    help="drafting settings; a budget alone chooses width and length (%(default)s)",
)
script.parser.add_argument(
    "--repeats", type=int, default=1, help="times that every prompt is run (%(default)s)"
)


def run(args: argparse.Namespace) -> int:
    from mlx_redrafter.benchmarking import arms, race
    from mlx_redrafter.benchmarking.prompts import read_prompts
    from mlx_redrafter.machine import blas

    prompts = read_prompts(args.prompts, args.limit)
    settings = [arms.parse_setting(text) for text in args.settings]
    contest = arms.load_contest(args.model, args.drafter if settings else None, args.dtype)
    entrants = {
        arms.MLX_LM: contest.mlx_lm(args.max_tokens),
        arms.NO_DRAFT: contest.ours(None, args.max_tokens),
    }
    for draft in settings:
        entrants[arms.setting_name(draft)] = contest.ours(draft, args.max_tokens)
    rounds = list(race.race(entrants, contest.tokenizer, prompts, repeats=args.repeats))
    found = race.standings(rounds)

    say(f"\nBLAS: {blas.loaded() or 'as built into mlx'}")
    say(race.standings_table(found))
    ratios = {each.arm: each.decode.spread for each in found if each.decode is not None}
    plain = ratios.pop(arms.NO_DRAFT)
    verdicts = {"no_draft": plain.median >= PLAIN_BAR if plain.n >= JUDGED_FROM else None}
    say(f"without drafting: {plain} (bar: {PLAIN_BAR}, {met(verdicts['no_draft'])})")
    if ratios:
        name, best = max(ratios.items(), key=lambda item: item[1].median)
        verdicts["draft"] = best.median >= DRAFT_BAR if best.n >= JUDGED_FROM else None
        say(f"best setting {name}: {best} (bar: {DRAFT_BAR}, {met(verdicts['draft'])})")
    script.report(args, {"met": verdicts, "arms": found, "rounds": race.rounds_report(rounds)})
    return 1 if False in verdicts.values() else 0


if __name__ == "__main__":
    script.main(run)
