"""A target with prompts, on which drafters are decoded and measured: for `paceline evaluate` and during training."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import DataConfig, EvaluateConfig, TargetConfig
from paceline.data.token_text import text_pieces
from paceline.data.tokenizer import load_tokenizer
from paceline.decode.loop import greedy_decode
from paceline.device import main_device
from paceline.evaluate.evaluate import check_way, evaluate
from paceline.evaluate.prompts import Prompt, PromptRenderer, render_prompts, with_later_turns
from paceline.evaluate.report import EvaluationReport
from paceline.target_model.load import load_target

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter


class Evaluator:
    """A target, loaded, and the prompts that are held out.

    Where a prompt has several turns, the later ones are asked after the target's own greedy answers, so they are the
    same for every drafter.

    Args:
        target: its settings.
        data: names the held-out files, and how the chat template writes their prompts.
        limits: how many prompts are decoded, and how.
        taps: of the drafters.
        device: where everything runs; of several, joined by ``+``, the drafter is on the first.

    Raises:
        PacelineError: one line for each error.
    """

    def __init__(
        self,
        target: TargetConfig,
        data: DataConfig,
        limits: EvaluateConfig,
        taps: Sequence[int],
        device: str = "cpu",
    ) -> None:
        self._limits = limits
        renderer = PromptRenderer(target.path, data.thinking, data.template_switches, target.trust_remote_code)
        prompts = render_prompts(data.heldout, renderer, limits.num_prompts)
        self._tokenizer = load_tokenizer(target.path, target.trust_remote_code)
        self._target = load_target(target, list(taps), device, limits.dtype_for(target))
        check_way(self._target, limits)
        self._device = main_device(device)
        self.prompts = with_later_turns(prompts, renderer, self._answer, limits.num_prompts)
        self._conditions = {
            **conditions_of(target, limits),
            **conditions_of_prompts(self.prompts, data),
            "device": device,
        }

    def measure(
        self,
        network: Drafter,
        *,
        check_lossless: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> EvaluationReport:
        """Decode the prompts with a drafter.

        Args:
            network: the drafter; moved to the device.
            check_lossless: also decode plainly, and compare.
            progress: called with (prompts done, prompts).

        Raises:
            PacelineError: one line for each error.
        """
        report = evaluate(
            self._target,
            network.to(self._device).eval(),
            self.prompts,
            self._limits,
            progress=progress,
            check_lossless=check_lossless,
            pieces=functools.partial(text_pieces, self._tokenizer),
        )
        return dataclasses.replace(report, conditions=self._conditions)

    def _answer(self, ids: list[int]) -> str | None:
        """The target's own answer as text, without the tokens that end it; None to more than its positions."""
        facts, limit = self._target.facts, self._limits.max_new_tokens
        if facts.max_position_embeddings is not None and len(ids) > facts.max_position_embeddings:
            return None
        answer = greedy_decode(self._target, ids, max_new_tokens=limit, stop_ids=facts.eos_token_ids)
        return str(self._tokenizer.decode(answer.ids, skip_special_tokens=True))


def conditions_of(target: TargetConfig, limits: EvaluateConfig) -> dict[str, Any]:
    """The settings on which the figures of an evaluation depend, as plain values."""
    kept = {"num_prompts", "max_new_tokens", "dtype", "temperature", "seed"}
    kept |= {"tree_budget", "tree_chain_seed", "tree_temperature"}
    return limits.model_dump(mode="json", include=kept) | {"dtype": limits.dtype_for(target)}


def conditions_of_prompts(prompts: Sequence[Prompt], data: DataConfig) -> dict[str, Any]:
    """A hash of all prompts' tokens, and the names of the files that they come from."""
    return {
        "prompts": hashlib.sha256(repr([prompt.ids for prompt in prompts]).encode()).hexdigest()[:16],
        "files": [Path(name).name for name in data.heldout],
    }
