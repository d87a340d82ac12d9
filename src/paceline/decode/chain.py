"""Speculative decoding with a chain: one block of drafts is verified by one target forward.

Shape letters: M drafts of a block, N taps, H hidden size, T tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.decode.answers import Decoded
from paceline.decode.compatibility import check_pair
from paceline.decode.draft_session import DraftSession
from paceline.decode.loop import OnTokens, PassTokens, decode_prompt, draft_logits, inference
from paceline.decode.sampling import Greedy, TokenChooser
from paceline.decode.session import TargetSession

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.target_model.model import TargetModel


class Chain:
    """Drafts a block, verifies it, keeps the drafts before the first one that the target would not choose.

    Args:
        drafts: the drafter's session.
        choice: how the target chooses.
        without_features: whether the drafter gets zeros instead of features.
    """

    def __init__(self, drafts: DraftSession, choice: TokenChooser, *, without_features: bool = False) -> None:
        self._drafts, self._choice = drafts, choice
        self._without_features = without_features

    def begin(self, features: Tensor) -> None:
        """Takes the prompt's features, [T, N·H]."""
        self._drafts.extend(torch.zeros_like(features) if self._without_features else features)

    def advance(self, session: TargetSession, token: int, room: int) -> PassTokens:
        """Drafts, reads anchor and drafts in one forward, and rewinds to what is kept."""
        target, position = session.target, session.length
        proposed = draft_logits(target, self._drafts, token, position)
        drafts, chances = self._choice.drafts(proposed[: room - 1])
        logits, features = session.read(torch.cat([torch.tensor([token], device=target.device), drafts]))
        accepted, after = self._choice.judge(drafts, chances, logits)
        session.rewind(position + 1 + accepted)
        self.begin(features[: accepted + 1])
        return PassTokens([*drafts[:accepted].tolist(), after], drafts.shape[0])


@inference
def speculative_decode(
    target: TargetModel,
    network: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    choice: TokenChooser | None = None,
    without_features: bool = False,
    on_tokens: OnTokens | None = None,
) -> Decoded:
    """Answers one prompt with chains of drafts.

    Args:
        target: the verifying model, with the drafter's taps.
        network: the drafter, on the target's device.
        prompt_ids: tokens of the prompt, at least one.
        max_new_tokens: longest answer, exact to the token.
        stop_ids: tokens that end an answer.
        choice: greedy where None, else e.g. `Sampled`.
        without_features: the negative control: the drafter gets zeros instead of the target's states.
        on_tokens: called while the answer grows, see `OnTokens`.

    Raises:
        DataError: an empty prompt, or one longer than the target's positions.
        DrafterError: drafter and target do not fit each other.
    """
    check_pair(target, network.spec)
    choice = choice or Greedy()
    chain = Chain(DraftSession(network), choice, without_features=without_features)
    return decode_prompt(
        target, prompt_ids, chain, choice, max_new_tokens=max_new_tokens, stop_ids=stop_ids, on_tokens=on_tokens
    )
