"""Which engine serves which drafter as it was trained, with which command line, and what keeps it from that.

What is said here of an engine was read in its code or seen when it ran: vLLM 0.32, z-lab dflash 0.1.0, SGLang's main
branch (read only, never run). Torch-free.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ExportError

if TYPE_CHECKING:
    from paceline.config import TargetConfig
    from paceline.drafter.spec import DrafterSpec

SGLANG, VLLM, ZLAB = "SGLang", "vLLM", "z-lab dflash"
ENGINES = {"zlab": (SGLANG, VLLM, ZLAB), "speculators": (VLLM,)}
"""Format → the engines that read it."""
ZLAB_TARGETS = ("qwen3", "llama")
"""Model types that ``dflash generate transformers`` is made for."""
VLLM_BY_TRANSFORMERS = (
    *("bloom", "cohere", "cohere2", "dbrx", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "glm4"),
    *("glm4_moe", "gpt2", "gptj", "granitemoe", "mixtral", "nemotron", "olmoe", "opt", "qwen2_moe", "stablelm"),
)
"""Model types whose classes in vLLM 0.32 do not hand over the outputs of layers; transformers' classes there do. Tried
with gemma3_text only."""
MERGED = "MERGED_TARGET"
"""Stands in commands for the folder of a target with its adapter merged into it."""
HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""A target that the hub knows, if no folder has that name."""
HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
"""A folder of the hub's local cache, which shows the name."""


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """The target as engines name it.

    Attributes:
        path: folder, file or hub name, as this machine finds it.
        model_type: of its text part; empty where unknown.
        adapter: folder of the adapter that was merged into it.
        quantization: see `TargetConfig`.
        trust_remote_code: whether its own code ran.
        embedding_scale: its first layer gets this times the stored embedding; None where that is no multiple.
    """

    path: str
    model_type: str = ""
    adapter: str | None = None
    quantization: str = "stored"
    trust_remote_code: bool = False
    embedding_scale: float | None = 1.0

    @classmethod
    def of(cls, settings: TargetConfig, model_type: str = "", embedding_scale: float | None = 1.0) -> ServedTarget:
        """The target of some settings."""
        return cls(
            settings.path,
            model_type,
            settings.adapter,
            settings.quantization,
            settings.trust_remote_code,
            embedding_scale,
        )

    @property
    def hub_name(self) -> str | None:
        """Its name on the hub; None for a folder that does not tell."""
        if found := HUB_CACHE.search(str(Path(self.path).expanduser())):
            return "/".join(found.groups())
        return self.path if HUB_NAME.match(self.path) and not Path(self.path).exists() else None

    @property
    def name(self) -> str:
        """Its hub name, or the last part of its path: what a card may show."""
        return self.hub_name or Path(self.path).name

    @property
    def changed(self) -> str | None:
        """How the weights that the drafter learned from differ from those under `path`; None where they do not."""
        if self.adapter is not None:
            return f"{self.name} with the adapter {Path(self.adapter).name} merged into it"
        if self.quantization in ("8bit", "4bit"):
            return f"{self.name}, quantized to {self.quantization} by bitsandbytes on loading"
        if self.quantization == "none":
            return f"{self.name}, its quantized weights widened"
        return None


def check_servable(spec: DrafterSpec) -> None:
    """Refuse a drafter that no engine computes as it was trained.

    Raises:
        ExportError: one line for each error: taps that do not ascend, a bidirectional window smaller than the block.
    """
    errors = []
    if list(spec.taps) != sorted(spec.taps):
        errors.append(
            f"taps {list(spec.taps)}: must ascend; vLLM hands over the target's layers in ascending order, whatever a "
            "folder says; train with target.taps in ascending order"
        )
    small = spec.sliding_window is not None and spec.sliding_window < spec.block_size
    if small and ("sliding", False) in zip(spec.layers, spec.causal, strict=True):
        errors.append(
            f"sliding_window {spec.sliding_window}: smaller than the block of {spec.block_size}, with bidirectional "
            "sliding layers; engines also limit how far such a slot sees ahead, and training does not; use a window "
            "of at least the block, or causal sliding layers"
        )
    if errors:
        raise ExportError(*errors)


def obstacles(spec: DrafterSpec, format: str, target: ServedTarget) -> dict[str, str]:
    """Engine → why it does not serve this drafter as it was trained; engines without an obstacle are left out."""
    return {engine: reason for engine in ENGINES[format] if (reason := _obstacle(engine, spec, format, target))}


