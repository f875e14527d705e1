"""Replaying held-out text gives the steps of real decoding."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.decoding.drafter import Drafter, DrafterConfig
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.decoding.tree import Tree
from mlx_redrafter.errors import InputError
from mlx_redrafter.training import acceptance as module
from mlx_redrafter.training.acceptance import simulate
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.features import Shard, extract, shards
from mlx_redrafter.training.trainer import DrafterTrainer, TrainOptions
from tests.decoding import harness

LENGTH = 64
PROMPTS = [[first, 7, 30] for first in range(1, 7)]
SETTINGS = [DraftOptions(1, 3, 3), DraftOptions(3, 3, 7), DraftOptions(2, 4, 3)]


@dataclass(frozen=True)
class Warm(Corpus):
    """A corpus that knows its rows' temperatures."""

    temperature: np.ndarray


def write(target: Target, sampling: SamplingOptions, prompt: list[int], length: int) -> list[int]:
    decoder = Decoder(target, sampling=sampling)
    first = decoder.start(prompt)
    return [*prompt, *harness.run(decoder, first, length - len(prompt))][:length]


def own_text(target: Target, temperature: float, prompts: list[list[int]]) -> Warm:
    texts = [
        write(target, SamplingOptions(temperature, seed), prompt, LENGTH)
        for seed, prompt in enumerate(prompts)
    ]
    ids = np.array(texts, dtype=np.int32)
    role = np.ones_like(ids, dtype=np.uint8)
    role[:, :3] = 0
    return Warm(f"t{temperature}", ids, role, np.full(len(ids), temperature, dtype=np.float16))


def cached(target: Target, corpus: Corpus, folder: Path) -> list[Shard]:
    wanted = shards([corpus], folder)
    extract(target, wanted)
    return wanted


@pytest.fixture(scope="module")
def target() -> Target:
    return harness.target("llama")


@pytest.fixture(scope="module")
def greedy(target: Target) -> Warm:
    return own_text(target, 0.0, PROMPTS)


