"""Name or path -> ModelPair. All checks that target, drafter and tokenizer fit are here."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from mlx_redrafter import registry
from mlx_redrafter.decoding import selfcheck
from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import CompatibilityError, FormatError, InputError, RedrafterError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.machine import paths

DEFAULT_MODEL = "smollm2-135m"
AUTO = "auto"
CAST_DTYPES = ("float32", "bfloat16", "float16")
_FALLBACK_CONTEXT = 2048  # where the config does not say


@dataclass
class ModelPair:
    """A target, its drafter (None where it decodes plain, ``drafting_reason`` says why), its
    tokenizer and what they were loaded from."""

    target: Target
    drafter: Drafter | None
    tokenizer: TokenizerWrapper
    name: str
    context_length: int
    config: dict[str, Any]
    drafting_reason: str | None = None
    fingerprint: str = ""  # of the target with its adapter; fits no drafter where it was not taken
    adapter_path: Path | None = None


def load(
    model: str = DEFAULT_MODEL,
    drafter: str | None = AUTO,
    dtype: str | None = None,
    adapter_path: str | Path | None = None,
) -> ModelPair:
    """Load a target and its drafter.

    ``model``: a shipped model's name, a folder in MLX format or a Hub repository. ``drafter``:
    "auto" for the one that is known for this model (none is no error), a name or folder, or None.
    ``dtype``: "float32", "bfloat16" or "float16" for unquantised weights and what is computed;
    a shipped model has "4bit" too. None takes what suits this machine. ``adapter_path``: a folder
    that mlx-lm's LoRA training wrote, applied to the target.

    Raises RedrafterError with the reason and the remedy.
    """
    folder = registry.resolve(model, dtype)
    network, config = _load_network(folder)
    adapter, adapter_name = None, None
    if adapter_path is not None:
        adapter = Path(adapter_path).expanduser()
        adapter_name = _adapter_fingerprint(adapter)
    fingerprint = fingerprints.of_target(network, adapter_name)
    if adapter is not None:
        _apply_adapter(network, adapter)
    if dtype in CAST_DTYPES:
        network.set_dtype(getattr(mx, dtype))
    tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    target = Target(network)
    pair = ModelPair(
        target=target,
        drafter=None,
        tokenizer=tokenizer,
        name=model,
        context_length=_context_length(config),
        config=config,
        fingerprint=fingerprint,
        adapter_path=adapter,
        drafting_reason="not asked for" if drafter is None else None,
    )
    if target.supports_trees:
        reason = _self_check(pair, adapter_name)
        if reason is not None:
            target.run_plain(reason)
    if drafter is not None:
        _add_drafter(pair, drafter)
    return pair


def _load_network(folder: Path) -> tuple[Any, dict[str, Any]]:
    try:
        return load_model(folder)
    except RedrafterError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise FormatError(f"{folder} cannot be loaded by mlx-lm: {_one_line(error)}") from error


_ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


def _adapter_fingerprint(folder: Path) -> str:
    for name in _ADAPTER_FILES:
        if not (folder / name).is_file():
            raise InputError(
                f"no adapter in {folder}: it lacks {name}; give a folder that mlx_lm.lora wrote"
            )
    try:
        return fingerprints.of_adapter(folder)
    except (OSError, ValueError, AttributeError) as error:
        raise FormatError(f"the adapter in {folder} cannot be read: {_one_line(error)}") from error


def _apply_adapter(network: Any, folder: Path) -> None:
    try:
        load_adapters(network, str(folder))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise CompatibilityError(
            f"the adapter in {folder} does not fit this model, or is broken: {_one_line(error)}"
        ) from error
    network.eval()  # the new layers come in training mode, with dropout
    mx.eval(network.parameters())


def _one_line(error: Exception, longest: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else f"{text[:longest]}..."


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return {**nested, **config} if isinstance(nested, dict) else config


def _context_length(config: dict[str, Any]) -> int:
    length = _text_config(config).get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else _FALLBACK_CONTEXT


def _original_context(config: dict[str, Any]) -> int | None:
    values = _text_config(config)
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    for place in (scaling, values):
        length = place.get("original_max_position_embeddings")
        if isinstance(length, int):
            return length
    return None


def _self_check(pair: ModelPair, adapter: str | None) -> str | None:
    """Why trees cannot be trusted on this model and machine; None where they can. Measured once
    per model, adapter, machine and mlx version."""
    weights = [(n, w.shape, str(w.dtype)) for n, w in tree_flatten(pair.target.model.parameters())]
    key = fingerprints.of_values(
        selfcheck.VERSION,
        {name: value for name, value in pair.config.items() if name != "eos_token_id"},
        sorted(weights),
        [platform.machine(), str(mx.default_device()), _chip()],
        [version("mlx"), version("mlx-lm")],
        *([adapter] if adapter else []),
    )
    path = paths.home() / "selfcheck" / f"{key}.json"
    try:
        reason = json.loads(path.read_text(encoding="utf-8"))["reason"]
        if reason is None or isinstance(reason, str):
            return reason
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never measured, or a broken record: measure
    verdict = selfcheck.check(pair.target, pair.context_length, _original_context(pair.config))
    mx.clear_cache()
    _remember(path, verdict)
    return verdict.reason


def _chip() -> str:
    return str(mx.device_info().get("device_name", platform.processor()))


def _remember(path: Path, verdict: selfcheck.Verdict) -> None:
    """Write the verdict whole or not at all. A full or read-only disk only costs time next time."""
    partial = path.with_suffix(f".{os.getpid()}")
    record = {"reason": verdict.reason, "measured": [vars(m) for m in verdict.measured]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)


def _add_drafter(pair: ModelPair, drafter: str) -> None:
    """Put the drafter into the pair, or say why there is none. An explicit one must fit."""
    folder = registry.resolve_drafter(pair.name, drafter, pair.fingerprint)
    if folder is None:
        pair.drafting_reason = "no drafter is known for this model; train one, or name a folder"
        return
    if not pair.target.supports_trees:
        if drafter != AUTO:
            raise CompatibilityError(
                f"{pair.name} cannot verify drafts, so it takes no drafter: {pair.target.reason}."
            )
        pair.drafting_reason = pair.target.reason
        return
    loaded = Drafter.load(folder, dtype=pair.target.dtype)
    _check_fit(pair, loaded, folder)
    if loaded.config.tie_head:
        loaded.bind_head(pair.target.head)
    pair.drafter = loaded


def _check_fit(pair: ModelPair, drafter: Drafter, folder: Path) -> None:
    config, target = drafter.config, pair.target
    for what, theirs, ours in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if theirs != ours:
            raise CompatibilityError(
                f"the drafter in {folder} has {what} {theirs}, {pair.name} has {ours}: "
                "it was made for another model."
            )
    made_for = config.target or {}
    fingerprint = made_for.get("fingerprint")
    if fingerprint and fingerprints.similarity(fingerprint, pair.fingerprint) < fingerprints.SAME:
        raise CompatibilityError(
            f"the drafter in {folder} was made for other weights than {pair.name} has here, or for "
            f"another adapter (its target: {made_for.get('name', 'without a name')})."
        )
    expected = made_for.get("tokenizer")
    if expected and expected != fingerprints.of_vocabulary(pair.tokenizer.get_vocab()):
        raise CompatibilityError(
            f"the drafter in {folder} was made for another tokenizer than {pair.name}'s."
        )
