"""The options of `train`: wrong ones are refused before anything is loaded or written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_redrafter.training.data import DataOptions
from mlx_redrafter.training.distil import Run
from tests.cli.conftest import Result

Runner = Callable[..., Result]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--output is missing"),
        (("--output", "x", "--horizon", "9"), "between 1 and 8"),
        (("--output", "x", "--learning-rate", "2"), "learning_rate"),
        (("--output", "x", "--q-bits", "3"), "q_bits is 3"),
        (("--output", "x", "--temperatures", "hot"), "like 0,0.5,1"),
        (("--output", "x", "--temperatures", "-1"), "temperature"),
        (("--output", "x", "--tokens", "-5"), "tokens"),
        (("--output", "x", "--corpus", "c", "--row-length", "64"), "no effect with --corpus alone"),
        (("--output", "x", "--features-only", "1/2"), "needs --corpus and --work"),
        (
            ("--output", "x", "--corpus", "c", "--work", "w", "--features-only", "3/2"),
            "like 1/2",
        ),
        (("--output", "x", "--token-budget", "0"), "token_budget"),
        (("--output", "x", "--batch", "0"), "batch is 0"),
        (("--output", "x", "--accumulate", "0"), "accumulate is 0"),
        (("--output", "x", "--average-decay", "1"), "average_decay"),
        (("--output", "x", "--acceptance-weight", "1.5"), "acceptance_weight"),
        (("--output", "x", "--features-gb", "nan"), "features-gb"),
        (("--output", "x", "--max-shards", "0"), "max_shards"),
        (("--output", "x", "--seed", "99999999999999999999"), "seed"),
        (("--output", "x", "--upload-repo", "bad name!!"), "no name of a repository"),
        (("--output", "x", "--upload-repo", "me/it"), "no token"),
        (("--output", "x", "--draft-vocab", "0"), "draft_vocab"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    run: Runner,
    options: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    result = run("train", *options)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert says in result.err
    assert len(result.err.splitlines()) == 1
    assert not run.loaded  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_options_reach_the_run(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Run, dict[str, object]]] = []

    def train(self: Run, **given: object) -> None:
        seen.append((self, given))
        raise KeyboardInterrupt

    def init(
        self: Run, pair: object, output: Path, recipe: object, sources: object, **more: object
    ) -> None:
        self.output, self.recipe, self.sources = output, recipe, sources  # type: ignore[assignment]
        self.more = more  # type: ignore[attr-defined]

    monkeypatch.setattr(Run, "__init__", init)
    monkeypatch.setattr(Run, "train", train)
    options = (
        "--tokens 5000 --row-length 128 --rows-per-shard 4 --temperatures 0,0.7 "
        "--self-prompted 0.2 --prompts a.jsonl --prompts b.txt --text c.txt "
        "--exit-dim 32 --num-draft-layers 1 "
        "--draft-vocab 300 --tie-head --q-bits 8 --horizon 5 --depth-decay 0.7 "
        "--acceptance-weight 0.5 --epochs 3 --batch 64 --accumulate 2 --learning-rate 0.002 "
        "--average-decay 0.9 --validations 7 --patience 3 --seed 9 --features-gb 2 "
        "--proof-prompts 3 --beam-width 2 --beam-length 3 --token-budget 5 --max-shards 40 "
        "--work w --report-to r.jsonl --no-register"
    )
    assert run("train", "--output", str(tmp_path / "x"), *options.split()).code == 130
    ((made, given),) = seen
    assert given == {"registered": False}
    recipe = made.recipe
    assert recipe.data == DataOptions(
        tokens=5000,
        row_length=128,
        rows_per_shard=4,
        temperatures=(0.0, 0.7),
        self_prompted=0.2,
        seed=9,
    )
    train_options = recipe.options
    assert (train_options.horizon, train_options.depth_decay) == (5, 0.7)
    assert (train_options.acceptance_weight, train_options.epochs) == (0.5, 3)
    assert (train_options.anchors_per_batch, train_options.accumulate_batches) == (64, 2)
    assert (train_options.learning_rate, train_options.average_decay) == (0.002, 0.9)
    assert (train_options.validations, train_options.patience, train_options.seed) == (7, 3, 9)
    assert (recipe.exit_dim, recipe.num_draft_layers, recipe.draft_vocab) == (32, 1, 300)
    assert (recipe.tie_head, recipe.bits, recipe.max_shards) == (True, 8, 40)
    assert recipe.features_bytes == 2 * 10**9
    assert recipe.proof_prompts == 3
    assert (recipe.draft.beam_width, recipe.draft.beam_length, recipe.draft.token_budget) == (
        2,
        3,
        5,
    )
    assert [path.name for path in made.sources.prompts] == ["a.jsonl", "b.txt"]
    assert [path.name for path in made.sources.texts] == ["c.txt"]
    more = made.more  # type: ignore[attr-defined]
    assert (more["work"], more["report_to"]) == (Path("w"), Path("r.jsonl"))


def test_from_needs_a_drafter(run: Runner, pair: object, tmp_path: Path) -> None:
    pair.drafter = None  # type: ignore[attr-defined]
    pair.drafting_reason = "none is known"  # type: ignore[attr-defined]
    result = run("train", "--output", str(tmp_path / "x"), "--from", "auto")
    assert result.code == 2
    assert "none is known" in result.err
