"""Peak memory of one arm, each in a process of its own, since a peak cannot be taken back.

`python -m mlx_redrafter.benchmarking.memory` is the child: it runs one arm and prints one line.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from mlx_redrafter.errors import RedrafterError

ALLOWANCE = 1.10


@dataclass(frozen=True)
class MemoryJob:
    """What a child runs. ``draft`` is (W, L, budget) for ours, None for mlx-lm."""

    model: str
    drafter: str
    dtype: str | None
    prompt: list[int]
    max_tokens: int
    draft: tuple[int, int, int] | None


@dataclass(frozen=True)
class MemoryPeak:
    """``mlx_bytes`` as MLX counts its arrays, ``process_bytes`` as the system counts the process.

    ``drafter_bytes`` is the size of the drafter's weights (0 for mlx-lm).
    """

    mlx_bytes: int
    process_bytes: int
    drafter_bytes: int


def measure_peak(job: MemoryJob) -> MemoryPeak:
    """Run a job in a process of its own."""
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(asdict(job)), capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RedrafterError(f"the memory run failed: {lines[-1] if lines else 'no reason given'}")
    return MemoryPeak(**json.loads(done.stdout.splitlines()[-1]))


def allowed(mlx_lm: int, drafter: int) -> float:
    """The bar: mlx-lm plus the drafter plus 10 %."""
    return (mlx_lm + drafter) * ALLOWANCE


def run_job(job: MemoryJob) -> MemoryPeak:
    """Load and generate in this process."""
    import mlx.core as mx
    from mlx.utils import tree_reduce

    drafter_bytes = 0
    if job.draft is None:
        import mlx_lm

        from mlx_redrafter import registry
        from mlx_redrafter.benchmarking.arms import load_mlx_lm

        model, tokenizer = load_mlx_lm(registry.resolve(job.model, job.dtype), job.dtype)
        stream: Any = mlx_lm.stream_generate(
            model, tokenizer, job.prompt, max_tokens=job.max_tokens
        )
    else:
        from mlx_redrafter.decoding.options import DraftOptions
        from mlx_redrafter.generate import stream_generate
        from mlx_redrafter.load import load

        pair = load(job.model, job.drafter, job.dtype)
        if pair.drafter is not None:
            drafter_bytes = tree_reduce(
                lambda total, array: total + array.nbytes, pair.drafter.parameters(), 0
            )
        stream = stream_generate(
            pair, job.prompt, max_tokens=job.max_tokens, draft=DraftOptions(*job.draft)
        )
    for _ in stream:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return MemoryPeak(mx.get_peak_memory(), process_bytes, drafter_bytes)


if __name__ == "__main__":
    values = json.load(sys.stdin)
    if values["draft"] is not None:
        values["draft"] = tuple(values["draft"])
    print(json.dumps(asdict(run_job(MemoryJob(**values)))))
