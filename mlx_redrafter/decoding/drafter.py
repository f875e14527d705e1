"""The recurrent drafter: an RNN over drafted tokens, a small network, a head.

With E the target's embedding, h the target's hidden state and g_0 the last emitted token (paper:
arXiv 2403.09919; equations: design 4.2):

    s_0 = 0;   s_t = SiLU(rnn_w E[g_{t-1}] + rnn_u s_{t-1} + b_u)      (rnn = true)
    s_0 = 0;   s_t = E[g_{t-1}] + s_{t-1}                              (rnn = false)
    x = [h ; s_t];   x = input_proj x  if exit_dim != 2 D
    x = x + SiLU(linear_i x)  for each residual block
    log q(g_t) = log_softmax(head x)

Weight names and shapes are Apple's, so a drafter trained elsewhere loads here. Ours are optional:
a reduced vocabulary (the head has V_d rows, and ``draft_tokens`` (V_d,) holds their target token
ids), packed weights, and the target's own head in place of one in the file.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_redrafter.errors import FormatError

MODEL_TYPE = "recurrent_drafting_drafter"
_DRAFT_TOKENS = "draft_tokens"
_QUANTIZATIONS = [{"bits": bits, "group_size": size} for bits in (4, 8) for size in (32, 64)]


@dataclass(frozen=True)
class DrafterConfig:
    """Apple's configuration keys, and ours as optional ones. Unknown keys are kept out."""

    hidden_size: int
    vocab_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool = True
    draft_vocab: int | None = None
    target: dict[str, Any] | None = None
    quantization: dict[str, int] | None = None  # {"bits": 4 or 8, "group_size": 32 or 64}
    tie_head: bool = False  # the head is the target's rows for draft_tokens

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "exit_dim"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise FormatError(f"drafter config: {name} is {getattr(self, name)!r}, not a size.")
        if not _is_int(self.num_draft_layers) or self.num_draft_layers < 0:
            raise FormatError(f"drafter config: num_draft_layers is {self.num_draft_layers!r}.")
        if not isinstance(self.rnn, bool):
            raise FormatError(f"drafter config: rnn is {self.rnn!r}; it must be true or false.")
        if self.quantization is not None and self.quantization not in _QUANTIZATIONS:
            raise FormatError(
                f"drafter config: quantization is {self.quantization!r}; it must have bits 4 or 8 "
                "and group_size 32 or 64."
            )
        if not isinstance(self.tie_head, bool):
            raise FormatError(f"drafter config: tie_head is {self.tie_head!r}, not true or false.")
        if self.tie_head and self.exit_dim != self.hidden_size:
            raise FormatError(
                f"drafter config: exit_dim is {self.exit_dim}; with tie_head it must be "
                f"hidden_size ({self.hidden_size})."
            )
        if self.draft_vocab is not None and not (
            _is_int(self.draft_vocab) and 1 <= self.draft_vocab <= self.vocab_size
        ):
            raise FormatError(
                f"drafter config: draft_vocab is {self.draft_vocab!r}; it must be between 1 and "
                f"vocab_size ({self.vocab_size})."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrafterConfig:
        if values.get("model_type", MODEL_TYPE) != MODEL_TYPE:
            raise FormatError(
                f"model_type is {values['model_type']!r}, not {MODEL_TYPE!r}: this folder holds "
                "no drafter."
            )
        required = ("hidden_size", "vocab_size", "exit_dim", "num_draft_layers")
        missing = [name for name in required if name not in values]
        if missing:
            raise FormatError(f"drafter config lacks {', '.join(missing)}.")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        values = {  # an optional key that says nothing is left out, as Apple's files lack it
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name == "rnn" or getattr(self, field.name) != field.default
        }
        return {"model_type": MODEL_TYPE, "architectures": ["Drafter"], **values}

    @property
    def head_size(self) -> int:
        """Rows of the head: the reduced vocabulary's size, or the target's."""
        return self.draft_vocab or self.vocab_size


class ResidualBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def __call__(self, x: mx.array) -> mx.array:
        return x + nn.silu(self.linear(x))


class Drafter(nn.Module):
    """See the module's docstring. D hidden size, E exit size, V_d head rows."""

    def __init__(self, config: DrafterConfig, draft_tokens: mx.array | None = None) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        if config.rnn:
            self.rnn_u = nn.Linear(size, size)
            self.rnn_w = nn.Linear(size, size, bias=False)
        if config.exit_dim != 2 * size:
            self.input_proj = nn.Linear(2 * size, config.exit_dim)
        blocks: list[nn.Module] = [
            ResidualBlock(config.exit_dim) for _ in range(config.num_draft_layers)
        ]
        own_head = nn.Linear(config.exit_dim, config.head_size, bias=False)
        self.lm_head = blocks if config.tie_head else [*blocks, own_head]
        self._tied_head: nn.Module | None = None  # "_": not among the drafter's own parameters
        self._draft_tokens = draft_tokens
        if config.quantization is not None:
            self._pack(config.quantization)

    @property
    def draft_tokens(self) -> mx.array | None:
        """(V_d,) int32 target ids of the head's rows; None where the head covers all of V."""
        return self._draft_tokens

    def target_tokens(self, rows: mx.array) -> mx.array:
        """Target token ids of head rows (any shape)."""
        if self._draft_tokens is None:
            return rows.astype(mx.int32)
        return self._draft_tokens[rows]

    def advance(self, state: mx.array | None, embedding: mx.array) -> mx.array:
        """s_t from s_{t-1} (None for s_0 = 0) and E[g_{t-1}], each (..., D)."""
        if not self.config.rnn:
            return embedding if state is None else embedding + state
        inputs = self.rnn_w(embedding)
        recurrent = self.rnn_u.bias if state is None else self.rnn_u(state)
        return nn.silu(inputs + recurrent)

    def features(self, hidden: mx.array, state: mx.array) -> mx.array:
        """x before the residual blocks, (..., E), from hidden and state (..., D)."""
        x = mx.concatenate([mx.broadcast_to(hidden, state.shape), state], axis=-1)
        return self.input_proj(x) if "input_proj" in self else x

    def head(self, x: mx.array) -> mx.array:
        """Logits over the head's rows, (..., V_d), from features (..., E)."""
        for layer in self.lm_head:
            x = layer(x)
        if self.config.tie_head:
            assert self._tied_head is not None, "tie_head: call bind_head first"
            x = self._tied_head(x)
        return x

    def bind_head(self, matrix: nn.Module) -> None:
        """Take the head that ``tie_head`` leaves out from the target's, ``matrix``: a linear or an
        embedding of shape (V, D), packed or not. Packed rows stay packed."""
        rows = {name: matrix[name] for name in ("weight", "scales", "biases") if name in matrix}
        if self._draft_tokens is not None:
            rows = {name: each[self._draft_tokens] for name, each in rows.items()}
        if "scales" in rows:
            packing = {name: getattr(matrix, name) for name in ("group_size", "bits", "mode")}
            size = (self.config.exit_dim, self.config.head_size)
            head = nn.QuantizedLinear(*size, bias=False, **packing)
        else:
            head = nn.Linear(self.config.exit_dim, self.config.head_size, bias=False)
        head.update(rows)
        mx.eval(head.parameters())
        self._tied_head = head.freeze()

    def quantize(self, quantization: dict[str, int]) -> None:
        """Pack the weights in place, once they are trained."""
        self.config = dataclasses.replace(self.config, quantization=quantization)
        self._pack(quantization)
        mx.eval(self.parameters())

    def _pack(self, quantization: dict[str, int]) -> None:
        """All linears but ``input_proj``: it reads hidden states, a few directions of which are ten
        times as wide as the rest, and its columns make up for it, so that a group of them would
        share too coarse a scale. (Beam search packs the half that it reads at every step.)"""
        size = quantization["group_size"]
        nn.quantize(
            self,
            **quantization,
            class_predicate=lambda name, module: (
                name not in ("input_proj", "_tied_head")
                and isinstance(module, nn.Linear)
                and module.weight.shape[1] % size == 0
            ),
        )

    @property
    def num_parameters(self) -> int:
        """Weights, however they are packed; scales are not counted."""
        total = 0
        for name, weight in tree_flatten(self.parameters()):
            if weight.dtype == mx.uint32:
                assert self.config.quantization is not None
                total += weight.size * (32 // self.config.quantization["bits"])
            elif not name.endswith((".scales", ".biases")):
                total += weight.size
        return total

    def save(self, folder: Path, dtype: mx.Dtype | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors`` (Apple's names) into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = dict(tree_flatten(self.parameters()))
        if dtype is not None:
            weights = _cast(weights, dtype)
        if self._draft_tokens is not None:
            weights[_DRAFT_TOKENS] = self._draft_tokens
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        text = json.dumps(self.config.to_dict(), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, dtype: mx.Dtype | None = None) -> Drafter:
        """Read a drafter folder. FormatError names what is missing, extra or misshapen."""
        config = DrafterConfig.from_dict(_read_config(folder / "config.json"))
        path = folder / "model.safetensors"
        if not path.is_file():
            raise FormatError(f"{folder} has no model.safetensors: it is not a drafter's folder.")
        try:
            weights = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise FormatError(f"{path} is broken: {_first_line(error)}; fetch it anew.") from None
        assert isinstance(weights, dict)
        weights.pop("emb_norm.weight", None)  # allocated by Apple's trainer, never applied
        draft_tokens = weights.pop(_DRAFT_TOKENS, None)
        _check_draft_tokens(config, draft_tokens, path)
        drafter = cls(config, None if draft_tokens is None else draft_tokens.astype(mx.int32))
        _check_shapes(drafter, weights, path)
        if dtype is not None:
            weights = _cast(weights, dtype)
        drafter.load_weights(list(weights.items()))
        mx.eval(drafter.parameters())
        return drafter


def _cast(weights: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Packed weights are integers, and stay as they are."""
    return {
        name: weight.astype(dtype) if mx.issubdtype(weight.dtype, mx.floating) else weight
        for name, weight in weights.items()
    }


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(
            f"{path.parent} has no config.json: it is not a drafter's folder."
        ) from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {_first_line(error)}.") from None
    if not isinstance(values, dict):
        raise FormatError(f"{path} does not hold a JSON object.")
    return values


def _check_draft_tokens(config: DrafterConfig, tokens: mx.array | None, path: Path) -> None:
    if (tokens is None) != (config.draft_vocab is None):
        raise FormatError(f"{path}: draft_vocab and the array {_DRAFT_TOKENS} come only together.")
    if tokens is None:
        return
    if tokens.shape != (config.draft_vocab,):
        raise FormatError(
            f"{path}: {_DRAFT_TOKENS} has shape {tokens.shape}, expected ({config.draft_vocab},)."
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= config.vocab_size:
        raise FormatError(f"{path}: {_DRAFT_TOKENS} holds ids outside 0..{config.vocab_size - 1}.")


def _check_shapes(drafter: Drafter, weights: dict[str, mx.array], path: Path) -> None:
    expected = {name: w.shape for name, w in tree_flatten(drafter.parameters())}
    missing = sorted(expected.keys() - weights.keys())
    extra = sorted(weights.keys() - expected.keys())
    wrong = [
        f"{name} {weights[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in weights and weights[name].shape != shape
    ]
    problems = [
        f"{what} {', '.join(names)}"
        for what, names in (("lacks", missing), ("has unknown", extra), ("has", wrong))
        if names
    ]
    if problems:
        raise FormatError(f"{path} {'; '.join(problems)}.")
