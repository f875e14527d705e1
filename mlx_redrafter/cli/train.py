"""`mlx-redrafter train`: distil a drafter from a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_redrafter.cli import common
from mlx_redrafter.errors import InputError
from mlx_redrafter.training.distil import Recipe, Report, cache_features, distil
from mlx_redrafter.training.trainer import TrainOptions

if TYPE_CHECKING:
    from mlx_redrafter.training.trainer import Progress

_REPORT_EVERY = 20  # steps


def train(
    corpus: Annotated[
        list[Path],
        typer.Option(
            "--corpus",
            metavar="FILE",
            help="Token rows that the model wrote: .npz with ids and role. May be given again.",
        ),
    ],
    model: common.ModelOption = None,
    dtype: common.DtypeOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="Where the drafter goes.")
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            "--features",
            metavar="FOLDER",
            help="Keep the model's hidden states here (1.2 kB a token at 576 dimensions).",
        ),
    ] = None,
    features_only: Annotated[
        str | None,
        typer.Option(
            "--features-only",
            metavar="I/N",
            help="Only compute the I-th of N parts of the hidden states, then stop.",
        ),
    ] = None,
    num_draft_layers: Annotated[
        int, typer.Option(help="Residual blocks of the drafter.")
    ] = Recipe.num_draft_layers,
    exit_dim: Annotated[
        int | None, typer.Option(help="Default: the model's hidden size.", show_default=False)
    ] = Recipe.exit_dim,
    draft_vocab: Annotated[
        int, typer.Option(help="Most frequent tokens that it can draft.")
    ] = Recipe.draft_vocab,
    horizon: Annotated[int, typer.Option(help="Depths trained.")] = TrainOptions.horizon,
    epochs: Annotated[float, typer.Option(help="Passes over the corpus.")] = TrainOptions.epochs,
    batch: Annotated[
        int, typer.Option(help="Positions per step.")
    ] = TrainOptions.anchors_per_batch,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = TrainOptions.learning_rate,
    max_shards: Annotated[
        int | None,
        typer.Option(help="Use only so many shards of 64 rows. Default: all.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and order.")] = TrainOptions.seed,
) -> None:
    """Distil a drafter from a model's own text."""
    recipe = Recipe(
        num_draft_layers=num_draft_layers,
        exit_dim=exit_dim,
        draft_vocab=draft_vocab,
        options=TrainOptions(
            horizon=horizon,
            epochs=epochs,
            anchors_per_batch=batch,
            learning_rate=learning_rate,
            seed=seed,
        ),
    )
    report = Report(features=_features, training=_training)
    if features_only is not None:
        if features is None or output is not None:
            raise InputError("--features-only needs --features and no --output.")
        part = _part(features_only)
        cache_features(common.load_pair(model, None, dtype), corpus, features, part, report)
        return
    if output is None:
        raise InputError("--output is missing: name the folder for the drafter.")
    pair = common.load_pair(model, None, dtype)
    result = distil(pair, corpus, output, recipe, features, max_shards, report)
    shares = ", ".join(f"{share:.3f}" for share in result.agreement)
    common.note(f"{result.parameters:,} parameters; agreement by depth on held-out rows: {shares}")
    common.note(f"a greedy chain should give {result.expected_tokens_per_step:.2f} tokens per step")
    print(result.folder)


def _part(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise InputError(f"--features-only is {text}; it must be like 1/2.")
    return int(index) - 1, int(count)


def _features(done: int, total: int) -> None:
    common.note(f"hidden states: {done} of {total} shards")


def _training(progress: Progress) -> None:
    if progress.step % _REPORT_EVERY == 0 or progress.step == progress.steps:
        left = progress.seconds / progress.step * (progress.steps - progress.step)
        common.note(
            f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, "
            f"learning rate {progress.learning_rate:.1e}, {left / 60:.0f} min left"
        )
