"""How long training waits for a checkpoint: written at once, and copied to the host and written in the background.

    python benchmarks/checkpoint.py --mib 64 512 --folder /mnt/runs

A stand-in for a learner holds float32 weights of the size given and AdamW's two moments, so a checkpoint is three times
as large. `blocking` is the whole write (files, SHA-256, fsync, rename); `copy` is the time that training waits
when the write is in the background; `step` is a run of matrix products alone and beside a write, to see how much slower
training is during a write. Medians of --repeats; on a busy machine compare the ratios.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.checkpoint import checkpoints
from paceline.checkpoint.checkpoints import CheckpointWriter
from paceline.config import CheckpointConfig
from paceline.drafter.host_copy import HostCopy


def learner_state(mib: int) -> dict:
    """Weights of so many MiB in eight matrices, and two moments of each."""
    weights = {f"w{i}": torch.randn(mib * 2**20 // 4 // 8 // 256, 256) for i in range(8)}
    moments = {i: {"exp_avg": tensor * 0.1, "exp_avg_sq": tensor**2} for i, tensor in enumerate(weights.values())}
    return {"network": weights, "optimizer": {"adamw": {"state": moments}}}


def seconds(work: Callable[[], object]) -> float:
    """Wall time of some work."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def training(size: int = 512, rounds: int = 12) -> None:
    """Some matrix products."""
    matrix = torch.ones(size, size)
    for _ in range(rounds):
        matrix @ matrix


def measure(folder: Path, state: dict, repeats: int) -> list[float]:
    """Median seconds of a blocking write, a copy, a stretch of training alone, and one beside a write."""
    writer, copies = CheckpointWriter(folder, CheckpointConfig(keep_last=1)), HostCopy("cpu")
    rows = []
    for step in range(1, 2 * repeats, 2):
        blocking = seconds(functools.partial(checkpoints.write_checkpoint, folder, step, state, keep_last=1))
        alone = seconds(training)
        stall = seconds(lambda at=step + 1: writer.put(at, copies.take(state)))
        rows.append((blocking, stall, alone, seconds(training)))
        writer.wait()
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64, 256], help="of the float32 weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; unset: the temporary folder")
    arguments = parser.parse_args()
    print(f"{'weights':>10} {'blocking':>10} {'copy':>10} {'share':>7} {'step alone':>11} {'beside a write':>15}")
    for mib in arguments.mib:
        folder = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            blocking, stall, alone, beside = measure(folder, learner_state(mib), arguments.repeats)
        finally:
            shutil.rmtree(folder)
        print(
            f"{mib:6d} MiB {1e3 * blocking:7.0f} ms {1e3 * stall:7.0f} ms {stall / blocking:7.1%} "
            f"{1e3 * alone:8.1f} ms {1e3 * beside:12.1f} ms",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