@pytest.fixture(scope="module")
def held_out(target: Target, greedy: Warm, tmp_path_factory: pytest.TempPathFactory) -> list[Shard]:
    return cached(target, greedy, tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def drafter(target: Target, held_out: list[Shard]) -> Drafter:
    """Has learned some of the greedy text, so that it is accepted often but not always."""
    mx.random.seed(3)
    drafter = Drafter(DrafterConfig(target.hidden_size, target.vocab_size, 64, 1))
    options = TrainOptions(horizon=3, anchors_per_batch=128, epochs=36, learning_rate=4e-3)
    DrafterTrainer(target, drafter, options).train(held_out, held_out)
    return drafter


def really_accepted(
    target: Target, drafter: Drafter, draft: DraftOptions, prompt: list[int], sampling: object
) -> list[int]:
    decoder = Decoder(target, drafter, draft, sampling)  # type: ignore[arg-type]
    decoder.start(prompt)
    emitted, accepted = len(prompt) + 1, []
    while emitted < LENGTH:
        step = decoder.step()
        decoder.commit(len(step.tokens))
        emitted += len(step.tokens)
        accepted.append(step.num_accepted)
    return accepted


@pytest.mark.parametrize("draft", SETTINGS, ids=str)
def test_agrees_with_real_decoding(
    target: Target, drafter: Drafter, held_out: list[Shard], draft: DraftOptions
) -> None:
    found = simulate(target, drafter, held_out, draft)
    runs = [really_accepted(target, drafter, draft, prompt, None) for prompt in PROMPTS]
    real = 1 + float(np.mean(np.concatenate(runs)))
    assert real > 1.7
    assert found.overall.tokens_per_step == pytest.approx(real, rel=0.05)
    assert list(found.by_temperature) == [0.0]
    assert found.overall.turns == len(PROMPTS)


def test_repeats_the_very_steps(
    target: Target, drafter: Drafter, held_out: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = SETTINGS[1]
    seen: list[module._Replay] = []
    estimate = module._estimate

    def look(replays: list[module._Replay], depth: int) -> module.Estimate:
        seen.extend(replays)
        return estimate(replays, depth)

    monkeypatch.setattr(module, "_estimate", look)
    simulate(target, drafter, held_out, draft)
    for replay in seen[: len(PROMPTS)]:
        real = really_accepted(target, drafter, draft, replay.text[:3].tolist(), None)
        assert replay.accepted == real[: replay.steps]
        assert 0 <= len(real) - replay.steps <= 3  # those that the row's end could have cut


def test_sampled_text_gives_the_steps_of_sampled_decoding(
    target: Target, drafter: Drafter, tmp_path: Path
) -> None:
    """The rows were drawn with the decoder's own noise, so that the steps are the same here too."""
    warm = own_text(target, 0.7, PROMPTS[:3])
    draft = SETTINGS[0]
    found = simulate(target, drafter, cached(target, warm, tmp_path), draft)
    runs = [
        really_accepted(target, drafter, draft, prompt, SamplingOptions(0.7, seed))
        for seed, prompt in enumerate(PROMPTS[:3])
    ]
    real = 1 + float(np.mean(np.concatenate(runs)))
    assert found.by_temperature[0.7].tokens_per_step == pytest.approx(real, rel=0.05)


# --- what counts, with a scripted drafter --------------------------------------------------------


class Scripted:
    """In the proposer's place: always drafts the ids 1, 2, 3 below the root, as a chain."""

    def __init__(self, drafter: Drafter, embed: object, options: DraftOptions) -> None:
        self.options = options
        self.states: list[float] = []

    def __call__(self, hidden: mx.array, token: mx.array) -> Tree:
        self.states.append(float(hidden[0]))
        return harness.chain_tree(mx.array([int(token), 1, 2, 3]))


def replay(
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    folder: Path,
    rows: list[tuple[list[int], list[int]]],
    **options: object,
) -> tuple[module.Acceptance, list[float]]:
    """The state at place p of a row is p everywhere, in float16."""
    ids = np.array([row[0] for row in rows], dtype=np.int32)
    role = np.array([row[1] for row in rows], dtype=np.uint8)
    path = folder / "rows.safetensors"
    places = mx.broadcast_to(mx.arange(ids.shape[1])[None, :, None], (*ids.shape, 4))
    mx.save_safetensors(str(path), {"hidden": places.astype(mx.float16)})
    made: list[Scripted] = []

    def scripted(*given: object) -> Scripted:
        made.append(Scripted(*given))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(module, "BeamProposer", scripted)
    shard = Shard(Corpus("rows", ids, role), slice(0, len(ids)), path)
    found = simulate(target, None, [shard], DraftOptions(1, 3, 3), **options)  # type: ignore[arg-type]
    return found, made[0].states


def test_starts_where_decoding_starts_and_stops_before_the_cut(
    monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path
) -> None:
    """Root 5, with the state before it; 1 2 accepted, bonus 9; nothing accepted, 1 2 3, bonus 4.
    Then 2 tokens are left, and a step could have gone on beyond them."""
    ids = [8, 8, 5, 1, 2, 9, 7, 1, 2, 3, 4, 6, 6]
    role = [0, 2] + [1] * 11
    found, states = replay(monkeypatch, target, tmp_path, [(ids, role)])
    assert states == [1, 4, 5]
    assert (found.overall.tokens, found.overall.steps) == (8, 3)
    assert found.overall.by_position == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert found.overall.error is None
    assert found.by_temperature == {}


@pytest.mark.parametrize("marked", [1, 2], ids=["as the assistant's", "as the template's"])
def test_an_end_token_cuts_the_last_step(
    monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path, marked: int
) -> None:
    """1 and the end token 2 are emitted, the 3 behind it is not."""
    ids, role = [8, 5, 9, 1, 2, 3, 3, 3], [0, 1, 1, 1, marked, 0, 0, 0]
    found, states = replay(monkeypatch, target, tmp_path, [(ids, role)], end_tokens={2})
    assert states == [0, 1]
    assert (found.overall.tokens, found.overall.steps) == (3, 2)
    assert found.overall.by_position == (0.5, 0.5, 0.0)


def test_every_turn_counts_and_the_error_is_between_turns(
    monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path
) -> None:
    """Turns of 1 step with 2, 1 step with 4 and 1 step with 3 tokens: mean 3, error 1 / sqrt 3."""
    rows = [
        ([0, 5, 1, 9, 9, 9, 0, 5, 1, 2, 3, 9, 0], [0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]),
        ([0, 5, 1, 2, 9, 9, 9, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3]),
    ]
    found, _ = replay(monkeypatch, target, tmp_path, rows)
    assert found.overall.turns == 3
    assert found.overall.tokens_per_step == pytest.approx(3)
    assert found.overall.error == pytest.approx(1 / 3**0.5)


def test_steps_are_capped(monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path) -> None:
    rows = [([9] * 40, [1] * 40)] * 20
    found, _ = replay(monkeypatch, target, tmp_path, rows, max_steps=60)
    assert 60 <= found.overall.steps < 70


def test_rows_without_an_answer_are_refused(
    monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="long enough"):
        replay(monkeypatch, target, tmp_path, [([9] * 8, [0] * 8)])
