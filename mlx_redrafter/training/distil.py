"""From a target and token rows to a drafter's folder: the steps of training, in order."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.errors import CompatibilityError, InputError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.load import ModelPair
from mlx_redrafter.machine.files import atomic_folder
from mlx_redrafter.training.corpus import read_corpus
from mlx_redrafter.training.features import Shard, extract, shards
from mlx_redrafter.training.trainer import (
    VALIDATION_SHARDS,
    DrafterTrainer,
    Progress,
    TrainOptions,
)
from mlx_redrafter.training.vocabulary import count_tokens, draft_vocabulary


@dataclass(frozen=True)
class Recipe:
    """The drafter's size and how it is trained. ``exit_dim`` None: the target's hidden size."""

    num_draft_layers: int = 2
    exit_dim: int | None = None
    draft_vocab: int = 4096
    options: TrainOptions = field(default_factory=TrainOptions)


@dataclass(frozen=True)
class Report:
    """What to show while it runs; does nothing unless given."""

    features: Callable[[int, int], None] = lambda done, total: None
    training: Callable[[Progress], None] = lambda progress: None


@dataclass(frozen=True)
class Distilled:
    """agreement: per depth, on rows never trained on (see ``DrafterTrainer.agreement``)."""

    folder: Path
    parameters: int
    agreement: list[float]

    @property
    def expected_tokens_per_step(self) -> float:
        """Of a greedy chain as long as the horizon, if depths were independent."""
        return 1.0 + sum(accumulate(self.agreement, mul))


def cache_features(
    pair: ModelPair, files: list[Path], folder: Path, part: tuple[int, int], report: Report
) -> None:
    """Only compute hidden states into ``folder``: the i-th of n parts, ``part`` = (i, n)."""
    extract(_trainable(pair).target, _shards(pair, files, folder), part, report.features)


def distil(
    pair: ModelPair,
    files: list[Path],
    output: Path,
    recipe: Recipe,
    features: Path | None = None,
    max_shards: int | None = None,
    report: Report | None = None,
) -> Distilled:
    """Train a drafter for ``pair.target`` on the corpus ``files`` and write it to ``output``.

    ``features`` keeps the hidden states for other runs; None computes them into a temporary folder.
    ``max_shards`` uses only the first so many shards. The output appears whole or not at all.
    """
    report = report or Report()
    target = _trainable(pair).target
    with ExitStack() as stack:
        folder = features or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wanted = _shards(pair, files, folder)[:max_shards]
        if len(wanted) <= VALIDATION_SHARDS:
            raise InputError(
                f"the corpus has {len(wanted)} shards and {VALIDATION_SHARDS} are held out for "
                "validation: give more text."
            )
        extract(target, wanted, progress=report.features)
        corpora = list({id(shard.corpus): shard.corpus for shard in wanted}.values())
        mx.random.seed(recipe.options.seed)
        size = target.hidden_size
        count = min(recipe.draft_vocab, target.vocab_size)
        config = DrafterConfig(
            hidden_size=size,
            vocab_size=target.vocab_size,
            exit_dim=recipe.exit_dim or size,
            num_draft_layers=recipe.num_draft_layers,
            draft_vocab=count,
            target=made_for(pair),
        )
        counts = count_tokens(corpora, target.vocab_size)
        vocabulary = draft_vocabulary(counts, count, pair.tokenizer)
        drafter = Drafter(config, mx.array(vocabulary.tokens))
        trainer = DrafterTrainer(target, drafter, recipe.options)
        trainer.train(wanted[VALIDATION_SHARDS:], report.training)
        agreement = trainer.agreement(wanted[:VALIDATION_SHARDS])
    result = Distilled(output, drafter.num_parameters, agreement)
    with atomic_folder(output) as temporary:
        drafter.save(temporary, dtype=mx.float16)
        (temporary / "README.md").write_text(_card(pair, files, recipe, result), encoding="utf-8")
    return result


def made_for(pair: ModelPair) -> dict[str, Any]:
    """What a drafter's config says of its target, for `load` and the registry to tell by."""
    values: dict[str, Any] = {
        "name": pair.name,
        "model_type": pair.config.get("model_type"),
        "tokenizer": fingerprints.of_vocabulary(pair.tokenizer.get_vocab()),
        "fingerprint": pair.fingerprint,
    }
    if pair.adapter_path is not None:
        values["adapter"] = pair.adapter_path.resolve().name
    return values


def _trainable(pair: ModelPair) -> ModelPair:
    if not pair.target.supports_trees:
        raise CompatibilityError(
            f"{pair.name} cannot use a drafter, so none is trained: {pair.target.reason}."
        )
    return pair


def _shards(pair: ModelPair, files: list[Path], folder: Path) -> list[Shard]:
    corpora = [read_corpus(path, pair.target.vocab_size) for path in files]
    names = [corpus.name for corpus in corpora]
    if len(set(names)) != len(names):
        raise InputError("two corpus files have the same name: rename one.")
    return shards(corpora, folder)


def _card(pair: ModelPair, files: list[Path], recipe: Recipe, result: Distilled) -> str:
    settings = {**dataclasses.asdict(recipe), **dataclasses.asdict(recipe.options)}
    settings.pop("options")
    rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
    depths = "\n".join(f"| {i} | {a:.3f} |" for i, a in enumerate(result.agreement, start=1))
    return f"""# Drafter for {pair.name}

A recurrent drafter (ReDrafter) of {result.parameters:,} parameters, distilled from the target's own
distribution on {", ".join(path.name for path in files)}.

| setting | value |
|---|---|
{rows}

Share of held-out positions where its first choice is the target's, given the text up to there and
within its vocabulary:

| depth | agreement |
|---|---|
{depths}
"""
