"""A whole run on a tiny trained target: what it writes, what it refuses, where it goes on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_redrafter import registry
from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.errors import CompatibilityError, InputError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.load import ModelPair, load
from mlx_redrafter.training import distil
from mlx_redrafter.training.data import DataOptions, write_data
from mlx_redrafter.training.distil import Distilled, Recipe, Run, Sources
from mlx_redrafter.training.log import read_log
from mlx_redrafter.training.trainer import TrainOptions

DATA = DataOptions(tokens=2500, row_length=96, rows_per_shard=8, batch_size=8)
OPTIONS = TrainOptions(
    horizon=2, anchors_per_batch=128, epochs=4, learning_rate=3e-3, validations=2
)
RECIPE = Recipe(
    data=None, options=OPTIONS, draft_vocab=400, draft=DraftOptions(2, 2, 3), proof_prompts=2
)


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_REDRAFTER_HOME", str(tmp_path_factory.mktemp("home")))
        return load(str(tiny_target), drafter=None, dtype="float32")


@pytest.fixture(scope="module")
def rows(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Text that the target wrote, in files of their own."""
    return Sources(tuple(write_data(pair, tmp_path_factory.mktemp("data") / "rows", DATA)))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_REDRAFTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def train(pair: ModelPair, rows: Sources, tmp_path: Path) -> Callable[..., Distilled]:
    def train(name: str = "out", recipe: Recipe = RECIPE, **more: Any) -> Distilled:
        return Run(pair, tmp_path / name, recipe, rows, **more).train()

    return train


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_output_is_a_drafter_with_its_proof(
    train: Callable[..., Distilled], tiny_target: Path, tmp_path: Path
) -> None:
    log = tmp_path / "copy.jsonl"
    result = train(report_to=log)
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "curves.png",
        "log.jsonl",
        "model.safetensors",
    ]
    assert not (tmp_path / "out.work").exists()
    assert result.proof is not None
    assert result.acceptance is not None
    greedy = result.proof.at(0.0)
    assert greedy is not None
    assert greedy.equal_texts == greedy.texts
    assert result.outcome.best.agreement[0] > 0.2
    text = (out / "README.md").read_text()
    assert f"{result.outcome.best.loss:.3f}" in text
    assert str(tmp_path) not in text
    events = [event["event"] for event in read_log(out / "log.jsonl")]
    assert events.count("step") == result.outcome.steps
    assert {"start", "validation", "acceptance", "proof"} <= set(events)
    assert log.read_text() == (out / "log.jsonl").read_text()

    # Registered: the model finds it, also under another path and in another type.
    found = load(str(tiny_target), dtype="bfloat16")
    assert found.drafter is not None
    assert found.drafter.config.target is not None
    assert found.drafter.config.draft_vocab == 400
    names = [entry.name for entry in registry.models() if entry.kind == "drafter"]
    assert tiny_target.name in names


def test_the_same_again_gives_the_same_and_replaces_it(
    train: Callable[..., Distilled], tmp_path: Path
) -> None:
    quick = replace(RECIPE, proof_prompts=0)
    train("one", quick)
    train("two", quick)
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    train("two", replace(quick, options=replace(OPTIONS, seed=1)))
    assert weights(tmp_path / "one") != weights(tmp_path / "two")


def test_hidden_states_computed_again_give_the_same(
    train: Callable[..., Distilled], tmp_path: Path
) -> None:
    quick = replace(RECIPE, proof_prompts=0)
    train("kept", quick, work=tmp_path / "work")
    assert list((tmp_path / "work" / "features").glob("*.safetensors"))
    train("anew", replace(quick, features_bytes=0), work=tmp_path / "other")
    assert not (tmp_path / "other" / "features").exists()
    assert weights(tmp_path / "kept") == weights(tmp_path / "anew")


