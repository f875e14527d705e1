"""Options of the decode loop. Each default of the project's decoding stands here, once."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_redrafter.errors import InputError

MAX_BEAM_LENGTH = 8
_FITTING_BUDGET = 16  # the most nodes that are verified unless more are asked for


@dataclass(frozen=True)
class DraftOptions:
    """How much to draft in one step.

    ``beam_length`` counts drafted tokens, the root excluded (Apple's ``beam_length`` is one more).
    ``token_budget`` is the number of drafted nodes that the target verifies, the root excluded; a
    verify pass therefore has ``token_budget + 1`` rows.
    """

    beam_width: int = 1
    beam_length: int = 2
    token_budget: int = 2

    def __post_init__(self) -> None:
        if self.beam_width < 1:
            raise InputError(f"beam_width is {self.beam_width}; it must be at least 1.")
        if not 1 <= self.beam_length <= MAX_BEAM_LENGTH:
            raise InputError(
                f"beam_length is {self.beam_length}; it must be between 1 and {MAX_BEAM_LENGTH}."
            )
        most = self.beam_width * self.beam_length
        if not 1 <= self.token_budget <= most:
            raise InputError(
                f"token_budget is {self.token_budget}; with beam_width {self.beam_width} and "
                f"beam_length {self.beam_length} it must be between 1 and {most}."
            )

    @classmethod
    def fitting(
        cls,
        beam_width: int | None = None,
        beam_length: int | None = None,
        token_budget: int | None = None,
    ) -> DraftOptions:
        """Options from what a user named; what was left out is chosen to fit the rest.

        A budget alone gives a chain up to three nodes and a beam of three above that: past three
        nodes a sibling is likelier to be right than one more link of the chain.
        """
        width, length, budget = beam_width, beam_length, token_budget
        if width is None and length is None and budget is None:
            return cls()
        if budget is not None and budget < 1:
            raise InputError(f"token_budget is {budget}; it must be at least 1.")
        if width is None:
            if budget is None or (length is not None and budget <= length):
                width = cls.beam_width
            elif length is None:
                width = 1 if budget <= 3 else max(3, -(-budget // MAX_BEAM_LENGTH))
            else:
                width = -(-budget // max(length, 1))
        if length is None:
            length = cls.beam_length if budget is None else min(budget, MAX_BEAM_LENGTH)
            if budget is not None and width > 1:
                length = max(min(4, budget), -(-budget // width))
        if budget is None:
            budget = min(width * length, _FITTING_BUDGET)
        return cls(width, length, budget)


@dataclass(frozen=True)
class SamplingOptions:
    """The law that tokens are drawn from. Temperature 0 is greedy and ignores the seed.

    Drawing is keyed by position: the text is a function of (prompt, seed) alone (design 4.4).
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:  # also refuses NaN
            raise InputError(f"temperature is {self.temperature}; it must be between 0 and 100.")
        if not 0 <= self.seed < 2**64:
            raise InputError(f"seed is {self.seed}; it must be between 0 and 2**64 - 1.")
