"""Options are checked where they are made, and the message names the fix."""

import dataclasses

import pytest

from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.errors import InputError


def test_defaults_are_valid() -> None:
    draft = DraftOptions()
    assert 1 <= draft.token_budget <= draft.beam_width * draft.beam_length
    assert SamplingOptions().temperature == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"beam_width": -1},
        {"beam_length": 0},
        {"beam_length": 9},
        {"token_budget": 0},
        {"beam_width": 2, "beam_length": 3, "token_budget": 7},
    ],
)
def test_refuses(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError) as error:
        DraftOptions(**({"beam_width": 2, "beam_length": 3, "token_budget": 2} | wrong))
    message = str(error.value)
    assert "\n" not in message
    names = [name.replace("_", "-") for name in wrong] + list(wrong)
    assert any(name in message for name in names), message


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_refuses_temperature(temperature: float) -> None:
    with pytest.raises(InputError, match="temp"):
        SamplingOptions(temperature=temperature)


def test_limits_are_allowed() -> None:
    DraftOptions(beam_width=1, beam_length=1, token_budget=1)
    DraftOptions(beam_width=4, beam_length=8, token_budget=32)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DraftOptions().beam_width = 3  # type: ignore[misc]


def test_a_width_alone_does_not_ask_for_a_huge_tree() -> None:
    assert DraftOptions.fitting(beam_width=300).token_budget == 16
    assert DraftOptions.fitting(beam_width=300, token_budget=40).token_budget == 40
    assert DraftOptions.fitting(beam_width=2, beam_length=3).token_budget == 6


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7, 9, 16, 25, 40, 99])
def test_a_budget_alone_gives_a_tree_that_holds_it(budget: int) -> None:
    assert DraftOptions.fitting(token_budget=budget).token_budget == budget
