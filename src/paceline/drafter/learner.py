"""Trains one drafter on one device: accumulates micro-batches, closes windows.

A window's gradient is the gradient of Σ weighted loss over all its micro-batches and ranks, divided once by Σ weight.
Gradients accumulate undivided; nothing is fetched from the device before `step`, which does so once.

Shape letters: A anchors, K slots, J drafts of a block, M supervised drafts, S context tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from paceline.config.drafter import DrafterConfig
from paceline.config.objective import ObjectiveConfig
from paceline.config.optimizer import OptimizerConfig
from paceline.contracts import FeatureBatch, HostBatch, Ratio, StepReport
from paceline.drafter.blocks import BlockTable, build_blocks
from paceline.drafter.head import head_cross_entropy
from paceline.drafter.network import Drafter
from paceline.drafter.objectives import SLOT_WEIGHTS
from paceline.drafter.objectives.decay import default_gamma
from paceline.drafter.objectives.weighting import weigh
from paceline.drafter.optimizer import MasterOptimizer
from paceline.drafter.portions import portions
from paceline.drafter.ranks import add_counters, add_gradients
from paceline.drafter.spec import DrafterSpec
from paceline.drafter.tally import WindowTally, bucket_totals, ratios_of
from paceline.errors import DrafterError

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

    Raises:
        DrafterError: embedding or head do not fit the spec.
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
    ) -> None:
        for name, tensor in (("embedding", embedding), ("head", head)):
            if tuple(tensor.shape) != (spec.vocab_size, spec.hidden_size):
                raise DrafterError(
                    f"the target's {name} is {list(tensor.shape)}; a drafter of this spec needs "
                    f"[{spec.vocab_size}, {spec.hidden_size}]"
                )
        self.spec, self.settings, self.objective = spec, drafter, objective
        self.device, self.world = torch.device(device), world
        self.dtype = COMPUTE_TYPES[drafter.dtype]
        self._embedding = embedding.detach().to(self.device, self.dtype)
        tied = head.data_ptr() == embedding.data_ptr()
        self._head = self._embedding if tied else head.detach().to(self.device, self.dtype)
        self.network = Drafter(spec, attention=drafter.attention, seed=seed).to(self.device)
        self.optimizer = MasterOptimizer(self.network, optimizer, total_steps)
        self.gamma = objective.gamma or default_gamma(spec.block_size)
        self.steps_done = 0
        self.skipped_in_row = 0
        self._tally = WindowTally(spec.num_drafts, self.device)

    def accumulate(self, batch: FeatureBatch) -> None:
        """Adds a micro-batch to the open window: its undivided gradient, loss and metrics.

        Batches above `positions_per_pass` draft positions are computed in parts of whole samples. A batch without
        any anchor takes part in the window and contributes nothing.
        """
        self._tally.count(batch.host)
        features = batch.features.to(self.device, self.dtype, non_blocking=True)
        for part in portions(batch.host, self.spec.block_size, self.settings.positions_per_pass):
            self._accumulate_part(part.host, features[part.tokens])

    def step(
        self, *, step: int, epoch: int, window: int, seconds: float, waits_s: Mapping[str, float] | None = None
    ) -> StepReport:
        """Closes the window: divides its gradient once by its weight, clips, steps and clears.

        A window whose gradient is not finite moves nothing and is reported as skipped; a window without any
        supervised draft moves nothing either.

        Args:
            step: 1-based optimizer step.
            epoch, window: where in the plan.
            seconds: wall time since the previous step ended.
            waits_s: seconds by stage and state.

        Raises:
            DrafterError: too many windows in a row had a gradient that is not finite; names their samples.
        """
        tally, self._tally = self._tally, WindowTally(self.spec.num_drafts, self.device)
        counts, batches, max_length = tally.bucket_counts(), tally.batches, tally.max_length
        if self.world is not None:
            add_gradients(self.optimizer.gradients(), self.world)
        sums, (norm, unmoved, norm_weights) = tally.fetch(torch.stack([self.optimizer.norm(), *self._norms_unmoved()]))
        if self.world is not None:
            counts, batches, sums, max_length = add_counters(counts, batches, sums, max_length, self.world)
        loss = Ratio(*(float(sum(sums[n][i] for n in sums if n.startswith("loss/"))) for i in (0, 1)))
        rate = self.optimizer.rates.at(self.steps_done)
        gradient_norm = float(norm) / loss.denominator if loss.denominator else float(norm)
        finite = math.isfinite(gradient_norm) and math.isfinite(loss.numerator)
        clip = self.optimizer.config.clip_norm
        if finite and loss.denominator:
            shrink = min(1.0, clip / gradient_norm) if gradient_norm else 1.0
            self.optimizer.step(shrink / loss.denominator, self.steps_done)
        self.optimizer.clear()
        self.steps_done += 1
        self.skipped_in_row = 0 if finite else self.skipped_in_row + 1
        if self.skipped_in_row >= self.optimizer.config.max_skipped_steps:
            raise DrafterError(self._not_finite(tally, sums, step))
        buckets = bucket_totals(counts, sums)
        ratios = ratios_of(sums, self.spec.num_drafts, self.spec.first_draft_slot)
        ratios["norms/unmoved"] = Ratio(float(unmoved), float(norm_weights))
        anchors = sum(bucket.anchors for bucket in buckets.values())
        return StepReport(
            step=step,
            epoch=epoch,
            window=window,
            loss=loss,
            ratios=ratios,
            buckets=buckets,
            batches=batches,
            gradient_norm=gradient_norm,
            clipped=finite and gradient_norm > clip,
            skipped=not finite,
            learning_rate=rate,
            samples=sum(bucket.samples for bucket in buckets.values()),
            anchors=anchors,
            real_tokens=sum(bucket.real_tokens for bucket in buckets.values()),
            padded_tokens=sum(bucket.padded_tokens for bucket in buckets.values()),
            draft_positions=anchors * self.spec.block_size,
            seconds=seconds,
            waits_s=dict(waits_s or {}),
            max_length=max_length,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs between two windows: tensors and plain values, copied."""
        return {
            "network": {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "steps_done": self.steps_done,
            "skipped_in_row": self.skipped_in_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes on what `state_dict` gave; the next window trains exactly as if the run had never stopped."""
        self.network.load_state_dict(dict(state["network"]))
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.steps_done = int(state["steps_done"])
        self.skipped_in_row = int(state["skipped_in_row"])

    def _accumulate_part(self, host: HostBatch, features: Tensor) -> None:
        table = build_blocks(host, self.spec)
        if not len(table.rows):
            return
        hidden = self._hidden(host, features, table).flatten(0, 1)
        supervised = hidden.index_select(0, self._on_device(table.rows))
        labels = table.labels.reshape(-1)[table.cells]
        losses, right = head_cross_entropy(supervised, self._head, labels, self.settings.head_chunk)
        cells, live = self._on_device(table.cells), self._on_device(table.live)
        zeros = torch.zeros(live.numel(), dtype=losses.dtype, device=self.device)
        grid = zeros.index_copy(0, cells, losses).view(live.shape)
        strategy = SLOT_WEIGHTS[self.objective.name]
        weights = strategy(grid.detach(), live, self.gamma, self.objective.alpha)
        documents = self._on_device(table.documents)
        weights = weigh(weights, documents, len(host.lengths), self.objective.weighting)
        total = (weights * grid).sum()
        total.backward()
        correct = torch.zeros_like(live).view(-1).index_copy(0, cells, right).view(live.shape)
        self._tally.add_loss(host.planned.bucket, host.planned.index, total, weights.sum())
        self._tally.add_acceptance(correct, live)

    def _hidden(self, host: HostBatch, features: Tensor, table: BlockTable) -> Tensor:
        blocks = F.embedding(self._on_device(table.tokens), self._embedding)
        return self.network.training_forward(features, host.lengths, host.anchors, host.anchor_counts, blocks)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def _norms_unmoved(self) -> tuple[Tensor, Tensor]:
        """(norm weights that still are exactly 1, norm weights): a stuck drafter shows here."""
        norms = torch.cat([p.detach() for p in self.optimizer.parameters if p.ndim == 1])
        return (norms == 1).sum().float(), torch.full((), float(norms.numel()), device=self.device)

    def _not_finite(self, tally: WindowTally, sums: dict[str, np.ndarray], step: int) -> str:
        bad = [index for index in tally.rows if not np.isfinite(sums.get(f"batch/{index}", np.zeros(2))).all()]
        named = bad or list(tally.rows)
        samples = [int(row) for index in named for row in tally.rows[index]]
        return (
            f"step {step}: gradient not finite {self.skipped_in_row} steps in a row; last in batches {named}, samples "
            f"{samples[:20]}{' ...' if len(samples) > 20 else ''}; look at their features, or lower optimizer.lr"
        )
