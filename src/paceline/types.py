"""The types that pass through doors: frozen dataclasses, one direction, metadata riding in the data.

PlannedBatch → HostBatch → FeatureBatch → StepReport. Beside them the facts of a target and the sample store's face.

Shape letters: B documents, W padded width, S real tokens of the batch (packed, documents in row order), A anchors of
the batch, N·H number of taps × hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One micro-batch of an epoch's plan: which rows go together, in which optimizer window.

    Attributes:
        index: position in the epoch's order.
        epoch: 0-based epoch.
        window: 0-based optimizer window of the epoch; one window is one optimizer step.
        replica: drafter replica that trains it.
        slot: place inside the window and replica.
        bucket: packing class or reporting bucket (0 = shortest).
        rows: row numbers in the store = sample ids, int64 [B].
        width: padded width in tokens; no row is longer.
        real_tokens: sum of the rows' lengths.
        padded_tokens: B · width.
        draft_positions: anchors × block size that the drafter computes for it.
    """

    index: int
    epoch: int
    window: int
    replica: int
    slot: int
    bucket: int
    rows: np.ndarray
    width: int
    real_tokens: int
    padded_tokens: int
    draft_positions: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One optimizer step as planned: which micro-batches, from where in the plan.

    Attributes:
        step: 1-based optimizer step of the run.
        epoch, window: where in the plan.
        batches: plan indices of the epoch that make up the window, ascending.
        save: whether a checkpoint follows the step.
        validate: whether the step's report holds the metrics of the validation batches too.
    """

    step: int
    epoch: int
    window: int
    batches: range
    save: bool
    validate: bool = False

    def rank_of(self, index: int, num_ranks: int) -> int:
        """Which of so many drafter ranks trains a micro-batch of this window: in turn, as the plan deals replicas."""
        return (index - self.batches.start) % num_ranks


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A planned batch with its tokens, right-padded, on the host.

    Attributes:
        planned: where it comes from.
        ids: token ids, int64 [B, W]; positions at and after ``lengths`` hold the pad id.
        loss_mask: True where the token is supervised, bool [B, W]; False on padding.
        lengths: real tokens per row, int64 [B].
        anchors: anchor positions within their document, ascending per document, int64 [A].
        anchor_counts: anchors per document, int64 [B]; sums to A.
    """

    planned: PlannedBatch
    ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    anchors: np.ndarray
    anchor_counts: np.ndarray

    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(part.nbytes for part in (self.ids, self.loss_mask, self.lengths, self.anchors, self.anchor_counts))


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """A host batch with what the target saw: features of the real tokens, padding stripped.

    Attributes:
        host: the batch it was made from.
        features: tap outputs, concatenated in tap order, [S, N·H]; documents follow one another in row order.
        last_hidden: input of the target's final norm [S, H], when an objective needs teacher distributions; else None.
    """

    host: HostBatch
    features: Tensor
    last_hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TeacherParts:
    """All of a target that is outside of its decoder layers and that its logits need.

    Attributes:
        built_from: class and configuration of the target's model, pickled: code that comes with the target can be
            imported only where transformers has prepared for it.
        layers: dotted name of the container of its decoder layers.
        layers_give_tuples: whether a layer returns a tuple.
        tensors: norms, head and buffers, by their names in the model.
        states: outputs of the last decoder layer for a few tokens, [M, H].
        logits: what the target itself made of them, [M, V]; a copy that makes others is refused.
    """

    built_from: bytes
    layers: str
    layers_give_tuples: bool
    tensors: Mapping[str, Tensor]
    states: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """What a drafter takes over from its target, once, at the start; frozen.

    Attributes:
        embedding: what the target's layer 0 sees for every token, [V, H].
        head: weight of its language model head, [V, H]; the very same tensor where the two are tied.
        teacher: what makes its logits, where an objective compares with them.
        embedding_scale: `embedding` is this times the stored embedding; None where it is no multiple.
    """

    embedding: Tensor
    head: Tensor
    teacher: TeacherParts | None = None
    embedding_scale: float | None = 1.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quantity that reduces exactly over micro-batches and ranks: add numerators, add denominators, divide once."""

    numerator: float
    denominator: float

    @property
    def value(self) -> float:
        """numerator / denominator; NaN when nothing was counted."""
        return self.numerator / self.denominator if self.denominator else float("nan")


@dataclass(frozen=True, slots=True)
class BucketTotals:
    """What one bucket contributed to one optimizer step."""

    loss: Ratio
    micro_batches: int
    samples: int
    anchors: int
    real_tokens: int
    padded_tokens: int


@dataclass(frozen=True, slots=True)
class TagTotals:
    """What the samples with one tag contributed to one optimizer step."""

    loss: Ratio
    samples: int


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """What one worker process did since the step before; a worker that did nothing has zeros.

    Attributes:
        batches: micro-batches that it finished.
        real_tokens: their real tokens.
        busy_s: seconds that it worked.
    """

    batches: int = 0
    real_tokens: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of one optimizer step went.

    Attributes:
        waits_s: seconds by stage and state, such as ``drafter/starved``.
        workers: by name (``target_0``, ``drafter_1``), what each worker did.
    """

    waits_s: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[str, WorkerTotals] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step, as it was trained.

    Attributes:
        step: 1-based optimizer step of the run.
        epoch, window: where in the plan.
        loss: (Σ weighted loss, Σ weight) over the whole window.
        ratios: further metrics by catalogue name, e.g. ``accuracy/slot_1``, ``acceptance/streak``.
        buckets: per bucket number, its share of the step.
        batches: plan indices of the micro-batches of this step, in the order in which they were trained.
        gradient_norm: before clipping.
        clipped: whether the gradient was scaled down.
        skipped: whether the step was skipped (non-finite gradient).
        learning_rate: used in this step.
        samples, anchors, real_tokens, padded_tokens, draft_positions: totals of the window.
        seconds: wall time since the previous step ended.
        waits_s: seconds by stage and state, e.g. ``drafter/starved``.
        max_length: longest sample of the window in tokens; 0 where it was not counted.
        sample_losses: by plan index, (Σ weighted loss, Σ weight) of each row in planned order, float64 [B, 2].
        rows: by plan index, the row numbers, int64 [B].
        tags: by tag, its share of the step.
        workers: by name (``target_0``, ``drafter_1``), what each worker did; every worker is in every report.

    The learner makes it; `paceline.run.step_metrics` completes it once, with what plan, store and parent know: times,
    rows, tags, and the ratios that follow from them.
    """

    step: int
    epoch: int
    window: int
    loss: Ratio
    ratios: Mapping[str, Ratio]
    buckets: Mapping[int, BucketTotals]
    batches: Sequence[int]
    gradient_norm: float
    clipped: bool
    skipped: bool
    learning_rate: float
    samples: int
    anchors: int
    real_tokens: int
    padded_tokens: int
    draft_positions: int
    seconds: float
    waits_s: Mapping[str, float] = field(default_factory=dict)
    max_length: int = 0
    sample_losses: Mapping[int, np.ndarray] = field(default_factory=dict, compare=False)
    rows: Mapping[int, np.ndarray] = field(default_factory=dict, compare=False)
    tags: Mapping[str, TagTotals] = field(default_factory=dict)
    workers: Mapping[str, WorkerTotals] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What the rest of the house must know of a target, read from its folder without loading weights.

    Attributes:
        path: as given by the user.
        architecture: first entry of ``architectures``.
        model_type: of the text part.
        num_layers, hidden_size, vocab_size: of the text part; ``vocab_size`` = rows of the embedding.
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, rope_theta,
        max_position_embeddings, initializer_range: defaults for a drafter; None where the target has no such thing.
        tied_head: whether the head shares the embedding's weights.
        bos_token_id, eos_token_ids, pad_token_id: None / empty where unset.
        fingerprint: stable hash of all that `identity` holds.
        identity: a hash for each part that makes the target this one: configuration, weights, tokenizer, quantization.
    """

    path: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    rms_norm_eps: float | None
    rope_theta: float | None
    max_position_embeddings: int | None
    initializer_range: float | None
    tied_head: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    fingerprint: str
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def named_tokens(self) -> frozenset[int]:
        """Tokens to which the configuration gives a meaning: bos, eos, pad."""
        named = (self.bos_token_id, self.pad_token_id, *self.eos_token_ids)
        return frozenset(token for token in named if token is not None)


