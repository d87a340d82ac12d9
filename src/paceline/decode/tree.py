"""Decoding with a draft tree: all nodes verified by one target forward, the longest branch that it confirms is kept.

A node sees the context and its ancestors, in layers with a window as far as that reaches from its own position: the
anchor's plus its depth. Afterwards the cache keeps the branch's keys and values only. Recurrent state knows no masks:
there each branch from the anchor to a leaf is a row with a copy of the cache, and the kept branch is read once more.
Greedy, or each token drawn from the target on the way down the tree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.decode.answers import Decoded
from paceline.decode.compatibility import check_pair
from paceline.decode.draft_session import DraftSession
from paceline.decode.draft_tree import DraftTree, build_tree
from paceline.decode.loop import OnTokens, PassTokens, decode_prompt, draft_logits, inference
from paceline.decode.sampling import Greedy, TokenChooser
from paceline.decode.session import TargetSession

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.target_model.model import TargetModel


class Tree:
    """Drafts a tree, verifies all its nodes at once, keeps the branch that the target's choices follow.

    Args:
        drafts: the drafter's session.
        choice: how the target chooses.
        budget: nodes of a tree.
        temperature, chain: see `build_tree`.
    """

    def __init__(
        self, drafts: DraftSession, choice: TokenChooser, budget: int, *, temperature: float = 1.0, chain: bool = False
    ) -> None:
        self._drafts, self._choice = drafts, choice
        self._budget, self._temperature, self._chain = budget, temperature, chain

    def begin(self, features: Tensor) -> None:
        """Takes the prompt's features, [T, N·H]."""
        self._drafts.extend(features)

    def advance(self, session: TargetSession, token: int, room: int) -> PassTokens:
        """Drafts, reads anchor and nodes in one forward, and keeps one branch."""
        start = session.length
        logits = draft_logits(session.target, self._drafts, token, start)
        tree = build_tree(logits, self._budget, temperature=self._temperature, chain=self._chain)
        places, tokens, features = _verify(session, tree, token, start, self._choice)
        kept = torch.tensor(places, device=session.target.device)
        if session.replays:
            session.read(torch.tensor([token, *tokens[:-1]], device=session.target.device), last_only=True)
            session.replayed_tokens += len(places)
        else:
            session.keep_places(start, kept)
        self._drafts.extend(features[kept])
        return PassTokens(tokens, int(tree.depths.max(initial=0)))


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
    on_tokens: OnTokens | None = None,
) -> Decoded:
    """Answers one prompt with draft trees.

    Args:
        target: the verifying model.
        network: the drafter.
        prompt_ids: tokens of the prompt.
        max_new_tokens: longest answer, exact to the token.
        budget: nodes of a tree.
        stop_ids: tokens that end an answer.
        temperature: of the tree, see `build_tree`.
        chain: whether trees start with the chain.
        choice: how the target chooses; greedy where None.
        on_tokens: called while the answer grows, see `OnTokens`.

    Raises:
        TargetError: the target takes no masks, or its recurrent state cannot be copied.
        DataError, DrafterError: as `speculative_decode`.
    """
    check_pair(target, network.spec)
    choice = choice or Greedy()
    tree = Tree(DraftSession(network), choice, budget, temperature=temperature, chain=chain)
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "on_tokens": on_tokens}
    return decode_prompt(target, prompt_ids, tree, choice, **limits, branches=True)


def _verify(
    session: TargetSession, tree: DraftTree, token: int, start: int, choice: TokenChooser
) -> tuple[list[int], list[int], torch.Tensor]:
    """Reads anchor and nodes; walks down while the target's choice is a child.

    Returns:
        Places (0 = anchor) that stand, the tokens after the anchor with the target's own at the end, and all features.
    """
    logits, features = _read(session, tree, token, start)
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


def _read(session: TargetSession, tree: DraftTree, token: int, start: int) -> tuple[Tensor, Tensor]:
    """Logits [1 + N, V] and features of anchor and nodes."""
    device = session.target.device
    ids = torch.tensor([token, *tree.tokens.tolist()], device=device)
    if session.replays:
        return session.read_paths(ids, [[0, *(node + 1 for node in path)] for path in tree.paths() or [[]]])
    seen = np.zeros((len(ids), len(ids)), dtype=bool)
    seen[:, 0] = True
    seen[1:, 1:] = tree.visible()
    positions = start + torch.tensor([0, *tree.depths.tolist()], device=device)
    return session.read(ids, positions=positions, mask=torch.as_tensor(seen, device=device))
