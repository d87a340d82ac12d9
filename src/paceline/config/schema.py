"""Settings of a run: strict, frozen pydantic models, a sentence under each field. No torch here.

`Settings` is one YAML file. Every key has its default here and nowhere else; the command line help, the resolved
configuration in the run directory and the examples are all derived from these models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.checkpoint import CheckpointConfig
from paceline.config.drafter import DrafterConfig
from paceline.config.objective import ObjectiveConfig
from paceline.config.observe import ObserveConfig
from paceline.config.optimizer import OptimizerConfig
from paceline.config.plan import PlanConfig
from paceline.config.section import Section
from paceline.config.target import TargetConfig


class DataConfig(Section):
    """What the drafter learns from, and where its tokens are kept."""

    train: list[str] = []
    """JSONL, Parquet or Arrow files of chats whose answers are the target's own, folders of such, or `hub:NAME` data
    sets. `FILE#tag=code&weight=0.5` tags a file's rows and keeps half of them an epoch; 2 shows each twice."""
    heldout: list[str] = []
    """Files of chats that are never trained on; their prompts measure acceptance."""
    heldout_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the documents (a row's `document`, else its first question) that are never trained on; they measure
    acceptance where `heldout` is empty."""
    store: str | None = None
    """Folder of the tokenized store. Unset: `store` inside the run directory."""
    max_length: int = Field(default=4096, ge=4)
    """Longest sample in tokens; what happens to longer ones is `on_too_long`."""
    on_too_long: Literal["drop", "cut"] = "drop"
    """Leave longer samples out, or cut them at `max_length`; both are counted and reported."""
    on_rewrite: Literal["split", "last"] = "split"
    """Where the chat template rewrites earlier turns: a sample for each turn it changes, or only the last answer."""
    on_cut_answer: Literal["drop", "keep"] = "drop"
    """Answers that a token limit cut when they were generated: leave out, or keep without an end token."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Samples whose tokens came earlier: leave out, or keep."""
    near_duplicates: Literal["drop", "keep"] = "keep"
    """Samples that share four fifths of their token 5-grams with an earlier one; they are counted either way."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """The template's `enable_thinking`. auto: the generation prompt that each answer continues."""
    workers: int = Field(default=1, ge=1)
    """Processes that tokenize."""


class TrainConfig(Section):
    """How long to train."""

    epochs: int = Field(default=6, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps, wherever the epoch is. Unset: all epochs."""


def devices_of(worker: str) -> list[str]:
    """Devices of a worker, which may be spread over several: their names, joined by ``+``."""
    return worker.split("+")


class FlowConfig(Section):
    """How stages are joined and where they run."""

    mode: Literal["pipeline", "inline"] = "pipeline"
    """One process per role, joined by channels; or the same stages one after another in one process (the reference)."""
    delivery: Literal["ordered", "ready"] = "ready"
    """Order of micro-batches inside a window: the plan's, or as they become ready. Windows never change."""
    target_devices: list[str] = ["cpu"]
    """One target worker per entry, for example cuda:0; a list of devices, or cuda:0+cuda:1, spreads one worker over
    them."""
    drafter_devices: list[str] = ["cpu"]
    """One drafter rank per entry."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each worker process."""
    prefetch_batches: int = Field(default=4, ge=1)
    """Host batches collated ahead of each target worker."""
    prefetch_bytes: int = Field(default=2**30, ge=1)
    """Bytes of host batches collated ahead in all, at most; one batch is always made ahead."""
    pool_buffers: int | None = Field(default=None, ge=2)
    """Feature buffers that cross from targets to drafters, each of the size of the plan's largest micro-batch; the only
    backpressure there. Unset: one a target worker, four a drafter rank and one more."""
    pool_bytes: int | None = Field(default=None, ge=1)
    """Bytes of all feature buffers at most; fewer are made where `pool_buffers` would take more. Unset: no limit."""
    transport: Literal["exact", "bf16", "fp8"] = "exact"
    """How features cross from targets to drafters; bf16 and fp8 (a scale for each token and tap) are smaller, and their
    error is reported at the start."""
    stall_limit_s: float = Field(default=600.0, gt=0)
    """A stage that reports nothing for this long is named and the run is stopped; start-up has ten minutes at least."""

    @property
    def num_buffers(self) -> int:
        """Feature buffers: as set, else enough to bridge batches that take one stage longer than the other."""
        return self.pool_buffers or len(self.target_devices) + 4 * len(self.drafter_devices) + 1

    @field_validator("target_devices", mode="before")
    @classmethod
    def _join_groups(cls, value: object) -> object:
        """A worker over several devices is one name from here on."""
        if not isinstance(value, list):
            return value
        return [
            "+".join(entry) if isinstance(entry, list) and all(isinstance(n, str) for n in entry) else entry
            for entry in value
        ]


class EvaluateConfig(Section):
    """Real decoding of held-out prompts."""

    num_prompts: int = Field(default=64, ge=1)
    """At most this many prompts: the first of each file, in turn."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer."""
    batch_size: int = Field(default=1, ge=1)
    """Prompts that are decoded at once. Targets with recurrent layers decode one at a time."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Compute type of the decode loop. In float64 the output must equal greedy decoding exactly."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 decodes greedily. Above: answers are sampled at it, with the target's exact distribution, and no longer
    compared with plain ones token for token."""
    seed: int = Field(default=0, ge=0, lt=2**62)
    """Of the draws where answers are sampled; the prompts' draws differ."""
    tree_budget: int | None = Field(default=None, ge=1)
    """Nodes of a draft tree: prompts are decoded with trees too, beside the chain. Unset: with the chain alone."""
    tree_chain_seed: bool = False
    """Trees start with the chain and are then filled up."""
    tree_temperature: float = Field(default=1.0, gt=0.0)
    """Trees are built from the drafter's distributions sharpened (below 1) or flattened (above 1) by it."""
    every_steps: int = Field(default=200, ge=1)
    """Optimizer steps between measurements on held-out samples during training; the last step always measures."""
    device: str | None = None
    """Device, for example cuda:7 or cpu, on which a process of its own decodes `num_prompts` held-out prompts with each
    checkpoint while training continues. Unset: none."""
    wait_s: float = Field(default=600.0, ge=0)
    """Longest wait at the end of training for the decoding of the last checkpoint."""
    validation_samples: int = Field(default=64, ge=0)
    """Held-out samples measured during training, always the same with the same anchors; 0 measures none."""

    @model_validator(mode="after")
    def _fits(self) -> EvaluateConfig:
        if self.tree_budget is None and (self.tree_chain_seed or self.tree_temperature != 1.0):
            raise ValueError("tree_chain_seed and tree_temperature shape trees; set tree_budget, for example 64")
        if self.tree_budget is not None and self.batch_size > 1:
            raise ValueError("tree_budget: trees decode one prompt at a time; set batch_size to 1, or drop tree_budget")
        if self.temperature == 0 and self.seed:
            raise ValueError("seed: nothing is drawn in greedy decoding; set temperature above 0, or drop seed")
        return self


class Settings(Section):
    """All settings of one run."""

    run_dir: str
    """Directory of the run: resolved configuration, store, metrics, checkpoints, report."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Key of all randomness."""
    target: TargetConfig
    """The target."""
    data: DataConfig = DataConfig()
    """The data."""
    plan: PlanConfig = PlanConfig()
    """The plan."""
    drafter: DrafterConfig = DrafterConfig()
    """The drafter."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is minimised."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    train: TrainConfig = TrainConfig()
    """How long."""
    flow: FlowConfig = FlowConfig()
    """The pipeline."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation."""
    observe: ObserveConfig = ObserveConfig()
    """Metrics and who hears them."""

    @property
    def store_path(self) -> Path:
        """Folder of the tokenized store."""
        return Path(self.data.store) if self.data.store else Path(self.run_dir) / "store"

    @property
    def heldout_store_path(self) -> Path:
        """Folder of the tokenized held-out samples, beside the store."""
        return self.store_path.with_name(self.store_path.name + "-heldout")
