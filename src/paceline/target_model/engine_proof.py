"""Proof that an engine's features are those of the target as transformers runs it, on real rows.

Shape letters: S real tokens of the batch, N taps, H hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.errors import TargetError
from paceline.target_model.model import TargetModel
from paceline.target_model.row_check import judged, relative_errors, tolerance
from paceline.target_model.tap_guard import LONGEST_PROBE, check_features
from paceline.types import FeatureBatch


@torch.no_grad()
def prove_engine(reference: TargetModel, batch: FeatureBatch, engine: str) -> list[float]:
    """Compares the shortest and the longest row of a batch with the same rows alone in transformers.

    Rows are cut to `LONGEST_PROBE` tokens, which later tokens must not have changed.

    Args:
        reference: the target, loaded by transformers.
        batch: what the engine handed over, with the last layer's states where they are needed.
        engine: its name, for the error.

    Returns:
        Largest relative error of a token's states per tap, and of the last layer where it was handed over.

    Raises:
        TargetError: names layer, sample and size of the difference.
    """
    check_features(batch, reference.taps, reference.facts.hidden_size)
    lengths = np.asarray(batch.host.lengths)
    layers = [*reference.taps, *([reference.facts.num_layers - 1] if batch.last_hidden is not None else [])]
    worst = torch.zeros(len(layers), dtype=torch.float64)
    for row in sorted({int(lengths.argmin()), int(lengths.argmax())}):
        start, length = int(lengths[:row].sum()), min(int(lengths[row]), LONGEST_PROBE)
        ids = torch.as_tensor(np.asarray(batch.host.ids)[row : row + 1, :length], device=reference.device)
        features, last = reference.tap_rows(ids, [length], with_last=batch.last_hidden is not None)
        errors = relative_errors(features, batch.features[start : start + length], len(reference.taps))
        if last is not None and batch.last_hidden is not None:
            errors = torch.cat([errors, relative_errors(last, batch.last_hidden[start : start + length], 1)], dim=1)
        for layer, error in zip(layers, judged(errors, reference.dtype).tolist(), strict=True):
            if not error <= tolerance(reference.dtype):
                raise TargetError(
                    f"{engine}: batch {batch.host.planned.index}: layer {layer}: its states of sample "
                    f"{int(np.asarray(batch.host.planned.rows)[row])} differ from those of transformers by {error:.3g} "
                    f"(relative, {tolerance(reference.dtype):g} allowed); set target.engine to transformers, or where "
                    "the engine is meant to compute other numbers (quantization), target.prove_engine to false"
                )
        worst = torch.maximum(worst, errors.amax(dim=0).cpu())
    return worst.tolist()
