"""Batch planning of 902,087 lengths: all strategies of paceline beside other planners, and 100 million lengths.

Run: ``python benchmarks/plan.py`` (ours), ``--peers`` (also those of benchmarks/requirements-plan.txt that are
installed; minutes), ``--sizes`` (time and memory of other plans, ``--huge`` with 100 million lengths; needs 4 GiB),
``--small`` (padding and re-pairing of small data sets), ``--noise`` (step σ by weighting and schedule).

Every contender runs in a process of its own. Padded widths are
multiples of 64; "over" is the share of batches beyond the token budget. Step σ is the standard deviation over
optimizer steps of a loss that is linear in length (0.306 + 0.000442 · length): the length-driven noise. In the table a
step is the plain mean of its batches' means, which any planner can be asked for; ``--noise`` weighs samples as
paceline's loss does. Times are CPU seconds of one core, the best of several runs for ours.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.plan.epoch import plan_epoch
from paceline.plan.metrics import batch_totals, repairing, step_deviation, weighted_means

DATA = Path(__file__).parent / "data" / "lengths-902087.npz"
BUDGET, MOST, MULTIPLE = 49_152, 64, 64
SEXTILES = np.array([770, 1216, 1728, 2432, 3296, 8192])
BASE, SLOPE = 0.306, 0.000442

Batches = tuple[np.ndarray, np.ndarray]
"""Rows one batch after another, and the offsets of the batches, in training order."""


def ours(strategy: str, lengths: np.ndarray, epoch: int, schedule: str = "stratified", replicas: int = 1) -> Batches:
    """One epoch of paceline in training order; edges: the sextiles, for everything that speaks of buckets."""
    settings = PlanConfig(strategy=strategy, schedule=schedule, edges=SEXTILES.tolist())
    plan = plan_epoch(lengths, None, settings, num_anchors=512, block_size=16, seed=0, epoch=epoch, replicas=replicas)
    sizes = plan.counts
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    starts = plan.batches.offsets[plan.sequence].astype(np.int64)
    places = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
    return plan.batches.order[places], offsets


def listed(batches: Any) -> Batches:
    """The same from lists of rows."""
    parts = [np.asarray(batch, np.int64) for batch in batches]
    return np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])])


def transformers_grouped(lengths: np.ndarray, epoch: int) -> Batches:
    """Fixed batch size: the largest that never exceeds the budget."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    size = BUDGET // (-(-int(lengths.max()) // MULTIPLE) * MULTIPLE)
    sampler = LengthGroupedSampler(size, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(epoch))
    order = np.fromiter(sampler, np.int64, len(lengths))
    return order, np.append(np.arange(0, len(order), size), len(order))


def speculators_multipack(lengths: np.ndarray, epoch: int) -> Batches:
    """Bins of real tokens. Only the sampler's file is loaded: the package's own imports want an inference server's."""
    module = _loaded("speculators", "train/distributed_batch_sampler.py")
    sampler = module.MultipackDistributedBatchSamplerV2(BUDGET, lengths, 1, 0, seed=0)
    sampler.set_epoch(epoch)
    return listed(sampler)