def differing_parts(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Parts of a target's identity that are not the same, by name; those that only one side has included."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


class SampleSource(Protocol):
    """A tokenized data set: lengths in memory, tokens on demand."""

    fingerprint: str
    """Content hash of rows, tokenizer, template and settings."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per row, int64 [num_rows]."""
        ...

    @property
    def eligible(self) -> np.ndarray:
        """Eligible anchor positions per row, int64 [num_rows]."""
        ...

    def read(self, rows: Sequence[int] | np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids (int64 [length]) and loss mask (bool [length]) of each row, in the order asked for."""
        ...


class AnchorSampler(Protocol):
    """Chooses the anchors of one sample: ascending positions, keyed by (seed, epoch, sample id)."""

    def __call__(self, loss_mask: np.ndarray, *, seed: int, epoch: int, sample: int, limit: int) -> np.ndarray:
        """Anchor positions, int64 [min(limit, eligible)]."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn from the target.

    Attributes:
        max_new_tokens: limit of one answer; an answer that reaches it without ending is cut.
        temperature: 0 = greedy (the most probable token), else the logits are divided by it.
        top_k: only the k most probable tokens are drawn; 0 = all.
        top_p: only the smallest set of tokens with this much probability is drawn; 1 = all.
        seed: with the prompt's tokens, the key of an answer's randomness.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """One answer: its ids without the token that ended it; ``stop`` where it ended by itself, ``length`` if cut."""

    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


class GenerateAnswers(Protocol):
    """Answers a batch of tokenized prompts; an answer does not depend on the other prompts of its batch."""

    def __call__(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[GeneratedAnswer]:
        """One answer a prompt, in the order of the prompts."""
        ...


class EvaluationPrompt(Protocol):
    """What evaluation needs of a prompt."""

    @property
    def id(self) -> str:
        """Name in the report."""
        ...

    @property
    def ids(self) -> list[int]:
        """Token ids, generation prompt included."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """Words by which the report is split."""
        ...


JsonDict = dict[str, Any]
