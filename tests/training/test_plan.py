"""The plan of a run: what it says is counted, what cannot fit is refused."""

import dataclasses
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from mlx_redrafter.decoding.drafter import Drafter
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import InputError
from mlx_redrafter.training import plan as module
from mlx_redrafter.training.loss import soft_cross_entropy
from mlx_redrafter.training.plan import Plan, Rates, Work, measure_rates
from mlx_redrafter.training.size import DrafterSize, target_cost
from tests import tiny_models
from tests.decoding import harness

SIZE = DrafterSize(64, 1, 96)
WORK = Work(
    rows=640,
    row_tokens=100,
    new_rows=320,
    epochs=2.0,
    anchors_per_batch=512,
    horizon=4,
    features_budget=10**9,
)
RATES = Rates(0.001, 0.04, written_token=0.01, read_token=0.002, multiply_add=1e-9)
ANCHORS = 640 * 100 * 0.8 * 2


@pytest.fixture(scope="module")
def target() -> Target:
    return harness.target("llama")


def plan_of(target: Target, work: Work = WORK, folder: Path = Path()) -> Plan:
    return Plan.of(target, SIZE, work, folder, measure=False)


def test_disk_is_counted(target: Target, tmp_path: Path) -> None:
    plan = plan_of(target, folder=tmp_path / "not" / "yet")
    assert plan.data == 640 * 100 * 5
    assert plan.states == plan.features == 640 * 100 * 64 * 2
    assert plan.disk == plan.data + plan.features + plan.checkpoints + plan.stored
    assert plan.disk_free > 0
    assert not (tmp_path / "not").exists()
    less = plan_of(target, dataclasses.replace(WORK, features_budget=1000))
    assert less.features == 1000
    Drafter(SIZE.config(target), mx.arange(96, dtype=mx.int32)).save(tmp_path, dtype=mx.float16)
    written = (tmp_path / "model.safetensors").stat().st_size
    assert plan.stored == pytest.approx(written, abs=2000)  # its header and draft_tokens


def test_time_follows_from_the_rates(target: Target) -> None:
    plan = dataclasses.replace(plan_of(target), rates=RATES)
    assert WORK.anchors == ANCHORS
    data, features, training = plan.seconds or (0, 0, 0)
    assert data == pytest.approx(320 * 100 * 0.01)
    assert features == pytest.approx(640 * 100 * 0.002)
    step = plan.drafter.step_multiply_adds
    assert training == pytest.approx(ANCHORS * (4 * step + 96 * 64 / 3) * 1e-9)
    half = dataclasses.replace(WORK, features_budget=plan.states // 2)
    again = dataclasses.replace(plan_of(target, half), rates=RATES).seconds or (0, 0, 0)
    assert again[1] == pytest.approx(1.5 * features), "what is not kept is computed every epoch"
    assert plan.measured_share == pytest.approx(0.1)


def test_what_cannot_fit_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan_of(target).refuse()
    measured = []
    monkeypatch.setattr(module, "measure_rates", lambda *args: measured.append(args))
    monkeypatch.setattr(module, "memory_bytes", lambda: 10**6)
    with pytest.raises(InputError, match=r"needs about .* MB of memory and this machine has 1 MB"):
        Plan.of(target, SIZE, WORK, tmp_path).refuse()
    monkeypatch.setattr(module, "memory_bytes", lambda: 10**12)
    monkeypatch.setattr(module, "free_bytes", lambda folder: 10**6)
    with pytest.raises(InputError, match=r"on disk and .* has 1 MB left") as error:
        Plan.of(target, SIZE, WORK, tmp_path).refuse()
    assert "\n" not in str(error.value)
    assert not measured, "no time is spent on measuring what cannot be run"
    monkeypatch.setattr(module, "free_bytes", lambda folder: 10**12)
    Plan.of(target, SIZE, WORK, tmp_path).refuse()
    assert len(measured) == 1


def test_it_reads_like_this(target: Target) -> None:
    plan = dataclasses.replace(
        plan_of(target),
        rates=RATES,
        memory_limit=16 * 10**9,
        disk_free=5 * 10**11,
        memory=2_345_678_901,
    )
    lines = plan.lines()
    text = "\n".join(lines)
    assert lines[0].startswith("drafter: 26,816 parameters (exit_dim 64, 1 residual block, its own")
    assert "measured here: 10.0% (a draft step takes 1 ms, a target step 40 ms)" in text
    assert "memory: about 2.35 GB at the peak of training, of 16 GB" in text
    assert "disk: 320 kB of text, 8.19 MB of hidden states" in text
    assert "500 GB are free" in text
    assert "time: about 5 min to write text, 2 min for hidden states, 9 s to train" in text
    assert "note:" not in text
    dear = dataclasses.replace(plan, rates=dataclasses.replace(RATES, draft_step=0.002))
    assert "note: more than 10%" in "\n".join(dear.lines())
    unmeasured = "\n".join(dataclasses.replace(plan, rates=None).lines())
    assert "measured" not in unmeasured
    assert "time" not in unmeasured
    assert "note: more than 10%" in unmeasured, "a tiny target is cheaper than any drafter"


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (5000, "83 min"), (6000, "1 h 40 min")],
)
def test_durations(seconds: float, says: str) -> None:
    assert module._duration(seconds) == says


