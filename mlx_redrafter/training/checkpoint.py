"""The whole state of a training run in one folder, so that it can go on as if never interrupted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_redrafter.errors import FormatError
from mlx_redrafter.machine.files import atomic_folder

_ARRAYS = "state.safetensors"
_VALUES = "state.json"


@dataclass
class TrainingState:
    """All that a step changes. ``step`` counts the steps done; weights are trees of arrays.

    average is the moving average of the weights (None where there is none), best the weights with
    the best validation, best_score theirs (expected tokens per step, minus the loss), and waited
    the validations since.
    """

    step: int
    weights: Any
    optimizer: Any
    average: Any = None
    best: Any = None
    best_score: list[float] = field(default_factory=list)  # none is less than any
    best_step: int = 0
    waited: int = 0
    validations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def arrays(self) -> dict[str, Any]:
        named = {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "average": self.average,
            "best": self.best,
        }
        return {name: tree for name, tree in named.items() if tree is not None}

    @property
    def values(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "best_score": self.best_score,
            "best_step": self.best_step,
            "waited": self.waited,
            "validations": self.validations,
        }

    def in_order_of(self, fresh: TrainingState) -> TrainingState:
        """The same with its trees in the order of ``fresh``'s, which a file does not keep: sums
        over a tree then round as before, and processes that exchange trees agree."""

        def ordered(like: Any, tree: Any) -> Any:
            return None if tree is None else tree_map(lambda _, leaf: leaf, like, tree)

        return replace(
            self,
            weights=ordered(fresh.weights, self.weights),
            optimizer=ordered(fresh.optimizer, self.optimizer),
            average=ordered(fresh.weights, self.average),
            best=ordered(fresh.weights, self.best),
        )


@dataclass(frozen=True)
class Checkpoint:
    """The folder of one run. ``recipe`` tells runs apart: another one's state is not taken."""

    folder: Path
    recipe: str

    def save(self, state: TrainingState) -> None:
        """Replace the last one; it stays until the new one is whole."""
        with atomic_folder(self.folder) as temporary:
            mx.save_safetensors(
                str(temporary / _ARRAYS), dict(tree_flatten(state.arrays)), {"format": "mlx"}
            )
            text = json.dumps({"recipe": self.recipe, **state.values})
            (temporary / _VALUES).write_text(text, encoding="utf-8")

    def load(self) -> TrainingState | None:
        """The last state, or None where there is none. FormatError where it cannot be used."""
        path = self.folder / _VALUES
        if not path.is_file():
            return None
        try:
            values = dict(json.loads(path.read_text(encoding="utf-8")))
            recipe = values.pop("recipe")
            arrays = mx.load(str(self.folder / _ARRAYS))
            assert isinstance(arrays, dict)
            trees: Any = tree_unflatten(list(arrays.items()))
            state = TrainingState(**values, **trees)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise FormatError(
                f"checkpoint {self.folder} is broken ({reason}): delete it to train from the start."
            ) from None
        if recipe != self.recipe:
            raise FormatError(
                f"checkpoint {self.folder} is of a run with other settings or other data: give "
                "those again, or delete it to train from the start."
            )
        return state
