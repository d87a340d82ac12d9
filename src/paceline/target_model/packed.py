"""Whether a target keeps documents apart that share one row: tried on the loaded model, refused where it does not.

Attention that transformers masks by the positions passes. State-space and linear-attention layers whose state runs on
into the next document do not, nor does attention that ignores the positions or cuts its chunks by the place in the row.
"""

from __future__ import annotations

import torch

from paceline.errors import TargetError
from paceline.target_model.model import TargetModel
from paceline.target_model.packing_check import leaks
from paceline.target_model.tap_guard import TOLERANCE

LENGTHS = (19, 5, 32, 1, 11)
"""Documents of the trial, in tokens: longer than the kernels of short convolutions, and one of a single token."""
REMEDY = "set target.rows to padded and plan.strategy to grid"


@torch.no_grad()
def prove_packed(target: TargetModel) -> float:
    """Runs a few random documents in one row and each alone, then changes some and looks whether others follow.

    Where the configuration names an attention chunk, the first document ends just before its border, so that chunks cut
    by the place in the row are noticed.

    Args:
        target: loaded with `packed` set.

    Returns:
        The largest relative difference of a token's states.

    Raises:
        TargetError: no positions to restart, or states that differ beyond rounding; one line that names tap and place.
    """
    where = f"target.rows = packed: {type(target.model).__name__}"
    if not target.structure.explicit_positions:
        raise TargetError(f"{where} takes no position ids that could start again in each document; {REMEDY}")
    text = target.model.config.get_text_config(decoder=True)
    chunk = getattr(text, "attention_chunk_size", None)
    lengths = [chunk - 3, *LENGTHS] if isinstance(chunk, int) and chunk > 3 else list(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    rows = target.structure.embedding.weight.shape[0]
    ids = torch.randint(min(3, rows - 1), rows, (len(lengths), max(lengths)), generator=generator).to(target.device)
    together, _ = target.tap_rows(ids, lengths)
    alone = torch.cat([target.tap_rows(ids[row : row + 1, :size], [size])[0] for row, size in enumerate(lengths)])
    allowed, worst = TOLERANCE.get(target.dtype, 1e-2), 0.0
    for place, layer in enumerate(target.taps):
        part = slice(place * target.facts.hidden_size, (place + 1) * target.facts.hidden_size)
        one, other = alone[:, part].double(), together[:, part].double()
        relative = (one - other).norm(dim=1) / one.norm(dim=1).clamp_min(1e-30)
        judged = relative.median() if target.dtype in (torch.float16, torch.bfloat16) else relative.max()
        if not float(judged) <= allowed:
            raise TargetError(
                f"{where} lets documents that share a row see one another: at layer {layer} their states differ from "
                f"those alone by {float(judged):.2g} (relative, {allowed:g} allowed); {REMEDY}"
            )
        worst = max(worst, float(relative.max()))
    for layer, leak in zip(target.taps, leaks(target, ids, lengths), strict=True):
        if leak != 0.0:
            raise TargetError(
                f"{where} lets documents that share a row see one another: at layer {layer} their states follow a "
                f"change of the documents before them by {leak:.2g} (relative); {REMEDY}"
            )
    return worst
