"""A scripted draft: beams that hold the true continuation up to a random depth, among distractors.

A random drafter is nearly always wrong, so that a broken engine is never asked to accept anything.
This one knows the text. It finds its place by the hidden state alone, on the device, and so it can
be called at any moment of a step, inside a compiled function or not; a hidden state that belongs to
no position of the text yields no draft at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_redrafter.decoding.tree import Beams
from tests import reference


@dataclass
class Script:
    """Row i drafts what follows text[i]; `states[i]` is the target state that predicted text[i]."""

    text: list[int]
    states: mx.array  # (P, D)
    tokens: np.ndarray  # (P, L, W)
    parents: np.ndarray
    scores: np.ndarray
    tolerance: float

    def __post_init__(self) -> None:
        self._tokens = mx.array(self.tokens)
        self._parents = mx.array(self.parents)
        self._scores = mx.array(self.scores)
        mx.eval(self.states, self._tokens, self._parents, self._scores)

    def beams(self, hidden: mx.array) -> Beams:
        distance = mx.abs(self.states - hidden.astype(mx.float32)).max(axis=-1)
        row = mx.argmin(distance)
        scores = mx.where(distance[row] <= self.tolerance, self._scores[row], -mx.inf)
        return Beams(tokens=self._tokens[row], parents=self._parents[row], scores=scores)

    def accepted(self, row: int, budget: int) -> int:
        """How many drafted tokens a correct engine accepts at this place: the true ones among the
        kept nodes.
        """
        kept = set(
            reference.best_prefixes(self.tokens[row], self.parents[row], self.scores[row], budget)
        )
        depth = 0
        while tuple(self.text[row + 1 : row + 2 + depth]) in kept:
            depth += 1
        return depth


def write_script(
    text: Sequence[int],
    states: np.ndarray,
    *,
    width: int,
    length: int,
    vocab: int,
    seed: int = 0,
    tolerance: float = 1e-3,
) -> Script:
    """`text` is the true continuation and `states` (len(text), D) what predicted each of its
    tokens.
    """
    rng = np.random.default_rng(seed)
    text = [int(token) for token in text]
    places = len(text) - length
    tokens = np.zeros((places, length, width), np.int32)
    parents = np.zeros_like(tokens)
    scores = np.full(tokens.shape, -np.inf, np.float32)
    for place in range(places):
        future = text[place + 1 : place + 1 + length]
        levels = _levels(rng, future, int(rng.integers(length + 1)), width, vocab)
        for level, slots in enumerate(levels):
            for column, slot in enumerate(slots):
                index = place, level, column
                scores[index], parents[index], tokens[index] = slot
    return Script(text, mx.array(states[:places]), tokens, parents, scores, tolerance)


def _levels(
    rng: np.random.Generator, future: list[int], right: int, width: int, vocab: int
) -> list[list[tuple[float, int, int]]]:
    """Levels of (joint score, parent column, token), best first, as a beam search returns them.

    The first `right` tokens are the true ones. A quarter of the distractors repeat the true token
    of their depth below a wrong parent: they score as if true, and only their place in the tree
    makes them wrong.
    """
    levels: list[list[tuple[float, int, int]]] = []
    scores, true_column = [0.0], 0  # of the level above; -1 once the draft has left the truth
    for depth, token in enumerate(future):
        right_here = depth < right and true_column >= 0
        slots: list[tuple[float, int, int]] = []
        if right_here:
            slots.append((scores[true_column] - rng.exponential(0.4), true_column, token))
        room = min(width, len(scores) * (vocab - 1))
        while len(slots) < room:
            parent = int(rng.integers(len(scores)))
            copy = rng.random() < 0.25 and parent != true_column
            other = token if copy else int(rng.integers(vocab))
            wrong = parent != true_column or other != token
            if wrong and (parent, other) not in {slot[1:] for slot in slots}:
                slots.append((scores[parent] - rng.exponential(1.0), parent, other))
        true = slots[0] if right_here else None
        slots.sort(key=lambda slot: -slot[0])
        true_column = slots.index(true) if true is not None else -1
        scores = [slot[0] for slot in slots]
        levels.append(slots)
    return levels
