"""What each choice in a drafter's training is worth: one thing changed at a time.

Every variant trains a fresh drafter on the same shards of --corpus (their hidden states are kept in
--features) and is replayed on the same held-out rows. Tokens per step are those of decoding that
text at token budgets of 2, 7 and 15; the cost is of two draft steps, relative to one step of the
target, measured in turn. No bar: a table to choose by.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from mlx_redrafter.benchmarking.scripts import Script, say, table

BUDGETS = ((2, 2, 2), (5, 3, 7), (8, 4, 15))

# name -> what differs from the first one, which is the base
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "loss: half acceptance": {"acceptance_weight": 0.5},
    "loss: acceptance": {"acceptance_weight": 1.0},
    "vocabulary 2,048": {"draft_vocab": 2048},
    "vocabulary 8,192": {"draft_vocab": 8192},
    "1 residual block": {"blocks": 1},
    "0 residual blocks": {"blocks": 0},
    "exit 1,152": {"exit": 1152},
    "tied head": {"tie_head": True},
    "half the data": {"data": 0.5},
    "twice the data": {"data": 2.0},
    "moving average 0.99": {"average_decay": 0.99},
}

script = Script("ablation", __doc__)
add = script.parser.add_argument
add("--corpus", type=Path, required=True, metavar="FILE", help="token rows, .npz")
add("--features", type=Path, required=True, metavar="FOLDER", help="hidden states are kept here")
add("--shards", type=int, default=10, help="of 64 rows, for the base (%(default)s)")
add("--batch", type=int, default=512, help="positions in a step (%(default)s)")
add("--epochs", type=float, default=1.0, help="passes (%(default)s)")
add("--draft-vocab", type=int, default=4096, help="of the base (%(default)s)")
add("--max-steps", type=int, default=4000, help="replayed for each setting (%(default)s)")
add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="which (all)")


def run(args: argparse.Namespace) -> int:
    from mlx_redrafter.decoding.options import DraftOptions
    from mlx_redrafter.load import load
    from mlx_redrafter.training.corpus import read_corpus
    from mlx_redrafter.training.features import extract, shards

    pair = load(args.model, None, args.dtype)
    corpus = read_corpus(args.corpus, pair.target.vocab_size)
    wanted = shards([corpus], args.features, pair.target, pair.fingerprint)
    most = max(VARIANTS[name].get("data", 1.0) for name in args.variants)
    held_out, trained = wanted[:2], wanted[2 : 2 + round(most * args.shards)]
    extract(pair.target, [*held_out, *trained])
    drafts = [DraftOptions(*budget) for budget in BUDGETS]
    columns = ["variant", "parameters", "loss", "agreement 1, 2, 3"]
    columns += [f"tokens per step, {w},{n},{b}" for w, n, b in BUDGETS]
    columns.append("two draft steps")
    results = []
    for name in args.variants:
        result = _variant(args, pair, corpus, trained, held_out, drafts, VARIANTS[name])
        results.append({"variant": name, **result})
        say(f"{name}: {result}")
    rows = [
        [
            result["variant"],
            f"{result['parameters']:,}",
            result["loss"],
            ", ".join(f"{share:.3f}" for share in result["agreement"]),
            *(f"{tokens:.2f}" for tokens in result["tokens_per_step"]),
            f"{result['cost']:.1%}",
        ]
        for result in results
    ]
    say("\n" + table(columns, rows))
    script.report(args, {"results": results})
    return 0


def _variant(
    args: argparse.Namespace,
    pair: Any,
    corpus: Any,
    trained: list[Any],
    held_out: list[Any],
    drafts: list[Any],
    change: dict[str, Any],
) -> dict[str, Any]:
    import mlx.core as mx

    from mlx_redrafter.decoding.drafter import Drafter
    from mlx_redrafter.generate import eos_tokens
    from mlx_redrafter.training.acceptance import simulate
    from mlx_redrafter.training.size import DrafterSize, measure_costs
    from mlx_redrafter.training.trainer import DrafterTrainer, TrainOptions
    from mlx_redrafter.training.vocabulary import count_tokens, draft_vocabulary

    options = TrainOptions(
        horizon=3, anchors_per_batch=args.batch, epochs=args.epochs, validations=1
    )
    names = {field.name for field in dataclasses.fields(TrainOptions)}
    options = dataclasses.replace(options, **{k: v for k, v in change.items() if k in names})
    size = DrafterSize(
        exit_dim=change.get("exit", pair.target.hidden_size),
        num_draft_layers=change.get("blocks", 2),
        draft_vocab=change.get("draft_vocab", args.draft_vocab),
        tie_head=change.get("tie_head", False),
    )
    counts = count_tokens([corpus], pair.target.vocab_size)
    tokens = draft_vocabulary(counts, size.draft_vocab, pair.tokenizer).tokens
    mx.random.seed(0)
    drafter = Drafter(size.config(pair.target), mx.array(tokens))
    if size.tie_head:
        drafter.bind_head(pair.target.head)
    trainer = DrafterTrainer(pair.target, drafter, options)
    data = trained[: round(change.get("data", 1.0) * args.shards)]
    outcome = trainer.train(data, held_out)
    found = [
        simulate(
            pair.target,
            drafter,
            held_out,
            draft,
            end_tokens=eos_tokens(pair),
            max_steps=args.max_steps,
        )
        for draft in drafts
    ]
    draft_step, target_step = measure_costs(pair.target, drafter)
    return {
        "parameters": drafter.num_parameters,
        "loss": outcome.best.loss,
        "agreement": outcome.best.agreement,
        "tokens_per_step": [each.overall.tokens_per_step for each in found],
        "cost": 2 * draft_step / target_step,
    }


if __name__ == "__main__":
    script.main(run)
