"""The training forward on the blocks of a decode loop: both must draft the same.

This is the bridge between the acceptance that training reports and the one that serving gets.

Shape letters: A blocks, K slots of a block, M drafts of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.decode.answers import Decoded

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.target_model.model import TargetModel


@torch.no_grad()
def training_accepted(
    target: TargetModel, network: Drafter, prompt_ids: Sequence[int], answer: Decoded
) -> tuple[list[int], list[int]]:
    """Accepted drafts per block, by the decode loop and by one training forward over prompt and answer.

    Args:
        target: the target, whose padded forward gives the features.
        network: the drafter.
        prompt_ids: the prompt.
        answer: what the decode loop made of it.

    Returns:
        Two lists, one entry per block: the loop's and the training forward's. Both count drafts inside the answer only.
    """
    spec = network.spec
    ids = [*prompt_ids, *answer.ids]
    sequence = torch.tensor(ids, device=target.device)
    anchors = [entry.position for entry in answer.passes if entry.position < len(ids)]
    features, _ = target.tap_rows(sequence[None], [len(ids)])
    slots = torch.full((len(anchors), spec.block_size), spec.mask_token_id, device=target.device)
    slots[:, 0] = sequence[anchors]
    hidden = network.training_forward(
        features, [len(ids)], anchors, [len(anchors)], target.embedding[slots].to(target.dtype)
    )
    drafts = (hidden[:, spec.first_draft_slot :] @ target.head.T.to(hidden.dtype)).argmax(dim=-1)
    ours, theirs = [], []
    for row, (anchor, entry) in enumerate(zip(anchors, answer.passes, strict=False)):
        labels = sequence[anchor + 1 : anchor + 1 + min(spec.num_drafts, entry.drafted)]
        agree = (drafts[row, : labels.shape[0]] == labels).long().cumprod(0)
        theirs.append(int(agree.sum()))
        ours.append(min(entry.accepted, labels.shape[0]))
    return ours, theirs
