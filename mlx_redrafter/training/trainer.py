"""The training loop: batches of anchors, soft labels of the frozen target, AdamW with a cosine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import numpy.typing as npt

from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import InputError
from mlx_redrafter.training.corpus import anchors
from mlx_redrafter.training.features import Shard
from mlx_redrafter.training.head import head_rows
from mlx_redrafter.training.inputs import InputScaling
from mlx_redrafter.training.loss import soft_cross_entropy, teacher_law

VALIDATION_SHARDS = 2  # the first ones: whole rows, never trained on
_POOL = 4  # shards shuffled together


@dataclass(frozen=True)
class TrainOptions:
    horizon: int = 4  # depths trained
    depth_decay: float = 0.8  # weight of depth i is depth_decay ** (i - 1)
    anchors_per_batch: int = 2048
    epochs: float = 1.0
    learning_rate: float = 1e-3
    warmup: float = 0.05  # share of all steps
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.horizon <= 8:
            raise InputError(f"horizon is {self.horizon}; it must be between 1 and 8.")
        if self.anchors_per_batch < 1 or not 0 < self.epochs <= 1000:
            raise InputError("anchors_per_batch and epochs must be positive.")
        if not 0 < self.learning_rate < 1:
            raise InputError(f"learning_rate is {self.learning_rate}; it must be in (0, 1).")


@dataclass(frozen=True)
class Batch:
    """n anchors and, per depth i = 1..horizon, what to predict.

    hidden (n, D); tokens (n, horizon): g_0 and the tokens up to depth horizon - 1;
    states (q, D): target states of all predicted positions, each once;
    label_rows (n, horizon): their row in ``states``; usable (n, horizon) float32
    """

    hidden: mx.array
    tokens: mx.array
    states: mx.array
    label_rows: mx.array
    usable: mx.array


@dataclass(frozen=True)
class Progress:
    step: int
    steps: int
    loss: float
    learning_rate: float
    seconds: float


class DrafterTrainer:
    """Distils ``drafter`` in place. The target gives embeddings and soft labels and stays fixed."""

    def __init__(self, target: Target, drafter: Drafter, options: TrainOptions) -> None:
        tokens = drafter.draft_tokens
        if tokens is None:
            tokens = mx.arange(drafter.config.vocab_size, dtype=mx.int32)
        self.target = target
        self.drafter = drafter
        self.options = options
        self.head = head_rows(target, tokens)
        self.known = np.zeros(drafter.config.vocab_size, dtype=np.bool_)
        self.known[np.array(tokens)] = True
        weights = [options.depth_decay**i for i in range(options.horizon)]
        self._weights = mx.array(weights) / sum(weights)
        self._scaling: InputScaling | None = None  # only while training

    def train(self, shards: list[Shard], report: Callable[[Progress], None]) -> None:
        """Go over the shards ``epochs`` times. ``report`` is called after every step."""
        options = self.options
        per_epoch = sum(self._count(shard) for shard in shards) / options.anchors_per_batch
        steps = max(1, math.ceil(per_epoch * options.epochs))
        warmup = max(1, int(options.warmup * steps))
        schedule = optim.join_schedules(
            [
                optim.linear_schedule(0.0, options.learning_rate, warmup),
                optim.cosine_decay(options.learning_rate, max(1, steps - warmup)),
            ],
            [warmup],
        )
        sample = next(self._batches(shards[:1], np.random.default_rng(options.seed)))
        self._scaling = InputScaling.measure(
            self.drafter, sample.hidden, self._embed(sample.tokens.reshape(-1))
        )
        if self.drafter.config.exit_dim == self.drafter.config.hidden_size:
            start_from_head(self.drafter, self.head)
        optimizer = optim.AdamW(
            schedule,
            betas=[0.9, 0.99],
            weight_decay=options.weight_decay,
            bias_correction=True,  # else the first steps are three times as long
        )
        gradient = nn.value_and_grad(self.drafter, self.loss)
        started = time.monotonic()
        for step, batch in zip(range(steps), self._endless(shards), strict=False):
            loss, grads = gradient(batch)
            grads, _ = optim.clip_grad_norm(grads, options.clip_norm)
            optimizer.update(self.drafter, grads)
            mx.eval(self.drafter.parameters(), optimizer.state, loss)
            rate = float(optimizer.learning_rate)
            report(Progress(step + 1, steps, float(loss), rate, time.monotonic() - started))
        self._scaling.fold(self.drafter)
        self._scaling = None

    def loss(self, batch: Batch) -> mx.array:
        """Weighted soft-label cross-entropy over the depths, teacher-forced along the text."""
        teacher = mx.stop_gradient(teacher_law(batch.states, self.head))
        total = mx.array(0.0)
        for depth, logits in enumerate(self._logits(batch)):
            losses = soft_cross_entropy(logits, teacher[batch.label_rows[:, depth]])
            usable = batch.usable[:, depth]
            total = (
                total + self._weights[depth] * (losses * usable).sum() / batch.usable[:, 0].sum()
            )
        return total

    def agreement(self, shards: list[Shard]) -> list[float]:
        """Share of anchors where the drafter's first choice is the target's, per depth, given the
        text up to it and within the draft vocabulary. Products of these estimate acceptance."""
        hits = np.zeros(self.options.horizon)
        seen = np.zeros(self.options.horizon)
        for batch in self._batches(shards, np.random.default_rng(0)):
            wanted = mx.argmax(batch.states @ self.head.T, axis=-1)
            for depth, logits in enumerate(self._logits(batch)):
                hit = mx.argmax(logits, axis=-1) == wanted[batch.label_rows[:, depth]]
                hits[depth] += float((hit * batch.usable[:, depth]).sum())
                seen[depth] += float(batch.usable[:, depth].sum())
        return [float(h / max(n, 1)) for h, n in zip(hits, seen, strict=True)]

    def _logits(self, batch: Batch) -> Iterator[mx.array]:
        """Logits (n, V_d) of depth 1, 2, ... given the text's own tokens."""
        hidden = batch.hidden if self._scaling is None else self._scaling.hidden(batch.hidden)
        state: mx.array | None = None
        for depth in range(self.options.horizon):
            embedding = self._embed(batch.tokens[:, depth])
            if self._scaling is not None:
                embedding = self._scaling.embedding(embedding)
            state = self.drafter.advance(state, embedding)
            yield self.drafter.head(self.drafter.features(hidden, state))

    def _embed(self, tokens: mx.array) -> mx.array:
        return self.target.embed(tokens).astype(mx.float32)

    def _usable(self, shard: Shard) -> npt.NDArray[np.bool_]:
        rows = shard.rows
        known = self.known[shard.corpus.ids[rows]]
        return anchors(shard.corpus.role[rows], known, self.options.horizon)

    def _count(self, shard: Shard) -> int:
        return int(self._usable(shard)[:, :, 0].sum())

    def _endless(self, shards: list[Shard]) -> Iterator[Batch]:
        random = np.random.default_rng(self.options.seed)
        while True:
            yield from self._batches(shards, random)

    def _batches(self, shards: list[Shard], random: np.random.Generator) -> Iterator[Batch]:
        """All anchors once. Rows of a few shards are shuffled together, anchors stay in rows so
        that neighbours share their labels."""
        order = random.permutation(len(shards))
        for start in range(0, len(shards), _POOL):
            pool = [shards[i] for i in order[start : start + _POOL]]
            rows = [
                (hidden, shard.corpus.ids[shard.rows][i], usable[i])
                for shard in pool
                for usable, hiddens in [(self._usable(shard), shard.hidden())]
                for i, hidden in enumerate(hiddens)
            ]
            pending: list[int] = []
            count = 0
            for i in random.permutation(len(rows)):
                pending.append(int(i))
                count += int(rows[i][2][:, 0].sum())
                if count >= self.options.anchors_per_batch:
                    yield _batch([rows[j] for j in pending])
                    pending, count = [], 0
            if count:
                yield _batch([rows[j] for j in pending])


