"""What the decoding tests share: cases with a known text, the lossless check, hand-made trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_redrafter.decoding.choose import make_chooser
from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.decoding.tree import Tree, build_tree, chain_tree
from tests import reference, tiny_models
from tests.reference import HostTree
from tests.scripted import Script, write_script

TIE = 5e-4  # well above float32 rounding, so that a tiny model's text is decided everywhere
PROMPT = (3, 0, 41, 5, 92, 65, 35, 8, 97)


@dataclass(frozen=True)
class Case:
    """A model with its plain text: what `Decoder` must emit after the prompt, and the states that
    predicted it.
    """

    family: str
    prompt: tuple[int, ...]
    sampling: SamplingOptions
    dtype: str
    text: list[int]
    states: np.ndarray  # (len(text), D)


@cache
def case(
    family: str = "llama",
    *,
    prompt: tuple[int, ...] = PROMPT,
    count: int = 110,
    temperature: float = 0.0,
    seed: int = 0,
    model_seed: int = 0,
    dtype: str = "float32",
) -> Case:
    """Made without the engine, but for the noise of sampled text, whose law the tests of `choose`
    check.
    """
    model = pristine(family, model_seed, dtype)
    sampling = SamplingOptions(temperature=temperature, seed=seed)
    text = reference.decode(model, prompt, count, choose_with(sampling))
    if not temperature:
        if count >= 72:
            tiny_models.assert_diverse(text)
        if dtype != "bfloat16":
            assert margins(model, prompt, text).min() > TIE, "a near tie: take another model seed"
    whole = reference.states(model, [*prompt, *text])
    return Case(family, prompt, sampling, dtype, text, whole[len(prompt) - 1 : -1])


def margins(model: nn.Module, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """(len(text),): by how much the best token beats the second, at each position of the text."""
    scores = np.sort(reference.logits(model, [*prompt, *text])[len(prompt) - 1 : -1])
    return scores[:, -1] - scores[:, -2]


def pristine(family: str, model_seed: int = 0, dtype: str = "float32") -> nn.Module:
    """The unmodified twin of `target(family)`. Never wrap it."""
    return _pristine(family, model_seed, dtype)


def target(family: str, model_seed: int = 0, dtype: str = "float32") -> Target:
    """One wrapped model for all tests: a cache belongs to the target that made it."""
    return _target(family, model_seed, dtype)


@cache
def _pristine(family: str, model_seed: int, dtype: str) -> nn.Module:
    return tiny_models.build(family, dtype, seed=model_seed)


@cache
def _target(family: str, model_seed: int, dtype: str) -> Target:
    return Target(tiny_models.build(family, dtype, seed=model_seed))


def choose_with(sampling: SamplingOptions) -> reference.Choose:
    chooser = make_chooser(sampling)
    alone = chain_tree(mx.array([0]))

    def choose(row: np.ndarray, position: int) -> int:
        return int(chooser(mx.array(row)[None], alone, position - 1)[0].item())

    return reference.argmax if sampling.temperature == 0 else choose


# --- scripted decoding ----------------------------------------------------------------------------


def scripted(
    case: Case, draft: DraftOptions, *, seed: int = 0, wrapped: Target | None = None
) -> tuple[Decoder, Script]:
    """A decoder whose beam search is replaced by the script; the tree is built as always."""
    wrapped = wrapped or target(case.family, dtype=case.dtype)
    script = write_script(
        case.text,
        case.states,
        width=draft.beam_width,
        length=draft.beam_length,
        vocab=wrapped.vocab_size,
        seed=seed,
        tolerance=0.3 if case.dtype == "bfloat16" else 1e-3,
    )
    decoder = Decoder(wrapped, random_drafter(wrapped), draft, case.sampling)

    def propose(hidden: mx.array, token: mx.array) -> Tree:
        return build_tree(token, script.beams(hidden), draft.token_budget)

    decoder.propose = propose
    return decoder, script


def check_lossless(
    case: Case,
    draft: DraftOptions,
    *,
    count: int = 96,
    seed: int = 0,
    wrapped: Target | None = None,
    arrange: Callable[[Decoder], None] = lambda decoder: None,
) -> dict[int, int]:
    """Decode `count` tokens, compare all there is to compare at every step; {accepted: steps}.

    The number of accepted tokens is checked too: an engine that accepts too little gives the right
    text, slowly.
    """
    decoder, script = scripted(case, draft, seed=seed, wrapped=wrapped)
    arrange(decoder)
    emitted = [decoder.start(list(case.prompt))]
    assert emitted == case.text[:1], "the first token, after prefill"
    histogram: dict[int, int] = {}
    while len(emitted) < count:
        place = len(emitted) - 1
        step = decoder.step()
        expected = script.accepted(place, draft.token_budget)
        assert step.tokens == case.text[len(emitted) : len(emitted) + len(step.tokens)], (
            f"{step} differs from the plain text at token {len(emitted)}"
        )
        assert step.num_accepted == expected, f"{expected} drafted tokens were right, {step}"
        assert len(step.tokens) == expected + 1
        decoder.commit(len(step.tokens))
        emitted += step.tokens
        histogram[expected] = histogram.get(expected, 0) + 1
        assert decoder.offset == len(case.prompt) + len(emitted) - 1, (
            "one row per token but the last"
        )
    return histogram


def run(decoder: Decoder, first: int, count: int) -> list[int]:
    """`first` and what follows it, by whole steps, until at least `count` tokens are there."""
    emitted = [first]
    while len(emitted) < count:
        step = decoder.step()
        decoder.commit(len(step.tokens))
        emitted += step.tokens
    return emitted


# --- drafters and trees ---------------------------------------------------------------------------


def random_drafter(wrapped: Target, seed: int = 0, **config: Any) -> Drafter:
    settings: dict[str, Any] = {
        "hidden_size": wrapped.hidden_size,
        "vocab_size": wrapped.vocab_size,
        "exit_dim": wrapped.hidden_size,
        "num_draft_layers": 1,
        "rnn": True,
    }
    return make_drafter(settings | config, seed)


def make_drafter(config: dict[str, Any], seed: int = 0) -> Drafter:
    """Random weights; a reduced vocabulary is a random subset in random order."""
    rng = np.random.default_rng(seed)
    ids = None
    if reduced := config.get("draft_vocab"):
        ids = mx.array(rng.permutation(config["vocab_size"])[:reduced], mx.int32)
    drafter = Drafter(DrafterConfig(**config), ids)
    weights = []
    for key, value in tree_flatten(drafter.parameters()):
        scale = 0.5 if value.ndim == 1 else 2.0 / value.shape[-1] ** 0.5
        weights.append((key, mx.array(scale * rng.standard_normal(value.shape))))
    drafter.load_weights([(key, value.astype(mx.float32)) for key, value in weights])
    mx.eval(drafter.parameters())
    return drafter


def device_tree(host: HostTree, padding: int = 0) -> Tree:
    """`padding` invalid nodes at the end, which repeat the root's token below the root."""
    tokens = host.tokens + [host.tokens[0]] * padding
    count = len(host.tokens)
    mask = np.eye(len(tokens), dtype=bool)
    mask[:count, :count] = host.mask()
    return Tree(
        tokens=mx.array(tokens, mx.int32),
        parents=mx.array(host.parents + [0] * padding, mx.int32),
        depths=mx.array(host.depths + [1] * padding, mx.int32),
        mask=mx.array(mask),
        valid=mx.array([True] * count + [False] * padding),
        chain=not padding and host.parents[1:] == list(range(count - 1)),
        max_depth=max(host.depths),
    )


def sequential_positions(tree: Tree) -> Tree:
    """Negative control: positions by row, as if the tree were one chain."""
    return replace(tree, depths=mx.arange(tree.tokens.shape[0], dtype=mx.int32))


def causal_mask(tree: Tree) -> Tree:
    """Negative control: each node sees all the nodes before it."""
    count = tree.tokens.shape[0]
    return replace(tree, mask=mx.tril(mx.ones((count, count), mx.bool_)))
