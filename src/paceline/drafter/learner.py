"""Trains one drafter on one device: accumulates micro-batches, closes windows.

A window's gradient is the gradient of Σ weighted loss over all its micro-batches and ranks, divided once by Σ weight.
Gradients accumulate undivided; nothing is fetched from the device before `step`, which does so once.

Shape letters: A anchors, K slots, J drafts of a block, M supervised drafts, S context tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from paceline.config.learning import DrafterConfig, ObjectiveConfig, OptimizerConfig
from paceline.device import to_device
from paceline.drafter.attention.flex import compiler_errors
from paceline.drafter.block_inputs import BlockInputs, build_blocks
from paceline.drafter.distributed import add_gradients, gather_plain
from paceline.drafter.host_copy import HostCopy, StateWriter
from paceline.drafter.loss import choose_head
from paceline.drafter.loss.distillation import SlotLosses, Teacher, distillation_loss
from paceline.drafter.loss.weights import SLOT_WEIGHTS, default_gamma, normalize_weights, sum_by_document
from paceline.drafter.memory import optimizer_bytes
from paceline.drafter.metrics import WindowMetrics, WindowTotals, bucket_totals, ratios_of, sample_losses
from paceline.drafter.network import Drafter
from paceline.drafter.noise import add_noise, noise_ratio
from paceline.drafter.optimizer import (
    learning_rates,
    load_optimizer_state,
    make_optimizers,
    optimizer_state,
    with_moments,
)
from paceline.drafter.schedule import Schedule, ramp
from paceline.drafter.spec import DrafterSpec
from paceline.drafter.split_batch import split_batch
from paceline.drafter.tree_metrics import diagnose, diagnosis_ratios, evenly_spaced
from paceline.errors import DrafterError
from paceline.types import FeatureBatch, HostBatch, PlannedStep, Ratio, StepReport

COMPUTE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Learner:
    """A drafter in training.

    Args:
        spec: the drafter.
        embedding, head: the target's, frozen, [V, D]; kept in the compute type, never trained, not in the state.
        drafter: compute type, attention backend, chunk sizes.
        objective: what is minimised.
        optimizer: how the masters move.
        total_steps: optimizer steps of the run, for schedules.
        seed: key of the new weights.
        device: of network and frozen tensors.
        world: process group of the drafter ranks, or None for one rank. Ranks start from the same seed and stay equal.
        shards: those of them that share the optimizer's state out; None: each holds all of it.
        teacher: makes the target's logits from inputs of its final norm; needed by the terms kl, tv and lk only.

    Raises:
        DrafterError: embedding or head do not fit the spec, or a term lacks its teacher.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        *,
        embedding: Tensor,
        head: Tensor,
        drafter: DrafterConfig,
        objective: ObjectiveConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        seed: int,
        device: str | torch.device = "cpu",
        world: dist.ProcessGroup | None = None,
        shards: dist.ProcessGroup | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self._cross_entropy = choose_head(drafter.head, torch.device(device))
        if objective.needs_teacher and teacher is None:
            raise DrafterError(
                "objective.terms compares with the target's distributions, and no teacher was given; "
                "give the target's norm and head, or use ce alone"
            )
        for name, tensor in (("embedding", embedding), ("head", head)):
            if tuple(tensor.shape) != (spec.vocab_size, spec.hidden_size):
                raise DrafterError(
                    f"the target's {name} is {list(tensor.shape)}; a drafter of this spec needs "
                    f"[{spec.vocab_size}, {spec.hidden_size}]"
                )
        self.spec, self.settings, self.objective = spec, drafter, objective
        self.device, self.world, self.shards = torch.device(device), world, shards
        self.dtype = COMPUTE_TYPES[drafter.dtype]
        self._embedding = embedding.detach().to(self.device, self.dtype)
        tied = head.data_ptr() == embedding.data_ptr()
        self._head = self._embedding if tied else head.detach().to(self.device, self.dtype)
        network = Drafter(spec, attention=drafter.attention, recompute=drafter.recompute, seed=seed)
        self.network = network.to(self.device)
        self.parameters = list(self.network.parameters())
        self.optimizer_settings, self.optimizers = optimizer, make_optimizers(self.network, optimizer, self.shards)
        self.rates = learning_rates(optimizer, total_steps)
        self.seed, self.teacher = seed, teacher
        gamma = objective.gamma or default_gamma(spec.block_size)
        self.gammas = ramp(objective, gamma, objective.gamma_end, total_steps)
        self.shares = _share_schedules(objective, total_steps)
        self.noise_ratios = noise_ratio(drafter.noise, total_steps)
        self.steps_done = 0
        self.skipped_in_row = 0
        self._window = WindowMetrics(spec.num_drafts, self.device)
        self._validation: list[FeatureBatch] = []
        self._host_copy = HostCopy(self.device)
        self._step_ended = time.perf_counter()

    def accumulate(self, batch: FeatureBatch) -> None:
        """Adds a micro-batch to the open window: its undivided gradient, loss and metrics.

        Batches above `positions_per_pass` draft positions are computed in parts of whole samples. A batch without
        any anchor takes part in the window and contributes nothing.
        """
        self._window.count(batch.host)
        self._require_teacher(batch)
        features, last = self._moved(batch)
        ratio = self.noise_ratios.at(self.steps_done)
        if ratio:
            features, energies = add_noise(
                features, batch.host, len(self.spec.taps), self.settings.noise.kind, ratio, self.seed
            )
            self._window.add("noise", energies.flatten())
        every = self.settings.diagnose_every
        diagnosing = bool(every) and self.steps_done % every == 0
        for part in split_batch(batch.host, self.spec.block_size, self.settings.positions_per_pass):
            teacher_input = last[part.tokens] if last is not None else None
            total = self._measure(part.host, features[part.tokens], teacher_input, self._window, diagnosing)
            if total is not None:
                with compiler_errors():
                    total.backward()

    def probe(self, batch: FeatureBatch) -> None:
        """Does with a micro-batch what `accumulate` does and forgets it, so that what does not fit shows early.

        The optimizer's state, which a run that begins makes in its first step, takes its room meanwhile.
        """
        size = optimizer_bytes(self.spec, self.optimizer_settings) if not self.steps_done else 0
        sharers = dist.get_world_size(self.shards) if self.shards is not None else 1
        room = torch.empty(size // sharers, dtype=torch.uint8, device=self.device)
        self.accumulate(batch)
        del room
        self._window = WindowMetrics(self.spec.num_drafts, self.device)
        self._clear()
        self._step_ended = time.perf_counter()

    def hold_for_validation(self, batch: FeatureBatch) -> None:
        """Keep a held-out batch, collated with anchors of a fixed epoch: `step` measures it when that is planned."""
        self._require_teacher(batch)
        self._validation.append(batch)
        self._step_ended = time.perf_counter()

    @torch.no_grad()
    def validate(self) -> dict[str, Ratio]:
        """The metrics of training on the held-out batches: no noise, no gradient, nothing of the open window touched.

        Returns:
            ``loss`` and all ratios of `StepReport.ratios` that depend on the batches.
        """
        metrics = WindowMetrics(self.spec.num_drafts, self.device)
        for batch in self._validation:
            features, last = self._moved(batch)
            for part in split_batch(batch.host, self.spec.block_size, self.settings.positions_per_pass):
                teacher_input = last[part.tokens] if last is not None else None
                self._measure(part.host, features[part.tokens], teacher_input, metrics, diagnosing=True)
        totals, _ = metrics.fetch()
        return {"loss": totals.loss, **self._ratios(totals)}

    def step(self, planned: PlannedStep) -> StepReport:
        """Closes the window: divides its gradient once by its weight, clips, steps and clears; validates if planned.

        A window whose gradient is not finite moves nothing and is reported as skipped; a window without any
        supervised draft moves nothing either. The report's `seconds` count from the end of the step before, without
        the time of validations.

        Raises:
            DrafterError: too many windows in a row had a gradient that is not finite; names their samples.
        """
        window, self._window = self._window, WindowMetrics(self.spec.num_drafts, self.device)
        gradients = self._gradients()
        if self.world is not None:
            add_gradients(gradients, self.world)
        totals, (norm, unmoved, num_norms) = window.fetch(
            torch.nn.utils.get_total_norm(gradients), *self._norms_unmoved()
        )
        if self.world is not None:
            totals = WindowTotals.merged(gather_plain(totals, WindowTotals, self.world, self.device))
        loss, rate = totals.loss, self.rates.at(self.steps_done)
        gradient_norm = norm / loss.denominator if loss.denominator else norm
        finite = math.isfinite(gradient_norm) and math.isfinite(loss.numerator)
        self._move(gradients, loss.denominator, gradient_norm, finite)
        if self.skipped_in_row >= self.optimizer_settings.max_skipped_steps:
            raise DrafterError(self._not_finite(window, totals, planned.step))
        buckets = bucket_totals(totals)
        ratios = self._ratios(totals) | self._scheduled(self.steps_done - 1)
        ratios["norms/unmoved"] = Ratio(unmoved, num_norms)
        seconds = time.perf_counter() - self._step_ended
        if planned.validate and self._validation:
            ratios |= {f"validation/{name}": ratio for name, ratio in self.validate().items()}
        anchors = sum(bucket.anchors for bucket in buckets.values())
        self._step_ended = time.perf_counter()
        return StepReport(
            step=planned.step,
            epoch=planned.epoch,
            window=planned.window,
            loss=loss,
            ratios=ratios,
            buckets=buckets,
            batches=totals.batches,
            gradient_norm=gradient_norm,
            clipped=finite and gradient_norm > self.optimizer_settings.clip_norm,
            skipped=not finite,
            learning_rate=rate,
            samples=sum(bucket.samples for bucket in buckets.values()),
            anchors=anchors,
            real_tokens=sum(bucket.real_tokens for bucket in buckets.values()),
            padded_tokens=sum(bucket.padded_tokens for bucket in buckets.values()),
            draft_positions=anchors * self.spec.block_size,
            seconds=seconds,
            max_length=totals.max_length,
            sample_losses=sample_losses(totals.sums),
        )

    def _gradients(self) -> list[Tensor]:
        """Gradients of all parameters; zeros where nothing reached one."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _move(self, gradients: list[Tensor], weight: float, gradient_norm: float, finite: bool) -> None:
        """Clip, step and clear; a window without weight moves nothing and leaves the count of skipped steps alone."""
        if finite and weight:
            clip = self.optimizer_settings.clip_norm
            shrink = min(1.0, clip / gradient_norm) if gradient_norm else 1.0
            torch._foreach_mul_(gradients, shrink / weight)
            for optimizer in self.optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] = self.rates.at(self.steps_done)
                optimizer.step()
            self.skipped_in_row = 0
        elif not finite:
            self.skipped_in_row += 1
        self._clear()
        self.steps_done += 1

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs between two windows: the tensors themselves, and plain values.

        Where ranks share the optimizer's state out, all of them must ask, and the first one gets it.
        """
        optimizers = self.optimizers.items()
        return {
            "network": self.network.state_dict(),
            "optimizer": {name: optimizer_state(of, self.shards, self.device) for name, of in optimizers},
            "steps_done": self.steps_done,
            "skipped_in_row": self.skipped_in_row,
        }

    def save(self, writer: StateWriter, step: int, note: Mapping[str, Any]) -> None:
        """Hands a copy of the state to the writer, which works while training continues.

        Waits where the checkpoint before is still being written, for its memory is used again.
        """
        writer.wait()
        writer.put(step, self._host_copy.take(self.state_dict()), note)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes on what `state_dict` gave; the next window trains exactly as if the run had never stopped."""
        self.network.load_state_dict(dict(state["network"]))
        for name, optimizer in self.optimizers.items():
            load_optimizer_state(optimizer, state["optimizer"][name], self.shards)
        self.steps_done = int(state["steps_done"])
        self.skipped_in_row = int(state["skipped_in_row"])

    def begin(self, state: Mapping[str, Any]) -> None:
        """Takes on where another run or trainer ended: weights, steps, and what there is of AdamW's moments.

        Args:
            state: ``network``; and where the run counts on, ``steps_done`` and ``moments`` by name.
        """
        self.network.load_state_dict(dict(state["network"]))
        self.steps_done = int(state.get("steps_done", 0))
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.network.named_parameters()}
        if moments := state.get("moments"):
            adamw = self.optimizers["adamw"]
            load_optimizer_state(adamw, with_moments(adamw, names, moments), self.shards)

    def _measure(
        self, host: HostBatch, features: Tensor, last_hidden: Tensor | None, metrics: WindowMetrics, diagnosing: bool
    ) -> Tensor | None:
        """Σ weighted loss of some samples, differentiable; their metrics go to the metrics. None without anchors."""
        table = build_blocks(host, self.spec)
        if not len(table.rows):
            metrics.add_samples(host.planned.index, torch.zeros(len(host.lengths), 2, device=self.device))
            return None
        hidden = self._hidden(host, features, table)
        found = self._losses(hidden.flatten(0, 1), table, last_hidden)
        cells, live = self._on_device(table.cells), self._on_device(table.live)

        def grid(values: Tensor) -> Tensor:
            empty = torch.zeros(live.numel(), dtype=values.dtype, device=self.device)
            return empty.index_copy(0, cells, values).view(live.shape)

        strategy = SLOT_WEIGHTS[self.objective.name]
        gamma = self.gammas.at(self.steps_done)
        weights = strategy(grid(found.cross_entropy.detach()), live, gamma, self.objective.alpha)
        anchor_counts = self._on_device(host.anchor_counts)
        weights = normalize_weights(weights, anchor_counts, self.objective.weighting)
        weighted = weights * grid(found.loss)
        total = weighted.sum()
        metrics.add_loss(host.planned.bucket, host.planned.index, total, weights.sum())
        by_anchor = torch.stack([weighted.detach().sum(1), weights.sum(1)], dim=1)
        metrics.add_samples(host.planned.index, sum_by_document(by_anchor, anchor_counts))
        metrics.add_acceptance(grid(found.correct), live)
        for name, values in found.terms.items():
            metrics.add(f"term/{name}", torch.stack([values.sum(), torch.full_like(values[0], len(values))]))
        if diagnosing:
            chosen = evenly_spaced(len(table.live), self.settings.diagnose_share)
            first, some = self.spec.first_draft_slot, self._on_device(chosen)
            labels = self._on_device(table.labels[chosen])
            drafting = hidden.detach().index_select(0, some)[:, first : first + self.spec.num_drafts]
            diagnose(drafting, self._head, labels, live[some], self.settings.head_chunk, metrics)
        return total

    def _losses(self, hidden: Tensor, table: BlockInputs, last_hidden: Tensor | None) -> SlotLosses:
        """Losses of the live drafts from the hidden states of all slots [A·K, D]."""
        supervised = hidden.index_select(0, self._on_device(table.rows))
        labels = table.labels.reshape(-1)[table.cells]
        shares = {name: schedule.at(self.steps_done) for name, schedule in self.shares.items()}
        if set(shares) == {"ce"} and shares["ce"] == 1.0:
            losses, right = self._cross_entropy(supervised, self._head, labels, self.settings.head_chunk)
            return SlotLosses(losses, losses.detach(), right, {"ce": losses.detach()})
        rows = last_hidden.index_select(0, self._on_device(table.teacher_rows)) if last_hidden is not None else None
        return distillation_loss(supervised, self._head, labels, shares, self.teacher, rows, self.settings.head_chunk)

    def _moved(self, batch: FeatureBatch) -> tuple[Tensor, Tensor | None]:
        last = batch.last_hidden if self.objective.needs_teacher else None
        moved = last.to(self.device, non_blocking=True) if last is not None else None
        return batch.features.to(self.device, self.dtype, non_blocking=True), moved

    def _require_teacher(self, batch: FeatureBatch) -> None:
        if self.objective.needs_teacher and batch.last_hidden is None:
            raise DrafterError(
                f"batch {batch.host.planned.index}: objective.terms needs the target's last hidden states, and the "
                "target stage did not send them; have it send them, or use ce alone"
            )

    def _ratios(self, totals: WindowTotals) -> dict[str, Ratio]:
        sums, first = totals.sums, self.spec.first_draft_slot
        ratios = ratios_of(sums, self.spec.num_drafts, first) | diagnosis_ratios(sums, first)
        for name in self.shares:
            total, count = sums.get(f"term/{name}", np.zeros(2))
            ratios[f"objective/{name}"] = Ratio(float(total), float(count))
        for tap, (signal, noise) in enumerate(sums.get("noise", np.zeros(0)).reshape(2, -1).T):
            ratios[f"noise/snr_tap_{tap}"] = Ratio(float(signal), float(noise))
        return ratios

    def _scheduled(self, step: int) -> dict[str, Ratio]:
        values = {"schedule/noise_ratio": self.noise_ratios.at(step)}
        if self.objective.name == "decay":
            values["schedule/gamma"] = self.gammas.at(step)
        return {name: Ratio(value, 1.0) for name, value in values.items()}

    def _hidden(self, host: HostBatch, features: Tensor, table: BlockInputs) -> Tensor:
        blocks = F.embedding(self._on_device(table.tokens), self._embedding)
        return self.network.training_forward(features, host.lengths, host.anchors, host.anchor_counts, blocks)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return to_device(values, self.device)

    def _norms_unmoved(self) -> tuple[Tensor, Tensor]:
        """(norm weights that still are exactly 1, norm weights): a stuck drafter shows here."""
        norms = torch.cat([p.detach() for p in self.parameters if p.ndim == 1])
        return (norms == 1).sum().float(), torch.full((), float(norms.numel()), device=self.device)

    def _not_finite(self, window: WindowMetrics, totals: WindowTotals, step: int) -> str:
        sums = totals.sums
        bad = [index for index in window.rows if not np.isfinite(sums.get(f"batch/{index}", np.zeros(2))).all()]
        named = bad or list(window.rows)
        samples = [int(row) for index in named for row in window.rows[index]]
        return (
            f"step {step}: gradient not finite {self.skipped_in_row} steps in a row; last in batches {named}, samples "
            f"{samples[:20]}{' ...' if len(samples) > 20 else ''}; look at their features, or lower optimizer.lr"
        )


def _share_schedules(objective: ObjectiveConfig, total_steps: int) -> dict[str, Schedule]:
    """Share of each term by 0-based step, for the terms that ever have one."""
    end = objective.terms if objective.terms_end is None else objective.terms_end
    both = {name: (objective.terms.get(name, 0.0), end.get(name, 0.0)) for name in (*objective.terms, *end)}
    return {name: ramp(objective, *pair, total_steps) for name, pair in both.items() if any(pair)}
