"""Which target layers feed the drafter. Torch-free.

A tap id *i* is the output of 0-based decoder layer *i*: entry *i* + 1 of transformers' ``hidden_states``.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import TargetError


def default_taps(num_layers: int, num_taps: int) -> list[int]:
    """Taps spread over the depth by the usual rule.

    ``round(1 + j·(L - 4)/(n - 1))`` for j = 0..n-1 with Python's rounding (halves to even); one tap is ``L // 2``
    (arXiv 2602.06036 and its published checkpoints: 36 layers and 5 taps give 1, 9, 17, 25, 33).

    Args:
        num_layers: decoder layers of the target.
        num_taps: how many to tap.

    Returns:
        Ascending layer ids.

    Raises:
        TargetError: the target is too shallow for as many different taps.
    """
    if num_taps < 1:
        raise TargetError(f"target.num_taps = {num_taps}: at least one layer must be tapped")
    if num_taps == 1:
        taps = [num_layers // 2]
    else:
        taps = [round(1 + j * (num_layers - 4) / (num_taps - 1)) for j in range(num_taps)]
    if taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= num_layers:
        raise TargetError(
            f"target.num_taps = {num_taps}: the usual rule gives {taps} on {num_layers} layers, which are not "
            f"{num_taps} layers in order; lower num_taps or list `target.taps` yourself (0 to {num_layers - 1}), for "
            f"example target.taps: {_spread(num_layers, num_taps)}"
        )
    return taps


def _spread(num_layers: int, num_taps: int) -> list[int]:
    """As many taps as a shallow target has, evenly from its first layer to the last but one."""
    count = max(1, min(num_taps, num_layers - 1))
    return [round(j * (num_layers - 2) / max(1, count - 1)) for j in range(count)]


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Refuses taps that a target does not have, or that servers would read in another order.

    Args:
        taps: layer ids, in the order in which their features are concatenated.
        num_layers: decoder layers of the target.

    Raises:
        TargetError: empty, outside 0..num_layers-1, or not ascending; all in one line.
    """
    shown = f"target.taps = {list(taps)}"
    if not taps:
        raise TargetError(f"{shown}: no layer is tapped; list ids from 0 to {num_layers - 1} or leave taps unset")
    outside = [tap for tap in taps if not 0 <= tap < num_layers]
    if outside:
        raise TargetError(
            f"{shown}: no such layer {', '.join(map(str, outside))}; the target has {num_layers} layers, "
            f"ids 0 to {num_layers - 1} (id i is the output of 0-based layer i); for example target.taps: "
            f"{_spread(num_layers, len(taps))}"
        )
    ascending = sorted(set(taps))
    if list(taps) != ascending:
        raise TargetError(f"{shown}: must ascend, each layer once, as vLLM reads them in that order; write {ascending}")