_Row = tuple[npt.NDArray[np.float16], npt.NDArray[np.int32], npt.NDArray[np.bool_]]


def _batch(rows: list[_Row]) -> Batch:
    length = rows[0][1].shape[0]
    horizon = rows[0][2].shape[1]
    usable = np.stack([row[2] for row in rows])
    row, place = np.nonzero(usable[:, :, 0])
    anchor = row * length + place
    depths = np.arange(1, horizon + 1)
    used = usable[row, place]
    # Where a depth is not usable, point it at depth 1, which always is.
    labels = np.where(used, anchor[:, None] + depths, anchor[:, None] + 1)
    positions, label_rows = np.unique(labels, return_inverse=True)
    hidden = np.concatenate([row[0] for row in rows]).astype(np.float32)
    ids = np.concatenate([row[1] for row in rows])
    return Batch(
        hidden=mx.array(hidden[anchor]),
        tokens=mx.array(ids[labels]),
        states=mx.array(hidden[positions]),
        label_rows=mx.array(label_rows.reshape(labels.shape).astype(np.int32)),
        usable=mx.array(used.astype(np.float32)),
    )


def start_from_head(drafter: Drafter, head: mx.array) -> None:
    """Give the drafter the target's own head, ``head`` (V_d, D), scaled to the usual size of fresh
    weights: what remains to be learned is where to move the hidden state to."""
    fresh = drafter.lm_head[-1].weight
    size = mx.sqrt(mx.square(fresh).mean() / mx.square(head).mean())
    drafter.lm_head[-1].weight = head * size
    mx.eval(drafter.parameters())
