"""Read first: builds the rooms, joins them with channels, runs the loop, owns the order of shutdown.

    store ─► plan ─► feed ─► target ─► drafter ─► checkpoint
                      └────── flow ───────┘
    every StepReport ─► observe

`compose` turns settings into a `Composition` (everything that is known before a model loads, every fault raised there);
`train` runs it: `inline`, the same stages one after another in this process (the reference), or `pipeline`, one process
per role joined by the hub. Both give the same weights, bit for bit, when delivery is ordered.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.checkpoint import rundir, store
from paceline.config import Settings
from paceline.contracts import FeatureBatch, HostBatch, StepReport, TargetFacts
from paceline.data.store import TokenStore, open_store
from paceline.data.tokenizer import load_tokenizer, mask_token_id
from paceline.drafter.anchors import sample_anchors
from paceline.drafter.spec import DrafterSpec, derive_spec
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.feed.collate import collate
from paceline.flow.hub import Hub
from paceline.flow.messages import StepOrder
from paceline.flow.pool import BufferPool
from paceline.flow.prefetch import Prefetcher
from paceline.flow.stop import StopRequest
from paceline.flow.worker import Worker
from paceline.observe.observer import Observer, open_observer
from paceline.plan.epoch import EpochPlan, plan_epoch
from paceline.plan.intake import groups_of_tags
from paceline.target.facts import describe
from paceline.target.taps import check_taps, default_taps

if TYPE_CHECKING:
    from paceline.drafter.learner import Learner


@dataclass(frozen=True)
class Composition:
    """A run as it is known before any model loads.

    Attributes:
        settings: resolved.
        run_dir: where it lives.
        facts, taps, spec: of target and drafter.
        source: the tokenised data.
        orders: every optimizer step of the run.
        first_step: steps that a checkpoint already holds.
    """

    settings: Settings
    run_dir: Path
    facts: TargetFacts
    taps: list[int]
    spec: DrafterSpec
    source: TokenStore
    orders: list[StepOrder]
    first_step: int

    @property
    def remaining(self) -> list[StepOrder]:
        """Steps still to take."""
        return self.orders[self.first_step :]


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    Attributes:
        step: optimizer steps that the newest checkpoint holds.
        total_steps: steps of the whole run.
        stopped: whether the user stopped it before the end.
    """

    step: int
    total_steps: int
    stopped: bool


def resolve_spec(settings: Settings) -> tuple[TargetFacts, list[int], DrafterSpec]:
    """Facts of the target, taps and drafter of a run; reads configurations and tokenizer only."""
    facts = describe(settings.target.path, settings.target.trust_remote_code)
    taps = settings.target.taps or default_taps(facts.num_layers, settings.target.num_taps)
    check_taps(taps, facts.num_layers)
    mask_id = settings.drafter.mask_token_id
    if mask_id is None:
        mask_id = mask_token_id(load_tokenizer(settings.target.path, settings.target.trust_remote_code))
    if mask_id is None:
        raise ConfigError(
            f"drafter.mask_token_id: unset, and the tokenizer of {settings.target.path} names no mask token; "
            "give the id of a token that never occurs in text"
        )
    return facts, list(taps), derive_spec(settings.drafter, facts, taps, mask_id)


def compose(settings: Settings) -> Composition:
    """Everything about a run that can be known, and refused, before a model loads.

    Raises:
        PacelineError: one line per fault.
    """
    _check_devices(settings)
    facts, taps, spec = resolve_spec(settings)
    source = open_store(settings.store_path)
    orders = step_orders(settings, functools.partial(epoch_plan, settings, spec, source))
    if not orders:
        raise DataError(f"{settings.store_path}: no optimizer step can be planned from its {len(source.lengths)} rows")
    run_dir = rundir.open_run(
        settings,
        {
            "drafter": spec.to_dict(),
            "target_fingerprint": facts.fingerprint,
            "data_fingerprint": source.fingerprint,
            "total_steps": len(orders),
        },
    )
    first = min(store.newest_step(run_dir), len(orders))
    return Composition(settings, run_dir, facts, taps, spec, source, orders, first)


def epoch_plan(settings: Settings, spec: DrafterSpec, source: TokenStore, epoch: int) -> EpochPlan:
    """The plan of one epoch: a pure function of lengths, settings, seed and epoch."""
    weights = settings.plan.weights
    return plan_epoch(
        source.lengths,
        source.eligible,
        settings.plan,
        num_anchors=settings.drafter.num_anchors,
        block_size=spec.block_size,
        replicas=len(settings.flow.drafter_devices),
        seed=settings.seed,
        epoch=epoch,
        groups=groups_of_tags(source.names(), weights) if weights else None,
    )


