"""Tokens per step on a prompt set, greedy, for several settings at once.

The target's greedy answers are written once, many at a time, and kept in --answers with their
hidden states; decoding is then replayed on them with the drafter at every setting, without the
target (training/acceptance.py). --check decodes so many of the prompts for real too: the two must
agree within 5 %, or the exit code is 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlx_redrafter.benchmarking.scripts import Script, met, say, table

AGREEMENT = 0.05

script = Script("acceptance", __doc__)
script.add_prompts(max_tokens=128)
add = script.parser.add_argument
add("--answers", type=Path, required=True, metavar="FOLDER", help="answers and states, kept")
add("--settings", nargs="+", default=["2,2,2", "5,3,7", "8,4,15"], metavar="W,L,BUDGET")
add("--check", type=int, default=0, help="prompts to decode for real as well (%(default)s)")
add("--batch", type=int, default=16, help="answers written at a time (%(default)s)")


def run(args: argparse.Namespace) -> int:
    from mlx_redrafter.benchmarking.answers import (
        decode,
        replay,
        tokens_per_step,
        write_answers,
    )
    from mlx_redrafter.benchmarking.arms import parse_setting
    from mlx_redrafter.benchmarking.prompts import read_prompts
    from mlx_redrafter.load import load

    settings = [parse_setting(text) for text in args.settings]
    pair = load(args.model, args.drafter, args.dtype)
    prompts = read_prompts(args.prompts, args.limit)
    answers = write_answers(pair, prompts, args.max_tokens, args.answers, args.batch, say)
    counts = {setting: replay(pair, answers, setting) for setting in settings}
    results: dict[str, Any] = {}
    rows = []
    for name in ["all", *dict.fromkeys(prompt.category for prompt in prompts)]:
        chosen = [i for i, prompt in enumerate(prompts) if name in ("all", prompt.category)]
        found = [tokens_per_step(counts[setting][i] for i in chosen) for setting in settings]
        results[name] = dict(zip(args.settings, found, strict=True))
        rows.append([name, len(chosen), *found])
    say("\n" + table(["category", "prompts", *args.settings], rows))
    agreed = True
    if args.check:
        step = max(1, len(answers) // args.check)
        chosen = range(0, len(answers), step)[: args.check]
        for setting, text in zip(settings, args.settings, strict=True):
            replayed = tokens_per_step(counts[setting][i] for i in chosen)
            real = tokens_per_step(
                decode(pair, answers[i], setting, args.max_tokens) for i in chosen
            )
            within = abs(real / replayed - 1) <= AGREEMENT
            agreed = agreed and within
            results[f"check {text}"] = {"replayed": replayed, "decoded": real}
            say(f"{text}: replayed {replayed:.3f}, decoded {real:.3f}: {met(within)}")
    script.report(args, {"results": results})
    return 0 if agreed else 1


if __name__ == "__main__":
    script.main(run)
