"""Slow oracles, written from the equations of the design and from nothing else.

They use an unmodified mlx-lm model without any cache, NumPy, and plain Python loops. Nothing here
imports the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

Path = tuple[int, ...]
# (logits (V,), absolute position of the chosen token) -> token
Choose = Callable[[np.ndarray, int], int]


# --- the target -----------------------------------------------------------------------------------


def logits(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    """(T, V) in float32: row t scores the token at position t + 1. One pass over the whole text."""
    return np.array(model(mx.array([list(tokens)]))[0].astype(mx.float32))


def states(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    """(T, D): what the inner stack returns, after the final norm; row t predicted the token at
    position t + 1.
    """
    return np.array(model.model(mx.array([list(tokens)]))[0].astype(mx.float32))


def argmax(row: np.ndarray, position: int) -> int:
    return int(np.argmax(row))


def decode(
    model: nn.Module, prompt: Sequence[int], count: int, choose: Choose = argmax
) -> list[int]:
    """The `count` tokens after the prompt, the whole text recomputed for each."""
    text = list(prompt)
    for _ in range(count):
        text.append(choose(logits(model, text)[-1], len(text)))
    return text[len(prompt) :]


def decode_by_row(
    model: nn.Module, cache: list[Any], prefix: Sequence[int], path: Sequence[int]
) -> np.ndarray:
    """(len(path), V): logits after each token of the path, fed one row at a time to mlx-lm's own
    cache.
    """
    _prefill(model, cache, prefix)
    return np.stack([_feed(model, cache, [token])[-1] for token in path])


def decode_by_chunk(
    model: nn.Module, cache: list[Any], prefix: Sequence[int], path: Sequence[int]
) -> np.ndarray:
    """The same as `decode_by_row` with the path in one pass: their difference is the model's own
    rounding noise.
    """
    _prefill(model, cache, prefix)
    return _feed(model, cache, path)


def _prefill(model: nn.Module, cache: list[Any], prefix: Sequence[int]) -> None:
    if len(prefix) > 1:
        _feed(model, cache, prefix[:-1])
    _feed(model, cache, prefix[-1:])


def _feed(model: nn.Module, cache: list[Any], tokens: Sequence[int]) -> np.ndarray:
    return np.array(model(mx.array([list(tokens)]), cache=cache)[0].astype(mx.float32))


# --- the drafter (design 4.2) ---------------------------------------------------------------------


@dataclass
class NumpyDrafter:
    """Apple's weight names; `embedding` is the target's raw table (V, D)."""

    weights: dict[str, np.ndarray]
    embedding: np.ndarray
    layers: int

    def log_q(self, hidden: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities of the next draft token (over the head's rows) after tokens = [g_0,
        g_1, ...].
        """
        w = self.weights
        state = np.zeros(self.embedding.shape[1])
        for token in tokens:
            if "rnn_w.weight" in w:
                pre = w["rnn_w.weight"] @ self.embedding[token]
                state = _silu(pre + w["rnn_u.weight"] @ state + w["rnn_u.bias"])
            else:
                state = self.embedding[token] + state
        x = np.concatenate([hidden, state])
        if "input_proj.weight" in w:
            x = w["input_proj.weight"] @ x + w["input_proj.bias"]
        for i in range(self.layers):
            linear = f"lm_head.{i}.linear"
            x = x + _silu(w[f"{linear}.weight"] @ x + w[f"{linear}.bias"])
        return _log_softmax(w[f"lm_head.{self.layers}.weight"] @ x)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


# --- beams and trees (design 4.3) -----------------------------------------------------------------