def step_orders(settings: Settings, plan_of: Callable[[int], EpochPlan]) -> list[StepOrder]:
    """All optimizer steps of a run, from the plans of all its epochs."""
    limit = settings.train.max_steps
    places: list[tuple[int, int, range]] = []
    for epoch in range(settings.train.epochs):
        plan = plan_of(epoch)
        places += [(epoch, window, plan.window(window)) for window in range(plan.num_windows)]
        if limit is not None and len(places) >= limit:
            places = places[:limit]
            break
    every = settings.checkpoint.every_steps
    return [
        StepOrder(step, epoch, window, batches, save=step % every == 0 or step == len(places))
        for step, (epoch, window, batches) in enumerate(places, 1)
    ]


def host_batches(run: Composition, orders: Sequence[StepOrder]) -> Iterator[HostBatch]:
    """Host batches of these steps in plan order."""
    plan_of = functools.lru_cache(maxsize=2)(functools.partial(epoch_plan, run.settings, run.spec, run.source))
    pad_id = run.facts.pad_token_id if run.facts.pad_token_id is not None else 0
    for order in orders:
        for index in order.batches:
            yield collate(
                plan_of(order.epoch).batch(index),
                run.source,
                sample_anchors,
                seed=run.settings.seed,
                num_anchors=run.settings.drafter.num_anchors,
                pad_id=pad_id,
            )


