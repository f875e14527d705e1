"""Batches are aligned as decoding aligns them, and training makes a drafter that is accepted."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import FormatError, InputError
from mlx_redrafter.training.batches import Batches, make_batch
from mlx_redrafter.training.checkpoint import Checkpoint
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.features import Shard, extract, shards
from mlx_redrafter.training.teacher import Teacher
from mlx_redrafter.training.trainer import DrafterTrainer, Progress, TrainOptions, Validation, Watch
from tests import reference
from tests.decoding import harness

LENGTH = 24


def own_text(target: Target, rows: int) -> Corpus:
    """Greedy text of the target from four prompts, over and over, to be learned by heart."""
    texts = []
    for first in range(1, 5):
        decoder = Decoder(target)
        text = [first, 7]
        text.append(decoder.start(text))
        while len(text) < LENGTH:
            text += decoder.step().tokens
            decoder.commit(1)
        texts.append(text[:LENGTH])
    ids = np.tile(np.array(texts, dtype=np.int32), (rows // 4, 1))
    role = np.ones_like(ids, dtype=np.uint8)
    role[:, :2] = 0
    return Corpus("own", ids, role)


@pytest.fixture(scope="module")
def target() -> Target:
    return harness.target("llama")


@pytest.fixture(scope="module")
def corpus(target: Target) -> Corpus:
    return own_text(target, 160)


def test_hidden_states_are_those_that_decoding_taps(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    (shard,) = shards([Corpus("few", corpus.ids[:3], corpus.role[:3])], tmp_path)
    extract(target, [shard])
    expected = reference.states(harness.pristine("llama"), corpus.ids[2].tolist())
    np.testing.assert_allclose(shard.hidden()[2], expected, rtol=2e-3, atol=2e-3)


def test_parts_share_the_work_and_a_second_run_does_none(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = shards([corpus], tmp_path)
    assert len(wanted) == 3
    extract(target, wanted, part=(1, 2))
    assert [shard.path.exists() for shard in wanted] == [False, True, False]
    extract(target, wanted, part=(0, 2))
    assert all(shard.path.exists() for shard in wanted)
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(target, "hidden_states", None)
    extract(target, wanted)


def test_an_interrupted_shard_leaves_nothing(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mx, "save_safetensors", stopped)
    with pytest.raises(KeyboardInterrupt):
        extract(target, shards([corpus], tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_broken_or_foreign_shard_is_named(tmp_path: Path) -> None:
    corpus = Corpus("own", np.ones((2, 4), dtype=np.int32), np.ones((2, 4), dtype=np.uint8))
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"cut")
    with pytest.raises(FormatError, match=r"x\.safetensors"):
        Shard(corpus, slice(0, 2), path).hidden()
    mx.save_safetensors(str(path), {"hidden": mx.zeros((2, 5, 8))})
    with pytest.raises(FormatError, match="another corpus"):
        Shard(corpus, slice(0, 2), path).hidden()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("qwen2", "4bit"), ("granite", "float32")],
)
def test_the_teacher_says_what_the_model_says(family: str, dtype: str) -> None:
    """Also where the head scales its logits, of which a matrix of its rows knows nothing."""
    target = harness.target(family, dtype=dtype)
    tokens = mx.array([3, 90, 17, 40])
    teacher = Teacher(target, tokens)
    assert teacher.is_matrix == (family != "granite")
    states, logits = target.prefill(mx.array([5, 6]), target.make_cache())
    assert states is not None
    law = np.array(mx.softmax(logits[tokens].astype(mx.float32)))
    np.testing.assert_allclose(np.array(teacher.law(states[None]))[0], law, rtol=0.02, atol=0.01)


def test_every_depth_predicts_what_decoding_will_ask_for(target: Target, corpus: Corpus) -> None:
    """Anchor p: hidden state at p, token p + 1 and on as input, target states from p + 1 on as
    labels. The text is greedy, so each label's argmax is the text's own next token."""
    hidden = target.hidden_states(mx.array(corpus.ids[:5]))
    drafter = Drafter(DrafterConfig(target.hidden_size, target.vocab_size, 64, 1))
    trainer = DrafterTrainer(target, drafter, TrainOptions(horizon=3))
    batches = Batches([Shard(corpus, slice(0, 5), Path())], trainer.known, 3, 10)
    usable = batches._usable(batches.shards[0])
    batch = make_batch((np.array(hidden[i]), corpus.ids[i], usable[i]) for i in range(5))
    row, place = np.nonzero(usable[:, :, 0])
    wanted = np.array(mx.argmax(trainer.teacher.logits(batch.states), axis=-1))
    for index, (r, p) in enumerate(zip(row, place, strict=True)):
        np.testing.assert_allclose(np.array(batch.hidden)[index], np.array(hidden[r, p]), atol=1e-5)
        for depth in range(1, 4):
            if usable[r, p, depth - 1]:
                assert batch.tokens[index, depth - 1].item() == corpus.ids[r, p + depth]
                label = wanted[int(batch.label_rows[index, depth - 1])]
                assert label == corpus.ids[r, p + depth + 1]


def test_a_drafter_that_knows_the_text_is_accepted(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Learned by heart, it must be accepted nearly always: labels or states off by one are not."""
    wanted = shards([corpus], tmp_path)
    extract(target, wanted)
    drafter = Drafter(DrafterConfig(target.hidden_size, target.vocab_size, 64, 1))
    options = TrainOptions(
        horizon=3, anchors_per_batch=256, epochs=12, learning_rate=5e-3, depth_decay=1.0
    )
    losses = []
    trainer = DrafterTrainer(target, drafter, options)
    watch = Watch(step=lambda progress: losses.append(progress.loss))
    outcome = trainer.train(wanted, wanted, watch=watch)
    assert losses[-1] < 0.7 * losses[0]
    agreement = outcome.best.agreement
    assert min(agreement) > 0.9, agreement

    decoder = Decoder(target, drafter, DraftOptions(1, 3, 3))
    text = [1, 7]
    text.append(decoder.start(text))
    accepted = []
    while len(text) < LENGTH - 4:
        step = decoder.step()
        text += step.tokens
        accepted.append(step.num_accepted)
        decoder.commit(len(step.tokens))
    assert text[: LENGTH - 4] == corpus.ids[0, : LENGTH - 4].tolist()
    assert sum(accepted) / len(accepted) > 2.2, accepted


