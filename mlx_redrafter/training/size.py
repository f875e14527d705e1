"""How large a drafter may be for its target: what a step costs, counted and measured.

Decoding one sequence is bound by memory: a step's cost is the bytes it reads. On a CPU packed
weights are the exception: unpacking them takes longer than reading floats (measured: a drafter in 8
bits took 2.6 times as long), so there it is the multiply-adds. Both counts are exact but for the KV
cache, which only the target has. The default size keeps four draft steps below a tenth of a target
step (design 4.2).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.proposers.beam import BeamProposer
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.decoding.tree import chain_tree

DRAFT_STEPS = 4
SHARE = 0.1  # of a target step that so many draft steps may cost

WANTED_ROWS = 4096  # below that, packing the weights is the lesser loss
MOST_ROWS = 16384  # the rest is too rare to pay for its rows
LEAST_ROWS = 1024
_ROWS_UNIT = 256
_PACKINGS = ({"bits": 8, "group_size": 64}, {"bits": 4, "group_size": 64})


@dataclass(frozen=True)
class Cost:
    """parameters: however they are packed; bytes: held in memory; step_bytes: read by one step of
    one row; step_multiply_adds: done by it."""

    parameters: int
    bytes: int
    step_bytes: int
    step_multiply_adds: int


def target_cost(target: Target) -> Cost:
    """Of an embedding that is no head, a step reads one row; of experts, those that are used."""
    total = Cost(0, 0, 0, 0)
    for module in _owners(target.model):
        held = sum(array.nbytes for _, array in _arrays(module))
        parameters = sum(_unpacked(module, name, array) for name, array in _arrays(module))
        matrix = module.weight if "weight" in module and module.weight.ndim > 1 else None
        multiplied = 0 if matrix is None else _unpacked(module, "weight", matrix)
        share = 1.0
        if matrix is not None and matrix.ndim == 3:
            args = getattr(target.model, "args", None)
            used = getattr(args, "num_experts_per_tok", None) or matrix.shape[0]
            share = used / matrix.shape[0]
        elif matrix is not None and module is target.embedding and module is not target.head:
            share, multiplied = 1 / matrix.shape[0], 0
        total = Cost(
            total.parameters + parameters,
            total.bytes + held,
            total.step_bytes + round(share * held),
            total.step_multiply_adds + round(share * multiplied),
        )
    return total


def drafter_cost(config: DrafterConfig, target: Target, dtype: mx.Dtype | None = None) -> Cost:
    """``dtype`` of the floats: by default the target's. Nothing is computed: MLX is lazy.

    A tied head has no parameters of its own, and is read all the same. The half of ``input_proj``
    for the hidden state is applied once for all draft steps, and so is no part of one; the other is
    packed while drafting if the rest is.
    """
    width = (dtype or target.dtype).size
    drafter = Drafter(config)
    parameters, held = drafter.num_parameters, 0
    read = float(config.hidden_size * width)  # the token's embedding
    multiplied = 0.0
    for path, module in drafter.named_modules():
        for name, array in _arrays(module):
            size = array.nbytes if array.dtype == mx.uint32 else array.size * width
            held += size
            if path == "input_proj" and name == "weight":
                half = config.exit_dim * config.hidden_size
                read += half * _bytes_each(config, width)
                multiplied += half
            else:
                read += size
                multiplied += _unpacked(module, name, array) if name == "weight" else 0
    if config.tie_head:
        rows = config.head_size
        matrix = target.head
        row_bytes = sum(array.nbytes for _, array in _arrays(matrix)) / matrix.weight.shape[0]
        read += rows * row_bytes
        held += round(rows * row_bytes) if config.draft_vocab else 0
        multiplied += rows * config.hidden_size
    return Cost(parameters, held, round(read), round(multiplied))


def _bytes_each(config: DrafterConfig, width: int) -> float:
    """Of one weight among rows of D, packed with a scale and a bias a group where it can be."""
    packing = config.quantization
    if packing is None or config.hidden_size % packing["group_size"]:
        return width
    return packing["bits"] / 8 + 2 * width / packing["group_size"]


def estimated_share(drafter: Cost, target: Cost, on_gpu: bool | None = None) -> float:
    """Four draft steps relative to a target step. ``on_gpu`` None: as this machine is."""
    if _on_gpu() if on_gpu is None else on_gpu:
        return DRAFT_STEPS * drafter.step_bytes / target.step_bytes
    return DRAFT_STEPS * drafter.step_multiply_adds / target.step_multiply_adds


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


@dataclass(frozen=True)
class DrafterSize:
    """What is chosen about a drafter; the rest follows from its target."""

    exit_dim: int
    num_draft_layers: int
    draft_vocab: int
    tie_head: bool = False
    quantization: dict[str, int] | None = None

    @classmethod
    def for_target(cls, target: Target, on_gpu: bool | None = None) -> DrafterSize:
        """The largest that keeps four draft steps below a tenth of a target step.

        In order: two residual blocks and then one; floats, and on a GPU 8 and then 4 bits; until
        ``WANTED_ROWS`` fit. ``on_gpu`` None: as this machine is. A target too small to have room
        for any gets the smallest, and its plan says that it is too dear.
        """
        on_gpu = _on_gpu() if on_gpu is None else on_gpu
        size, vocab = target.hidden_size, target.vocab_size
        packings = [None, *_PACKINGS] if on_gpu else [None]
        found = []
        for quantization in packings:
            for blocks in (2, 1):
                rows = _rows_that_fit(target, cls(size, blocks, vocab, False, quantization), on_gpu)
                if rows >= min(WANTED_ROWS, vocab):
                    return cls(size, blocks, min(rows, MOST_ROWS, vocab), False, quantization)
                found.append((rows, cls(size, blocks, rows, False, quantization)))
        rows, best = max(found, key=lambda each: each[0])
        if rows >= min(LEAST_ROWS, vocab):
            return best
        return cls(size, 1, min(LEAST_ROWS, vocab), False, packings[-1])

    def config(self, target: Target, made_for: dict[str, Any] | None = None) -> DrafterConfig:
        """``made_for``: what the config says of its target (see ``distil.made_for``)."""
        return DrafterConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            exit_dim=self.exit_dim,
            num_draft_layers=self.num_draft_layers,
            draft_vocab=min(self.draft_vocab, target.vocab_size),
            target=made_for,
            quantization=self.quantization,
            tie_head=self.tie_head,
        )

    def __str__(self) -> str:
        blocks = f"{self.num_draft_layers} residual block{'s' * (self.num_draft_layers != 1)}"
        head = "the target's head" if self.tie_head else "its own head"
        packing = f", {self.quantization['bits']} bits" if self.quantization else ""
        return f"exit_dim {self.exit_dim}, {blocks}, {head} of {self.draft_vocab} tokens{packing}"


def _rows_that_fit(target: Target, size: DrafterSize, on_gpu: bool) -> int:
    """Head rows within the budget; the cost is linear in them. At most the vocabulary."""
    step = target_cost(target)
    configs = (dataclasses.replace(size, draft_vocab=rows).config(target) for rows in (1, 2))
    one, two = (estimated_share(drafter_cost(config, target), step, on_gpu) for config in configs)
    rows = int((SHARE - one) / (two - one))
    if rows >= target.vocab_size:
        return target.vocab_size
    return max(0, rows // _ROWS_UNIT * _ROWS_UNIT)


def fresh_drafter(config: DrafterConfig, target: Target) -> Drafter:
    """An untrained drafter of that size in the target's type, ready to draft: to measure with."""
    tokens = None if config.draft_vocab is None else mx.arange(config.draft_vocab, dtype=mx.int32)
    drafter = Drafter(config, tokens)
    drafter.set_dtype(target.dtype)
    if config.tie_head:
        drafter.bind_head(target.head)
    mx.eval(drafter.parameters())
    return drafter


