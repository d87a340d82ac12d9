"""Whether a drafter and a target belong together. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.drafter.spec import DrafterSpec, target_differences
from paceline.errors import DrafterError, ExportError

if TYPE_CHECKING:
    from paceline.types import TargetFacts


def build_spec(where: str, fields: Mapping[str, Any]) -> DrafterSpec:
    """The spec of these fields, its errors with their place.

    Raises:
        ExportError: one line for each error: mask id outside the embedding, taps outside the target, a window without a
            sliding layer, ...
    """
    try:
        return DrafterSpec(**fields)
    except DrafterError as error:
        raise ExportError(*(f"{where}: {line}" for line in error.errors)) from error


def check_mask(where: str, spec: DrafterSpec) -> None:
    """Refuse a mask token that means something else to the target.

    Raises:
        ExportError: it is the bos, eos or pad token.
    """
    special = {"bos": (spec.bos_token_id,), "eos": spec.eos_token_ids, "pad": (spec.pad_token_id,)}
    if taken := [name for name, ids in special.items() if spec.mask_token_id in ids]:
        raise ExportError(
            f"{where}: mask_token_id {spec.mask_token_id} is the target's {' and '.join(taken)} token; use its own id"
        )


def check_target(where: str, spec: DrafterSpec, facts: TargetFacts, identity: Mapping[str, str] | None = None) -> None:
    """Refuse a drafter that was made for another target; one line for each difference.

    Args:
        where: for messages.
        spec: the drafter.
        facts: the target.
        identity: of the target that the drafter was trained on, part by part, where known.

    Raises:
        ExportError: hidden size, vocabulary, depth or identity differ.
    """
    differences = target_differences(spec, facts, identity=identity)
    if differences:
        raise ExportError(*(f"{where}: {line}; use the target that it was trained on" for line in differences))