def test_the_same_seed_gives_the_same_weights(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    wanted = shards([Corpus("few", corpus.ids[:64], corpus.role[:64])], tmp_path)
    extract(target, wanted)
    weights = []
    for seed in (1, 1, 2):
        mx.random.seed(0)
        drafter = Drafter(DrafterConfig(target.hidden_size, target.vocab_size, 64, 1))
        options = TrainOptions(horizon=1, anchors_per_batch=256, seed=seed)
        DrafterTrainer(target, drafter, options).train(wanted, wanted)
        weights.append(np.array(drafter.rnn_w.weight))
    np.testing.assert_allclose(weights[0], weights[1], atol=1e-6)
    assert np.abs(weights[0] - weights[2]).max() > 1e-5


@pytest.mark.parametrize(
    "values",
    [{"horizon": 0}, {"horizon": 9}, {"epochs": 0}, {"anchors_per_batch": 0}, {"learning_rate": 2}],
)
def test_options_are_checked(values: dict[str, float]) -> None:
    with pytest.raises(InputError):
        TrainOptions(**values)  # type: ignore[arg-type]


class Killed(Exception):
    pass


def trained(
    target: Target,
    wanted: list[Shard],
    options: TrainOptions,
    checkpoint: Checkpoint | None = None,
    kill_after: int | None = None,
) -> tuple[Drafter, list[Progress]]:
    mx.random.seed(0)
    drafter = Drafter(DrafterConfig(target.hidden_size, target.vocab_size, 64, 1))
    seen: list[Progress] = []

    def step(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == kill_after:
            raise Killed

    trainer = DrafterTrainer(target, drafter, options)
    watch = Watch(step=step)
    if kill_after is None:
        trainer.train(wanted[1:], wanted[:1], checkpoint, watch, checkpoint_seconds=0)
    else:
        with pytest.raises(Killed):
            trainer.train(wanted[1:], wanted[:1], checkpoint, watch, checkpoint_seconds=0)
    return drafter, seen


def weights_of(drafter: Drafter) -> dict[str, np.ndarray]:
    return {name: np.array(weight) for name, weight in tree_flatten(drafter.parameters())}


SHORT = TrainOptions(
    horizon=2,
    anchors_per_batch=200,
    epochs=2,
    clip_norm=0.1,  # always: the norm is a sum over all weights, whose order must not matter
    validations=3,
    average_decay=0.9,
)


@pytest.fixture(scope="module")
def features(
    target: Target, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> list[Shard]:
    wanted = shards([corpus], tmp_path_factory.mktemp("features"))
    extract(target, wanted)
    return wanted


def test_a_killed_run_goes_on_to_the_same_weights(
    target: Target, features: list[Shard], tmp_path: Path
) -> None:
    """Bit for bit, wherever it is killed: in the first pass, in the second, after validations."""
    whole, seen = trained(target, features, SHORT)
    expected = weights_of(whole)
    steps = seen[-1].steps
    assert steps > 12
    checkpoint = Checkpoint(tmp_path / "checkpoint", "recipe")
    for kill in (1, 5, steps - 2):
        _, before = trained(target, features, SHORT, checkpoint, kill_after=kill)
    resumed, after = trained(target, features, SHORT, checkpoint)
    assert len(after) == steps - before[-1].step + 1  # the step it was killed in is done again
    assert [(p.step, p.positions, p.loss) for p in after] == [
        (p.step, p.positions, p.loss) for p in seen[-len(after) :]
    ]
    for name, weight in weights_of(resumed).items():
        assert (weight == expected[name]).all(), name


def test_a_checkpoint_of_another_run_is_refused(
    target: Target, features: list[Shard], tmp_path: Path
) -> None:
    trained(target, features, SHORT, Checkpoint(tmp_path / "x", "one"), kill_after=2)
    with pytest.raises(FormatError, match="other settings"):
        trained(target, features, SHORT, Checkpoint(tmp_path / "x", "two"))
    (tmp_path / "x" / "state.safetensors").write_bytes(b"cut")
    with pytest.raises(FormatError, match="broken"):
        trained(target, features, SHORT, Checkpoint(tmp_path / "x", "one"))


def test_parts_of_a_batch_add_up_to_it(target: Target, features: list[Shard]) -> None:
    """Accumulated over three parts or in one go: the same steps, to rounding."""
    one, _ = trained(target, features, replace(SHORT, anchors_per_batch=300))
    three, _ = trained(
        target, features, replace(SHORT, anchors_per_batch=100, accumulate_batches=3)
    )
    for name, weight in weights_of(one).items():
        np.testing.assert_allclose(weights_of(three)[name], weight, atol=2e-3)


def test_the_best_weights_are_kept_and_it_stops_early(
    target: Target, features: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation figures are made worse from the second on: the first one's weights must stay."""
    options = replace(SHORT, validations=6, patience=2)
    drafter = Drafter(DrafterConfig(target.hidden_size, target.vocab_size, 64, 1))
    trainer = DrafterTrainer(target, drafter, options)
    scores = iter([0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    kept = []

    def validate(batches: Batches, step: int) -> Validation:
        kept.append(trainer.drafter.lm_head[-1].weight)
        return Validation(step, 1.0, [next(scores)])

    monkeypatch.setattr(trainer, "_validate", validate)
    outcome = trainer.train(features[1:], features[:1])
    assert len(outcome.validations) == 3
    assert outcome.stopped < outcome.steps
    assert outcome.best == outcome.validations[0]
    assert (np.array(drafter.lm_head[-1].weight) == np.array(kept[0])).all()
    assert (np.array(kept[0]) != np.array(kept[2])).any()


def test_a_moving_average_lags_behind_the_weights(target: Target, features: list[Shard]) -> None:
    plain, _ = trained(target, features, replace(SHORT, average_decay=0.0))
    averaged, _ = trained(target, features, replace(SHORT, average_decay=0.99))
    assert any((w != weights_of(averaged)[n]).any() for n, w in weights_of(plain).items())


def test_text_without_answers_is_refused(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    none = Corpus("none", corpus.ids[:4], np.zeros_like(corpus.role[:4]))
    wanted = shards([none], tmp_path)
    extract(target, wanted)
    with pytest.raises(InputError, match="no answers"):
        trained(target, [*wanted, *wanted], SHORT)


def test_rows_of_two_lengths_make_one_batch(target: Target, corpus: Corpus) -> None:
    """Laid end to end, each row's anchors must be those it has alone."""
    short = Corpus("short", corpus.ids[:2, :17], corpus.role[:2, :17])
    wanted = [
        Shard(corpus, slice(0, 3), Path("none"), target),
        Shard(short, slice(0, 2), Path("none"), target),
    ]
    known = np.ones(target.vocab_size, dtype=np.bool_)
    together = Batches(wanted, known, 3, 10_000)
    (rows,) = together.epoch(0, 0)
    batch = together.load(rows)
    alone = [together.load([row]) for row in rows]
    for name in ("hidden", "tokens", "usable"):
        expected = np.concatenate([np.array(getattr(part, name)) for part in alone])
        np.testing.assert_array_equal(np.array(getattr(batch, name)), expected)
    picked = np.array(batch.states)[np.array(batch.label_rows)]
    parts = [np.array(part.states)[np.array(part.label_rows)] for part in alone]
    np.testing.assert_array_equal(picked, np.concatenate(parts))
