"""The loop: propose, verify, choose, walk, commit.

Invariant: the cache holds everything before ``token``; ``hidden`` is the target state that
predicted ``token``. It holds between steps and after a stop anywhere inside an accepted run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from mlx_redrafter.decoding.accept import Walk, accept
from mlx_redrafter.decoding.caches import Cache
from mlx_redrafter.decoding.choose import make_chooser
from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.proposers.beam import BeamProposer
from mlx_redrafter.decoding.proposers.none import propose_nothing
from mlx_redrafter.decoding.target import PREFILL_STEP, Target
from mlx_redrafter.decoding.tree import Tree
from mlx_redrafter.errors import CompatibilityError, InputError

# (hidden (D,), token ()) -> the next tree; hidden is None where the model can only run plain
Proposer = Callable[[Any, mx.array], Tree]


@dataclass(frozen=True)
class Step:
    """What one step gave: at least one token. The last is the target's own (the bonus); the
    ``num_accepted`` before it were drafted and accepted."""

    tokens: list[int]
    num_accepted: int


@dataclass(frozen=True)
class _Round:
    """A verify pass under way: everything still on the device."""

    tree: Tree
    states: mx.array | None
    chosen: mx.array
    walk: Walk
    packed: mx.array


class Decoder:
    """Decodes one sequence. Without a drafter it is plain decoding, pipelined as in mlx-lm."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        draft: DraftOptions | None = None,
        sampling: SamplingOptions | None = None,
    ) -> None:
        if drafter is not None and not target.supports_trees:
            raise CompatibilityError(f"this target cannot verify drafts: {target.reason}.")
        if drafter is not None and drafter.config.hidden_size != target.hidden_size:
            raise CompatibilityError(
                f"the drafter reads hidden states of {drafter.config.hidden_size}, the target's "
                f"have {target.hidden_size}: it was made for another model."
            )
        self.target = target
        self.propose: Proposer = propose_nothing
        if drafter is not None:
            self.propose = BeamProposer(drafter, target.embed, draft or DraftOptions())
        self.choose = make_chooser(sampling or SamplingOptions())
        self.host_reads = 0

    @property
    def offset(self) -> int:
        """Number of positions in the cache: everything before ``token``."""
        return self.cache.offset

    def start(
        self,
        prompt: list[int],
        cache: Cache | None = None,
        *,
        max_tokens: int | None = None,
        prefill_step: int = PREFILL_STEP,
    ) -> int:
        """Prefill and choose the first token. A cache that already holds a prefix of the prompt
        is continued: only what comes after its offset is prefilled, at least one token.

        ``max_tokens`` is a hint: past so many tokens, no pass is queued before it is asked for.
        """
        self.cache = self.target.make_cache() if cache is None else cache
        new = prompt[self.cache.offset :]
        if not new:
            raise InputError("the prompt is empty, or the cache holds all of it already.")
        self.target.check_tokens(new)
        if self.cache.slot is not self.target.slot:
            raise InputError("the cache belongs to another target; make one with make_cache().")
        if not self.cache.rewind(self.cache.offset):  # rows of a pass that had run ahead
            raise InputError("the cache cannot be continued; prefill the text into a new one.")
        hidden, logits = self.target.prefill(
            mx.array(new, dtype=mx.int32), self.cache, prefill_step
        )
        chosen = self.choose(logits[None], propose_nothing(hidden, mx.array(0)), self.offset - 1)
        self._next(hidden, chosen[0])
        self._wanted = math.inf if max_tokens is None else max_tokens - 1
        (token,) = self.read(chosen)
        self._step: Step | None = None
        return token

    def step(self) -> Step:
        """Emit the next tokens. ``commit`` must follow before the next step."""
        assert self._step is None, "commit the last step first"
        self._base = self.offset
        round_ = self._round = self._verify(self.tree) if self._ahead is None else self._ahead
        if round_.tree.num_nodes == 1:
            self._run_ahead(round_)
        else:
            last = round_.walk.last
            assert round_.states is not None
            self._next(round_.states[last], round_.chosen[last])
        count, *rest = self.read(round_.packed)
        self._path, tokens = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        self._step = Step(tokens[:count], count - 1)
        self._wanted -= count
        return self._step

    def commit(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of the last step's tokens: cache, hidden and token follow.

        What was queued for the next step is dropped if any token falls away.
        """
        assert self._step is not None
        kept, emitted = num_tokens, len(self._step.tokens)
        assert 1 <= kept <= emitted, f"cannot keep {kept} of {emitted} tokens"
        round_, self._step = self._round, None
        if round_.tree.num_nodes == 1:
            return  # committed when the next pass was queued
        self.cache.compact(self._base, self._path[:kept])
        if kept < emitted:
            node = self._path[kept - 1]
            assert round_.states is not None
            self._next(round_.states[node], round_.chosen[node])

    def read(self, array: mx.array) -> list[int]:
        """The one place where decoding waits for the device."""
        self.host_reads += 1
        return cast(list[int], array.tolist())

    def _verify(self, tree: Tree) -> _Round:
        """Queue one target pass over the tree, the choice at every node and the walk."""
        base = self.offset
        states, logits = self.target.verify(tree, self.cache)
        chosen = self.choose(logits, tree, base)
        walk = accept(tree, chosen)
        packed = walk.packed
        mx.async_eval(packed)
        return _Round(tree, states, chosen, walk, packed)

    def _next(self, hidden: mx.array | None, token: mx.array) -> None:
        """Queue the next tree: it needs only ``hidden`` and ``token``, both on the device."""
        self.hidden, self.token = hidden, token
        self.tree = self.propose(hidden, token)
        self._ahead: _Round | None = None
        mx.async_eval(self.tree.arrays)

    def _run_ahead(self, round_: _Round) -> None:
        """One node always commits one token, so the next pass need not wait for the read."""
        self.cache.compact(self._base, [0])
        hidden = None if round_.states is None else round_.states[0]
        self._next(hidden, round_.chosen[0])
        if self._wanted > 1:
            self._ahead = self._verify(self.tree)