def _loaded(package: str, file: str) -> Any:
    """A module of an installed package, without the package's ``__init__``."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}")
    spec = importlib.util.spec_from_file_location(f"{package}_file", Path(found.submodule_search_locations[0]) / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def axolotl_multipack(lengths: np.ndarray, epoch: int) -> Batches:
    """Bins of real tokens, over a random order as its trainer gives it."""
    from axolotl.utils.samplers.multipack import MultipackBatchSampler

    order = np.random.default_rng(epoch).permutation(len(lengths))
    sampler = MultipackBatchSampler(
        order.tolist(), batch_size=1, batch_max_len=BUDGET, lengths=lengths, bin_size=MOST, drop_last=False,
        num_count_samples=1, num_processes=1,
    )  # fmt: skip
    return listed(row for batch in sampler.generate_batches() for row in batch)


def speechbrain_dynamic(lengths: np.ndarray, epoch: int) -> Batches:
    """Buckets of its own choosing."""
    from speechbrain.dataio.sampler import DynamicBatchSampler

    sampler = DynamicBatchSampler(
        list(range(len(lengths))), max_batch_length=BUDGET, num_buckets=60, max_batch_ex=MOST, shuffle=True,
        lengths_list=lengths.tolist(), epoch=epoch,
    )  # fmt: skip
    return listed(sampler)


def lhotse_buckets(lengths: np.ndarray, epoch: int) -> Batches:
    """Thirty buckets, padded duration as the budget; one token is one second."""
    from lhotse import CutSet, MonoCut, SupervisionSegment
    from lhotse.dataset import DynamicBucketingSampler

    class Cuts:
        def __iter__(self) -> Iterator[Any]:
            for row in np.random.default_rng(epoch).permutation(len(lengths)).tolist():
                tokens = float(lengths[row])
                segment = SupervisionSegment(str(row), str(row), 0.0, tokens)
                yield MonoCut(str(row), 0.0, tokens, 0, supervisions=[segment])

    sampler = DynamicBucketingSampler(
        CutSet(Cuts()), max_duration=BUDGET, max_cuts=MOST, num_buckets=30, shuffle=True, seed=epoch, drop_last=False,
        world_size=1, rank=0,
    )  # fmt: skip
    return listed([int(cut.id) for cut in batch] for batch in sampler)


PEERS: dict[str, tuple[Callable[[np.ndarray, int], Batches], str, bool]] = {
    "lhotse": (lhotse_buckets, "lhotse", False),
    "transformers, length-grouped": (transformers_grouped, "transformers", False),
    "speechbrain, dynamic": (speechbrain_dynamic, "speechbrain", False),
    "speculators, multipack": (speculators_multipack, "speculators", True),
    "axolotl, multipack": (axolotl_multipack, "axolotl", True),
}


def score(lengths: np.ndarray, first: Batches, second: Batches, packed: bool) -> dict[str, float]:
    """Padding and what training sees of it."""
    rows, offsets = first
    held = lengths[rows].astype(np.int64)
    sizes = np.diff(offsets)
    real = np.add.reduceat(held, offsets[:-1])
    widest = np.maximum.reduceat(held, offsets[:-1])
    padded = np.full(len(sizes), BUDGET) if packed else sizes * (-(-widest // MULTIPLE) * MULTIPLE)
    over = (real if packed else padded) > BUDGET
    loss = BASE + SLOPE * real / sizes
    bucket = np.searchsorted(SEXTILES, widest)
    windows = bucket[: len(bucket) // 4 * 4].reshape(-1, 4)
    crowded = np.array([(windows == number).sum(axis=1) >= 3 for number in range(6)]).any(axis=0)
    return {
        "samples": len(np.unique(rows)),
        "efficiency": real.sum() / padded.sum(),
        "batches": len(sizes),
        "over": over.mean(),
        "crowded": crowded.mean(),
        "crowded_last": crowded[-len(crowded) // 10 :].mean(),
        "sigma_4": _window_std(loss, 4),
        "sigma_12": _window_std(loss, 12),
        "repaired": _repaired(first, second, len(lengths)),
    }


def _window_std(values: np.ndarray, size: int) -> float:
    return float(values[: len(values) // size * size].reshape(-1, size).mean(axis=1).std())


def _repaired(first: Batches, second: Batches, count: int) -> float:
    batch_of = np.full(count, -1, np.int64)
    batch_of[second[0]] = np.repeat(np.arange(len(second[1]) - 1), np.diff(second[1]))
    sizes = np.diff(first[1])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    _, together = np.unique(owner * len(second[1]) + batch_of[first[0]], return_counts=True)
    return float((together * (together - 1)).sum() / (sizes * (sizes - 1)).sum())


def _peak_mib() -> float | None:
    """Most resident memory since the last call of `_forget_peak`, in MiB; None where /proc does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _forget_peak() -> None:
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")


