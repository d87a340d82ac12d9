"""The name of a plan: equal where the plan is, on every platform, and different where anything it came from differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from operator import index

import numpy as np

from paceline.config.schema import PlanConfig


def fingerprint(
    settings: PlanConfig, shape: Sequence[int], given: Sequence[np.ndarray | None], decided: Sequence[np.ndarray]
) -> str:
    """Hash of a plan.

    Args:
        settings: all planning settings, used or not.
        shape: seed, epoch, replicas, num_anchors, block_size.
        given: arrays that the plan was made from, integers below 2³¹ of any type; None for one that is unknown.
        decided: arrays that make up the plan, integers of 4 or 8 bytes, or fewer.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    sizes = [None if values is None else len(values) for values in given]
    head = {"settings": settings.model_dump(), "shape": [index(number) for number in shape], "sizes": sizes}
    digest.update(json.dumps(head, sort_keys=True).encode())
    for values in given:
        if values is not None:
            digest.update(np.ascontiguousarray(values, "<i4").data)
    for part in decided:
        digest.update(np.ascontiguousarray(part, np.dtype("<i8") if part.itemsize == 8 else np.dtype("<i4")).data)
    return digest.hexdigest()
