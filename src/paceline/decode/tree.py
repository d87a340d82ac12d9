"""Decoding with a draft tree: all nodes verified by one target forward, the longest branch that stands is kept.

A node sees the context and its ancestors, in layers with a window as far as that reaches from its own position: the
anchor's plus its depth. Afterwards the cache keeps the branch's keys and values only. Greedy, or each token drawn from
the target on the way down the tree.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.decode.chain import Answer, Decoded, Pass, draft_logits, inference, prompt_tensor
from paceline.decode.compatibility import check_pair
from paceline.decode.draft_tree import DraftTree, build_tree
from paceline.decode.sampling import Greedy, TokenChooser
from paceline.decode.session import TargetSession

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.target_model.model import TargetModel


@inference
def tree_decode(
    target: TargetModel,
    network: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    budget: int,
    stop_ids: Collection[int] = (),
    temperature: float = 1.0,
    chain: bool = False,
    choice: TokenChooser | None = None,
) -> Decoded:
    """Answers one prompt with draft trees.

    Args:
        target: the verifying model; its layers attend, over everything or a window.
        network: the drafter.
        prompt_ids: tokens of the prompt.
        max_new_tokens: longest answer, exact to the token.
        budget: nodes of a tree.
        stop_ids: tokens that end an answer.
        temperature: of the tree, see `build_tree`.
        chain: whether trees start with the chain.
        choice: how the target chooses; greedy where None.

    Raises:
        TargetError: the target has recurrent layers, where branches that fall cannot be left out, or takes no masks.
        DataError, DrafterError: as `speculative_decode`.
    """
    check_pair(target, network.spec)
    choice = choice or Greedy()
    started = time.perf_counter()
    answer = Answer(len(prompt_ids), target, max_new_tokens, stop_ids)
    session, context = TargetSession(target), network.new_cache()
    session.check_branches()
    logits, features = session.read(prompt_tensor(prompt_ids, target), last_only=True)
    network.extend(context, features)
    token = choice.token(logits[-1])
    answer.add([token])
    prompted = time.perf_counter()
    passes: list[Pass] = []
    while answer.finish is None:
        start = session.length
        tree = build_tree(
            draft_logits(target, network, context, token, start), budget, temperature=temperature, chain=chain
        )
        places, tokens, features = _verify(session, tree, token, start, choice)
        counted = answer.add(tokens)
        accepted = len(tokens) - 1
        passes.append(Pass(start, int(tree.depths.max(initial=0)), min(accepted, counted), counted))
        kept = torch.tensor(places, device=target.device)
        session.keep_places(start, kept)
        network.extend(context, features[kept])
        token = tokens[-1]
    return Decoded(answer.ids, answer.finish, passes, time.perf_counter() - prompted, prompted - started)


def _verify(
    session: TargetSession, tree: DraftTree, token: int, start: int, choice: TokenChooser
) -> tuple[list[int], list[int], torch.Tensor]:
    """Reads anchor and nodes; walks down while the target's choice is a child.

    Returns:
        Places (0 = anchor) that stand, the tokens after the anchor with the target's own at the end, and all features.
    """
    device = session.target.device
    count = len(tree.tokens) + 1
    seen = np.zeros((count, count), dtype=bool)
    seen[:, 0] = True
    seen[1:, 1:] = tree.visible()
    ids = torch.tensor([token, *tree.tokens.tolist()], device=device)
    positions = start + torch.tensor([0, *tree.depths.tolist()], device=device)
    logits, features = session.read(ids, positions=positions, mask=torch.as_tensor(seen, device=device))
    children = {
        (int(parent) + 1, int(child)): node + 1
        for node, (parent, child) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    places, tokens, here = [0], [], 0
    while True:
        tokens.append(choice.token(logits[here]))
        nearest = children.get((here, tokens[-1]))
        if nearest is None:
            return places, tokens, features
        here = nearest
        places.append(here)