def test_rates_are_measured(target: Target) -> None:
    rates = measure_rates(target, SIZE.config(target), WORK)
    assert all(0 < value < 0.5 for value in vars(rates).values())
    assert rates.written_token < rates.target_step, "a batch shares the weights"
    assert rates.read_token < rates.target_step
    assert rates.multiply_add < 1e-6


@pytest.mark.parametrize("tied", [False, True])
def test_the_peak_of_memory_is_about_right(tied: bool) -> None:
    """Against a training step made of the same parts; where logits are most of it, and where
    weights are."""
    for count, hidden in ((500, 64), (32, 256)):
        target = Target(tiny_models.build("llama", vocab_size=2048, hidden_size=hidden))
        size = DrafterSize(hidden, 2, 2048, tied)
        work = dataclasses.replace(WORK, anchors_per_batch=count, rows=8, row_tokens=16)
        predicted = Plan.of(target, size, work, Path(), measure=False).memory
        found = peak_of_a_step(target, size, count, work.horizon)
        assert found < 1.25 * predicted
        assert predicted < 1.5 * found


def peak_of_a_step(target: Target, size: DrafterSize, count: int, horizon: int) -> int:
    drafter = Drafter(size.config(target), mx.arange(size.draft_vocab, dtype=mx.int32))
    head = mx.random.normal((size.draft_vocab, target.hidden_size))
    if size.tie_head:
        drafter.bind_head(target.head)
    hidden, embedding = (mx.random.normal((count, target.hidden_size)) for _ in range(2))
    optimizer = optim.AdamW(1e-3)

    def loss(hidden: mx.array) -> mx.array:
        state, total = None, mx.array(0.0)
        for _ in range(horizon):
            state = drafter.advance(state, embedding)
            teacher = mx.stop_gradient(mx.softmax(hidden @ head.T, axis=-1, precise=True))
            logits = drafter.head(drafter.features(hidden, state))
            total = total + soft_cross_entropy(logits, teacher).mean()
        return total

    gradient = nn.value_and_grad(drafter, loss)
    average = drafter.parameters()
    for _ in range(2):
        mx.eval(head, hidden, embedding, drafter.parameters(), optimizer.state)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        held = sum(a.nbytes for a in (head, hidden, embedding)) + target_cost(target).bytes
        held += 4 * (4 if optimizer.state.get("rnn_u") else 1) * drafter.num_parameters
        value, grads = gradient(hidden)
        optimizer.update(drafter, grads)
        mx.eval(value, drafter.parameters(), optimizer.state)
    del average
    return held + mx.get_peak_memory() - before
