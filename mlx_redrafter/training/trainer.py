"""The training loop: batches of anchors, soft labels of the frozen target, AdamW with a cosine.

Alone or as one of several processes (``mlx.launch``), from the start or from a checkpoint: the
same batches in the same order, and so the same weights. Each process works on the rows of its own
shards (``Workers.owns``) and needs no other hidden states.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import InputError, RedrafterError
from mlx_redrafter.training.batches import Batch, Batches, Rows
from mlx_redrafter.training.checkpoint import Checkpoint, TrainingState
from mlx_redrafter.training.features import Shard
from mlx_redrafter.training.initial import start_from_drafter, start_from_head
from mlx_redrafter.training.inputs import InputScaling
from mlx_redrafter.training.loss import distillation_loss
from mlx_redrafter.training.teacher import Teacher
from mlx_redrafter.training.workers import Workers

_CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class TrainOptions:
    """anchors_per_batch is what one process takes at a time: an optimiser step sees that many,
    times ``accumulate_batches``, times the number of processes."""

    horizon: int = 4  # depths trained
    depth_decay: float = 0.8  # weight of depth i is depth_decay ** (i - 1)
    acceptance_weight: float = 0.0  # of the acceptance loss, against soft cross-entropy
    anchors_per_batch: int = 2048
    accumulate_batches: int = 1
    epochs: float = 1.0
    learning_rate: float = 1e-3
    warmup: float = 0.05  # share of all steps
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    average_decay: float = 0.0  # of the moving average of the weights; 0: none
    validations: int = 10  # in the whole run
    patience: int = 4  # validations without gain before it stops early
    seed: int = 0

    def __post_init__(self) -> None:
        whole = {
            "batch": self.anchors_per_batch,
            "accumulate": self.accumulate_batches,
            "validations": self.validations,
            "patience": self.patience,
        }
        for name, value in whole.items():
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1.")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed is {self.seed}; it must be from 0 to {2**32 - 1}.")
        if not 1 <= self.horizon <= 8:
            raise InputError(f"horizon is {self.horizon}; it must be between 1 and 8.")
        if not 0 < self.epochs <= 1000:
            raise InputError(f"epochs is {self.epochs}; it must be in (0, 1000].")
        if not 0 < self.learning_rate < 1:
            raise InputError(f"learning_rate is {self.learning_rate}; it must be in (0, 1).")
        if not 0 < self.depth_decay <= 1:
            raise InputError(f"depth_decay is {self.depth_decay}; it must be in (0, 1].")
        for name in ("acceptance_weight", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be in [0, 1].")
        if not 0 <= self.average_decay < 1:
            raise InputError(f"average_decay is {self.average_decay}; it must be in [0, 1).")


@dataclass(frozen=True)
class Progress:
    """After a step. ``positions``: anchors seen so far, of all processes."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    seconds: float
    positions: int


@dataclass(frozen=True)
class Validation:
    """On rows never trained on. agreement: per depth, the share of anchors where the drafter's
    first choice is the target's, given the text up to it and within the draft vocabulary."""

    step: int
    loss: float
    agreement: list[float]

    @property
    def expected_tokens_per_step(self) -> float:
        """Of a greedy chain as long as the horizon, if depths were independent."""
        return 1.0 + sum(accumulate(self.agreement, mul))


@dataclass(frozen=True)
class Watch:
    """What to call while it trains; does nothing unless given."""

    step: Callable[[Progress], None] = lambda progress: None
    validation: Callable[[Validation], None] = lambda validation: None
    resumed: Callable[[int], None] = lambda step: None


@dataclass(frozen=True)
class Outcome:
    """best: the validation whose weights were kept; stopped: the step it ended at."""

    best: Validation
    validations: list[Validation]
    stopped: int
    steps: int


