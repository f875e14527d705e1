"""Any mlx-lm model as a target: prefill, verify a tree, tap the hidden state.

The model is never forked. A tree reaches it through three of its own hooks: the cache's
``make_mask``, the RoPE modules (one position per token) and the class of its inner stack (whose
output, after the final norm, is what the drafter reads).

Letters for shapes: T prompt tokens, N nodes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.decoding import families
from mlx_redrafter.decoding.caches import Cache, TreeSlot, unsupported_layer
from mlx_redrafter.decoding.tree import Tree
from mlx_redrafter.errors import CompatibilityError, InputError

PREFILL_STEP = 2048  # rows per prefill pass, as in mlx-lm, so that plain outputs agree


class TreeRoPE(nn.Module):
    """A RoPE module that takes one position per token while a tree is verified.

    ``mx.fast.rope`` accepts a vector of offsets per batch row, so the rows of the tree move to the
    batch axis and back.
    """

    def __init__(self, rope: nn.Module, slot: TreeSlot) -> None:
        super().__init__()
        self.rope = rope
        self._slot = slot

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        positions = self._slot.positions
        if positions is None:
            rotated: mx.array = self.rope(x, offset=offset)
            return rotated
        rows = self.rope(x.transpose(2, 1, 0, 3), offset=positions)  # (1, H, N, K) -> (N, H, 1, K)
        turned: mx.array = rows.transpose(2, 1, 0, 3)
        return turned


class Target:
    """Wraps ``model`` in place. Raises CompatibilityError if it is wrapped already.

    ``reason`` says why a model can only run plain; it is None where trees can be verified.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, TreeRoPE) for _, module in model.named_modules()):
            raise CompatibilityError("this model is a target already; load it anew to wrap it.")
        self.model = model
        self.slot = TreeSlot()
        self._tapped: mx.array | None = None
        self._given: mx.array | None = None  # what the inner stack is to return unseen
        stack = _inner_stack(model)
        self._embedding = None if stack is None else _embedding(stack)
        self.reason = _why_plain(model, stack, self._embedding)
        self._trees = self.reason is None
        if self._trees:
            assert stack is not None
            _wrap_rope(model, self.slot)
            self._tap(stack)
            self._check_tap()

    @property
    def supports_trees(self) -> bool:
        return self.reason is None

    def run_plain(self, reason: str) -> None:
        """Verify no trees from now on, because of ``reason``; caches are then mlx-lm's own."""
        self.reason = reason
        self._trees = False

    @property
    def hidden_size(self) -> int:
        return int(self.embed(mx.array([0])).shape[-1])

    @property
    def vocab_size(self) -> int:
        assert self._embedding is not None
        return int(self._embedding.weight.shape[0])

    @property
    def dtype(self) -> mx.Dtype:
        """The type that hidden states are computed in."""
        return self.embed(mx.array([0])).dtype

    def embed(self, tokens: mx.array) -> mx.array:
        """Raw embedding rows (..., D), without a family's multipliers."""
        assert self._embedding is not None
        rows: mx.array = self._embedding(tokens)
        return rows

    @property
    def embedding(self) -> nn.Module:
        """The module (V, D) that embeds tokens, packed or not."""
        assert self._embedding is not None
        return self._embedding

    @property
    def head(self) -> nn.Module:
        """The module (V, D) that gives the logits, packed or not: the embedding where it is tied.
        A scale, cap or bias that a family puts on top is not in it."""
        for name, module in self.model.named_modules():
            if name.rpartition(".")[2] == "lm_head":
                return module
        return self.embedding

    def check_tokens(self, tokens: list[int]) -> None:
        """Raise InputError for ids that MLX would read from behind the embedding's end."""
        last = 2**31 if self._embedding is None else self.vocab_size - 1
        if min(tokens) < 0 or max(tokens) > last:
            raise InputError(f"the prompt has token ids outside 0..{last}: for another model?")

    def make_cache(self) -> Cache:
        return Cache(make_prompt_cache(self.model), self.slot, trees=self._trees)

    def prefill(
        self, tokens: mx.array, cache: Cache, step_size: int = PREFILL_STEP
    ) -> tuple[mx.array | None, mx.array]:
        """Append ``tokens`` (T,) to the cache; the last one's hidden (D,) and logits (V,).

        Split as mlx-lm splits it: chunks over T - 1 tokens, then one. hidden is None where the
        model can only run plain.
        """
        while tokens.shape[0] > 1:
            chunk = tokens[: min(step_size, tokens.shape[0] - 1)]
            self.model(chunk[None], cache=cache)
            cache.wrote(chunk.shape[0], final=True)
            self._tapped = None
            mx.eval(cache.arrays)
            mx.clear_cache()
            tokens = tokens[chunk.shape[0] :]
        logits = self.model(tokens[None], cache=cache)
        cache.wrote(1, final=True)
        hidden = self.take_hidden()
        return None if hidden is None else hidden[0, -1], logits[0, -1]

    def verify(self, tree: Tree, cache: Cache) -> tuple[mx.array | None, mx.array]:
        """One pass over the tree's N nodes: their states (N, D) and logits (N, V).

        Writes N rows behind the cache's offset; ``cache.compact`` keeps those of the path.
        """
        with self.slot.hold(tree, cache.offset):
            logits = self.model(tree.tokens[None], cache=cache)
        cache.wrote(tree.num_nodes, final=False)
        states = self.take_hidden()
        return None if states is None else states[0], logits[0]

    def hidden_states(self, tokens: mx.array, step_size: int = PREFILL_STEP) -> mx.array:
        """Hidden states (B, T, D) of whole rows of tokens (B, T), for training."""
        cache = self.make_cache()
        states: list[mx.array] = []
        for start in range(0, tokens.shape[1], step_size):
            chunk = tokens[:, start : start + step_size]
            self.model(chunk, cache=cache)
            cache.wrote(chunk.shape[1], final=True)
            hidden = self.take_hidden()
            assert hidden is not None
            mx.eval(hidden)
            states.append(hidden)
        return mx.concatenate(states, axis=1)

    def logits(self, hidden: mx.array) -> mx.array:
        """The model's own logits (n, V) of states after the final norm (n, D): head, scaling and
        capping as the family has them. For training."""
        self._given = hidden[None].astype(self.dtype)
        try:
            logits: mx.array = self.model(mx.zeros((1, hidden.shape[0]), dtype=mx.int32))
        finally:
            self._given = None
        return logits[0]

    def _tap(self, stack: nn.Module) -> None:
        """Keep the stack's output. Python looks ``__call__`` up on the class, so subclass it."""
        target = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if target._given is not None:
                return target._given
            output = base.__call__(module, *args, **kwargs)
            target._tapped = output
            return output

        base = type(stack)
        stack.__class__ = type(base.__name__, (base,), {"__call__": call})

    def _check_tap(self) -> None:
        """Build, but do not evaluate, one pass: the tapped output must look like a hidden state."""
        self.model(mx.array([[0]]))
        hidden = self.take_hidden()
        if hidden is None or hidden.shape != (1, 1, self.hidden_size):
            self.run_plain("its hidden state could not be tapped")

    def take_hidden(self) -> mx.array | None:
        """The hidden states (B, T, D) of the last forward pass, once."""
        hidden, self._tapped = self._tapped, None
        return hidden


