"""How a target may compute the rows of a batch: without an attention mask, or all documents in one row; tried on it.

Both are cheaper and both are right for most targets only, so nothing is believed: a few random documents are run both
ways on the loaded model and compared.

Comparing alone is not enough in 16 bits: rounding differs between the two ways, and a state that runs on into a few
tokens of the next document hides in it. So what a token must not see is changed, and its states must not follow. There
both runs have the same shapes, so most models compute the very same numbers for what is not changed. Where they do not
(the experts of a mixture get other tokens beside), documents that nothing can leak into show how large that noise is.

Shape letters: B documents, W width, S real tokens, N taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import TargetError
from paceline.target_model.model import TargetModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Allowed relative error of a token's states between two batchings. In 16 bits it is the median over tokens that must
keep it: a router may send single tokens elsewhere after a rounding error."""
LENGTHS = (19, 5, 32, 1, 11)
"""Documents of a trial, in tokens: longer than the kernels of short convolutions, and one of a single token."""
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layers that keep nothing of a token but its keys and values, as configurations name them."""
EXACT = 1e-6
"""Relative difference up to which two runs of the same shapes count as the same."""
NOISE = 4.0
"""How many times the noise of what cannot change is still noise elsewhere."""
COMPARED_AT_ONCE = 4096
"""Tokens whose states are compared in float64 at once: a whole batch would need gigabytes beside the target."""
REMEDY = "set target.rows to padded and plan.strategy to grid"


@torch.no_grad()
def needs_mask(target: TargetModel) -> bool:
    """Whether right-padded rows need an attention mask, as they do where a real token sees what comes after it.

    Under a causal mask no real token sees the padding behind it, so the mask changes nothing but the speed: with it
    attention cannot use its fast kernels. Targets with recurrent layers keep it.

    Args:
        target: loaded; nothing of it is changed.
    """
    if _keeps_a_state(target.model):
        return True
    ids, lengths = _documents(target, LENGTHS)
    free = target.with_layout(masked=False, packed=False)
    masked, _ = target.with_layout(masked=True, packed=False).tap_rows(ids, lengths)
    plain, _ = free.tap_rows(ids, lengths)
    if _too_large(relative_errors(plain, masked, len(target.taps)), target.dtype).any():
        return True
    padding = torch.arange(ids.shape[1], device=ids.device)[None] >= torch.tensor(lengths, device=ids.device)[:, None]
    changed, _ = free.tap_rows(torch.where(padding, _other(ids, target), ids), lengths)
    followed = relative_errors(plain, changed, len(target.taps)).amax(dim=1)
    whole = torch.as_tensor(np.repeat(np.array(lengths) == max(lengths), lengths), device=ids.device)
    floor = float(followed[whole].max())
    return float(followed[~whole].max()) > (EXACT if floor <= EXACT else NOISE * floor)


@torch.no_grad()
def prove_packed(target: TargetModel) -> float:
    """Runs a few documents in one row and each alone, then changes some and looks whether others follow.

    Attention that transformers masks by the positions passes. State-space and linear-attention layers, whose state runs
    on into the next document, do not, nor does attention that ignores the positions or cuts its chunks by the place in
    the row. Where the configuration names an attention chunk, the first document ends just before its border.

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
    ids, lengths = _documents(target, (chunk - 3, *LENGTHS) if isinstance(chunk, int) and chunk > 3 else LENGTHS)
    together, _ = target.tap_rows(ids, lengths)
    alone = torch.cat([target.tap_rows(ids[row : row + 1, :size], [size])[0] for row, size in enumerate(lengths)])
    errors = relative_errors(alone, together, len(target.taps))
    for layer, wrong, error in zip(target.taps, _too_large(errors, target.dtype), errors.amax(dim=0), strict=True):
        if wrong:
            raise TargetError(
                f"{where} lets documents that share a row see one another: at layer {layer} their states differ from "
                f"those alone by {float(error):.2g} (relative, {tolerance(target.dtype):g} allowed); {REMEDY}"
            )
    for layer, leak in zip(target.taps, leaks(target, ids, lengths, together), strict=True):
        if leak != 0.0:
            raise TargetError(
                f"{where} lets documents that share a row see one another: at layer {layer} their states follow a "
                f"change of the documents before them by {leak:.2g} (relative); {REMEDY}"
            )
    return float(errors.max())


