"""`mlx-redrafter train`: distil a drafter from a model, and prove what it gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_redrafter.cli import common
from mlx_redrafter.cli.train_display import TrainDisplay
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.errors import InputError
from mlx_redrafter.training import publish
from mlx_redrafter.training.data import DataOptions
from mlx_redrafter.training.distil import Distilled, Recipe, Run, Silent, Sources
from mlx_redrafter.training.trainer import TrainOptions
from mlx_redrafter.training.workers import Workers

_GIGABYTE = 10**9


def _files(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="FILE", help=f"{text} May be given again.")


def _data(text: str, default: object) -> Any:
    return typer.Option(help=f"{text} Default: {default}.", show_default=False)


def _size(text: str) -> Any:
    return typer.Option(help=f"{text} Default: what suits the model.", show_default=False)


def _training(text: str) -> Any:
    return typer.Option(help=text)


def train(
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Where the drafter goes. Required."),
    ] = None,
    model: common.ModelOption = None,
    dtype: common.DtypeOption = None,
    adapter_path: common.AdapterOption = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what the run takes, then stop.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Answer tokens that the model writes to learn from. "
            f"Default: {DataOptions.tokens:,}, or none where --corpus is given alone.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        _files("--prompts", "Prompts for the model to answer: JSON lines, ShareGPT, plain text."),
    ] = None,
    text: Annotated[
        list[Path] | None, _files("--text", "Text to train on as it is, not the model's own.")
    ] = None,
    corpus: Annotated[
        list[Path] | None,
        _files("--corpus", "Token rows that the model wrote before: .npz with ids and role."),
    ] = None,
    row_length: Annotated[int | None, _data("Tokens in a row.", DataOptions.row_length)] = None,
    rows_per_shard: Annotated[
        int | None,
        _data("Rows written at a time: a kill loses no more.", DataOptions.rows_per_shard),
    ] = None,
    temperatures: Annotated[
        str | None,
        _data(
            "Of the answers, in equal shares, like 0,0.5,1.",
            ",".join(f"{t:g}" for t in DataOptions.temperatures),
        ),
    ] = None,
    self_prompted: Annotated[
        float | None,
        _data("Share of rows that the model begins, beside --prompts.", DataOptions.self_prompted),
    ] = None,
    max_shards: Annotated[
        int | None,
        typer.Option(help="Use only so many shards of 64 rows. Default: all.", show_default=False),
    ] = None,
    exit_dim: Annotated[int | None, _size("Width of the exit.")] = None,
    num_draft_layers: Annotated[int | None, _size("Residual blocks.")] = None,
    draft_vocab: Annotated[int | None, _size("Tokens that can be drafted.")] = None,
    tie_head: Annotated[
        bool,
        typer.Option("--tie-head", help="Use the model's own head, not a trained one."),
    ] = Recipe.tie_head,
    q_bits: Annotated[
        int | None,
        typer.Option(
            help="Pack the drafter to 4 or 8 bits. Default: what suits the model.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="DRAFTER", help="Start from an earlier drafter, by name or folder."
        ),
    ] = None,
    horizon: Annotated[int, _training("Depths trained, 1 to 8.")] = TrainOptions.horizon,
    depth_decay: Annotated[
        float, _training("Weight of each depth, relative to the one before.")
    ] = TrainOptions.depth_decay,
    acceptance_weight: Annotated[
        float, _training("Share of the acceptance loss; the rest is soft cross-entropy.")
    ] = TrainOptions.acceptance_weight,
    epochs: Annotated[float, _training("Passes over the text.")] = TrainOptions.epochs,
    batch: Annotated[
        int, _training("Positions that a process takes at a time.")
    ] = TrainOptions.anchors_per_batch,
    accumulate: Annotated[
        int, _training("Batches that make one step.")
    ] = TrainOptions.accumulate_batches,
    learning_rate: Annotated[float, _training("At its peak.")] = TrainOptions.learning_rate,
    average_decay: Annotated[
        float, _training("Of the weights' moving average; 0: none.")
    ] = TrainOptions.average_decay,
    validations: Annotated[int, _training("In the whole run.")] = TrainOptions.validations,
    patience: Annotated[
        int, _training("Validations without gain before it stops.")
    ] = TrainOptions.patience,
    seed: Annotated[int, _training("Of text, weights and order.")] = TrainOptions.seed,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep text, hidden states and checkpoints here. Default: beside the output, "
            "until it is done.",
            show_default=False,
        ),
    ] = None,
    features_gb: Annotated[
        float,
        typer.Option(
            "--features-gb",
            help="Most that hidden states may take on disk; the rest is computed anew.",
        ),
    ] = Recipe.features_bytes / _GIGABYTE,
    features_only: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Only compute the I-th of N parts of the hidden states of --corpus into --work.",
        ),
    ] = None,
    proof_prompts: Annotated[
        int,
        typer.Option(help="Prompts decoded at the end, with the drafter and without."),
    ] = Recipe.proof_prompts,
    beam_width: common.BeamWidthOption = None,
    beam_length: common.BeamLengthOption = None,
    token_budget: common.TokenBudgetOption = None,
    report_to: Annotated[
        Path | None,
        typer.Option("--report-to", metavar="FILE", help="Log as JSON lines."),
    ] = None,
    register: Annotated[
        bool,
        typer.Option(help="Let the model find this drafter from now on."),
    ] = True,
    upload_repo: Annotated[
        str | None,
        typer.Option(
            "--upload-repo",
            metavar="NAME",
            help="Upload to this repository of the Hugging Face Hub.",
        ),
    ] = None,
) -> None:
    """Distil a drafter from a model, with no data set: the model writes the text it learns from.
    The same command goes on where a killed one stopped."""
    if output is None:
        raise InputError("--output is missing: name the folder for the drafter.")
    if not math.isfinite(features_gb):
        raise InputError(f"--features-gb is {features_gb}; it must be a number of gigabytes.")
    recipe = Recipe(
        data=_data_options(
            seed,
            bool(corpus) and not prompts and not text,
            tokens=tokens,
            row_length=row_length,
            rows_per_shard=rows_per_shard,
            temperatures=temperatures,
            self_prompted=self_prompted,
        ),
        options=TrainOptions(
            horizon=horizon,
            depth_decay=depth_decay,
            acceptance_weight=acceptance_weight,
            anchors_per_batch=batch,
            accumulate_batches=accumulate,
            epochs=epochs,
            learning_rate=learning_rate,
            average_decay=average_decay,
            validations=validations,
            patience=patience,
            seed=seed,
        ),
        exit_dim=exit_dim,
        num_draft_layers=num_draft_layers,
        draft_vocab=draft_vocab,
        tie_head=tie_head,
        bits=q_bits,
        draft=DraftOptions.fitting(beam_width, beam_length, token_budget),
        features_bytes=int(features_gb * _GIGABYTE),
        proof_prompts=proof_prompts,
        max_shards=max_shards,
    )
    sources = Sources(tuple(corpus or ()), tuple(prompts or ()), tuple(text or ()))
    part = None if features_only is None else _part(features_only)
    if part is not None and (work is None or not corpus):
        raise InputError("--features-only needs --corpus and --work.")
    if upload_repo is not None:
        publish.check(upload_repo)
    workers = Workers.launched()
    pair = common.load_pair(model, start, dtype, adapter_path, plain=start is None)
    if start is not None and pair.drafter is None:
        raise InputError(f"there is nothing to start --from: {pair.drafting_reason}.")
    with TrainDisplay() as display:
        run = Run(
            pair,
            output,
            recipe,
            sources,
            work=work,
            earlier=pair.drafter,
            report_to=report_to,
            workers=workers,
            display=display if workers.is_first else Silent(),
        )
        if plan:
            found = run.plan()
            display.note("\n".join(found.lines()))
            found.refuse()
            return
        if part is not None:
            run.cache_features(part)
            return
        result = run.train(registered=register)
        if result.folder is not None:
            display.note(_summary(result))
    if result.folder is not None:
        print(result.folder)
        if upload_repo is not None:
            common.note(f"uploaded to {publish.publish(result.folder, upload_repo)}")


def _data_options(seed: int, complete: bool, **options: Any) -> DataOptions | None:
    """What the model is to write; None where the corpora are ``complete`` and nothing was asked."""
    given = {name: value for name, value in options.items() if value is not None}
    if complete and "tokens" not in given:
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise InputError(
                f"{names} has no effect with --corpus alone: give --tokens, or drop it."
            )
        return None
    if "temperatures" in given:
        given["temperatures"] = _numbers(given["temperatures"])
    return DataOptions(**given, seed=seed)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--temperatures is {text}; it must be like 0,0.5,1.") from None


def _part(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise InputError(f"--features-only is {text}; it must be like 1/2.")
    return int(index) - 1, int(count)


def _summary(result: Distilled) -> str:
    agreement = ", ".join(f"{share:.3f}" for share in result.outcome.best.agreement)
    lines = [f"{result.parameters:,} parameters; agreement by depth on held-out rows: {agreement}"]
    if result.outcome.stopped < result.outcome.steps:
        lines.append(
            f"stopped early, after {result.outcome.stopped} of {result.outcome.steps} steps"
        )
    if result.acceptance is not None:
        tokens = result.acceptance.overall.tokens_per_step
        lines.append(f"tokens per step on held-out text: {tokens:.2f}")
    for each in () if result.proof is None else result.proof.results:
        steps = (
            "" if each.tokens_per_step is None else f"{each.tokens_per_step:.2f} tokens per step"
        )
        gain = "" if each.gain is None else f", {each.gain} times as fast as plain decoding"
        lines.append(f"decoding at temperature {each.temperature:g}: {steps}{gain}")
    return "\n".join(lines)
