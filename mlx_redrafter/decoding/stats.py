"""What one answer cost, and the formulas of the figures that are shown for it.

Plain Python: no arrays, no clock. The caller measures, this file counts and divides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class GenerationStats:
    """The statistics of one answer.

    prompt_tokens         tokens of the prompt, the template's included
    cached_tokens         those of them whose rows a kept cache already held: not prefilled again
    emitted               tokens drawn from the target, up to and including the one that ended the
                          answer (an EOS, or the token that completed a stop string); what a step
                          accepted beyond it never counts. Equal to mlx-lm's ``generation_tokens``
    steps                 verify passes; the first token comes from the prefill and needs none
    acceptance_histogram  {drafted tokens kept: steps}, after the same cut as ``emitted``
    prefill_s             time of the prefill and the choice of the first token
    ttft_s                time until the first token was there, tokenising included
    decode_s              time of all steps
    drafting              "on", or "off (reason)"
    seed                  what reproduces the answer; None at temperature 0, which needs none
    peak_memory_bytes     the process's peak of device memory so far, as mlx counts it
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    emitted: int = 0
    steps: int = 0
    acceptance_histogram: dict[int, int] = field(default_factory=dict)
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    drafting: str = "off"
    temperature: float = 0.0
    seed: int | None = None
    peak_memory_bytes: int = 0

    def count_step(self, kept: int, num_accepted: int, seconds: float) -> None:
        """Count a step of which the first ``kept`` tokens were emitted.

        ``num_accepted`` of its tokens were drafted. A cut before the bonus leaves fewer of them.
        """
        accepted = min(num_accepted, kept)
        self.emitted += kept
        self.steps += 1
        self.acceptance_histogram[accepted] = self.acceptance_histogram.get(accepted, 0) + 1
        self.decode_s += seconds

    @property
    def accepted(self) -> int:
        """Emitted tokens that were drafted."""
        return sum(count * steps for count, steps in self.acceptance_histogram.items())

    @property
    def tokens_per_step(self) -> float | None:
        """(emitted - 1) / steps: the prefill's token is nobody's gain. None without a step."""
        return (self.emitted - 1) / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the steps: (emitted - 1) / decode_s. None without a step."""
        return (self.emitted - 1) / self.decode_s if self.steps and self.decode_s > 0 else None

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Speed of the prefill: tokens that it really computed, by second."""
        if self.prefill_s <= 0:
            return None
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: keys of the histogram are strings, in order."""
        histogram = {
            str(k): self.acceptance_histogram[k] for k in sorted(self.acceptance_histogram)
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "emitted": self.emitted,
            "steps": self.steps,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_histogram": histogram,
            "prefill_s": self.prefill_s,
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "tokens_per_second": self.tokens_per_second,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "drafting": self.drafting,
            "temperature": self.temperature,
            "seed": self.seed,
            "peak_memory_bytes": self.peak_memory_bytes,
        }
