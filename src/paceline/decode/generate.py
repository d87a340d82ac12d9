"""Answers from a target by plain Hugging Face generation: batched, greedy or sampled, keyed by prompt.

Prompts of a batch are padded on the left with an attention mask, from which transformers derives the positions, so
each row sees its own tokens at their own positions only. Sampling is the Gumbel maximum: argmax(logits / temperature
+ g), with g drawn from a generator of the row's own, is a draw from softmax(logits / temperature). So a sampled
answer, like a greedy one, does not depend on which prompts share its batch (up to the rounding of the batched matrix
products).

Shape letters: B prompts, S padded prompt length, T new tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from paceline.errors import TargetError
from paceline.types import GeneratedAnswer, Sampling


class GeneratingModel(Protocol):
    """What is needed of a Hugging Face causal language model."""

    generation_config: GenerationConfig

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        ...

    def generate(self, **settings: Any) -> Any:
        """Transformers' generation: ids [B, S + T]."""
        ...


class KeyedGumbel(LogitsProcessor):
    """Makes the greedy choice a sample: adds Gumbel noise, one generator a row, to tempered, filtered logits.

    Args:
        sampling: temperature above zero, top-k and top-p (applied in this order).
        seeds: one 63-bit seed a row.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] whose argmax is the drawn token; the noise is drawn on the CPU so that devices agree."""
        kept = keep_likely(scores.float() / self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
        uniform = torch.stack(
            [torch.rand(scores.shape[-1], generator=row, dtype=torch.float64) for row in self.generators]
        )
        gumbel = -torch.log(-torch.log(uniform.clamp(min=1e-300)))
        return kept + gumbel.to(device=scores.device, dtype=kept.dtype)


def keep_likely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [B, V] with all but the most probable tokens at minus infinity.

    Args:
        logits: tempered logits, float [B, V].
        top_k: keep the k largest; 0 keeps all.
        top_p: then keep the smallest set, largest first, whose probability reaches this; 1 keeps all.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p < 1.0:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits


def answer_seed(prompt: Sequence[int], seed: int) -> int:
    """The 63-bit seed of one answer: a hash of the sampling seed and the prompt's token ids."""
    text = ",".join(map(str, (seed, *prompt)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class TargetGenerator:
    """Answers batches of tokenized prompts with a causal language model; is a `GenerateAnswers`.

    Args:
        model: in evaluation mode, on its device.
        pad_id: any id of the vocabulary; it is masked.
        stop_ids: tokens that end an answer, such as the end of a chat turn.
    """

    def __init__(self, model: GeneratingModel, pad_id: int, stop_ids: Sequence[int]) -> None:
        if not stop_ids:
            raise TargetError("generation: the target names no token that ends an answer; give at least one stop id")
        self.model = model
        self.pad_id = pad_id
        self.stop_ids = tuple(stop_ids)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[GeneratedAnswer]:
        """One answer a prompt, in order.

        Raises:
            TargetError: for an empty prompt or sampling settings out of range.
        """
        _check(prompts, sampling)
        if not prompts:
            return []
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad_id)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        processors = LogitsProcessorList()
        if sampling.temperature > 0:
            processors.append(KeyedGumbel(sampling, [answer_seed(prompt, sampling.seed) for prompt in prompts]))
        output = self._generate(ids.to(self.model.device), mask.to(self.model.device), processors, sampling)
        return [self._answer(row) for row in output[:, width:].tolist()]

    def _generate(self, ids: Tensor, mask: Tensor, processors: LogitsProcessorList, sampling: Sampling) -> Tensor:
        """Ids [B, S + T] of prompts and answers.

        The folder's own generation settings are set aside for the call: transformers fills every setting left open
        from them, so a repetition penalty there would silently make the answers other than the target's own.
        """
        plain = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.pad_id,
            eos_token_id=list(self.stop_ids),
        )
        own = self.model.generation_config
        self.model.generation_config = plain
        try:
            output = self.model.generate(
                input_ids=ids, attention_mask=mask, logits_processor=processors, generation_config=plain
            )
        finally:
            self.model.generation_config = own
        return output if isinstance(output, Tensor) else output.sequences

    def _answer(self, new_ids: list[int]) -> GeneratedAnswer:
        """The new tokens [T] of one row up to its first stop token."""
        ends = [index for index, token in enumerate(new_ids) if token in self.stop_ids]
        if ends:
            return GeneratedAnswer(tuple(new_ids[: ends[0]]), "stop")
        return GeneratedAnswer(tuple(new_ids), "length")


def _check(prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Refuse what has no answer."""
    errors = [
        f"generation: prompt {row} is empty; give at least one token" for row, ids in enumerate(prompts) if not ids
    ]
    if sampling.max_new_tokens < 1:
        errors.append(f"generation: max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
    if sampling.temperature < 0:
        errors.append(f"generation: temperature is {sampling.temperature}; it must be 0 (greedy) or more")
    if sampling.top_k < 0:
        errors.append(f"generation: top_k is {sampling.top_k}; it must be 0 (all tokens) or more")
    if not 0 < sampling.top_p <= 1:
        errors.append(f"generation: top_p is {sampling.top_p}; it must be above 0 and at most 1")
    if errors:
        raise TargetError(*errors)