def _measured(name: str, packed: bool, peer: bool, repeats: int, pipe: Any) -> None:
    """In a process of its own: time, memory and score of one contender, sent through the pipe."""
    lengths = np.load(DATA)["lengths"]
    plan = PEERS[name][0] if peer else lambda lengths, epoch: ours(name, lengths, epoch)

    def timed(epoch: int) -> tuple[float, Batches | None]:
        started = time.process_time()
        if peer:
            made = plan(lengths, epoch)
            return time.process_time() - started, made
        settings = PlanConfig(strategy=name, edges=SEXTILES.tolist())
        plan_epoch(lengths, None, settings, num_anchors=512, block_size=16, seed=0, epoch=epoch)
        return time.process_time() - started, None

    try:
        plan(lengths[:2000], 0)  # imports
        _forget_peak()
        before = _peak_mib()
        seconds, first = timed(0)
        peak = _peak_mib()
        if not peer:
            seconds = min(timed(epoch)[0] for epoch in range(repeats))
        found = score(lengths, first or plan(lengths, 0), plan(lengths, 1), packed)
        found["seconds"] = seconds
        found["mib"] = float("nan") if before is None or peak is None else peak - before
        if not peer:
            wide = ours(name, lengths, 0, replicas=3)
            found["sigma_12"] = score(lengths, wide, wide, packed)["sigma_12"]
        pipe.send(found)
    except Exception as error:  # noqa: BLE001 - a peer that fails is a row of the table
        pipe.send(f"{type(error).__name__}: {error}")


def _apart(name: str, packed: bool, peer: bool, repeats: int, limit_s: float) -> dict[str, float] | str:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    worker = context.Process(target=_measured, args=(name, packed, peer, repeats, there))
    worker.start()
    there.close()
    try:
        found = here.recv() if here.poll(limit_s) else f"not done in {limit_s:.0f} s"
    except EOFError:
        found = "died"
    worker.terminate()
    worker.join()
    return found


def _crowded(name: str, found: dict[str, float]) -> str:
    """Windows of one bucket; nothing where every batch mixes all lengths, so that its longest sample means nothing."""
    if name.startswith(("packed", "shuffled")) or "multipack" in name:
        return "–"
    return f"{100 * found['crowded']:.1f} / {100 * found['crowded_last']:.1f}"


def _row(name: str, found: dict[str, float] | str) -> str:
    if isinstance(found, str):
        return f"| {name} | {found} |" + " |" * 8
    return (
        f"| {name} | {found['efficiency']:.2%} | {found['batches']:,} | {found['over']:.1%} | {found['seconds']:.3f} | "
        f"{found['mib']:.0f} | {_crowded(name, found)} | "
        f"{found['sigma_4']:.3f} | {found['sigma_12']:.3f} | {found['repaired']:.2%} |"
    )


HEAD = (
    "| planner | efficiency | micro-batches | over | CPU s | peak MiB | ≥ 3 of 4 of one bucket, epoch / last tenth, % "
    "| σ of 4 | σ of 12 | re-paired |\n" + "|---" * 10 + "|"
)


def noise() -> Iterator[str]:
    """Step σ for windows of 4 and of 12 (three replicas), by how a sample is weighed; buckets of the default edges."""
    lengths = np.load(DATA)["lengths"]
    yield "| plan | by token | by anchor | by sample | batches as equals |\n" + "|---" * 5 + "|"
    for strategy, schedule in (
        ("grid", "stratified"), ("grid", "proportional"), ("grid", "diverse"), ("grid", "shuffled"),
        ("bucketed", "stratified"), ("bucketed", "diverse"),
    ):  # fmt: skip
        columns: list[list[float]] = []
        for replicas in (1, 3):
            plan = plan_epoch(
                lengths, None, PlanConfig(strategy=strategy, schedule=schedule),
                num_anchors=512, block_size=16, seed=0, epoch=0, replicas=replicas,
            )  # fmt: skip
            spreads = [float(weighted_means(plan, weighting)[0].std()) for weighting in ("token", "anchor", "sample")]
            columns.append([SLOPE * spread for spread in (*spreads, step_deviation(plan, batch_totals(plan)))])
        cells = " | ".join(f"{four:.3f} / {twelve:.3f}" for four, twelve in zip(*columns, strict=True))
        yield f"| `{strategy}` × `{schedule}` | {cells} |"


def chats(count: int, log_mean: float = 4.2, spread: float = 0.5) -> np.ndarray:
    """Lengths of short chats, 73 tokens on average where nothing else is asked for."""
    return np.clip(np.random.default_rng(0).lognormal(log_mean, spread, count), 16, 4000).astype(np.uint16)


