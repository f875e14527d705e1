"""Greedy bar: our text is mlx-lm's text, every position identical or a tie; defects 0.

Runs mlx_lm.stream_generate and ours on the same folder, prompt by prompt, and judges every
position of both texts with the unmodified model (docs: design 4.4). A tie is a token that scores
within delta of the best, delta = max(1e-3, 3 x the measured difference between the one-row and the
N-row logits). Exit code 1 on any defect.

Measures at the same time, over the same texts, tokens per step: at least 1.4 with a token budget
of 2, and 1.75 with 7.
"""

from __future__ import annotations

import argparse
from typing import Any

from mlx_redrafter.benchmarking.scripts import Script, met, say, table

TOKENS_PER_STEP = {2: 1.4, 7: 1.75}
JUDGED_FROM = 40  # prompts: tokens per step of fewer say little

script = Script("parity", __doc__)
script.add_prompts(max_tokens=128)
script.parser.add_argument(
    "--settings",
    nargs="+",
    default=["2", "7"],
    metavar="W,L,BUDGET",
    help="settings of ours; a budget alone chooses width and length (%(default)s)",
)
script.parser.add_argument(
    "--quick",
    action="store_true",
    help="score only texts that differ; where both are the same, each position is identical",
)


def run(args: argparse.Namespace) -> int:
    from mlx_redrafter.benchmarking import arms, parity
    from mlx_redrafter.benchmarking.paired import tokens_per_step
    from mlx_redrafter.benchmarking.prompts import chat_tokens, read_prompts

    prompts = read_prompts(args.prompts, args.limit)
    settings = [arms.parse_setting(text) for text in args.settings]
    contest = arms.load_contest(args.model, args.drafter, args.dtype)
    reference_arm = contest.mlx_lm(args.max_tokens)
    results: dict[str, dict[str, Any]] = {}
    runs: dict[str, list[Any]] = {arms.setting_name(draft): [] for draft in settings}
    rows: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts, 1):
        tokens = chat_tokens(contest.tokenizer, prompt.text)
        reference = reference_arm(tokens).tokens
        for draft in settings:
            name = arms.setting_name(draft)
            ours = contest.ours(draft, args.max_tokens)(tokens)
            comparison = parity.compare(
                contest.model,
                tokens,
                reference,
                parity.same_end(reference, ours.tokens, contest.end_tokens),
                rows=draft.token_budget + 1,
                max_tokens=args.max_tokens,
                end_tokens=contest.end_tokens,
                score_same=not args.quick,
            )
            runs[name].append(ours)
            rows.append(_row(prompt.id, name, comparison))
            say(f"{number}/{len(prompts)} {prompt.id} {name}: {_words(rows[-1])}")
    for draft in settings:
        name = arms.setting_name(draft)
        mine = [row for row in rows if row["setting"] == name]
        rate = tokens_per_step(runs[name])
        bar = TOKENS_PER_STEP.get(draft.token_budget)
        results[name] = {
            "prompts": len(mine),
            "identical_prompts": sum(row["same_text"] for row in mine),
            "positions": sum(row["positions"] for row in mine),
            "ties": sum(len(row["ties"]) for row in mine),
            "defects": sum(row["defects"] for row in mine),
            "largest_noise": max(row["noise"] for row in mine),
            "tokens_per_step": rate,
            "tokens_per_step_bar": bar,
            "tokens_per_step_met": (
                rate >= bar if bar and rate and len(prompts) >= JUDGED_FROM else None
            ),
        }
    columns = ["W,L,budget", "prompts", "identical", "positions", "ties", "defects", "tokens/step"]
    say()
    say(
        table(
            [*columns, "bar"],
            [
                [
                    name,
                    each["prompts"],
                    each["identical_prompts"],
                    each["positions"],
                    each["ties"],
                    each["defects"],
                    each["tokens_per_step"],
                    f"{each['tokens_per_step_bar'] or '-'} {met(each['tokens_per_step_met'])}",
                ]
                for name, each in results.items()
            ],
        )
    )
    defects = sum(each["defects"] for each in results.values())
    say(f"defects: {defects} (bar: 0, {met(not defects)})")
    script.report(args, {"results": results, "rows": rows})
    return 1 if defects else 0


def _row(prompt: str, setting: str, comparison: Any) -> dict[str, Any]:
    from mlx_redrafter.benchmarking.parity import Verdict

    marked = {
        verdict: [
            {
                "index": p.index,
                "token": p.token,
                "best": p.best,
                "margin": p.margin,
                "delta": p.delta,
            }
            for p in comparison.unique(verdict)
        ]
        for verdict in (Verdict.TIE, Verdict.DEFECT)
    }
    return {
        "prompt": prompt,
        "setting": setting,
        "same_text": comparison.same_text,
        "first_difference": comparison.first_difference,
        "positions": comparison.num_positions,
        "ties": marked[Verdict.TIE],
        "defects": comparison.defects,
        "defect_positions": marked[Verdict.DEFECT],
        "wrong_ending": comparison.wrong_ending,
        "noise": max(report.noise for report in comparison.reports),
    }


def _words(row: dict[str, Any]) -> str:
    text = "identical" if row["same_text"] else f"parts at {row['first_difference']}"
    text += "".join(f", tie (margin {tie['margin']:.1e})" for tie in row["ties"])
    return text + (f", {row['defects']} DEFECTS" if row["defects"] else "")


if __name__ == "__main__":
    script.main(run)
