"""What a step of training costs beside its matrix products."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_redrafter.benchmarking.paired import Spread
from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.errors import InputError
from mlx_redrafter.load import ModelPair
from mlx_redrafter.training.corpus import ASSISTANT, Corpus
from mlx_redrafter.training.features import extract, shards
from mlx_redrafter.training.trainer import DrafterTrainer, Progress, TrainOptions, Watch

_ROW = 64  # tokens in a row of random text
_WARM_UP = 2  # steps


@dataclass(frozen=True)
class Throughput:
    """flops: of a step's matrix products; share: the bare loop's time over the step's."""

    flops: float
    bare_seconds: Spread
    step_seconds: Spread
    share: Spread


class TrainingBench:
    """Trains a fresh copy of ``pair.drafter`` on random text, in batches of ``batch`` anchors."""

    def __init__(self, pair: ModelPair, batch: int, horizon: int) -> None:
        if pair.drafter is None:
            raise InputError(f"{pair.name} has no drafter whose size could be taken: name one.")
        self.target = pair.target
        self.drafter = Drafter(pair.drafter.config, pair.drafter.draft_tokens)
        tokens = np.array(self.drafter.target_tokens(mx.arange(self.drafter.config.head_size)))
        rows = -(-2 * batch // (_ROW - 2))
        ids = np.random.default_rng(0).choice(tokens, (rows, _ROW)).astype(np.int32)
        self.corpus = Corpus("random", ids, np.full(ids.shape, ASSISTANT, dtype=np.uint8))
        self.batch, self.horizon = batch, horizon

    def steps(self, count: int, mark: Callable[[Progress], None]) -> None:
        """Train for ``count`` steps; ``mark`` is called after each."""
        per_pass = self.corpus.ids.size / self.batch
        options = TrainOptions(
            horizon=self.horizon,
            anchors_per_batch=self.batch,
            epochs=2 * count / per_pass + 1,
            validations=1,
        )
        trainer = DrafterTrainer(self.target, self.drafter, options)
        with tempfile.TemporaryDirectory() as folder:
            wanted = shards([self.corpus], Path(folder))
            extract(self.target, wanted)

            def step(progress: Progress) -> None:
                mark(progress)
                if progress.step == count:
                    raise _Enough

            try:
                trainer.train(wanted, wanted, watch=Watch(step=step))
            except _Enough:
                return

    def throughput(self, repeats: int) -> Throughput:
        """Whole steps and the bare products of the same shapes, in turn."""
        products: list[tuple[mx.array, mx.array]] = []
        bare: list[float] = []
        whole: list[float] = []
        ended, positions = 0.0, 0

        def mark(progress: Progress) -> None:
            nonlocal ended, positions, products
            now = time.perf_counter()
            anchors, positions = progress.positions - positions, progress.positions
            if not products:
                products = _products(self.drafter, anchors, self.horizon)
            if progress.step > _WARM_UP:
                whole.append(now - ended)
            began = time.perf_counter()
            mx.eval([left @ right for left, right in products])
            ended = time.perf_counter()
            if progress.step >= _WARM_UP:
                bare.append(ended - began)

        self.steps(repeats + _WARM_UP, mark)
        shares = [b / w for b, w in zip(bare, whole, strict=False)]
        flops = sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in products)
        return Throughput(flops, Spread.of(bare), Spread.of(whole), Spread.of(shares))


class _Enough(Exception):
    pass


def _products(drafter: Drafter, rows: int, horizon: int) -> list[tuple[mx.array, mx.array]]:
    """The pairs of matrices that a step multiplies: per weight (out, in) and depth, ``rows``
    rows forward, to the weights and to the inputs; and the teacher's head once."""
    shapes = [
        shape
        for name, weight in tree_flatten(drafter.parameters())
        if weight.ndim == 2
        for out, inner in [weight.shape]
        for shape in ((rows, inner, out), (out, rows, inner), (rows, out, inner))
    ]
    head, width = drafter.config.head_size, drafter.config.hidden_size
    wanted = [*(shapes * horizon), (rows, width, head)]
    pairs = [(mx.random.normal((n, k)), mx.random.normal((k, m))) for n, k, m in wanted]
    mx.eval(pairs)
    return pairs