def sizes(repeats: int, *, huge: bool) -> Iterator[str]:
    """CPU time and memory beside the lengths of one plan, and its time over that of sorting as many 64-bit integers."""
    workload = np.load(DATA)["lengths"]
    eligible = (workload * np.random.default_rng(0).uniform(0.2, 0.9, len(workload))).astype(np.int32)
    cases: list[tuple[str, np.ndarray, np.ndarray | None, PlanConfig, int]] = [
        ("902,087 lengths", workload, None, PlanConfig(), repeats),
        ("the same, 131,072 draft positions", workload, None, PlanConfig(draft_position_budget=131_072), repeats),
        ("the same, eligible anchors counted", workload, eligible, PlanConfig(draft_position_budget=131_072), repeats),
        ("1 million short chats", chats(1_000_000), None, PlanConfig(), repeats),
        ("30 million short chats", chats(30_000_000), None, PlanConfig(), 2),
    ]
    if huge:
        cases = [("100 million lengths", np.resize(workload, 100_000_000), None, PlanConfig(), 1)]
    yield "| plan | CPU ms | peak MiB | / one sort |\n" + "|---" * 4 + "|"
    for name, lengths, counts, settings, times in cases:
        _forget_peak()
        before, spent, sorting = _peak_mib() or float("nan"), [], []
        for number in range(times):
            started = time.process_time()
            plan_epoch(lengths, counts, settings, num_anchors=512, block_size=16, seed=0, epoch=0)
            spent.append(time.process_time() - started)
            if not number:
                peak = (_peak_mib() or float("nan")) - before
            numbers = np.random.default_rng(0).integers(0, 2**63, len(lengths), np.uint64)
            started = time.process_time()
            numbers.sort()
            sorting.append(time.process_time() - started)
        yield f"| {name} | {1000 * min(spent):,.1f} | {peak:.0f} | {min(spent) / min(sorting):.2f} |"


def small() -> Iterator[str]:
    """Real / padded tokens as sorted and as composed, and the share of batch-mates that meet again; means of epochs."""
    workload = np.load(DATA)["lengths"]
    yield "| data | mean length | sorted | grid | re-paired |\n" + "|---" * 5 + "|"
    cases = [
        (f"{count:,} chats", chats(count, log_mean, spread))
        for log_mean, spread in ((4.2, 0.5), (5.3, 0.5), (5.6, 0.6))
        for count in (500, 2000, 6000)
    ]
    for name, lengths in [*cases, *((f"{count:,} of the lengths", workload[:count]) for count in (500, 2000, 6000))]:
        made = {
            strategy: [
                plan_epoch(
                    lengths, None, PlanConfig(strategy=strategy), num_anchors=512, block_size=16, seed=0, epoch=epoch
                )
                for epoch in range(4)
            ]
            for strategy in ("sorted", "grid")
        }
        full = [np.mean([lengths.sum() / (p.counts * p.widths).sum() for p in plans]) for plans in made.values()]
        again = np.mean([repairing(*pair) for pair in itertools.pairwise(made["grid"])])
        yield f"| {name} | {lengths.mean():.0f} | {full[0]:.1%} | {full[1]:.1%} | {again:.1%} |"


def main() -> None:
    """Print the table, and JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="also the installed peers")
    parser.add_argument("--sizes", action="store_true", help="only time and memory of other plans")
    parser.add_argument("--huge", action="store_true", help="only 100 million lengths")
    parser.add_argument("--small", action="store_true", help="only small data sets")
    parser.add_argument("--noise", action="store_true", help="only step σ by weighting and schedule")
    parser.add_argument("--repeats", type=int, default=15, help="runs of ours; the best counts")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one contender")
    parser.add_argument("--only", nargs="*", help="contenders")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = (
        sizes(arguments.repeats, huge=arguments.huge) if arguments.huge or arguments.sizes
        else small() if arguments.small else noise() if arguments.noise else None
    )  # fmt: skip
    if lines is not None:
        for line in lines:
            print(line, flush=True)
        return
    contenders = {
        name: (name == "packed", False)
        for name in ("grid", "packed", "sorted", "windowed", "jittered", "bucketed", "mixed", "shuffled")
    }
    if arguments.peers:
        contenders |= {name: (packed, True) for name, (_, _, packed) in PEERS.items()}
    print(HEAD)
    results = {}
    for name, (packed, peer) in contenders.items():
        if arguments.only and name not in arguments.only:
            continue
        shown = name if not peer else f"{name} {_version(PEERS[name][1])}"
        results[shown] = _apart(name, packed, peer, arguments.repeats, arguments.limit)
        print(_row(shown, results[shown]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