def test_a_run_killed_in_its_proof_does_not_train_again(
    train: Callable[..., Distilled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distil, "prove", killed)
        with pytest.raises(KeyboardInterrupt):
            train()
    assert not (tmp_path / "out").exists()
    result = train(recipe=RECIPE)
    events = read_log(tmp_path / "out" / "log.jsonl")
    assert sum(event["event"] == "step" for event in events) == result.outcome.steps
    (resume,) = (event for event in events if event["event"] == "resume")
    assert resume["step"] == result.outcome.steps


@pytest.mark.parametrize(
    "size", [{"tie_head": True}, {"bits": 8, "num_draft_layers": 2}, {"exit_dim": 64}]
)
def test_other_sizes_are_trained_and_load(
    train: Callable[..., Distilled], tmp_path: Path, tiny_target: Path, size: dict[str, Any]
) -> None:
    if "bits" in size:  # groups of 64 do not divide 96
        size = {**size, "exit_dim": 128}
    result = train(recipe=replace(RECIPE, proof_prompts=0, **size))
    assert result.outcome.best.agreement[0] > 0.15
    config = Drafter.load(tmp_path / "out").config
    for name, value in size.items():
        found = config.quantization["bits"] if name == "bits" else getattr(config, name)  # type: ignore[index]
        assert found == value
    assert load(str(tiny_target), drafter=str(tmp_path / "out"), dtype="float32").drafter


def test_it_starts_from_an_earlier_drafter(train: Callable[..., Distilled], tmp_path: Path) -> None:
    quick = replace(RECIPE, proof_prompts=0)
    first = train("first", quick)
    earlier = Drafter.load(tmp_path / "first")
    short = replace(quick, draft_vocab=None, options=replace(OPTIONS, epochs=0.1, validations=1))
    second = train("second", short, earlier=earlier)
    fresh = train("fresh", replace(short, draft_vocab=400))
    assert Drafter.load(tmp_path / "second").config.draft_vocab == 400
    assert second.outcome.best.agreement[0] > fresh.outcome.best.agreement[0] + 0.05
    assert abs(second.outcome.best.loss - first.outcome.best.loss) < 0.3


def test_a_plan_writes_nothing(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    plan = Run(pair, tmp_path / "out", RECIPE, rows).plan()
    text = "\n".join(plan.lines())
    assert "parameters" in text
    assert "time" in text
    assert not list(tmp_path.iterdir())


def test_what_is_no_drafter_is_not_replaced(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds no drafter"):
        Run(pair, tmp_path / "mine", RECIPE, rows)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        Run(pair, tmp_path / "file", RECIPE, rows)


def test_a_bad_repository_is_refused_before_the_work(
    pair: ModelPair, rows: Sources, tmp_path: Path
) -> None:
    run = Run(pair, tmp_path / "out", RECIPE, rows)
    with pytest.raises(InputError):
        run.train(repository="no/such/name")
    assert not list(tmp_path.iterdir())


def test_too_little_text_is_refused(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too short"):
        Run(pair, tmp_path / "out", replace(RECIPE, max_shards=1), rows).train()


def test_a_target_that_only_runs_plain_is_refused(pair: ModelPair, tmp_path: Path) -> None:
    class Plain:
        supports_trees = False
        reason = "no trees"

    with pytest.raises(CompatibilityError, match="no trees"):
        Run(replace(pair, target=Plain()), tmp_path / "out")  # type: ignore[arg-type]


def test_held_out_rows_are_not_trained_on(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    run = Run(pair, tmp_path / "out", RECIPE, rows)
    held_out, trained = run._split(run._given())
    seen = {row.tobytes() for shard in trained for row in shard.corpus.ids[shard.rows]}
    assert held_out
    assert not any(row.tobytes() in seen for s in held_out for row in s.corpus.ids[s.rows])


def test_parts_share_the_hidden_states(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    run = Run(pair, tmp_path / "out", RECIPE, rows, work=tmp_path / "work")
    run.cache_features((0, 2))
    half = len(list((tmp_path / "work" / "features").iterdir()))
    run.cache_features((1, 2))
    assert half < len(list((tmp_path / "work" / "features").iterdir())) == len(rows.corpora)


def test_the_config_says_whom_it_was_made_for(pair: ModelPair) -> None:
    made_for = distil.made_for(pair)
    assert fingerprints.similarity(made_for["fingerprint"], pair.fingerprint) == pytest.approx(1)
    assert np.array_equal(sorted(made_for), ["fingerprint", "model_type", "name", "tokenizer"])
