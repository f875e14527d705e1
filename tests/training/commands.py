"""`mlx-redrafter` as a process of its own, at one thread, so that a run can be killed and repeated
bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "mlx_redrafter"]


def environment(home: Path) -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {
        **os.environ,
        **one_thread,
        "MKL_CBWR": "AUTO,STRICT",  # the same sums wherever the allocator has put an array
        "PYTHONPATH": str(ROOT),
        "MLX_REDRAFTER_HOME": str(home),
    }


def train(home: Path, *options: object) -> None:
    """Run `train` to its end."""
    command = [*COMMAND, "train", *map(str, options)]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
