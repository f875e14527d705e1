"""The drafter's files and weight names (Apple's), and its network against NumPy."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.proposers.beam import BeamProposer
from mlx_redrafter.decoding.tree import Beams
from mlx_redrafter.errors import FormatError, RedrafterError
from tests import reference
from tests.decoding.harness import make_drafter

HIDDEN, VOCAB = 16, 40
BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "exit_dim": HIDDEN,
    "num_draft_layers": 1,
    "rnn": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "apple": {"exit_dim": 2 * HIDDEN, "num_draft_layers": 2},
    "no-blocks": {"num_draft_layers": 0},
    "no-blocks-wide": {"num_draft_layers": 0, "exit_dim": 2 * HIDDEN},
    "odd-exit": {"exit_dim": 24, "num_draft_layers": 2},
    "no-rnn": {"rnn": False},
    "no-rnn-apple": {"rnn": False, "exit_dim": 2 * HIDDEN},
    "reduced": {"draft_vocab": 11},
    "reduced-no-rnn": {"draft_vocab": 11, "rnn": False, "num_draft_layers": 2},
}


def make(kind: str, seed: int = 0) -> Drafter:
    return make_drafter(BASE | KINDS[kind], seed)


def search(
    drafter: Drafter, table: np.ndarray, hidden: np.ndarray, root: int, width: int, length: int
) -> Beams:
    embedding = mx.array(table)
    proposer = BeamProposer(drafter, lambda tokens: embedding[tokens], DraftOptions())
    return proposer.search(mx.array(hidden), mx.array(root), width, length)


def oracle(
    drafter: Drafter, kind: str, embedding: np.ndarray
) -> tuple[reference.NumpyDrafter, list[int]]:
    """The NumPy twin and the target token id of each row of its head."""
    weights = {
        key: np.array(value).astype(np.float64) for key, value in tree_flatten(drafter.parameters())
    }
    layers = (BASE | KINDS[kind])["num_draft_layers"]
    ids = range(VOCAB) if drafter.draft_tokens is None else drafter.draft_tokens.tolist()
    return reference.NumpyDrafter(weights, embedding.astype(np.float64), layers), list(ids)


def expected_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    config = BASE | KINDS[kind]
    exit_dim, layers = config["exit_dim"], config["num_draft_layers"]
    shapes: dict[str, tuple[int, ...]] = {}
    if config["rnn"]:
        shapes |= {
            "rnn_w.weight": (HIDDEN, HIDDEN),
            "rnn_u.weight": (HIDDEN, HIDDEN),
            "rnn_u.bias": (HIDDEN,),
        }
    if exit_dim != 2 * HIDDEN:
        shapes |= {"input_proj.weight": (exit_dim, 2 * HIDDEN), "input_proj.bias": (exit_dim,)}
    for i in range(layers):
        shapes |= {
            f"lm_head.{i}.linear.weight": (exit_dim, exit_dim),
            f"lm_head.{i}.linear.bias": (exit_dim,),
        }
    shapes[f"lm_head.{layers}.weight"] = (config.get("draft_vocab") or VOCAB, exit_dim)
    return shapes


def stored_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    reduced = KINDS[kind].get("draft_vocab")
    return expected_shapes(kind) | ({"draft_tokens": (reduced,)} if reduced else {})


@pytest.mark.parametrize("kind", KINDS)
def test_apple_names_and_shapes(kind: str) -> None:
    drafter = make(kind)
    found = {key: value.shape for key, value in tree_flatten(drafter.parameters())}
    assert found == expected_shapes(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_numpy(kind: str) -> None:
    """Every path of the beams has the joint log-probability that the equations give."""
    drafter = make(kind)
    rng = np.random.default_rng(5)
    embedding = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    hidden = rng.standard_normal(HIDDEN).astype(np.float32)
    beams = search(drafter, embedding, hidden, 0, 4, 4)
    twin, ids = oracle(drafter, kind, embedding)
    slots = reference.beam_paths(
        *(np.array(a) for a in (beams.tokens, beams.parents, beams.scores))
    )
    assert len(slots) == 16
    for score, _, _, path in slots:
        rows = [ids.index(token) for token in path]
        log_q = [twin.log_q(hidden, (0, *path[:i]))[row] for i, row in enumerate(rows)]
        assert score == pytest.approx(sum(log_q), abs=2e-4)


@pytest.mark.parametrize("kind", ["default", "apple", "no-rnn", "reduced"])
def test_round_trip(kind: str, tmp_path: Path) -> None:
    drafter = make(kind)
    drafter.save(tmp_path / "drafter")
    loaded = Drafter.load(tmp_path / "drafter")
    first, second = (dict(tree_flatten(d.parameters())) for d in (drafter, loaded))
    assert first.keys() == second.keys()
    assert all(mx.array_equal(first[key], second[key]).item() for key in first)
    if drafter.draft_tokens is not None:
        assert loaded.draft_tokens.tolist() == drafter.draft_tokens.tolist()
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["model_type"] == "recurrent_drafting_drafter"
    assert {key: config[key] for key in BASE} == BASE | {
        key: value for key, value in KINDS[kind].items() if key in BASE
    }
    stored = mx.load(str(tmp_path / "drafter" / "model.safetensors"))
    assert {key: value.shape for key, value in stored.items()} == stored_shapes(kind)


def write_apple_folder(folder: Path, **changes: Any) -> Path:
    """A drafter as Apple's PyTorch trainer leaves it: extra keys in the config, plain names in the
    file.
    """
    folder.mkdir()
    config = BASE | {"exit_dim": 2 * HIDDEN, "num_draft_layers": 2}
    extras = {
        "model_type": "recurrent_drafting_drafter",
        "num_lookback_tokens": -1,
        "architectures": ["Drafter"],
        "torch_dtype": "float32",
        "transformers_version": "4.42.0",
        "emb_norm": False,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config | extras))
    weights = {key: mx.random.normal(shape) for key, shape in expected_shapes("apple").items()}
    for key, value in changes.items():
        name = key.replace("__", ".")
        weights.pop(name, None)
        if value is not None:
            weights[name] = value
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def test_loads_apples_files(tmp_path: Path) -> None:
    folder = write_apple_folder(tmp_path / "apple")
    drafter = Drafter.load(folder)
    stored = mx.load(str(folder / "model.safetensors"))
    for key, value in tree_flatten(drafter.parameters()):
        assert mx.array_equal(value, stored[key]).item(), key


@pytest.mark.parametrize(
    "changes",
    [
        {"rnn_u__bias": None},
        {"lm_head__2__weight": None},
        {"rnn_w__weight": mx.zeros((HIDDEN, HIDDEN + 1))},
        {"lm_head__2__weight": mx.zeros((VOCAB - 1, 2 * HIDDEN))},
        {"surprise__weight": mx.zeros((2, 2))},
    ],
    ids=["missing-bias", "missing-head", "wrong-shape", "short-head", "unknown-tensor"],
)
def test_refuses_wrong_tensors(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RedrafterError) as error:
        Drafter.load(write_apple_folder(tmp_path / "apple", **changes))
    name = next(iter(changes)).replace("__", ".")
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_refuses_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(RedrafterError):
        Drafter.load(tmp_path / "nowhere")
    folder = write_apple_folder(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(RedrafterError):
        Drafter.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(RedrafterError):
        Drafter.load(folder)


def test_config_refuses_nonsense() -> None:
    for wrong in ({"hidden_size": 0}, {"draft_vocab": VOCAB + 1}, {"num_draft_layers": -1}):
        with pytest.raises(RedrafterError):
            DrafterConfig(**(BASE | wrong))


# --- packed weights and the target's own head -----------------------------------------------------

WIDE: dict[str, Any] = BASE | {"hidden_size": 64, "exit_dim": 64}


def wide_search(drafter: Drafter, width: int = 3) -> Beams:
    rng = np.random.default_rng(5)
    embedding = rng.standard_normal((VOCAB, 64)).astype(np.float32)
    return search(drafter, embedding, rng.standard_normal(64).astype(np.float32), 0, width, 3)


def logits_of(drafter: Drafter) -> np.ndarray:
    rng = np.random.default_rng(6)
    hidden, first, second = (mx.array(rng.standard_normal((7, 64)).astype("f")) for _ in range(3))
    state = drafter.advance(drafter.advance(None, first), second)
    return np.array(drafter.head(drafter.features(hidden, state)))


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize(("bits", "error"), [(8, 0.03), (4, 0.4)])
def test_a_packed_drafter_says_nearly_the_same(
    bits: int, error: float, group_size: int, tmp_path: Path
) -> None:
    """Also after it was written, in another floating-point type, and read again."""
    drafter = make_drafter(WIDE | {"draft_vocab": 30})
    exact = logits_of(drafter)
    parameters = drafter.num_parameters
    drafter.quantize({"bits": bits, "group_size": group_size})
    packed = logits_of(drafter)
    assert np.std(packed - exact) < error * np.std(exact)
    assert np.abs(packed - exact).max() > 0, "nothing was packed"
    assert drafter.num_parameters == parameters
    assert drafter.input_proj.weight.dtype == mx.float32
    drafter.save(tmp_path, dtype=mx.float16)
    stored = mx.load(str(tmp_path / "model.safetensors"))
    assert stored["lm_head.1.weight"].shape == (30, 64 * bits // 32)
    assert {str(array.dtype) for array in stored.values()} == {
        "mlx.core.uint32",
        "mlx.core.float16",
        "mlx.core.int32",
    }
    loaded = Drafter.load(tmp_path, dtype=mx.float32)
    assert loaded.config.quantization == {"bits": bits, "group_size": group_size}
    np.testing.assert_allclose(logits_of(loaded), packed, atol=0.02 * np.std(exact))
    first, second = wide_search(drafter, 1), wide_search(loaded, 1)
    assert first.tokens.tolist() == second.tokens.tolist()


def test_a_linear_that_no_group_fits_stays_as_it_is() -> None:
    drafter = make_drafter(WIDE | {"exit_dim": 48})
    drafter.quantize({"bits": 4, "group_size": 32})
    kinds = {name: str(w.dtype) for name, w in tree_flatten(drafter.parameters())}
    assert kinds["rnn_u.weight"] == "mlx.core.uint32"
    assert kinds["lm_head.0.linear.weight"] == kinds["lm_head.1.weight"] == "mlx.core.float32"
    wide_search(drafter)


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantization": {"bits": 3, "group_size": 64}},
        {"quantization": {"bits": 4, "group_size": 128}},
        {"quantization": {"bits": 4}},
        {"quantization": {"bits": 4, "group_size": 64, "mode": "mxfp4"}},
        {"quantization": 4},
        {"quantization": {}},
        {"tie_head": 1},
        {"tie_head": True, "exit_dim": 48},
    ],
)
def test_config_refuses_what_cannot_be_packed_or_tied(wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        DrafterConfig.from_dict(WIDE | wrong)


def test_a_file_of_other_packing_is_refused(tmp_path: Path) -> None:
    drafter = make_drafter(WIDE)
    drafter.quantize({"bits": 8, "group_size": 64})
    drafter.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization": {"bits": 4, "group_size": 64}})
    )
    with pytest.raises(FormatError, match=r"rnn_u.weight \(64, 16\) instead of \(64, 8\)"):
        Drafter.load(tmp_path)


@pytest.mark.parametrize("reduced", [None, 11])
@pytest.mark.parametrize("packed", [False, True], ids=["floats", "packed"])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_a_tied_head_equals_an_own_one_of_the_same_rows(
    kind: Any, packed: bool, reduced: int | None, tmp_path: Path
) -> None:
    """The file has no head; the rows come from the target's, packed or not."""
    matrix = nn.Linear(64, VOCAB, bias=False) if kind is nn.Linear else nn.Embedding(VOCAB, 64)
    rows = matrix.weight
    if packed:
        matrix = matrix.to_quantized(group_size=32, bits=4)
        rows = mx.dequantize(matrix.weight, matrix.scales, matrix.biases, 32, 4)
    own = make_drafter(WIDE | ({"draft_vocab": reduced} if reduced else {}))
    own.lm_head[-1].weight = rows if reduced is None else rows[own.draft_tokens]
    tied = Drafter(dataclasses.replace(own.config, tie_head=True), own.draft_tokens)
    shared = {k: w for k, w in tree_flatten(own.parameters()) if k != "lm_head.1.weight"}
    tied.load_weights(list(shared.items()))
    tied.save(tmp_path)
    stored = mx.load(str(tmp_path / "model.safetensors"))
    assert set(stored) == set(shared) | ({"draft_tokens"} if reduced else set())
    loaded = Drafter.load(tmp_path)
    with pytest.raises(AssertionError, match="bind_head"):
        logits_of(loaded)
    loaded.bind_head(matrix)
    np.testing.assert_allclose(logits_of(loaded), logits_of(own), atol=1e-4)
    mine, theirs = wide_search(loaded), wide_search(own)
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    np.testing.assert_allclose(np.array(mine.scores), np.array(theirs.scores), atol=1e-4)
    # Packing the drafter leaves the target's rows alone, and what is trained and saved, too.
    head = loaded._tied_head
    loaded.quantize({"bits": 8, "group_size": 64})
    assert loaded._tied_head is head
    assert np.std(logits_of(loaded) - logits_of(own)) < 0.03 * np.std(logits_of(own))
    trainable = {name for name, _ in tree_flatten(loaded.trainable_parameters())}
    assert not any("_tied_head" in name for name in trainable)


def test_optional_keys_that_say_nothing_are_left_out() -> None:
    keys = set(DrafterConfig(**BASE).to_dict())
    assert keys == {*BASE, "model_type", "architectures"}
    assert DrafterConfig.from_dict(DrafterConfig(**BASE).to_dict()) == DrafterConfig(**BASE)
    full = DrafterConfig(
        **BASE, quantization={"bits": 4, "group_size": 32}, tie_head=True, draft_vocab=9
    )
    assert DrafterConfig.from_dict(full.to_dict()) == full