def beam_search(
    log_q: Callable[[Path], np.ndarray], ids: Sequence[int], width: int, length: int
) -> list[dict[Path, float]]:
    """Levels 1..length: {path of target token ids: joint log-probability}, the best `width`
    continuations of each level.

    `log_q(path)` scores the next draft token after the root and `path`; `ids[r]` is the target
    token of head row r.
    """
    levels: list[dict[Path, float]] = []
    beams: dict[Path, float] = {(): 0.0}
    for _ in range(length):
        grown: dict[Path, float] = {}
        for path, score in beams.items():
            for row, value in enumerate(log_q(path)):
                grown[(*path, ids[row])] = score + float(value)
        best = sorted(grown, key=lambda path: -grown[path])[:width]
        beams = {path: grown[path] for path in best}
        levels.append(beams)
    return levels


def beam_paths(
    tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray
) -> list[tuple[float, int, int, Path]]:
    """All slots of the beams (L, W) that are not padding, as (score, level, column, path)."""
    slots = []
    for level in range(tokens.shape[0]):
        for column in range(tokens.shape[1]):
            if np.isfinite(scores[level, column]):
                path = _path_of(tokens, parents, level, column)
                slots.append((float(scores[level, column]), level, column, path))
    return slots


def _path_of(tokens: np.ndarray, parents: np.ndarray, level: int, column: int) -> Path:
    path: list[int] = []
    while level >= 0:
        path.insert(0, int(tokens[level, column]))
        column = int(parents[level, column])
        level -= 1
    return tuple(path)


def best_prefixes(
    tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray, budget: int
) -> list[Path]:
    """The `budget` best prefixes of all beams by joint log-probability; the shallower (then the
    first) wins a tie.
    """
    slots = sorted(
        beam_paths(tokens, parents, scores), key=lambda slot: (-slot[0], slot[1], slot[2])
    )
    return [path for *_, path in slots[:budget]]


@dataclass
class HostTree:
    """A tree as lists: node 0 is the root and its own parent."""

    tokens: list[int]
    parents: list[int]
    depths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.depths = [0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            assert self.parents[node] < node, "parents come before children"
            self.depths[node] = self.depths[self.parents[node]] + 1

    def ancestors(self, node: int) -> list[int]:
        """From the root down to the node, both included."""
        line = [node]
        while line[0]:
            line.insert(0, self.parents[line[0]])
        return line

    def path(self, node: int) -> Path:
        """Tokens from the root's child to the node."""
        return tuple(self.tokens[n] for n in self.ancestors(node)[1:])

    def mask(self) -> np.ndarray:
        mask = np.zeros((len(self.tokens),) * 2, bool)
        for node in range(len(self.tokens)):
            mask[node, self.ancestors(node)] = True
        return mask

    def leaves(self) -> list[int]:
        return [node for node in range(len(self.tokens)) if node not in self.parents[1:]]


def random_tree(rng: np.random.Generator, nodes: int, vocab: int, depth: int = 4) -> HostTree:
    """Siblings have different tokens; node 1, 2, ... start a chain, the rest hangs anywhere."""
    tokens, parents, depths = [int(rng.integers(vocab))], [0], [0]
    while len(tokens) < nodes:
        parent = len(tokens) - 1 if len(tokens) < 4 else int(rng.integers(len(tokens)))
        token = int(rng.integers(vocab))
        taken = {t for t, p in zip(tokens[1:], parents[1:], strict=True) if p == parent}
        if depths[parent] >= depth or token in taken:
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return HostTree(tokens, parents)


# --- acceptance (design 4.4) ----------------------------------------------------------------------


def walk(
    tree: HostTree, chosen: Sequence[int], valid: Sequence[bool] | None = None
) -> tuple[list[int], list[int]]:
    """(path of node ids from the root, tokens): follow the chosen tokens while the tree has them as
    children.
    """
    node, path, tokens = 0, [0], []
    while True:
        tokens.append(int(chosen[node]))
        children = [
            child
            for child in range(1, len(tree.tokens))
            if tree.parents[child] == node
            and tree.tokens[child] == chosen[node]
            and (valid is None or valid[child])
        ]
        if not children:
            return path, tokens
        node = children[0]
        path.append(node)
