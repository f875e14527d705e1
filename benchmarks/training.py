"""Training bars: throughput and memory of the trainer, on the model's own sizes and random text.

throughput  Bar: at least half of the FLOP/s of a bare loop of the same matrix products, forward and
            backward, without loss, optimiser or batches. Both run in turn; the figure is the median
            of the ratios.
memory      Bar: over --steps steps neither MLX's count nor the system's peak grows after the first
            tenth by more than 5 %.

Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import resource
from typing import Any

from mlx_redrafter.benchmarking.scripts import Script, met, say

PARTS = ("throughput", "memory")
THROUGHPUT_BAR = 0.5
GROWTH_BAR = 0.05

script = Script("training", __doc__)
add = script.parser.add_argument
add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (both)")
add("--batch", type=int, default=1024, help="anchors in a batch (%(default)s)")
add("--horizon", type=int, default=3, help="depths trained (%(default)s)")
add("--repeats", type=int, default=10, help="repeats of the throughput pair (%(default)s)")
add("--steps", type=int, default=1000, help="of memory (%(default)s)")


def run(args: argparse.Namespace) -> int:
    results: dict[str, Any] = {}
    verdicts: dict[str, bool] = {}
    if "throughput" in args.parts:
        results["throughput"] = _throughput(args, verdicts)
    if "memory" in args.parts:
        results["memory"] = _memory(args, verdicts)
    script.report(args, {"met": verdicts, "results": results})
    return 0 if all(verdicts.values()) else 1


def _bench(args: argparse.Namespace, batch: int) -> Any:
    from mlx_redrafter.benchmarking.training import TrainingBench
    from mlx_redrafter.load import load

    pair = load(args.model, args.drafter or "auto", args.dtype)
    return TrainingBench(pair, batch, args.horizon)


def _throughput(args: argparse.Namespace, verdicts: dict[str, bool]) -> Any:
    bench = _bench(args, args.batch)
    result = bench.throughput(args.repeats)
    verdicts["throughput"] = result.share.median >= THROUGHPUT_BAR
    say(
        f"\nthroughput: {result.flops / 1e9:.1f} GFLOP a step; of the bare loop's FLOP/s "
        f"{result.share}, bar {THROUGHPUT_BAR}: {met(verdicts['throughput'])}"
    )
    return result


def _memory(args: argparse.Namespace, verdicts: dict[str, bool]) -> Any:
    import mlx.core as mx

    bench = _bench(args, min(args.batch, 128))
    marks: list[tuple[int, int, int]] = []

    def mark(progress: Any) -> None:
        step = progress.step
        if step == args.steps // 10:
            mx.reset_peak_memory()
        if step in (args.steps // 5, args.steps):
            marks.append((step, mx.get_peak_memory(), _process_peak()))

    bench.steps(args.steps, mark)
    (_, early, early_process), (_, late, late_process) = marks
    growth = max(late / early, late_process / early_process) - 1
    verdicts["memory"] = growth <= GROWTH_BAR
    say(
        f"memory over {args.steps} steps: MLX {early / 1e6:.0f} -> {late / 1e6:.0f} MB, process "
        f"{early_process / 1e6:.0f} -> {late_process / 1e6:.0f} MB, bar {GROWTH_BAR:.0%} more: "
        f"{met(verdicts['memory'])}"
    )
    return marks


def _process_peak() -> int:
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    script.main(run)