def _obstacle(engine: str, spec: DrafterSpec, format: str, target: ServedTarget) -> str | None:
    kinds = set(zip(spec.layers, spec.causal, strict=True))
    if spec.sample_from_anchor:
        return "it drafts from the anchor (sample_from_anchor), which no released engine does"
    if engine == SGLANG:
        if kinds & {("sliding", False), ("full", True)}:
            return "SGLang computes full layers as bidirectional and sliding ones as causal, whatever a folder says"
        if target.embedding_scale != 1:
            return "whether SGLang scales the embedding as the target does depends on the target's code there"
    if engine == VLLM and format == "zlab" and target.embedding_scale != 1:
        return "vLLM drops the scale of the target's embedding; export with --format speculators for it"
    if engine == ZLAB:
        if spec.num_target_layers - 1 in spec.taps:
            return f"it takes the last layer's output (tap {spec.num_target_layers - 1}) after the final norm"
        plain = target.changed is None and not target.trust_remote_code and not target.path.endswith(".gguf")
        if target.model_type not in ZLAB_TARGETS or not plain:
            return "it loads plain Qwen3 and Llama targets only"
    return None


def serving_commands(
    spec: DrafterSpec, format: str, folder: str, target: ServedTarget, *, model: str | None = None
) -> dict[str, str]:
    """Engine → the command line that serves target and drafter; only engines that serve them as trained.

    Args:
        spec, format, target: what is served.
        folder: of the drafter, as the commands name it.
        model: how the commands name the target; None for its path.
    """
    if model is None:
        model = MERGED if target.adapter is not None else target.path
    commands = {
        engine: command_line(serving_words(engine, model, target, spec=spec, folder=folder))
        for engine in (SGLANG, VLLM)
    }
    shown, draft = shlex.quote(model), shlex.quote(folder)
    commands[ZLAB] = f'dflash generate transformers --model {shown} --draft {draft} "Why is the sky blue?"'
    hindered = obstacles(spec, format, target)
    return {engine: commands[engine] for engine in ENGINES[format] if engine not in hindered}


def serving_words(
    engine: str, model: str, target: ServedTarget, *, spec: DrafterSpec | None = None, folder: str = ""
) -> list[str]:
    """Words of the command that starts vLLM or SGLang.

    Args:
        engine: which.
        model: how the command names the target.
        target: the target.
        spec, folder: of the drafter; None serves the target without one.
    """
    if engine == VLLM:
        words = ["vllm", "serve", model]
        if spec is not None:
            speculative = {"method": "dflash", "model": folder, "num_speculative_tokens": spec.num_drafts}
            words += ["--speculative-config", json.dumps(speculative)]
        if target.model_type in VLLM_BY_TRANSFORMERS:
            words += ["--model-impl", "transformers"]
    else:
        words = ["python", "-m", "sglang.launch_server", "--model-path", model]
        if spec is not None:
            words += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", folder]
    words += ["--quantization", "bitsandbytes"] if target.quantization == "4bit" else []
    return words + (["--trust-remote-code"] if target.trust_remote_code else [])


def command_line(words: Sequence[str]) -> str:
    """Words as a shell takes them, each flag on a line."""
    return " ".join(f"\\\n    {word}" if word.startswith("--") else shlex.quote(word) for word in words)


def serving_notes(spec: DrafterSpec, format: str, target: ServedTarget) -> list[str]:
    """What to know before serving this drafter, one sentence each."""
    return [
        *(f"Not for {engine}: {why}." for engine, why in obstacles(spec, format, target).items()),
        *_notes(spec, target),
    ]


def _notes(spec: DrafterSpec, target: ServedTarget) -> Iterator[str]:
    if target.changed is not None:
        yield (
            f"It was trained for {target.changed}: serve those weights, not the plain ones"
            + (" (MERGED_TARGET: save the merged model to a folder first)." if target.adapter is not None else ".")
        )
    if target.model_type in VLLM_BY_TRANSFORMERS:
        yield (
            f"vLLM 0.32 takes layers' outputs of a {target.model_type} target from transformers' class only "
            "(--model-impl transformers), which is slower than its own."
        )
    if target.path.endswith(".gguf"):
        yield "Its target is a GGUF file: engines may want a folder with the same weights, and a tokenizer."
    if not set(spec.layers) <= {"full"} and "full" in spec.layers:
        yield "It mixes sliding and full layers: vLLM serves that on GPUs only."
    if spec.num_target_layers - 1 in spec.taps:
        yield (
            f"Tap {spec.num_target_layers - 1} is the target's last layer, before the final norm: vLLM serves that; "
            "other engines were not tried."
        )
    if "sliding" in spec.layers:
        yield (
            f"An engine that drops the window of {spec.sliding_window} tokens accepts as well on short contexts and "
            "fails on long ones: compare the golden tensors."
        )


def training_notes(spec: DrafterSpec) -> list[str]:
    """What to know of serving before a drafter like this one is trained, one sentence each."""
    notes = []
    if spec.sample_from_anchor:
        notes.append("drafter.sample_from_anchor: no released engine serves such a drafter, only paceline decodes it")
    if (last := spec.num_target_layers - 1) in spec.taps:
        notes.append(f"target.taps: {last} is the target's last layer; vLLM serves that, z-lab dflash does not")
    return notes
