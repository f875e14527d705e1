"""From a target to a proven drafter: the steps of training, in order.

Everything that takes long is kept in the run's work folder, so that the same call goes on where a
killed one stopped.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
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
from mlx_redrafter.machine.files import alone_in, atomic_folder, check_writable
from mlx_redrafter.training import curves
from mlx_redrafter.training.acceptance import Acceptance, simulate
from mlx_redrafter.training.card import CardFacts, DataFacts, card
from mlx_redrafter.training.checkpoint import Checkpoint
from mlx_redrafter.training.corpus import ASSISTANT, Corpus, read_corpus
from mlx_redrafter.training.data import DataOptions, write_data
from mlx_redrafter.training.features import ROWS_PER_SHARD, Shard, extract, shards
from mlx_redrafter.training.initial import check_start
from mlx_redrafter.training.log import TrainingLog
from mlx_redrafter.training.plan import WRITTEN, Plan, Work
from mlx_redrafter.training.prompts import Prompt, read_prompts, read_texts
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

_LEAST_SHARDS = 16  # of which one is held out
_HELD_OUT_ROWS = 128  # at most
_PAYS = 1.1  # tokens per step, below which no drafter is registered
_CURVES = "curves.png"
_LOG = "log.jsonl"
_OUTPUT_FILES = {"README.md", "config.json", "model.safetensors", _CURVES, _LOG}


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
            raise InputError(f"q_bits is {self.bits}; it must be 4 or 8.")
        least = {
            "exit_dim": 1,
            "num_draft_layers": 0,
            "draft_vocab": 1,
            "max_shards": 1,
            "features_bytes": 0,
            "proof_prompts": 0,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InputError(f"{name} is {value}; it must be at least {lowest}.")

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

    @property
    def tokens_per_step(self) -> float | None:
        """On held-out text; None where it was not measured."""
        return None if self.acceptance is None else self.acceptance.overall.tokens_per_step


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
        self.output = output.resolve()
        self.recipe = recipe or Recipe()
        self.sources = sources or Sources()
        self._keeps_work = work is not None
        self.earlier = earlier
        self.workers = workers or Workers()
        self.display = display or Silent()
        self._check_output()
        self.work = work or self.output.with_name(f"{self.output.name}.work")
        self._logs = [self.work / _LOG, *([report_to] if report_to else [])]
        for path in (self.work, *self._logs):
            if path.resolve().is_relative_to(self.output):
                raise InputError(f"{path} is inside the output, which is replaced: name another.")
        self.size = self.recipe.size(pair, earlier)
        self.config = self.size.config(pair.target, made_for(pair))
        if earlier is not None:
            check_start(self.config, earlier.config)
        draft_vocabulary(np.zeros(pair.target.vocab_size), self.config.head_size, pair.tokenizer)
        if self.recipe.data is not None and self.recipe.data.row_length > pair.context_length:
            raise InputError(
                f"row_length is {self.recipe.data.row_length}, but {pair.name} reads only "
                f"{pair.context_length} tokens."
            )
        self._given: list[Corpus] = []
        self._prompts: list[Prompt] = []
        self._texts: list[str] = []
        if self.workers.is_first:
            self._given = self._read_corpora()
            self._prompts = [p for path in self.sources.prompts for p in read_prompts(path)]
            self._texts = [text for path in self.sources.texts for text in read_texts(path)]

    def plan(self, measure: bool = True) -> Plan:
        """What the run takes, before anything is written."""
        rows = sum(corpus.num_rows for corpus in self._given)
        tokens = sum(corpus.ids.size for corpus in self._given)
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
            anchors_per_batch=min(options.anchors_per_batch, max(tokens, 1)),
            horizon=options.horizon,
            features_budget=self.recipe.features_bytes,
        )
        return Plan.of(self.pair.target, self.size, work, self.work.resolve().parent, measure)

    def train(self, registered: bool = True) -> Distilled:
        """Do it all; the output appears whole or not at all.

        ``registered``: the model finds its drafter from then on, if it was measured to pay.
        """
        self.plan(measure=False).refuse()
        with ExitStack() as stack:
            if self.workers.is_first:
                stack.enter_context(alone_in(self.work))
                check_writable(self.output.parent)
            logs = stack.enter_context(_Logs(self._logs if self.workers.is_first else []))
            corpora = self.workers.share_corpora(self._corpora() if self.workers.is_first else [])
            held_out, trained = self._split(corpora)
            self._extract(held_out, trained)
            drafter = self._fresh_drafter(corpora)
            outcome = self._fit(drafter, trained, held_out, corpora, logs)
            if not self.workers.is_first:
                return Distilled(None, drafter.num_parameters, outcome)
            result = self._finish(drafter, outcome, held_out, corpora, logs)
            if registered:
                self._register(result)
            if not self._keeps_work:
                shutil.rmtree(self.work, ignore_errors=True)
        return result

    def cache_features(self, part: tuple[int, int]) -> None:
        """Only compute hidden states: the i-th of n parts, ``part`` = (i, n)."""
        held_out, trained = self._split(self._given)
        extract(
            self.pair.target,
            [*held_out, *trained],
            part,
            self.recipe.features_bytes,
            self.display.stage("hidden states", "tokens"),
        )

    def _check_output(self) -> None:
        """Replace an older drafter, but nothing else and nothing that the run reads."""
        output = self.output
        if not output.name:
            raise InputError(f"{output} cannot be replaced: name a folder for the drafter.")
        if output.is_file():
            raise InputError(f"{output} is a file: name a folder for the drafter.")
        read = [Path(self.pair.name), *([self.pair.adapter_path] if self.pair.adapter_path else [])]
        read += [*self.sources.corpora, *self.sources.prompts, *self.sources.texts, Path.cwd()]
        for path in read:
            if path.exists() and path.resolve().is_relative_to(output):
                raise InputError(f"{output} holds {path}, which is in use: name another folder.")
        if output.is_dir() and any(output.iterdir()):
            others = sorted({path.name for path in output.iterdir()} - _OUTPUT_FILES)
            if others or not registry.is_drafter(output):
                what = f"holds {others[0]}" if others else "holds no drafter"
                raise InputError(f"{output} is not empty and {what}: name another folder.")

    def _read_corpora(self) -> list[Corpus]:
        corpora = [read_corpus(path, self.pair.target.vocab_size) for path in self.sources.corpora]
        names = [corpus.name for corpus in corpora]
        if len(set(names)) != len(names):
            raise InputError("two corpus files have the same name: rename one.")
        for corpus in corpora:
            if corpus.ids.shape[1] > self.pair.context_length:
                raise InputError(
                    f"corpus {corpus.name} has rows of {corpus.ids.shape[1]} tokens, but "
                    f"{self.pair.name} reads only {self.pair.context_length}: cut them."
                )
        if corpora and not any((corpus.role == ASSISTANT).any() for corpus in corpora):
            raise InputError("no corpus has a token of role 1, the only ones trained on.")
        return corpora

    def _corpora(self) -> list[Corpus]:
        """The files given, then what the target writes now."""
        corpora = list(self._given)
        if self.recipe.data is not None:
            files = write_data(
                self.pair,
                self.work / "data",
                self.recipe.data,
                self._prompts,
                self._texts,
                self.display.stage("text", "tokens"),
            )
            corpora += [read_corpus(path, self.pair.target.vocab_size) for path in files]
        return corpora

    def _split(self, corpora: list[Corpus]) -> tuple[list[Shard], list[Shard]]:
        """Shards held out, evenly over all text, and shards trained on. Little text is cut into
        smaller ones, so that a fair part of it can be held out."""
        rows = sum(corpus.num_rows for corpus in corpora)
        size = max(1, min(ROWS_PER_SHARD, rows // _LEAST_SHARDS))
        made_by = f"{self.pair.fingerprint} {self.pair.target.dtype}"
        folder = self.work / "features"
        wanted = shards(corpora, folder, self.pair.target, made_by, size)[: self.recipe.max_shards]
        if len(wanted) < 2:
            raise InputError(
                "the text is too short: one row is held out for validation, and none is left to "
                "train on. Give more text."
            )
        count = max(1, min(_HELD_OUT_ROWS // size, len(wanted) // _LEAST_SHARDS))
        chosen = {(2 * i + 1) * len(wanted) // (2 * count) for i in range(count)}
        return (
            [shard for i, shard in enumerate(wanted) if i in chosen],
            [shard for i, shard in enumerate(wanted) if i not in chosen],
        )

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
            [shard.path.name for shard in (*held_out, *trained)],  # a digest of model and tokens
            [zlib.crc32(corpus.role.tobytes()) for corpus in corpora],
            None if self.earlier is None else _sketch(self.earlier),
        )
        logs.begin(recipe, target=self.pair.name, recipe=self._settings)
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
            logs.write("end", parameters=drafter.num_parameters)
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

    def _register(self, result: Distilled) -> None:
        """Let the model find the drafter, unless it does not pay. The output is whole without."""
        assert result.folder is not None
        if result.tokens_per_step is not None and result.tokens_per_step < _PAYS:
            self.display.note(
                f"not registered: {result.tokens_per_step:.2f} tokens per step do not pay; train "
                "on more text, or for longer"
            )
            return
        try:
            kept = registry.register_drafter(result.folder, self.pair.name, self.pair.adapter_path)
            self.display.note(f"registered as {kept.name}: {self.pair.name} finds it from now on")
        except RedrafterError as error:
            self.display.note(f"not registered: {error}")

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
        counts = Counter(None if np.isnan(t) else round(float(t), 1) for t in temperatures)
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

    def begin(self, run: str, **more: Any) -> None:
        for log in self._logs:
            log.begin(run, **more)

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


def _sketch(drafter: Drafter) -> str:
    return fingerprints.of_weights(drafter.parameters())
