"""A whole run on a tiny trained target: what it writes, what it refuses, where it goes on."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_redrafter import registry
from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.errors import CompatibilityError, InputError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.load import ModelPair, load
from mlx_redrafter.machine.files import alone_in
from mlx_redrafter.training import distil
from mlx_redrafter.training.corpus import Corpus
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


def test_nothing_that_is_in_use_is_replaced(
    pair: ModelPair, rows: Sources, tmp_path: Path, tiny_target: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_target, model)
    for output in (model, tmp_path):
        with pytest.raises(InputError, match="in use"):
            Run(replace(pair, name=str(model)), output, RECIPE, rows)
    with pytest.raises(InputError, match="is not empty"):
        Run(pair, model, RECIPE, rows)
    out = tmp_path / "out"
    with pytest.raises(InputError, match="inside the output"):
        Run(pair, out, RECIPE, rows, report_to=out / "log.jsonl")
    with pytest.raises(InputError, match="inside the output"):
        Run(pair, out, RECIPE, rows, work=out / "work")
    with pytest.raises(InputError, match="cannot be replaced"):
        Run(pair, Path("/"), RECIPE, rows)


def test_a_drafters_folder_with_more_in_it_is_not_replaced(
    train: Callable[..., Distilled], tmp_path: Path
) -> None:
    quick = replace(RECIPE, proof_prompts=0, options=replace(OPTIONS, epochs=0.2))
    train(recipe=quick)
    (tmp_path / "out" / "NOTES.md").write_text("mine")
    with pytest.raises(InputError, match=r"holds NOTES\.md"):
        train(recipe=quick)
    (tmp_path / "out" / "NOTES.md").unlink()
    train(recipe=quick)


def test_states_of_other_text_are_not_taken(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    """Corpora of one name and shape with other tokens, and one corpus read by another model."""
    ids = np.ones((20, 32), np.int32)
    corpora = [Corpus("own", ids + i, np.ones((20, 32), np.uint8)) for i in (0, 1)]
    runs = [Run(each, tmp_path / "out", RECIPE) for each in (pair, replace(pair, fingerprint="x"))]
    names = [
        {shard.path.name for part in run._split([corpus]) for shard in part}
        for run, corpus in ((runs[0], corpora[0]), (runs[0], corpora[1]), (runs[1], corpora[0]))
    ]
    assert not names[0] & names[1]
    assert not names[0] & names[2]


def test_a_second_run_in_the_same_folder_is_refused(
    train: Callable[..., Distilled], tmp_path: Path
) -> None:
    with alone_in(tmp_path / "out.work"), pytest.raises(InputError, match="another run"):
        train()
    assert not (tmp_path / "out").exists()


def test_a_drafter_that_does_not_pay_is_not_registered(
    train: Callable[..., Distilled], tmp_path: Path, home: Path
) -> None:
    options = replace(OPTIONS, epochs=0.1, learning_rate=1e-6, validations=1)
    result = train(recipe=replace(RECIPE, proof_prompts=0, options=options))
    assert result.tokens_per_step is not None
    assert result.tokens_per_step < 1.1
    assert (tmp_path / "out" / "config.json").exists()
    assert not (home / "drafters").exists()


def test_a_log_of_other_runs_is_kept(train: Callable[..., Distilled], tmp_path: Path) -> None:
    quick = replace(RECIPE, proof_prompts=0)
    log = tmp_path / "all.jsonl"
    steps = [train(name, quick, report_to=log).outcome.steps for name in ("one", "two")]
    events = [event["event"] for event in read_log(log)]
    assert events.count("step") == sum(steps)
    assert events.count("start") == events.count("end") == 2


def test_what_cannot_work_is_refused_at_once(
    pair: ModelPair, rows: Sources, tmp_path: Path
) -> None:
    def refused(says: str, recipe: Recipe = RECIPE, sources: Sources = rows, **more: Any) -> None:
        with pytest.raises((InputError, CompatibilityError), match=says):
            Run(pair, tmp_path / "out", recipe, sources, **more)

    refused("at least", replace(RECIPE, draft_vocab=10))
    refused("reads only 512", replace(RECIPE, data=DataOptions(row_length=600)))
    np.savez(tmp_path / "long.npz", ids=np.ones((2, 600), int), role=np.ones((2, 600), int))
    refused("reads only 512", sources=Sources((tmp_path / "long.npz",)))
    np.savez(tmp_path / "user.npz", ids=np.ones((2, 60), int), role=np.zeros((2, 60), int))
    refused("role 1", sources=Sources((tmp_path / "user.npz",)))
    refused(r"none\.jsonl", sources=Sources(prompts=(tmp_path / "none.jsonl",)))
    config = DrafterConfig(96, 448, 50, 1)
    refused("exit_dim", replace(RECIPE, exit_dim=64), earlier=Drafter(config))
    assert not (tmp_path / "out.work").exists()


def test_what_is_no_drafter_is_not_replaced(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds letter"):
        Run(pair, tmp_path / "mine", RECIPE, rows)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        Run(pair, tmp_path / "file", RECIPE, rows)


def test_too_little_text_is_refused(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too short"):
        Run(pair, tmp_path / "out", replace(RECIPE, max_shards=1), rows).train()


def test_little_text_is_cut_finer(pair: ModelPair, tmp_path: Path) -> None:
    """One file of a few rows: some are held out, and the others trained on."""
    corpus = Corpus("few", np.ones((20, 32), np.int32), np.ones((20, 32), np.uint8))
    held_out, trained = Run(pair, tmp_path / "out", RECIPE)._split([corpus])
    assert (len(held_out), len(trained)) == (1, 19)


def test_held_out_rows_come_from_all_text(pair: ModelPair, tmp_path: Path) -> None:
    corpora = [
        Corpus(name, np.full((640, 4), i, np.int32), np.ones((640, 4), np.uint8))
        for i, name in enumerate("abcd")
    ]
    held_out, trained = Run(pair, tmp_path / "out", RECIPE)._split(corpora)
    assert len(held_out) + len(trained) == 40
    assert [shard.corpus.name for shard in held_out] == ["b", "d"]


def test_a_target_that_only_runs_plain_is_refused(pair: ModelPair, tmp_path: Path) -> None:
    class Plain:
        supports_trees = False
        reason = "no trees"

    with pytest.raises(CompatibilityError, match="no trees"):
        Run(replace(pair, target=Plain()), tmp_path / "out")  # type: ignore[arg-type]


def test_held_out_rows_are_not_trained_on(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    run = Run(pair, tmp_path / "out", RECIPE, rows)
    held_out, trained = run._split(run._given)
    seen = {row.tobytes() for shard in trained for row in shard.corpus.ids[shard.rows]}
    assert held_out
    assert not any(row.tobytes() in seen for s in held_out for row in s.corpus.ids[s.rows])


def test_parts_share_the_hidden_states(pair: ModelPair, rows: Sources, tmp_path: Path) -> None:
    run = Run(pair, tmp_path / "out", RECIPE, rows, work=tmp_path / "work")
    run.cache_features((0, 2))
    half = len(list((tmp_path / "work" / "features").iterdir()))
    run.cache_features((1, 2))
    assert half < len(list((tmp_path / "work" / "features").iterdir()))


def test_the_config_says_whom_it_was_made_for(pair: ModelPair) -> None:
    made_for = distil.made_for(pair)
    assert fingerprints.similarity(made_for["fingerprint"], pair.fingerprint) == pytest.approx(1)
    assert np.array_equal(sorted(made_for), ["fingerprint", "model_type", "name", "tokenizer"])
