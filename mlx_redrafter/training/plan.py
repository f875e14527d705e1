"""What a training run will need and take, told before it starts, and refused if it cannot fit.

Bytes are counted; seconds come from a few short passes of this target on this machine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_redrafter.decoding.drafter import DrafterConfig
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import InputError
from mlx_redrafter.machine.device import memory_bytes
from mlx_redrafter.machine.files import free_bytes
from mlx_redrafter.training.features import ROWS_PER_SHARD
from mlx_redrafter.training.loss import soft_cross_entropy
from mlx_redrafter.training.size import (
    DRAFT_STEPS,
    SHARE,
    Cost,
    DrafterSize,
    drafter_cost,
    estimated_share,
    fresh_drafter,
    measure_costs,
    target_cost,
)

WRITTEN = 0.8  # share of a row's tokens that the assistant wrote, where the rows are yet to come
_FLOAT = 4  # bytes; what is trained is float32
_TRAINED = 5  # copies of the drafter: weights, gradients, Adam's two moments, the average
_KEPT = 10  # copies on disk: two checkpoints, each of weights, two moments, average, the best
_PER_DEPTH = 5  # arrays (n, V_d) at once: logits, laws, labels and their products
_TRANSIENT = 3  # more of them on the way back
_POOLED_SHARDS = 4
_PROBE_ANCHORS = 256
_PROBE_ROWS = 2
_PROBE_TOKENS = 96


@dataclass(frozen=True)
class Work:
    """What a run has to do.

    rows: of the corpus, ``row_tokens`` in each, ``new_rows`` of them still to be written by the
    target, ``batch_rows`` at once. features_budget: bytes that hidden states may take on disk.
    """

    rows: int
    row_tokens: int
    new_rows: int
    epochs: float
    anchors_per_batch: int
    horizon: int
    features_budget: int
    batch_rows: int = 16

    @property
    def anchors(self) -> int:
        """Positions trained on, over all epochs, about."""
        return round(self.rows * self.row_tokens * WRITTEN * self.epochs)


@dataclass(frozen=True)
class Rates:
    """Seconds, measured: of a draft and a target step of one sequence, of one token written in a
    batch, of one read for its hidden state, of one multiply-add forward and back."""

    draft_step: float
    target_step: float
    written_token: float
    read_token: float
    multiply_add: float


@dataclass(frozen=True)
class Plan:
    """stored: the drafter's file; states: all hidden states; multiply_adds: of one position trained
    on, forward. Sizes in bytes. ``rates`` is None where nothing was measured."""

    size: DrafterSize
    work: Work
    target: Cost
    drafter: Cost
    stored: int
    memory: int
    memory_limit: int
    data: int
    states: int
    checkpoints: int
    multiply_adds: float
    disk_free: int
    folder: Path
    rates: Rates | None

    @classmethod
    def of(
        cls, target: Target, size: DrafterSize, work: Work, folder: Path, measure: bool = True
    ) -> Plan:
        """``folder``: where the run will write. Measuring takes a few target passes; it does not
        happen where the run cannot fit."""
        config = size.config(target)
        trained = drafter_cost(_unpacked(config), target, mx.float32)
        corpus = work.rows * work.row_tokens
        labels = config.head_size * target.hidden_size / 3  # a third: no way back
        plan = cls(
            size=size,
            work=work,
            target=target_cost(target),
            drafter=drafter_cost(config, target),
            stored=drafter_cost(config, target, mx.float16).bytes,
            memory=_peak(target, config, trained, work),
            memory_limit=memory_bytes(),
            data=corpus * 5,  # an id and a role, uncompressed
            states=corpus * target.hidden_size * 2,  # float16
            checkpoints=_KEPT * trained.parameters * _FLOAT,
            multiply_adds=work.horizon * trained.step_multiply_adds + labels,
            disk_free=free_bytes(folder),
            folder=folder,
            rates=None,
        )
        if not measure or plan.problem is not None:
            return plan
        return dataclasses.replace(plan, rates=measure_rates(target, config, work))

    @property
    def features(self) -> int:
        """Bytes of hidden states that are kept on disk."""
        return min(self.states, self.work.features_budget)

    @property
    def disk(self) -> int:
        return self.data + self.features + self.checkpoints + self.stored

    @property
    def estimated_share(self) -> float:
        """Four draft steps relative to a target step."""
        return estimated_share(self.drafter, self.target)

    @property
    def measured_share(self) -> float | None:
        if self.rates is None:
            return None
        return DRAFT_STEPS * self.rates.draft_step / self.rates.target_step

    @property
    def seconds(self) -> tuple[float, float, float] | None:
        """For data, hidden states, training. Those that the budget does not hold are computed
        again in every epoch."""
        if self.rates is None:
            return None
        work, rates = self.work, self.rates
        corpus = work.rows * work.row_tokens
        kept = self.features / max(self.states, 1)
        passes = kept + (1 - kept) * max(1.0, work.epochs)
        return (
            work.new_rows * work.row_tokens * rates.written_token,
            corpus * passes * rates.read_token,
            work.anchors * self.multiply_adds * rates.multiply_add,
        )

    @property
    def problem(self) -> str | None:
        """Why the run cannot fit, and what to do about it; None where it can."""
        if self.memory > self.memory_limit:
            return (
                f"training needs about {_bytes(self.memory)} of memory and this machine has "
                f"{_bytes(self.memory_limit)}: take a smaller batch or draft vocabulary, or a "
                "target in 4 bits."
            )
        if self.disk > self.disk_free:
            return (
                f"the run needs about {_bytes(self.disk)} on disk and {self.folder} has "
                f"{_bytes(self.disk_free)} left: free some space, allow less for hidden states, "
                "or write elsewhere."
            )
        return None

    def refuse(self) -> None:
        """Raise InputError where the run cannot fit."""
        if self.problem is not None:
            raise InputError(self.problem)

    def lines(self) -> list[str]:
        """For people."""
        drafter, share = self.drafter, self.measured_share
        lines = [
            f"drafter: {_count(drafter.parameters)} parameters ({self.size}), "
            f"{_bytes(self.stored)} on disk, {_bytes(drafter.bytes)} in memory",
            f"target: {_count(self.target.parameters)} parameters, "
            f"{_bytes(self.target.bytes)} in memory",
            f"cost: {DRAFT_STEPS} draft steps are about {self.estimated_share:.1%} of a target "
            f"step (one reads {_bytes(drafter.step_bytes)}, the other "
            f"{_bytes(self.target.step_bytes)})",
        ]
        if self.rates is not None:
            lines.append(
                f"measured here: {share:.1%} (a draft step takes "
                f"{_milliseconds(self.rates.draft_step)}, a target step "
                f"{_milliseconds(self.rates.target_step)})"
            )
        if (self.estimated_share if share is None else share) > SHARE:
            lines.append(
                f"note: more than {SHARE:.0%}: a smaller draft vocabulary or fewer residual blocks "
                "may decode faster"
            )
        lines += [
            f"memory: about {_bytes(self.memory)} at the peak of training, of "
            f"{_bytes(self.memory_limit)}",
            f"disk: {_bytes(self.data)} of text, {_bytes(self.features)} of hidden states, "
            f"{_bytes(self.checkpoints)} of checkpoints; {_bytes(self.disk_free)} are free",
        ]
        if self.seconds is not None:
            data, features, training = map(_duration, self.seconds)
            lines.append(
                f"time: about {data} to write text, {features} for hidden states, "
                f"{training} to train ({_count(self.work.anchors)} positions)"
            )
        return lines


def measure_rates(target: Target, config: DrafterConfig, work: Work) -> Rates:
    """A few passes of the target, and of a drafter of that size that was never trained."""
    draft_step, target_step = measure_costs(target, fresh_drafter(config, target))
    multiplied = _PROBE_ANCHORS * config.head_size * config.exit_dim
    return Rates(
        draft_step=draft_step,
        target_step=target_step,
        written_token=_seconds(_writing(target, work.batch_rows)) / work.batch_rows,
        read_token=_seconds(_reading(target)) / (_PROBE_ROWS * _PROBE_TOKENS),
        multiply_add=_seconds(_training(config)) / multiplied,
    )


def _seconds(call: Callable[[], object], repeats: int = 2) -> float:
    """The best of a few calls, after one that warms up."""
    call()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def _writing(target: Target, rows: int) -> Callable[[], object]:
    """One token for each of a batch of rows."""
    cache = target.make_cache()
    tokens = mx.arange(rows, dtype=mx.int32)[:, None] % target.vocab_size

    def call() -> None:
        logits = target.model(tokens, cache=cache)
        cache.wrote(1, final=True)
        target.take_hidden()
        mx.eval(mx.argmax(logits, axis=-1))

    return call


def _reading(target: Target) -> Callable[[], object]:
    count = _PROBE_ROWS * _PROBE_TOKENS
    tokens = (mx.arange(count) * 7919 % target.vocab_size).reshape(_PROBE_ROWS, _PROBE_TOKENS)
    return lambda: mx.eval(target.hidden_states(tokens))


def _training(config: DrafterConfig) -> Callable[[], object]:
    """The head's product with its loss and gradients: the dearest part, and typical of the rest."""
    x = mx.random.normal((_PROBE_ANCHORS, config.exit_dim), key=mx.random.key(0))
    head = mx.random.normal((config.head_size, config.exit_dim), key=mx.random.key(1))
    teacher = mx.softmax(x @ head.T, axis=-1)
    mx.eval(x, head, teacher)
    gradient = mx.value_and_grad(
        lambda x, head: soft_cross_entropy(x @ head.T, teacher).sum(), argnums=(0, 1)
    )
    return lambda: mx.eval(gradient(x, head))


def _unpacked(config: DrafterConfig) -> DrafterConfig:
    """As it is trained: packing comes last."""
    return dataclasses.replace(config, quantization=None)


def _peak(target: Target, config: DrafterConfig, trained: Cost, work: Work) -> int:
    """Bytes held at the peak of training: target, drafter with all that the optimiser keeps, the
    rows of the target's head, hidden states of the shards in hand, and one batch."""
    size, count = target.hidden_size, work.anchors_per_batch
    pool = _POOLED_SHARDS * ROWS_PER_SHARD
    laws = (_PER_DEPTH * work.horizon + _TRANSIENT) * count * config.head_size
    inner = (config.num_draft_layers + 3) * work.horizon * count * (size + config.exit_dim)
    return (
        target_cost(target).bytes
        + _TRAINED * trained.parameters * _FLOAT
        + config.head_size * size * _FLOAT
        + min(pool, work.rows) * work.row_tokens * size * 2
        + (laws + inner) * _FLOAT
    )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _count(count: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 90 else f"{minutes} min"
