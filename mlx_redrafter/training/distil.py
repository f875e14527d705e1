"""From a target to a proven drafter: the steps of training, in order.

Everything that takes long is kept in the run's work folder, so that the same call goes on where a
killed one stopped.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_redrafter import registry
from mlx_redrafter.benchmarking import environment
from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.errors import CompatibilityError, InputError, RedrafterError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.generate import eos_tokens
from mlx_redrafter.load import ModelPair
from mlx_redrafter.machine.files import atomic_folder
from mlx_redrafter.training import curves, publish
from mlx_redrafter.training.acceptance import Acceptance, simulate
from mlx_redrafter.training.card import CardFacts, DataFacts, card
from mlx_redrafter.training.checkpoint import Checkpoint
from mlx_redrafter.training.corpus import ASSISTANT, Corpus, read_corpus
from mlx_redrafter.training.data import DataOptions, write_data
from mlx_redrafter.training.features import Shard, extract, shards
from mlx_redrafter.training.log import TrainingLog
from mlx_redrafter.training.plan import WRITTEN, Plan, Work
from mlx_redrafter.training.prompts import read_prompts, read_texts
from mlx_redrafter.training.proof import Proof, openings, prove
from mlx_redrafter.training.size import DrafterSize
from mlx_redrafter.training.trainer import (
    DrafterTrainer,
    Outcome,
    Progress,
    TrainOptions,
    Validation,
    Watch,
)
from mlx_redrafter.training.vocabulary import count_tokens, draft_vocabulary
from mlx_redrafter.training.workers import Workers

_HELD_OUT = 2  # shards, never trained on: the first ones
_CURVES = "curves.png"
_LOG = "log.jsonl"


@dataclass(frozen=True)
class Sources:
    """Files to train on. corpora: token rows that the target wrote already; prompts: for the target
    to answer; texts: taken as they are. None at all: the target thinks of its own prompts."""

    corpora: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()
    texts: tuple[Path, ...] = ()

    @property
    def names(self) -> list[str]:
        return [path.name for path in (*self.corpora, *self.prompts, *self.texts)]


@dataclass(frozen=True)
class Recipe:
    """What a drafter is made by. Of its size, None is what suits the target (``DrafterSize``).

    data: None where the corpora given are all. draft: the setting that acceptance and gain are
    measured at. features_bytes: what hidden states may take on disk; the rest is computed again in
    every pass. proof_prompts: decoded for the proof; 0: none. max_shards: of 64 rows, the first.
    """

    data: DataOptions | None = field(default_factory=DataOptions)
    options: TrainOptions = field(default_factory=TrainOptions)
    exit_dim: int | None = None
    num_draft_layers: int | None = None
    draft_vocab: int | None = None
    tie_head: bool = False
    bits: int | None = None
    draft: DraftOptions = field(default_factory=DraftOptions)
    features_bytes: int = 64 * 10**9
    proof_prompts: int = 8
    max_shards: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (None, 4, 8):
            raise InputError(f"bits is {self.bits}; it must be 4 or 8.")
        for name in ("exit_dim", "num_draft_layers", "draft_vocab", "max_shards"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "num_draft_layers" else 1):
                raise InputError(f"{name} is {value}; it must be positive.")
        if self.features_bytes < 0 or self.proof_prompts < 0:
            raise InputError("features_bytes and proof_prompts cannot be negative.")

    def size(self, pair: ModelPair, earlier: Drafter | None = None) -> DrafterSize:
        """``earlier``: the drafter to start from, whose size is kept where none is given."""
        chosen = DrafterSize.for_target(pair.target)
        if earlier is not None:
            old = earlier.config
            chosen = DrafterSize(
                old.exit_dim, old.num_draft_layers, old.head_size, old.tie_head, old.quantization
            )
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("exit_dim", "num_draft_layers", "draft_vocab")
            if getattr(self, name) is not None
        }
        if self.tie_head:
            given["tie_head"] = True
        if self.bits is not None:
            given["quantization"] = {"bits": self.bits, "group_size": 64}
        return dataclasses.replace(chosen, **given)


class Display(Protocol):
    """What is shown while it runs (``cli.train_display.TrainDisplay``)."""

    def stage(self, name: str, unit: str) -> Callable[[int, int], None]: ...
    def training(self, progress: Progress) -> None: ...
    def validated(self, validation: Validation) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str, unit: str) -> Callable[[int, int], None]:
        return lambda done, total: None

    def training(self, progress: Progress) -> None: ...
    def validated(self, validation: Validation) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Distilled:
    """``folder`` is None in a process that is not the first of several: it writes none."""

    folder: Path | None
    parameters: int
    outcome: Outcome
    acceptance: Acceptance | None = None
    proof: Proof | None = None


class Run:
    """One drafter's training. ``plan`` tells what it takes, ``train`` does it.

    ``work`` keeps what takes long (None: a folder beside ``output``, removed at the end).
    ``earlier`` is a drafter to start from, ``report_to`` a second place for the log.
    Raises CompatibilityError where the target can use no drafter.
    """

    def __init__(
        self,
        pair: ModelPair,
        output: Path,
        recipe: Recipe | None = None,
        sources: Sources | None = None,
        *,
        work: Path | None = None,
        earlier: Drafter | None = None,
        report_to: Path | None = None,
        workers: Workers | None = None,
        display: Display | None = None,
    ) -> None:
        if not pair.target.supports_trees:
            raise CompatibilityError(
                f"{pair.name} cannot use a drafter, so none is trained: {pair.target.reason}."
            )
        self.pair = pair
        self.output = output
        self.recipe = recipe or Recipe()
        self.sources = sources or Sources()
        self.work = work or output.with_name(f"{output.name}.work")
        self._keeps_work = work is not None
        self.earlier = earlier
        self.workers = workers or Workers()
        self.display = display or Silent()
        self._logs = [self.work / _LOG, *([report_to] if report_to else [])]
        self.size = self.recipe.size(pair, earlier)
        self.config = self.size.config(pair.target, made_for(pair))
        _check_output(output)

    def plan(self, measure: bool = True) -> Plan:
        """What the run takes, before anything is written."""
        given = self._given() if self.workers.is_first else []
        rows = sum(corpus.num_rows for corpus in given)
        tokens = sum(corpus.ids.size for corpus in given)
        new = 0
        if self.recipe.data is not None:
            length = self.recipe.data.row_length
            new = math.ceil(self.recipe.data.tokens / (WRITTEN * length))
            tokens += new * length
        options = self.recipe.options
        work = Work(
            rows=rows + new,
            row_tokens=max(1, round(tokens / max(rows + new, 1))),
            new_rows=new,
            epochs=options.epochs,
            anchors_per_batch=options.anchors_per_batch,
            horizon=options.horizon,
            features_budget=self.recipe.features_bytes,
        )
        return Plan.of(self.pair.target, self.size, work, self.output.resolve().parent, measure)

    def train(self, registered: bool = True, repository: str | None = None) -> Distilled:
        """Do it all; the output appears whole or not at all.

        ``registered``: the model finds its drafter from then on. ``repository``: of the Hub, to
        upload to.
        """
        if repository is not None:
            publish.check_repo(repository)
        self.plan(measure=False).refuse()
        corpora = self.workers.share_corpora(self._corpora() if self.workers.is_first else [])
        held_out, trained = self._split(corpora)
        self._extract(held_out, trained)
        drafter = self._fresh_drafter(corpora)
        with _Logs(self._logs if self.workers.is_first else []) as logs:
            logs.write("start", target=self.pair.name, recipe=self._settings)
            outcome = self._fit(drafter, trained, held_out, corpora, logs)
            if not self.workers.is_first:
                return Distilled(None, drafter.num_parameters, outcome)
            result = self._finish(drafter, outcome, held_out, corpora, logs)
        if registered:
            registry.register_drafter(self.output, self.pair.name, self.pair.adapter_path)
        if repository is not None:
            self.display.note(f"uploaded to {publish.publish(self.output, repository)}")
        if not self._keeps_work:
            shutil.rmtree(self.work, ignore_errors=True)
        return result

    def cache_features(self, part: tuple[int, int]) -> None:
        """Only compute hidden states: the i-th of n parts, ``part`` = (i, n)."""
        held_out, trained = self._split(self._given())
        extract(
            self.pair.target,
            [*held_out, *trained],
            part,
            self.recipe.features_bytes,
            self.display.stage("hidden states", "tokens"),
        )

    def _given(self) -> list[Corpus]:
        corpora = [read_corpus(path, self.pair.target.vocab_size) for path in self.sources.corpora]
        names = [corpus.name for corpus in corpora]
        if len(set(names)) != len(names):
            raise InputError("two corpus files have the same name: rename one.")
        return corpora

    def _corpora(self) -> list[Corpus]:
        """The files given, then what the target writes now."""
        corpora = self._given()
        if self.recipe.data is not None:
            prompts = [p for path in self.sources.prompts for p in read_prompts(path)]
            texts = [text for path in self.sources.texts for text in read_texts(path)]
            files = write_data(
                self.pair,
                self.work / "data",
                self.recipe.data,
                prompts,
                texts,
                self.display.stage("text", "tokens"),
            )
            corpora += [read_corpus(path, self.pair.target.vocab_size) for path in files]
        return corpora

    def _split(self, corpora: list[Corpus]) -> tuple[list[Shard], list[Shard]]:
        """Shards held out and trained on."""
        wanted = shards(corpora, self.work / "features", self.pair.target)
        wanted = wanted[: self.recipe.max_shards]
        if len(wanted) < 2:
            raise InputError(
                "the text is too short: one shard of rows is held out for validation, and none is "
                "left to train on. Give more text."
            )
        count = min(_HELD_OUT, max(1, len(wanted) // 8))
        return wanted[:count], wanted[count:]

    def _extract(self, held_out: list[Shard], trained: list[Shard]) -> None:
        """Hidden states of this process's own shards; the first one needs all that are held out."""
        owns = self.workers.owns
        mine = [s for i, s in enumerate(held_out) if owns(i) or self.workers.is_first]
        mine += [s for i, s in enumerate(trained) if owns(i)]
        extract(
            self.pair.target,
            mine,
            budget_bytes=self.recipe.features_bytes,
            progress=self.display.stage("hidden states", "tokens"),
        )

    def _fresh_drafter(self, corpora: list[Corpus]) -> Drafter:
        mx.random.seed(self.recipe.options.seed)
        config = dataclasses.replace(self.config, quantization=None)  # packed once it is trained
        assert config.draft_vocab is not None
        counts = count_tokens(corpora, config.vocab_size)
        vocabulary = draft_vocabulary(counts, config.draft_vocab, self.pair.tokenizer)
        self.display.note(
            f"drafter: {self.size}; it can draft {vocabulary.coverage:.1%} of what was written"
        )
        drafter = Drafter(config, mx.array(vocabulary.tokens))
        if config.tie_head:
            drafter.bind_head(self.pair.target.head)
        return drafter

    def _fit(
        self,
        drafter: Drafter,
        trained: list[Shard],
        held_out: list[Shard],
        corpora: list[Corpus],
        logs: _Logs,
    ) -> Outcome:
        def step(progress: Progress) -> None:
            logs.write("step", progress)
            self.display.training(progress)

        def validation(found: Validation) -> None:
            logs.write("validation", found)
            self.display.validated(found)

        def resumed(done: int) -> None:
            logs.truncate(done)
            logs.write("resume", step=done)
            self.display.note(f"going on after step {done}")

        trainer = DrafterTrainer(
            self.pair.target, drafter, self.recipe.options, self.workers, self.earlier
        )
        recipe = fingerprints.of_values(
            self._settings,
            self.workers.count,
            self.pair.fingerprint,
            [fingerprints.of_values(corpus.ids.tobytes().hex()) for corpus in corpora],
            None if self.earlier is None else _sketch(self.earlier),
        )
        checkpoint = Checkpoint(self.work / "checkpoint", recipe)
        if not checkpoint.folder.exists():
            logs.truncate(0)  # steps of a run that was killed before its first checkpoint
        return trainer.train(trained, held_out, checkpoint, Watch(step, validation, resumed))

    def _finish(
        self,
        drafter: Drafter,
        outcome: Outcome,
        held_out: list[Shard],
        corpora: list[Corpus],
        logs: _Logs,
    ) -> Distilled:
        """Write the output: weights, proof, curves, log and card."""
        if self.size.quantization is not None:
            drafter.quantize(self.size.quantization)
        with atomic_folder(self.output) as folder:
            drafter.save(folder, dtype=mx.float16)
            loaded = Drafter.load(folder, dtype=self.pair.target.dtype)
            if loaded.config.tie_head:
                loaded.bind_head(self.pair.target.head)
            pair = dataclasses.replace(self.pair, drafter=loaded, drafting_reason=None)
            acceptance = self._simulate(loaded, held_out)
            if acceptance is not None:
                logs.write("acceptance", acceptance)
            proof = self._prove(pair, held_out)
            if proof is not None:
                logs.write("proof", proof)
            result = Distilled(self.output, drafter.num_parameters, outcome, acceptance, proof)
            shutil.copyfile(self.work / _LOG, folder / _LOG)
            picture = self._draw(folder / _CURVES)
            text = card(self._facts(folder, result, corpora, held_out, picture))
            (folder / "README.md").write_text(text, encoding="utf-8")
        return result

    def _simulate(self, drafter: Drafter, held_out: list[Shard]) -> Acceptance | None:
        try:
            return simulate(
                self.pair.target,
                drafter,
                held_out,
                self.recipe.draft,
                end_tokens=eos_tokens(self.pair),
            )
        except InputError as error:
            self.display.note(f"acceptance was not measured: {error}")
            return None

    def _prove(self, pair: ModelPair, held_out: list[Shard]) -> Proof | None:
        if not self.recipe.proof_prompts:
            return None
        prompts = openings(held_out, self.recipe.proof_prompts)
        if not prompts:
            self.display.note("nothing was decoded for the proof: the held-out rows have no prompt")
            return None
        show = self.display.stage("proof", "answers")
        return prove(pair, prompts, self.recipe.draft, progress=show)

    def _draw(self, path: Path) -> str | None:
        try:
            curves.draw(self.work / _LOG, path)
        except RedrafterError as error:
            self.display.note(f"no curves: {error}")
            return None
        return path.name

    @property
    def _settings(self) -> dict[str, Any]:
        """What the weights depend on, as the card shows it."""
        recipe, options = self.recipe, dataclasses.asdict(self.recipe.options)
        size = {
            name: value
            for name, value in dataclasses.asdict(self.size).items()
            if value is not None
        }
        data = {} if recipe.data is None else {"data": dataclasses.asdict(recipe.data)}
        shards_ = {} if recipe.max_shards is None else {"max_shards": recipe.max_shards}
        start = {"started from": "an earlier drafter"} if self.earlier is not None else {}
        return {**size, **options, **data, **shards_, **start}

    def _facts(
        self,
        folder: Path,
        result: Distilled,
        corpora: list[Corpus],
        held_out: list[Shard],
        picture: str | None,
    ) -> CardFacts:
        temperatures = np.concatenate([corpus.temperature for corpus in corpora])
        counts = Counter(None if np.isnan(t) else round(float(t), 2) for t in temperatures)
        best = result.outcome.best
        return CardFacts(
            target=self.pair.name,
            name=self.output.name,
            parameters=result.parameters,
            size_bytes=(folder / "model.safetensors").stat().st_size,
            recipe={**self._settings, "steps": result.outcome.stopped, "best step": best.step},
            data=DataFacts(
                rows=sum(corpus.num_rows for corpus in corpora),
                tokens=sum(int(corpus.ids.size) for corpus in corpora),
                trained_tokens=sum(int((corpus.role == ASSISTANT).sum()) for corpus in corpora),
                held_out_rows=sum(len(shard.corpus.ids[shard.rows]) for shard in held_out),
                sources=self.sources.names,
                temperatures=counts,
            ),
            environment=environment.describe(),
            loss=best.loss,
            agreement=best.agreement,
            acceptance=result.acceptance,
            proof=result.proof,
            curves=picture,
        )


class _Logs:
    """The same events to every log."""

    def __init__(self, paths: list[Path]) -> None:
        self._logs = [TrainingLog(path) for path in paths]

    def write(self, event: str, values: Any = None, **more: Any) -> None:
        for log in self._logs:
            log.write(event, values, **more)

    def truncate(self, step: int) -> None:
        for log in self._logs:
            log.truncate(step)

    def __enter__(self) -> _Logs:
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs:
            log.close()


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


def _check_output(output: Path) -> None:
    """Replace an older drafter, but nothing else."""
    if output.is_file():
        raise InputError(f"{output} is a file: name a folder for the drafter.")
    with suppress(OSError):
        if output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
            raise InputError(f"{output} is not empty and holds no drafter: name another folder.")


def _sketch(drafter: Drafter) -> str:
    return fingerprints.of_weights(drafter.parameters())