def _inner_stack(model: nn.Module) -> nn.Module | None:
    """The module that owns the layers, embeds tokens and applies the final norm."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list) or not layers:
        return None
    for _, module in model.named_modules():
        owned = [child for child in module.children().values() if isinstance(child, list)]
        if module is not model and any(child and child[0] is layers[0] for child in owned):
            return module
    return None


def _embedding(stack: nn.Module) -> nn.Module | None:
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    found = [child for child in stack.children().values() if isinstance(child, kinds)]
    return found[0] if len(found) == 1 else None


def _is_rope(module: object) -> bool:
    name = type(module).__name__
    return (
        isinstance(module, nn.Module)
        and name not in families.NOT_ROPE
        and any(part in name for part in families.ROPE_NAMES)
    )


def _why_plain(model: nn.Module, stack: nn.Module | None, embedding: object) -> str | None:
    family = getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1])
    if family in families.UNSUPPORTED_FAMILIES:
        return f"{family}: {families.UNSUPPORTED_FAMILIES[family]}"
    ropes = {type(m).__name__ for _, m in model.named_modules() if _is_rope(m)}
    for name in sorted(ropes):
        if name in families.UNSUPPORTED_ROPE:
            return f"{family}: {families.UNSUPPORTED_ROPE[name]}"
    layer = unsupported_layer(make_prompt_cache(model))
    if layer is not None:
        return f"{family}: its {layer} cannot be rolled back to the accepted path"
    if stack is None or embedding is None:
        return f"{family}: its inner stack or its token embedding was not found"
    return None


def _wrap_rope(model: nn.Module, slot: TreeSlot) -> None:
    """Wrap every RoPE module, found by its type; one that layers share stays shared."""
    wrapped: dict[int, TreeRoPE] = {}
    for _, module in list(model.named_modules()):
        for name, child in list(module.children().items()):
            if _is_rope(child):
                module[name] = wrapped.setdefault(id(child), TreeRoPE(child, slot))