@dataclass(frozen=True)
class LearnerRecipe:
    """Builds the learner of a drafter rank, in whichever process; pickles.

    Attributes:
        settings, spec, run_dir, total_steps, first_step: of the run.
        rank: which of `flow.drafter_devices`.
        port: of the store on which several ranks find one another; 0 for a rank that is alone.
    """

    settings: Settings
    spec: DrafterSpec
    run_dir: Path
    total_steps: int
    first_step: int
    rank: int = 0
    port: int = 0

    @property
    def device(self) -> str:
        """Where the rank runs."""
        return self.settings.flow.drafter_devices[self.rank]

    def __call__(self) -> Learner:
        """The learner, with the state of the checkpoint that the run goes on from."""
        from paceline.drafter.learner import Learner
        from paceline.target.load import load_embedding_and_head

        settings = self.settings
        embedding, head = load_embedding_and_head(
            settings.target.path, torch.float32, settings.target.trust_remote_code
        )
        learner = Learner(
            self.spec,
            embedding=embedding,
            head=head,
            drafter=settings.drafter,
            objective=settings.objective,
            optimizer=settings.optimizer,
            total_steps=self.total_steps,
            seed=settings.seed,
            device=self.device,
            world=self._join() if self.port else None,
        )
        if self.first_step:
            learner.load_state_dict(store.read_checkpoint(self.run_dir, self.first_step))
        return learner

    def _join(self) -> dist.ProcessGroup:
        backend = "nccl" if self.device.startswith("cuda") else "gloo"
        meeting = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        ranks = len(self.settings.flow.drafter_devices)
        dist.init_process_group(backend, store=meeting, rank=self.rank, world_size=ranks)
        group = dist.group.WORLD
        assert group is not None, "init_process_group made the default group"
        return group

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint of the run."""
        store.write_checkpoint(self.run_dir, step, state, keep_last=self.settings.checkpoint.keep_last)


def recipe(run: Composition, rank: int = 0, port: int = 0) -> LearnerRecipe:
    """How a drafter rank of this run is built."""
    return LearnerRecipe(run.settings, run.spec, run.run_dir, len(run.orders), run.first_step, rank, port)


def train(run: Composition, *, notice: Callable[[str], None]) -> Outcome:
    """Train from where the run stands to its end, or to where the user stops it.

    Args:
        run: from `compose`.
        notice: hears what the user should know at once.

    Raises:
        StageError: a stage failed; the run goes on from its newest checkpoint when started again.
        CheckpointError: a checkpoint could not be written.
    """
    orders = run.remaining
    if not orders:
        return Outcome(run.first_step, len(run.orders), stopped=False)
    first_plan = epoch_plan(run.settings, run.spec, run.source, orders[0].epoch)
    header = {
        **rundir.read_run_facts(run.run_dir),
        "samples_per_epoch": first_plan.num_samples,
        "bucket_edges": first_plan.edges.tolist(),
    }
    observer = open_observer(
        run.settings.observe, run.run_dir, total_steps=len(run.orders), header=header, first_step=run.first_step
    )
    engine = _inline if run.settings.flow.mode == "inline" else _pipeline
    last, status = run.first_step, "failed: unforeseen"
    try:
        with StopRequest(notice) as stop:
            for report in engine(run, orders, stop):
                observer.step(report)
                last = report.step
                if run.orders[last - 1].save:
                    observer.event("checkpoint", step=last)
        status = "finished" if last == len(run.orders) else "stopped"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except PacelineError as fault:
        status = f"failed: {fault.faults[0]}"
        _log_failure(run.run_dir, fault, observer)
        raise
    finally:
        observer.close(status)
    return Outcome(store.newest_step(run.run_dir), len(run.orders), stopped=status == "stopped")


def _inline(run: Composition, orders: Sequence[StepOrder], stop: Callable[[], bool]) -> Iterator[StepReport]:
    from paceline.target.load import load_target

    torch.set_num_threads(run.settings.flow.threads)
    target = load_target(run.settings.target, run.taps, run.settings.flow.target_devices[0])
    build = recipe(run)
    learner = build()
    batches = host_batches(run, orders)
    began = time.perf_counter()
    for order in orders:
        spent = {"target/busy": 0.0, "drafter/busy": 0.0}
        for _ in order.batches:
            features = _timed(spent, "target/busy", target.features, next(batches))
            _timed(spent, "drafter/busy", learner.accumulate, features)
        now = time.perf_counter()
        report = learner.step(
            step=order.step, epoch=order.epoch, window=order.window, seconds=now - began, waits_s=spent
        )
        began = now
        stopping = stop()
        if order.save or stopping:
            build.save(order.step, learner.state_dict())
        yield report
        if stopping:
            return


def _timed(spent: dict[str, float], key: str, work: Callable[[Any], Any], item: HostBatch | FeatureBatch) -> Any:
    began = time.perf_counter()
    result = work(item)
    spent[key] += time.perf_counter() - began
    return result


def _pipeline(run: Composition, orders: Sequence[StepOrder], stop: Callable[[], bool]) -> Iterator[StepReport]:
    from paceline.drafter.worker import DrafterStage
    from paceline.target.worker import TargetStage

    settings, flow = run.settings, run.settings.flow
    pool = BufferPool(
        flow.pool_buffers,
        _most_tokens(run),
        len(run.taps) * run.facts.hidden_size,
        getattr(torch, settings.target.dtype),
    )
    ranks = len(flow.drafter_devices)
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    workers: list[Worker] = []
    feed = Prefetcher(host_batches(run, orders), flow.prefetch_batches * len(flow.target_devices))
    try:
        for number, device in enumerate(flow.target_devices):
            arguments = (settings.target, run.taps, device, pool)
            workers.append(Worker(f"target {number} ({device})", TargetStage, arguments, threads=flow.threads))
        for rank, device in enumerate(flow.drafter_devices):
            build = recipe(run, rank, meeting.port if meeting else 0)
            stage = (build, pool, build.save)
            workers.append(Worker(f"drafter {rank} ({device})", DrafterStage, stage, threads=flow.threads))
        hub = Hub(
            workers[:-ranks],
            workers[-ranks:],
            num_buffers=flow.pool_buffers,
            feed=feed,
            orders=orders,
            delivery=flow.delivery,
            stall_limit_s=flow.stall_limit_s,
            stop_requested=stop,
        )
        yield from hub.run()
        patience_s = 5.0
    except BaseException:
        patience_s = 0.0
        raise
    finally:
        feed.close()
        for worker in workers:
            worker.stop(patience_s)


def _most_tokens(run: Composition) -> int:
    """Real tokens of the largest micro-batch that any plan of the run can make."""
    plan = run.settings.plan
    return min(plan.token_budget, plan.max_samples * int(run.source.lengths.max()))


def _check_devices(settings: Settings) -> None:
    faults = []
    for role, names in (
        ("target_devices", settings.flow.target_devices),
        ("drafter_devices", settings.flow.drafter_devices),
    ):
        if not names:
            faults.append(f"flow.{role}: empty; list at least one device, for example cpu or cuda:0")
        for name in names:
            kind, _, number = name.partition(":")
            count = torch.cuda.device_count() if kind == "cuda" else 1
            if kind not in ("cpu", "cuda") or (number and not number.isdigit()) or (number and int(number) >= count):
                faults.append(f"flow.{role}: {name}: no such device here; there are cpu and {count} CUDA devices")
    if settings.flow.mode == "inline" and len(settings.flow.target_devices) + len(settings.flow.drafter_devices) > 2:
        faults.append("flow.mode: inline runs one target and one drafter; list one device each or use pipeline")
    if faults:
        raise ConfigError(*faults)


def _log_failure(run_dir: Path, fault: PacelineError, observer: Observer) -> None:
    """Keep the traceback of a failed stage; the user sees one line."""
    notes = getattr(fault, "__notes__", [])
    if notes:
        (run_dir / "failure.log").write_text("\n".join([*fault.faults, *notes]) + "\n", encoding="utf-8")
    observer.event("failure", fault=str(fault))
