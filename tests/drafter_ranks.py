"""Drafter ranks in processes of their own; importable by spawned children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from drafter_cases import close_window, make_batch, make_learner, small_spec, state_of

PARTS = [([10, 20], 0), ([7, 60, 3], 1), ([33], 2)]


def batches():
    spec = small_spec()
    return spec, [make_batch(spec, lengths, seed=i, index=i, bucket=i % 2) for lengths, i in PARTS]


def train_together(folder: Path, optimizer: dict[str, Any], steps: int = 2) -> list[list[Any]]:
    """Two ranks train the same window again and again; each rank's last report and state, by rank."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    arguments = (str(folder / "store"), queue, optimizer, steps)
    workers = [context.Process(target=_train, args=(rank, *arguments)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = {rank: rest for rank, *rest in (queue.get() for _ in workers)}
    for worker in workers:
        worker.join(timeout=250)
        assert worker.exitcode == 0
    return [found[rank] for rank in range(2)]


def _train(rank: int, store: str, queue: Any, optimizer: dict[str, Any], steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    spec, parts = batches()
    world = dist.group.WORLD
    shards = world if optimizer.get("shard") else None
    learner = make_learner(spec, world=world, shards=shards, optimizer=optimizer)
    for step in range(1, steps + 1):
        for batch in parts[:1] if rank == 0 else parts[1:]:
            learner.accumulate(batch)
        report = close_window(learner, step)
    held = sum(t.numel() for each in learner.optimizers.values() for s in each.state.values() for t in s.values())
    if shards is not None:
        held = sum(
            tensor.numel()
            for each in learner.optimizers.values()
            for state in each.optim.state.values()
            for tensor in state.values()
        )
    queue.put((rank, report, _as_arrays(state_of(learner)), held))
    dist.barrier()
    dist.destroy_process_group()


def _as_arrays(value: Any) -> Any:
    """Tensors as numpy arrays, which cross between processes by value."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _as_arrays(inner) for key, inner in value.items()}
    return [_as_arrays(inner) for inner in value] if isinstance(value, (list, tuple)) else value