class DrafterTrainer:
    """Distils ``drafter`` in place. The target gives embeddings and soft labels and stays fixed."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        options: TrainOptions,
        workers: Workers | None = None,
        earlier: Drafter | None = None,
    ) -> None:
        """``workers``: the processes that share the work; ``earlier``: a drafter to start from."""
        tokens = drafter.draft_tokens
        if tokens is None:
            tokens = mx.arange(drafter.config.vocab_size, dtype=mx.int32)
        self.target = target
        self.drafter = drafter
        self.options = options
        self.teacher = Teacher(target, tokens)
        self.known = np.zeros(drafter.config.vocab_size, dtype=np.bool_)
        self.known[np.array(tokens)] = True
        self._earlier = earlier
        self._workers = workers or Workers()
        weights = [options.depth_decay**i for i in range(options.horizon)]
        self._depth_weights = mx.array(weights) / sum(weights)
        self._scaling: InputScaling | None = None  # only while training
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        self._compute_type = mx.bfloat16 if on_gpu else mx.float32

    def train(
        self,
        shards: list[Shard],
        validation: list[Shard],
        checkpoint: Checkpoint | None = None,
        watch: Watch | None = None,
        checkpoint_seconds: float = _CHECKPOINT_SECONDS,
    ) -> Outcome:
        """Go over ``shards`` ``epochs`` times and leave the best weights in the drafter.

        With a ``checkpoint``, the state is saved after each validation and every
        ``checkpoint_seconds``, and a run that finds one goes on.
        """
        watch = watch or Watch()
        options = self.options
        self._batches = self._cut(shards, self._global_batch)
        self._held_out = self._cut(validation, options.anchors_per_batch)
        if not self._batches.num_anchors or not self._held_out.num_anchors:
            raise InputError(
                "the text holds no answers of the model that could be trained on, or none in the "
                "held-out part: give more text."
            )
        steps = max(1, math.ceil(len(self._batches.epoch(options.seed, 0)) * options.epochs))
        every = max(1, math.ceil(steps / options.validations))
        self._prepare()
        optimizer = self._optimizer(steps)
        state = self._start(optimizer, checkpoint, watch)
        gradient = mx.value_and_grad(self._total_loss)
        started = saved = time.monotonic()
        begun = state.step
        positions = self._positions(begun)
        for step, rows in self._remaining(state.step, steps):
            if state.waited >= options.patience:
                break
            loss, grads = self._accumulated(gradient, state.weights, rows)
            grads, _ = optim.clip_grad_norm(grads, options.clip_norm)
            state.weights = optimizer.apply_gradients(grads, state.weights)
            state.optimizer = optimizer.state
            if options.average_decay:
                state.average = _moved(state.average, state.weights, options.average_decay, step)
            mx.eval(state.weights, state.optimizer, state.average, loss)
            if not math.isfinite(float(loss)):
                raise RedrafterError(
                    f"the loss is {float(loss)} at step {step + 1}: take a lower learning rate."
                )
            state.step = step + 1
            positions += self._batches.count(rows)
            rate = float(optimizer.learning_rate)
            seconds = time.monotonic() - started
            watch.step(Progress(state.step, steps, float(loss), rate, seconds, positions))
            validates = state.step % every == 0 or state.step == steps
            if validates:
                watch.validation(self._judge(state))
            now = time.monotonic()
            if self._saves(checkpoint) and (validates or now - saved >= checkpoint_seconds):
                assert checkpoint is not None
                checkpoint.save(state)
                saved = now
        self.drafter.update(state.best)
        assert self._scaling is not None
        self._scaling.fold(self.drafter)
        self._scaling = None
        return _outcome(state, steps)

    def validate(self, shards: list[Shard], step: int = 0) -> Validation:
        """Loss and agreement of the drafter as it is."""
        return self._validate(self._cut(shards, self.options.anchors_per_batch), step)

    def loss(self, batch: Batch, total: int | None = None) -> mx.array:
        """Weighted loss over the depths, teacher-forced along the text. Sums over anchors are
        divided by ``total``, the batch's own number of them unless it is a part of a larger one."""
        teacher = self.teacher.law(batch.states)
        return self._loss_against(teacher, batch, total or batch.hidden.shape[0])

    def _loss_against(self, teacher: mx.array, batch: Batch, total: int) -> mx.array:
        sums = mx.array(0.0)
        for depth, logits in enumerate(self._logits(batch)):
            losses = distillation_loss(
                logits.astype(mx.float32),
                teacher[batch.label_rows[:, depth]],
                self.options.acceptance_weight,
            )
            sums = sums + self._depth_weights[depth] * (losses * batch.usable[:, depth]).sum()
        return sums / total

    def _total_loss(self, weights: Any, teacher: mx.array, batch: Batch, total: int) -> mx.array:
        """The loss as a function of the weights, computed in this machine's fast type."""
        self.drafter.update(tree_map(lambda weight: weight.astype(self._compute_type), weights))
        return self._loss_against(teacher, batch, total)

    def _accumulated(self, gradient: Any, weights: Any, rows: Rows) -> tuple[mx.array, Any]:
        """Loss and gradient of a whole optimiser step, of all parts and processes."""
        options = self.options
        total = self._batches.count(rows)
        loss, grads = mx.array(0.0), tree_map(mx.zeros_like, weights)
        for part in range(options.accumulate_batches):
            mine = self._own(rows)[part :: options.accumulate_batches]
            if not mine:
                continue
            batch = self._batches.load(mine)
            teacher = self.teacher.law(batch.states)
            part_loss, part_grads = gradient(weights, teacher, batch, total)
            loss = loss + part_loss
            grads = tree_map(mx.add, grads, part_grads)
            mx.eval(loss, grads)
        loss, grads = self._workers.sum((loss, grads))
        return loss, grads

    def _judge(self, state: TrainingState) -> Validation:
        """Validate, and keep the weights if they are the best so far."""
        weights = state.weights if state.average is None else state.average
        self.drafter.update(weights)
        found = self._validate(self._held_out, state.step)
        state.validations.append(dataclasses.asdict(found))
        score = [found.expected_tokens_per_step, -found.loss]
        if score > state.best_score:
            state.best_score, state.best_step = score, state.step
            state.best, state.waited = weights, 0
        else:
            state.waited += 1
        return found

    def _validate(self, batches: Batches, step: int) -> Validation:
        horizon = self.options.horizon
        hits, seen, loss = np.zeros(horizon), np.zeros(horizon), 0.0
        for rows in batches.epoch(0, 0):
            mine = self._own(rows)
            if not mine:
                continue
            batch = batches.load(mine)
            scores = self.teacher.logits(batch.states)
            wanted = mx.argmax(scores, axis=-1)
            teacher = mx.softmax(scores, axis=-1, precise=True)
            loss += float(self._loss_against(teacher, batch, batches.num_anchors))
            for depth, logits in enumerate(self._logits(batch)):
                hit = mx.argmax(logits, axis=-1) == wanted[batch.label_rows[:, depth]]
                hits[depth] += float((hit * batch.usable[:, depth]).sum())
                seen[depth] += float(batch.usable[:, depth].sum())
        sums = self._workers.sum(mx.array([*hits.tolist(), *seen.tolist(), loss]))
        hits, seen, loss = np.array(sums[:horizon]), np.array(sums[horizon:-1]), float(sums[-1])
        agreement = [float(h / max(n, 1)) for h, n in zip(hits, seen, strict=True)]
        return Validation(step, loss, agreement)

    def _logits(self, batch: Batch) -> Iterator[mx.array]:
        """Logits (n, V_d) of depth 1, 2, ... given the text's own tokens."""
        hidden = batch.hidden if self._scaling is None else self._scaling.hidden(batch.hidden)
        hidden = hidden.astype(self._compute_type)
        state: mx.array | None = None
        for depth in range(self.options.horizon):
            embedding = self._embed(batch.tokens[:, depth])
            if self._scaling is not None:
                embedding = self._scaling.embedding(embedding)
            state = self.drafter.advance(state, embedding.astype(self._compute_type))
            yield self.drafter.head(self.drafter.features(hidden, state))

    def _embed(self, tokens: mx.array) -> mx.array:
        return self.target.embed(tokens).astype(mx.float32)

    def _prepare(self) -> None:
        """Scale the inputs and set the first weights; the same on a resumed run."""
        drafter, head = self.drafter, self.teacher.head
        hidden, embeddings = mx.zeros((0, head.shape[1])), mx.zeros((0, head.shape[1]))
        mine = self._own(self._batches.epoch(self.options.seed, 0)[0])
        if mine:
            sample = self._batches.load(mine)
            hidden, embeddings = sample.hidden, self._embed(sample.tokens.reshape(-1))
        self._scaling = InputScaling.measure(drafter, hidden, embeddings, self._workers.sum)
        if self._earlier is not None:
            start_from_drafter(drafter, self._earlier, head)
            self._scaling.unfold(drafter)
        elif drafter.config.exit_dim == drafter.config.hidden_size:
            start_from_head(drafter, head)

    def _start(
        self, optimizer: optim.Optimizer, checkpoint: Checkpoint | None, watch: Watch
    ) -> TrainingState:
        """The state of the checkpoint, or a fresh one."""
        weights = self.drafter.trainable_parameters()
        optimizer.init(weights)
        fresh = TrainingState(0, weights, optimizer.state)
        saved = None
        if checkpoint is not None and self._workers.is_first:
            saved = checkpoint.load()
            if saved is not None:
                saved = saved.in_order_of(fresh)
        state = self._workers.share(saved, fresh)
        if state is None:
            return fresh
        optimizer.state = state.optimizer
        watch.resumed(state.step)
        return state

    def _optimizer(self, steps: int) -> optim.Optimizer:
        options = self.options
        warmup = max(1, int(options.warmup * steps))
        rise = optim.linear_schedule(0.0, options.learning_rate, warmup)
        fall = optim.cosine_decay(options.learning_rate, max(1, steps - warmup))
        return optim.AdamW(
            optim.join_schedules([rise, fall], [warmup]),
            betas=[0.9, 0.99],
            weight_decay=options.weight_decay,
            bias_correction=True,  # else the first steps are three times as long
        )

    def _remaining(self, done: int, steps: int) -> Iterator[tuple[int, Rows]]:
        """Steps from ``done`` on with their rows, pass after pass."""
        step, number = 0, 0
        while step < steps:
            for rows in self._batches.epoch(self.options.seed, number):
                if done <= step < steps:
                    yield step, rows
                step += 1
            number += 1

    def _positions(self, done: int) -> int:
        batches = self._remaining(0, done)
        return sum(self._batches.count(rows) for _, rows in batches)

    @property
    def _global_batch(self) -> int:
        options = self.options
        return options.anchors_per_batch * options.accumulate_batches * self._workers.count

    def _cut(self, shards: list[Shard], size: int) -> Batches:
        return Batches(shards, self.known, self.options.horizon, size)

    def _own(self, rows: Rows) -> Rows:
        return [row for row in rows if self._workers.owns(row[0])]

    def _saves(self, checkpoint: Checkpoint | None) -> bool:
        return checkpoint is not None and self._workers.is_first


def _moved(average: Any, weights: Any, decay: float, step: int) -> Any:
    """The moving average of the weights; young ones follow faster, so that it has no lag at
    first."""
    if average is None:
        return weights
    decay = min(decay, (1 + step) / (10 + step))
    return tree_map(lambda old, new: decay * old + (1 - decay) * new, average, weights)


def _outcome(state: TrainingState, steps: int) -> Outcome:
    validations = [Validation(**values) for values in state.validations]
    best = next(v for v in validations if v.step == state.best_step)
    return Outcome(best, validations, state.step, steps)