@torch.no_grad()
def leaks(
    target: TargetModel,
    ids: Tensor,
    lengths: Sequence[int] | np.ndarray,
    plain: Tensor,
    *,
    out: Tensor | None = None,
) -> list[float]:
    """How far documents of a packed row follow a change of the documents before them, for each tap.

    Every other document is changed, then the rest. Without noise the largest difference of an unchanged token counts.
    With noise the median over documents of the difference of their first tokens does, for whatever runs on from the
    document before reaches these first, and a router may send a single token elsewhere.

    Args:
        target: loaded with `packed` set.
        ids: right-padded documents, int64 [B, W], B > 1.
        lengths: real tokens of each.
        plain: features of these documents in one row, [S, N·H].
        out: memory for as many features, which are made again here; new memory where None.

    Returns:
        Relative differences; 0 where they are no larger than the noise.
    """
    lengths = np.asarray(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    document = torch.as_tensor(np.repeat(np.arange(len(lengths)), lengths), device=plain.device)
    firsts, all_of, noise = [], [], None
    for odd in (False, True):
        changed = ids.clone()
        changed[int(odd) :: 2] = _other(changed[int(odd) :: 2], target)
        difference = relative_errors(plain, target.tap_rows(changed, lengths, out=out)[0], len(target.taps))
        kept = [place for place in range(1, len(lengths)) if (place % 2 == 1) != odd]
        if odd:
            noise = difference[document == 0].amax(dim=0)
        if kept:
            firsts.append(difference[torch.as_tensor(starts[kept], device=plain.device)])
            all_of.append(difference[torch.isin(document, torch.as_tensor(kept, device=plain.device))].amax(dim=0))
    assert noise is not None, "the loop ends with it"
    largest, median = torch.stack(all_of).amax(dim=0), torch.cat(firsts).median(dim=0).values
    found = []
    for floor, of_all, of_first in zip(noise.tolist(), largest.tolist(), median.tolist(), strict=True):
        seen, allowed = (of_all, EXACT) if floor <= EXACT else (of_first, NOISE * floor)
        found.append(0.0 if seen <= allowed else seen)
    return found


def relative_errors(one: Tensor, other: Tensor, num_taps: int) -> Tensor:
    """Relative difference of every token's states by tap, float64 [S, N], on the device of `one`."""
    found = []
    for ours, theirs in zip(one.split(COMPARED_AT_ONCE), other.split(COMPARED_AT_ONCE), strict=True):
        a, b = (part.to(one.device).double().reshape(len(part), num_taps, -1) for part in (ours, theirs))
        found.append((a - b).norm(dim=2) / a.norm(dim=2).clamp_min(1e-30))
    return torch.cat(found)


def judged(errors: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of each tap that must keep the tolerance, [N], of the errors of all tokens [S, N]."""
    return errors.median(dim=0).values if dtype in (torch.float16, torch.bfloat16) else errors.amax(dim=0)


def tolerance(dtype: torch.dtype) -> float:
    """Allowed relative error between two batchings of the same tokens."""
    return TOLERANCE.get(dtype, 1e-2)


def _too_large(errors: Tensor, dtype: torch.dtype) -> Tensor:
    return ~(judged(errors, dtype) <= tolerance(dtype))


def _documents(target: TargetModel, lengths: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
    """Random right-padded documents of some lengths, int64 [B, W], and these lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = target.structure.embedding.weight.shape[0]
    ids = torch.randint(min(3, rows - 1), rows, (len(lengths), max(lengths)), generator=generator)
    return ids.to(target.device), lengths


def _other(ids: Tensor, target: TargetModel) -> Tensor:
    """Another token in each place."""
    rows = target.structure.embedding.weight.shape[0]
    return (ids + rows // 2) % rows


def _keeps_a_state(model: Any) -> bool:
    """Whether the model has recurrent layers."""
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        return True
    text = model.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    return any(kind not in ATTENTION_KINDS for kind in kinds)
