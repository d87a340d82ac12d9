"""Settings of a run: strict, frozen pydantic models, a sentence under each field. No torch here.

`Settings` is one YAML file. Every key has its default here (drafter, objective and optimizer: in `learning.py`) and
nowhere else; the command line help, the resolved configuration in the run directory and the examples are all derived
from these models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.learning import DrafterConfig, ObjectiveConfig, OptimizerConfig
from paceline.config.section import Section

DataType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["stored", "none", "8bit", "4bit"]
Strategy = Literal["grid", "sorted", "shuffled", "jittered", "windowed", "bucketed", "mixed", "packed"]
Schedule = Literal["stratified", "proportional", "diverse", "round_robin", "shuffled", "curriculum"]

MAX_COUNT = 2**31 - 1
"""Tokens, widths and samples are counted in 31 bits."""


SET_FOR_VLLM = (
    *("model", "dtype", "trust_remote_code", "skip_tokenizer_init", "enable_prefix_caching"),
    *("speculative_config", "kv_transfer_config"),
)
"""Options of vLLM that paceline sets itself."""


class TargetConfig(Section):
    """The frozen language model that the drafter will speed up."""

    path: str
    """Folder of a Hugging Face causal language model, a .gguf file, or a hub name."""
    dtype: DataType = "bfloat16"
    """Type of the target's weights and of the features that it hands over."""
    adapter: str | None = None
    """Folder of a LoRA adapter (PEFT) that is merged into the weights on loading."""
    quantization: Quantization = "stored"
    """stored: weights as the folder has them. none: quantized weights are widened to `dtype`. 8bit, 4bit: bitsandbytes
    quantizes plain weights on loading."""
    taps: list[int] | None = None
    """Tapped layers: id i is the output of 0-based decoder layer i. Unset: spread over the depth by the usual rule."""
    num_taps: int = Field(default=5, ge=1)
    """How many layers to tap when `taps` is unset."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention implementation that transformers is asked for."""
    rows: Literal["padded", "packed"] = "padded"
    """padded: one document a row of the target's forward. packed: all documents of a micro-batch in one row, where a
    test at the start proves that they do not see one another; goes with `plan.strategy: packed`."""
    device_map: Literal["auto"] | list[str] | dict[str, str] | None = None
    """Spreads one target worker over several devices: auto, a list of devices, or a device for each module name.
    Unset: all of it on the worker's entry of `flow.target_devices`."""
    trust_remote_code: bool = False
    """Whether code that comes with the target may run."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """What runs the target in training: transformers in the worker itself, or vLLM in a process beside it."""
    vllm: dict[str, Any] = {}
    """Options of vLLM's engine under its own names, such as tensor_parallel_size, max_num_batched_tokens,
    gpu_memory_utilization, quantization."""
    vllm_environment: str | None = None
    """Folder of the virtual environment that vLLM is installed in. Unset: that of this Python."""
    vllm_patience_s: float = Field(default=60.0, gt=0)
    """vLLM is ended where it makes no step for this long while it has work."""
    prove_engine: bool = True
    """Compare vLLM's features of the first batch with those of transformers, which loads the target on the CPU
    for it."""

    @model_validator(mode="after")
    def _engine_fits(self) -> TargetConfig:
        if self.engine == "transformers" and self.vllm:
            raise ValueError("vllm: these options are read by engine: vllm alone; set it, or drop them")
        if ours := [name for name in SET_FOR_VLLM if name in self.vllm]:
            raise ValueError(f"vllm: {', '.join(ours)} is set by paceline; drop it")
        if self.engine == "vllm" and (self.adapter or self.device_map or self.path.endswith(".gguf")):
            raise ValueError("engine: vllm takes a plain folder; drop adapter and device_map, and give no .gguf file")
        if self.engine == "vllm" and self.quantization != "stored":
            raise ValueError("quantization: with engine: vllm it is an option of vLLM; set vllm: {quantization: ...}")
        return self

    @field_validator("device_map", mode="before")
    @classmethod
    def _one_of_three_forms(cls, value: Any) -> Any:
        names = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
        if value in (None, "auto") or (names and all(isinstance(name, str) for name in names)):
            return value
        raise ValueError("must be auto, a list of devices like [cuda:0, cuda:1], or a device for each module name")


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
    on_too_long: Literal["drop", "turns", "cut"] = "drop"
    """Longer samples: leave them out, keep their first turns that fit, or cut them at `max_length`. What is lost is
    reported in supervised tokens."""
    on_rewrite: Literal["split", "last"] = "split"
    """Where the chat template rewrites earlier turns: a sample for each turn it changes, or only the last answer."""
    on_cut_answer: Literal["drop", "keep"] = "drop"
    """Answers that a token limit cut when they were generated: leave out, or keep without an end token."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Samples whose tokens came earlier: leave out, or keep."""
    near_duplicates: Literal["drop", "keep"] = "keep"
    """Samples that share four fifths of their token 5-grams with an earlier one: leave out, or keep and count. They are
    not looked for where `duplicates` are kept too."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """The template's switch for thinking, whatever its name. auto: on for chats whose answers hold thoughts, off for
    the others."""
    template_switches: dict[str, Any] = {}
    """Variables of the chat template for every chat, as the server that will use the drafter sets them; for example
    reasoning_effort: high."""
    on_not_written: Literal["drop", "text"] = "drop"
    """Where the chat template does not write a thought or a call of an answer: leave the chat out, or learn the text of
    its answers alone."""
    verify: bool = True
    """Compare each file of the store with its hash before training reads it for the first time."""
    workers: int = Field(default=1, ge=1)
    """Processes that tokenize."""


class PlanConfig(Section):
    """How samples become micro-batches and micro-batches become optimizer steps."""

    strategy: Strategy = "grid"
    """How batches are composed; grid (shuffled anew inside fine length classes) wastes least and re-pairs least."""
    schedule: Schedule = "stratified"
    """How batches are ordered into windows; stratified puts one batch of every length stratum into each window."""
    token_budget: int = Field(default=49_152, ge=1, le=MAX_COUNT)
    """Padded context tokens of a micro-batch at most (the target's work)."""
    max_samples: int = Field(default=64, ge=1, le=MAX_COUNT)
    """Samples of a micro-batch at most."""
    draft_position_budget: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Anchors × block size of a micro-batch at most (the drafter's work). Unset: no limit; what does not fit a card at
    once is done in passes, see `drafter.positions_per_pass`."""
    width_multiple: int = Field(default=64, ge=1, le=MAX_COUNT)
    """Padded widths are multiples of this many tokens."""
    attention_length: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Tokens at which attention costs as much as the rest: width w counts as w + w²/this. Unset: as w."""
    accumulate: int = Field(default=4, ge=1, le=65_535)
    """Micro-batches of one optimizer step and drafter replica."""
    leftover: Literal["short", "carry"] = "short"
    """Batches that fill no whole window: one short, correctly normalised window, or carried into the next epoch."""
    max_length: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Samples longer than this many tokens are over-length. Unset: none is."""
    on_over_length: Literal["drop", "keep"] = "drop"
    """Leave over-length samples out, or plan them like all others; both are counted and reported."""
    without_anchors: Literal["drop", "keep"] = "drop"
    """Leave out samples without any eligible anchor (they carry no loss), or plan them; both are counted."""
    eligible_share: float = Field(default=1.0, gt=0, le=1)
    """Eligible anchors per token, where their counts are unknown."""
    weights: dict[str, float] = {}
    """How often the samples of a tag or source are planned an epoch (0.5, 2, ...), by name; others once."""
    edges: list[int] | Literal["optimal"] | None = None
    """Upper ends of the buckets in tokens, ascending; or the best `num_buckets` ones. Unset: equal sample counts."""
    num_buckets: int = Field(default=6, ge=1, le=256)
    """Buckets of the bucketed and mixed strategies, of the schedules by bucket, and of the reports."""
    grid_class_batches: int = Field(default=4, ge=1, le=1_000_000)
    """Strategy grid: neighboring widths share a class where more than 1 / this of the batch-mates would meet again."""
    jitter: float = Field(default=0.05, ge=0, le=1)
    """Strategy jittered: standard deviation of the relative perturbation of the lengths before they are sorted."""
    sort_window: int = Field(default=2048, ge=1, le=MAX_COUNT)
    """Strategy windowed: samples that are sorted together."""
    mixed_span: int = Field(default=2, ge=1, le=256)
    """Strategy mixed: neighbouring buckets that one batch may draw from."""
    antithetic: bool = True
    """Schedule stratified: the window with the longest batches so far takes the shortest of the next stratum."""
    curriculum_epochs: int = Field(default=1, ge=1, le=1_000_000)
    """Schedule curriculum: epochs that begin with short samples; the later ones are stratified throughout."""
    curriculum_share: float = Field(default=0.5, gt=0, le=1)
    """Schedule curriculum: share of such an epoch that goes from short to long; the rest of it is stratified."""
    curriculum_stages: int = Field(default=8, ge=1, le=10_000)
    """Schedule curriculum: stages between short and long; inside a stage the order is stratified."""

    @model_validator(mode="after")
    def _edges_increase(self) -> PlanConfig:
        if isinstance(self.edges, list):
            if not self.edges:
                raise ValueError("edges is empty; list the upper end of every bucket in tokens, or leave it unset")
            if self.edges[0] < 1:
                raise ValueError(f"edges starts with {self.edges[0]}; an upper end is at least 1 token")
            for left, right in zip(self.edges, self.edges[1:], strict=False):
                if right <= left:
                    raise ValueError(f"edges do not increase: {right} follows {left}; list them ascending")
            if self.edges[-1] > MAX_COUNT:
                raise ValueError(f"edges ends with {self.edges[-1]}; an upper end is at most {MAX_COUNT} tokens")
            if len(self.edges) > 65_536:
                raise ValueError(f"edges lists {len(self.edges)} buckets; at most 65536 are possible")
        for name, weight in self.weights.items():
            if not 0 <= weight <= 1e6:
                raise ValueError(
                    f"weights: {name} has {weight}; a weight is 0 or more passes an epoch, at most 1000000"
                )
        return self


class TrainConfig(Section):
    """How long to train."""

    epochs: int = Field(default=6, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps, wherever the epoch is. Unset: all epochs."""
    deterministic: bool = False
    """Whether GPUs compute with algorithms that give the same bits each time, which some operations pay for with speed;
    what has none stops the run. On CPUs the bits are the same anyway."""


def devices_of(worker: str) -> list[str]:
    """Devices of a worker, which may be spread over several: their names, joined by ``+``."""
    return worker.split("+")


def tasks_in_flight(worker: str) -> int:
    """Batches that a target worker is given before the first of them is answered.

    On a card the next batch is computed while the last one is copied. A target that is spread over several cards works
    on as many batches at once.
    """
    cards = sum(name.startswith("cuda") for name in devices_of(worker))
    return max(2, cards) if cards else 1


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
    share_devices: bool = False
    """Allow a target and a drafter worker on the same GPU in pipeline mode; inline needs less memory there."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each worker process."""
    prefetch_batches: int = Field(default=4, ge=1)
    """Host batches collated ahead of each target worker."""
    prefetch_bytes: int = Field(default=2**30, ge=1)
    """Bytes of host batches collated ahead in all, at most; one batch is always made ahead."""
    pool_buffers: int | None = Field(default=None, ge=2)
    """Feature buffers that cross from targets to drafters, each of the size of the plan's largest micro-batch; the only
    backpressure there. Unset: one a target worker on a CPU, two on a GPU, four a drafter rank and one more."""
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
        return self.pool_buffers or sum(map(tasks_in_flight, self.target_devices)) + 4 * len(self.drafter_devices) + 1

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


class CheckpointConfig(Section):
    """When the run's state is written, and how much of it is kept."""

    every_steps: int = Field(default=500, ge=1)
    """Optimizer steps between checkpoints; the last step always writes one."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Minutes after which one is written too, counted from the one before. Unset: by steps alone."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this are never removed. Unset: none."""
    keep_best: str | None = None
    """Metric by which the best checkpoint is never removed, such as validation/loss. Unset: none."""
    export: Literal["none", "zlab", "speculators"] = "none"
    """Drafter folder that is written with each checkpoint, to export/step-NUMBER in the run directory, and removed
    with it."""


class EvaluateConfig(Section):
    """Real decoding of held-out prompts."""

    num_prompts: int = Field(default=64, ge=1)
    """At most this many prompts: the first of each file, in turn."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer."""
    batch_size: int = Field(default=1, ge=1)
    """Prompts that are decoded at once. A target with recurrent layers reads them one after another."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Compute type of the decode loop. Unset: `target.dtype`, in which the target fits its card. In float64 the output
    must equal greedy decoding exactly; that of 16 bits differs wherever two tokens are nearly equal."""
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
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(default=[1, 4, 16, 64], min_length=1)
    """Requests under way at once when a running server is measured: `paceline evaluate RUN --server URL`."""
    every_steps: int = Field(default=200, ge=1)
    """Optimizer steps between measurements on held-out samples during training; the last step always measures."""
    device: str | None = None
    """Device, for example cuda:7 or cpu, on which a separate process decodes `num_prompts` held-out prompts with each
    checkpoint while training continues. Unset: none."""
    wait_s: float = Field(default=600.0, ge=0)
    """Longest wait at the end of training for the decoding of the last checkpoint."""
    validation_samples: int = Field(default=64, ge=0)
    """Held-out samples measured during training, always the same with the same anchors; 0 measures none."""

    def dtype_for(self, target: TargetConfig) -> str:
        """Compute type of the decode loop with a target, by name."""
        return self.dtype or target.dtype

    @model_validator(mode="after")
    def _fits(self) -> EvaluateConfig:
        if self.tree_budget is None and (self.tree_chain_seed or self.tree_temperature != 1.0):
            raise ValueError("tree_chain_seed and tree_temperature shape trees; set tree_budget, for example 64")
        if self.tree_budget is not None and self.batch_size > 1:
            raise ValueError("tree_budget: trees decode one prompt at a time; set batch_size to 1, or drop tree_budget")
        if sorted(set(self.concurrency)) != self.concurrency:
            raise ValueError("concurrency: must ascend, each number once; for example [1, 4, 16, 64]")
        if self.temperature == 0 and self.seed:
            raise ValueError("seed: nothing is drawn in greedy decoding; set temperature above 0, or drop seed")
        return self


class ObserveConfig(Section):
    """Where the metrics of a run go. metrics.jsonl in the run directory is always written."""

    every_steps: int = Field(default=1, ge=1)
    """Optimizer steps between metric lines; a line covers all steps since the one before."""
    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """Progress on the terminal; auto is rich on a terminal and plain lines elsewhere, quiet shows warnings only."""
    plain_every_s: float = Field(default=10.0, ge=0)
    """Seconds of training between plain lines; the first and the last step always have one."""
    diagnose_every_steps: int = Field(default=200, ge=0)
    """Optimizer steps between looks at the numbers so far; what looks wrong is shown as a warning. 0: never."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Send to Weights & Biases (extra `wandb`)."""
    wandb_project: str = Field(default="paceline", min_length=1)
    """Project there, and at trackio."""
    wandb_entity: str | None = None
    """User or team there. Unset: the default of the account."""
    tensorboard: bool = False
    """Write TensorBoard event files in the run directory (extra `tensorboard`)."""
    trackio: bool = False
    """Send to trackio on this machine (extra `trackio`)."""
    alert_command: list[str] = []
    """Program and arguments that are run at an alert, which is one JSON object on its standard input. Empty: none."""
    alert_jump: float = Field(default=8.0, gt=0)
    """A step loss this many times its usual scatter above the recent steps is an alert."""
    micro_batches: bool = False
    """Write the loss of each micro-batch to micro_batches.jsonl in the run directory, and into the steps of the
    trace."""
    trace: bool = False
    """Write spans of every stage to trace.json in the run directory, which ui.perfetto.dev opens."""
    profile_steps: list[int] | None = None
    """First and last optimizer step that torch's profiler records, written to profile.json in the run directory."""
    peak_tflops: dict[str, float] = {}
    """Peak TFLOP/s of a device in its compute type, by name (cuda:0) or kind (cuda); gives the share that is used."""
    tracker_queue_lines: int = Field(default=256, ge=1)
    """Lines waiting for a slow tracker at most; beyond that the oldest are dropped for that tracker, and counted."""
    tracker_start_limit_s: float = Field(default=30.0, gt=0)
    """A tracker that has not started by then stops the run before any work."""
    tracker_close_limit_s: float = Field(default=30.0, gt=0)
    """A tracker that has not finished by then is left behind at the end of the run."""

    @model_validator(mode="after")
    def _fits(self) -> ObserveConfig:
        steps = self.profile_steps
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"profile_steps: {steps} is no range of steps; write [first, last], 1-based")
        for device, peak in self.peak_tflops.items():
            if not peak > 0:
                raise ValueError(f"peak_tflops: {device}: {peak:g}; a peak is above zero, leave out what is not known")
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
    """Metrics and where they go."""

    @property
    def decode_dtype(self) -> str:
        """Compute type of the decode loop, by name."""
        return self.evaluate.dtype_for(self.target)

    @property
    def store_path(self) -> Path:
        """Folder of the tokenized store."""
        return Path(self.data.store) if self.data.store else Path(self.run_dir) / "store"

    @property
    def heldout_store_path(self) -> Path:
        """Folder of the tokenized held-out samples, beside the store."""
        return self.store_path.with_name(self.store_path.name + "-heldout")