def measure_costs(
    target: Target, drafter: Drafter, repeats: int = 9, context: int = 128
) -> tuple[float, float]:
    """Seconds of a draft step and of a target step on this machine.

    A draft step is a fourth of a chain of four; a target step is a pass of one row behind
    ``context`` tokens. Both in turn, so that a busy machine disturbs them alike; medians.
    """
    cache = target.make_cache()
    prompt = (mx.arange(context) * 7919 % target.vocab_size).astype(mx.int32)  # all over V
    hidden, logits = target.prefill(prompt, cache)
    token = mx.argmax(logits).astype(mx.int32)
    assert hidden is not None
    mx.eval(hidden, token)
    tree = chain_tree(token[None])
    propose = BeamProposer(drafter, target.embed, DraftOptions(1, DRAFT_STEPS, DRAFT_STEPS))
    draft, verify = [], []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        mx.eval(propose.search(hidden, token, 1, DRAFT_STEPS).tokens)
        drafted = time.perf_counter()
        mx.eval(target.verify(tree, cache)[1])
        if repeat:  # the first is a warm-up
            draft.append((drafted - started) / DRAFT_STEPS)
            verify.append(time.perf_counter() - drafted)
    return statistics.median(draft), statistics.median(verify)


def _owners(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that have arrays, each once: layers may share one."""
    seen: set[int] = set()
    for _, module in model.named_modules():
        if id(module) not in seen and any(True for _ in _arrays(module)):
            seen.add(id(module))
            yield module


def _arrays(module: nn.Module) -> Iterator[tuple[str, mx.array]]:
    for name, value in module.items():
        if isinstance(value, mx.array) and not name.startswith("_"):
            yield name, value


def _unpacked(module: nn.Module, name: str, array: mx.array) -> int:
    """How many parameters an array stands for; scales and the biases beside them for none."""
    if "scales" in module:
        if name in ("scales", "biases"):
            return 0
        if name == "weight":
            return int(array.size) * 32 // int(module.bits)
    return int(array.size)
