"""One drafter rank in a process of its own, importable by spawned children."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drafter_cases import close_window, make_batch, make_learner, small_spec

PARTS = [([10, 20], 0), ([7, 60, 3], 1), ([33], 2)]


def batches():
    spec = small_spec()
    return spec, [make_batch(spec, lengths, seed=i, index=i, bucket=i % 2) for lengths, i in PARTS]


def work(rank: int, store: str, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    spec, parts = batches()
    learner = make_learner(spec)
    learner.world = dist.group.WORLD
    for step in (1, 2):
        for batch in parts[:1] if rank == 0 else parts[1:]:
            learner.accumulate(batch)
        report = close_window(learner, step)
    queue.put((rank, report, {n: t.numpy() for n, t in learner.network.state_dict().items()}))
    dist.barrier()
    dist.destroy_process_group()
