"""Acceptance without decoding: the decoder's own steps, replayed on held-out text.

The tree walk accepts a child if and only if it equals the token that the target draws there (design
4.4). In text that the target wrote, that token is the text's own next one, so drafting a tree from
the cached hidden state and walking it along the text repeats what decoding did or would have done:
greedy text gives the steps of greedy decoding, up to ties, and text sampled at a temperature gives
an unbiased estimate at that temperature. No pass of the target is needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.proposers.beam import BeamProposer
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.decoding.tree import Tree
from mlx_redrafter.errors import InputError
from mlx_redrafter.training.corpus import ASSISTANT, Corpus
from mlx_redrafter.training.features import Shard

MAX_STEPS = 4000  # enough for a standard error of about 1 %
_TURNS_AT_ONCE = 8  # their trees are drafted together, so that the device is waited for less often


@dataclass(frozen=True)
class Estimate:
    """What a number of turns say.

    ``error`` is the standard error of ``tokens_per_step``, with turns as the independent units;
    None with a single one. ``by_position[i]`` is the share of steps that accepted more than i
    drafted tokens, up to the tree's depth.
    """

    tokens_per_step: float
    error: float | None
    by_position: tuple[float, ...]
    tokens: int
    steps: int
    turns: int


@dataclass(frozen=True)
class Acceptance:
    """Over all turns, and by the temperature they were written at where that is known."""

    draft: DraftOptions
    overall: Estimate
    by_temperature: dict[float, Estimate]


def simulate(
    target: Target,
    drafter: Drafter,
    shards: Sequence[Shard],
    draft: DraftOptions,
    *,
    end_tokens: Collection[int] = (),
    max_steps: int = MAX_STEPS,
) -> Acceptance:
    """Replay decoding with ``drafter`` on the assistant's turns in ``shards``, whose hidden states
    are cached. ``target`` only gives embeddings.

    ``end_tokens`` end a turn, as in decoding; they are emitted and counted. A turn that does not
    end with one of them was cut short, and gives the steps that no cut can have touched.
    ``max_steps`` is spread over the shards; their turns come in random order, the same every time.

    Raises InputError where the rows have no turn that is long enough for a step.
    """
    propose = BeamProposer(drafter, target.embed, draft)
    replays: list[_Replay] = []
    steps = 0
    for number, shard in enumerate(shards):
        share = (max_steps - steps) // (len(shards) - number)
        found = _replay_shard(propose, target.dtype, shard, share, end_tokens)
        replays += found
        steps += sum(replay.steps for replay in found)
    replays = [replay for replay in replays if replay.steps]
    if not replays:
        raise InputError("the held-out rows have no answer that is long enough to be replayed.")
    depth = _depth(draft)
    temperatures = sorted({r.temperature for r in replays if not math.isnan(r.temperature)})
    return Acceptance(
        draft,
        _estimate(replays, depth),
        {t: _estimate([r for r in replays if r.temperature == t], depth) for t in temperatures},
    )


@dataclass
class _Replay:
    """One turn of the assistant while it is walked along.

    text (T,): the row's tokens; ``end``: behind the turn's last one; ``root``: place of the last
    emitted token; ``accepted``: of each step
    """

    text: npt.NDArray[np.int32]
    hidden: npt.NDArray[np.float16]
    root: int
    end: int
    whole: bool
    temperature: float
    accepted: list[int]
    tokens: int = 0

    @property
    def steps(self) -> int:
        return len(self.accepted)

    def goes_on(self, depth: int) -> bool:
        """Whether the next step, which emits up to ``depth`` + 1 tokens, can be told."""
        left = self.end - self.root - 1
        return left > 0 if self.whole else left > depth

    def take(self, tree: Tree) -> None:
        """Walk the tree along the text and go on at the last accepted node."""
        text: list[int] = self.text[self.root + 1 : self.end].tolist()
        accepted = _walk(tree, text)
        self.accepted.append(accepted)
        self.tokens += min(accepted + 1, len(text))  # nothing is emitted behind the end
        self.root += accepted + 1


def _replay_shard(
    propose: BeamProposer,
    dtype: mx.Dtype,
    shard: Shard,
    max_steps: int,
    end_tokens: Collection[int],
) -> list[_Replay]:
    waiting = list(_turns(shard, end_tokens))
    order = np.random.default_rng(0).permutation(len(waiting))
    waiting = [waiting[i] for i in order]
    depth = _depth(propose.options)
    begun: list[_Replay] = []
    active: list[_Replay] = []
    steps = 0
    while steps < max_steps:
        active = [replay for replay in active if replay.goes_on(depth)]
        while waiting and len(active) < _TURNS_AT_ONCE:
            replay = waiting.pop()
            if replay.goes_on(depth):
                active.append(replay)
                begun.append(replay)
        if not active:
            break
        trees = [
            propose(
                mx.array(replay.hidden[replay.root - 1]).astype(dtype),
                mx.array(replay.text[replay.root]),
            )
            for replay in active
        ]
        mx.eval([tree.arrays for tree in trees])
        for replay, tree in zip(active, trees, strict=True):
            replay.take(tree)
        steps += len(active)
    return begun


def _depth(draft: DraftOptions) -> int:
    """Of the deepest node that a tree can have."""
    return min(draft.beam_length, draft.token_budget)


def _turns(shard: Shard, end_tokens: Collection[int]) -> Iterator[_Replay]:
    """The assistant's turns of all rows, each at its first token: the prefill's, in decoding."""
    corpus = shard.corpus
    temperatures = _temperatures(corpus)
    hiddens = shard.hidden()
    for hidden, row in zip(hiddens, range(corpus.num_rows)[shard.rows], strict=True):
        ids = corpus.ids[row]
        written = np.concatenate([[False], corpus.role[row] == ASSISTANT, [False]])
        edges = np.flatnonzero(written[1:] != written[:-1])
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            # The end token may be marked as the template's, and text may follow one.
            ends = np.flatnonzero(np.isin(ids[start : stop + 1], list(end_tokens)))
            end = start + int(ends[0]) + 1 if ends.size else stop
            first = max(start, 1)  # a state comes before it
            temperature = round(float(temperatures[row]), 1)  # like ones are one in the tables
            yield _Replay(ids, hidden, first, end, bool(ends.size), temperature, [])


def _temperatures(corpus: Corpus) -> npt.NDArray[np.floating]:
    """(R,): NaN where it is not known."""
    temperatures = getattr(corpus, "temperature", None)
    return np.full(corpus.num_rows, np.nan) if temperatures is None else temperatures


def _walk(tree: Tree, text: Sequence[int]) -> int:
    """How many drafted tokens ``text``, which follows the root, accepts."""
    tokens, parents, valid = tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist()
    assert isinstance(tokens, list)
    assert isinstance(parents, list)
    assert isinstance(valid, list)
    children = {(parents[i], tokens[i]): i for i in range(1, len(tokens)) if valid[i]}
    node = accepted = 0
    for token in text:
        if (node, token) not in children:
            break
        node = children[node, token]
        accepted += 1
    return accepted


def _estimate(replays: Sequence[_Replay], depth: int) -> Estimate:
    tokens = np.array([replay.tokens for replay in replays])
    steps = np.array([replay.steps for replay in replays])
    rate = tokens.sum() / steps.sum()
    # Of a ratio of sums over turns, to first order: steps of one turn are not independent.
    spread = np.square(tokens - rate * steps).sum()
    turns = len(replays)
    error = math.sqrt(spread * turns / (turns - 1)) / steps.sum() if turns > 1 else None
    accepted = np.concatenate([replay.accepted for replay in replays])
    return Estimate(
        tokens_per_step=float(rate),
        error=None if error is None else float(error),
        by_position=tuple(float((accepted > i).mean()) for i in range(depth)),
        tokens=int(tokens.sum()),
        steps=int(steps.sum()),
        turns=turns,
    )
