"""What training a drafter needs, in bytes, before anything is allocated; and how many draft positions fit at once.

Weights, gradients, optimizer state, features and copies are counted exactly. Activations are what autograd keeps until
the backward pass, tensor by tensor; tests hold them against `saved_tensors_hooks`.

Shape letters: D hidden, H·E query heads × head size, G·E key heads × head size, I inner size of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import DrafterConfig, ObjectiveConfig, OptimizerConfig, Settings
from paceline.drafter.layers import rows_at_once
from paceline.drafter.loss.tiled_ce import VOCABULARY_TILE
from paceline.drafter.spec import DrafterSpec

FLOAT32 = 4
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number by the name of its type in the settings."""
CARD_SHARE = 0.9
"""Share of a card that a run may fill: the rest is for kernels' work space and fragments."""
CONTEXT = 600 * 2**20
"""A process's CUDA context with its kernels and libraries: 534 MiB on an H100 (pytorch/pytorch issue 135279)."""


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """What decides the memory of a drafter rank.

    Attributes:
        spec: the drafter.
        drafter, objective, optimizer: settings.
        features: type of the features that the target sends, by name.
        tied: whether the target's head is its embedding.
        ranks: of this machine, which share the optimizer's state where that is asked for.
        on_card: whether the rank is on a CUDA card.
    """

    spec: DrafterSpec
    drafter: DrafterConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    features: str = "bfloat16"
    tied: bool = False
    ranks: int = 1
    on_card: bool = True


def training_shape(settings: Settings, spec: DrafterSpec, tied: bool, ranks: int, device: str) -> TrainingShape:
    """The shape of a run's drafter ranks.

    Args:
        settings, spec: of the run.
        tied: whether the target's head is its embedding.
        ranks: drafter ranks of this machine.
        device: of a rank.
    """
    return TrainingShape(
        spec,
        settings.drafter,
        settings.objective,
        settings.optimizer,
        features=settings.target.dtype,
        tied=tied,
        ranks=ranks,
        on_card=device.startswith("cuda"),
    )


def num_parameters(spec: DrafterSpec) -> int:
    """Trained parameters of a drafter."""
    hidden, across = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    layer = 2 * hidden * across + 2 * hidden * keys + 3 * hidden * spec.intermediate_size
    norms = 2 * hidden + 2 * spec.head_dim
    return spec.num_layers * (layer + norms) + len(spec.taps) * hidden * hidden + 2 * hidden


def optimizer_bytes(spec: DrafterSpec, optimizer: OptimizerConfig) -> int:
    """Bytes of the optimizer's whole state: two moments a parameter with AdamW, one with Muon."""
    parameters = num_parameters(spec)
    if optimizer.name == "muon":
        return parameters * FLOAT32
    return parameters * 2 * (1 if optimizer.state == "8bit" else FLOAT32)


def copy_bytes(spec: DrafterSpec, optimizer: OptimizerConfig) -> int:
    """Bytes of host memory that a checkpoint is copied to, page-locked for a card: masters and optimizer state."""
    return num_parameters(spec) * FLOAT32 + optimizer_bytes(spec, optimizer)


def layer_bytes(spec: DrafterSpec, dtype: str, positions: int, tokens: int) -> int:
    """Bytes that one draft layer keeps for the backward pass of one pass.

    For each position the inputs of its norms (2 D), of its products (2 D, H·E, I) and of SwiGLU (2 I); of attention,
    queries before the norm and after, keys likewise, values and the output (3 H·E, 3 G·E); and one float32 number a
    norm. For each context token keys before the norm and after, and values (3 G·E).

    Args:
        spec, dtype: the drafter and its compute type.
        positions, tokens: of the pass.
    """
    width, hidden = WIDTHS[dtype], spec.hidden_size
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    rows = FLOAT32 * (2 + spec.num_attention_heads + spec.num_key_value_heads)
    of_position = width * (4 * hidden + 4 * queries + 3 * keys + 3 * spec.intermediate_size) + rows
    of_token = width * 3 * keys + FLOAT32 * spec.num_key_value_heads
    return positions * of_position + tokens * of_token


def activation_bytes(spec: DrafterSpec, dtype: str, positions: int, tokens: int, recompute: bool) -> int:
    """Bytes that a pass keeps until its backward pass.

    Args:
        spec, dtype, positions, tokens: as in `layer_bytes`.
        recompute: whether each layer keeps its input only.
    """
    width, hidden = WIDTHS[dtype], spec.hidden_size
    layer = positions * hidden * width if recompute else layer_bytes(spec, dtype, positions, tokens)
    tables = FLOAT32 * spec.head_dim * (positions + tokens)
    ends = (2 * tokens + 3 * positions) * hidden * width
    return spec.num_layers * layer + tables + ends


