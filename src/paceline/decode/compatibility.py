"""Whether drafter, target and prompts fit each other: asked before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from paceline.drafter.spec import DrafterSpec, target_differences
from paceline.errors import DataError, DrafterError

if TYPE_CHECKING:
    from paceline.target_model.model import TargetModel
    from paceline.types import EvaluationPrompt

    PromptType = TypeVar("PromptType", bound=EvaluationPrompt)


def check_pair(target: TargetModel, spec: DrafterSpec) -> None:
    """Refuses a drafter that was made for another target: one line per difference.

    Raises:
        DrafterError: hidden size, vocabulary, depth or taps differ.
    """
    differences = target_differences(spec, target.facts, taps=target.taps)
    if differences:
        raise DrafterError(*(f"drafter: {line}; give the target that it was trained on" for line in differences))


def fitting(target: TargetModel, prompts: Sequence[PromptType]) -> tuple[list[PromptType], list[str]]:
    """Prompts that can be answered, and one line about each that is longer than the target's positions.

    Raises:
        DataError: a prompt without tokens or with ids of another vocabulary, one line each; or none that fits.
    """
    facts = target.facts
    kept, set_aside, errors = [], [], []
    for prompt in prompts:
        bad = next((token for token in prompt.ids if not 0 <= token < facts.vocab_size), None)
        if not prompt.ids:
            errors.append(f"prompt {prompt.id}: holds no tokens; give at least one")
        elif bad is not None:
            errors.append(
                f"prompt {prompt.id}: token id {bad} is outside the target's vocabulary of {facts.vocab_size}; was it "
                "made with another tokenizer?"
            )
        elif facts.max_position_embeddings is not None and len(prompt.ids) > facts.max_position_embeddings:
            set_aside.append(
                f"prompt {prompt.id}: set aside; it has {len(prompt.ids)} tokens, but {facts.path} has "
                f"{facts.max_position_embeddings} positions"
            )
        else:
            kept.append(prompt)
    if errors:
        raise DataError(*errors)
    if not prompts:
        raise DataError("evaluate: no prompts; give a file with at least one chat")
    if not kept:
        raise DataError(*set_aside, "evaluate: no prompt fits into the target's positions; give shorter ones")
    return kept, set_aside
