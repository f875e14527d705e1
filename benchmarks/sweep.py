"""Sweep of settings (W,L,budget) on the project's own prompts: how the default is chosen.

Every setting is an arm next to mlx-lm, interleaved prompt by prompt; settings are ranked by the
median ratio to mlx-lm. No bar: the winner's figure is optimistic by construction, so measure it
again with `python -m benchmarks.speed` on prompts that did not choose it.
"""

from __future__ import annotations

import argparse

from mlx_redrafter.benchmarking.scripts import Script, say

# Chains and small beams up to the budgets where a verify pass stops being nearly free.
GRID = ["1,1,1", "1,2,2", "1,3,3", "1,4,4", "1,5,5", "2,2,2", "2,2,3", "2,3,4", "3,2,2"]
GRID += ["3,3,5", "3,4,7", "4,4,7", "4,4,11", "4,5,15"]

script = Script("sweep", __doc__)
script.add_prompts(max_tokens=64, limit=16)
script.parser.add_argument(
    "--settings", nargs="+", default=GRID, metavar="W,L,BUDGET", help="%(default)s"
)


def run(args: argparse.Namespace) -> int:
    from mlx_redrafter.benchmarking import arms, race
    from mlx_redrafter.benchmarking.prompts import read_prompts
    from mlx_redrafter.machine import blas

    prompts = read_prompts(args.prompts, args.limit)
    settings = [arms.parse_setting(text) for text in args.settings]
    contest = arms.load_contest(args.model, args.drafter, args.dtype)
    entrants = {arms.MLX_LM: contest.mlx_lm(args.max_tokens)}
    for draft in settings:
        entrants[arms.setting_name(draft)] = contest.ours(draft, args.max_tokens)
    rounds = list(race.race(entrants, contest.tokenizer, prompts))
    found = race.standings(rounds)
    found.sort(key=lambda each: each.decode.spread.median if each.decode else 1.0, reverse=True)
    say(f"\nBLAS: {blas.loaded() or 'as built into mlx'}")
    say(race.standings_table(found))
    script.report(args, {"arms": found, "rounds": race.rounds_report(rounds)})
    return 0


if __name__ == "__main__":
    script.main(run)