def backward_bytes(spec: DrafterSpec, dtype: str, positions: int, tokens: int, recompute: bool) -> int:
    """Bytes that the backward pass holds beside what was kept: gradients of one layer's MLP and of a norm in float32.

    An estimate; those of attention are of the same order or smaller. With `recompute`, a whole layer exists as well.
    """
    width = WIDTHS[dtype]
    largest = max(spec.intermediate_size * spec.hidden_size, len(spec.taps) * spec.hidden_size**2)
    queries = spec.num_attention_heads * spec.head_dim
    wide = FLOAT32 * max(spec.hidden_size, queries) * (2 if width == FLOAT32 else 4)
    found = positions * (width * (3 * spec.intermediate_size + 2 * spec.hidden_size) + wide)
    found += 2 * largest * width + tokens * width * 2 * spec.hidden_size
    return found + (layer_bytes(spec, dtype, positions, tokens) if recompute else 0)


def head_bytes(shape: TrainingShape, positions: int) -> int:
    """Bytes of the logits that exist at once: a tile of cross entropy, or whole rows of drafter and teacher."""
    spec, width = shape.spec, WIDTHS[shape.drafter.dtype]
    chunk = min(shape.drafter.head_chunk, positions)
    if shape.objective.needs_teacher:
        return 6 * rows_at_once(chunk, spec.vocab_size) * spec.vocab_size * FLOAT32
    tile = min(VOCABULARY_TILE["cuda" if shape.on_card else "cpu"], spec.vocab_size)
    # Beside the tile, the rows whose label is in it are copied.
    logits = tile * (width + FLOAT32 * (width != FLOAT32)) + tile * tile * FLOAT32 // spec.vocab_size
    return chunk * (logits + spec.hidden_size * (FLOAT32 + 2 * width))


def drafter_bytes(shape: TrainingShape, tokens: int, positions: int) -> dict[str, int]:
    """Bytes of a drafter rank's device, by cause.

    Args:
        shape: see there.
        tokens: real tokens of the largest micro-batch.
        positions: draft positions that are computed at once, at most.
    """
    spec, drafter = shape.spec, shape.drafter
    parameters, width = num_parameters(spec), WIDTHS[drafter.dtype]
    state = optimizer_bytes(spec, shape.optimizer) // (shape.ranks if shape.optimizer.shard else 1)
    shared = spec.vocab_size * spec.hidden_size * width * (1 if shape.tied else 2)
    teacher = spec.vocab_size * spec.hidden_size * WIDTHS[shape.features] if shape.objective.needs_teacher else 0
    columns = len(spec.taps) * spec.hidden_size + (spec.hidden_size if shape.objective.needs_teacher else 0)
    # A second buffer is filled while the first is trained on; on a CPU the features are read where they lie.
    features = tokens * columns * WIDTHS[shape.features] * (2 if shape.on_card else 1)
    if shape.features != drafter.dtype:
        features += tokens * len(spec.taps) * spec.hidden_size * width
    kept = (spec, drafter.dtype, positions, tokens, drafter.recompute)
    needed = {
        "master weights": parameters * FLOAT32,
        "gradients": parameters * FLOAT32,
        "optimizer state": state,
        "embedding and head": shared,
        "the target's head for the teacher": teacher,
        "features of the largest batch": features,
        "activations": activation_bytes(*kept),
        "logits, or the backward pass (estimate)": max(head_bytes(shape, positions), backward_bytes(*kept)),
        "CUDA context": CONTEXT if shape.on_card else 0,
    }
    return {name: size for name, size in needed.items() if size}


def fitting_positions(shape: TrainingShape, tokens: int, room: int) -> int:
    """Most draft positions at once with which a rank fits, in whole samples; one sample where not even that fits.

    Args:
        shape, tokens: as in `drafter_bytes`.
        room: bytes of the device that the rank may use.
    """
    sample = shape.drafter.num_anchors * shape.spec.block_size
    least = sum(drafter_bytes(shape, tokens, sample).values())
    more = sum(drafter_bytes(shape, tokens, 2 * sample).values()) - least
    return sample * (1 + max(0, (room - least) // more))
