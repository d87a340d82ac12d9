"""The target run by vLLM: a batch's token ids go to the engine's process, features of the real tokens come back.

The engine has its own interpreter and process. It schedules, pads and cuts as it likes; its connector writes each
document's states into memory that both map (`vllm_side.paceline_memory`). Whether documents are complete is read from
their marks there, never guessed from the order of answers.

Shape letters: S real tokens of the batch, N taps, H hidden size.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from paceline.config.schema import TargetConfig, devices_of
from paceline.errors import TargetError
from paceline.target_model.facts import describe_target
from paceline.target_model.files import resolve_folder
from paceline.target_model.load import torch_dtype
from paceline.target_model.vllm_environment import find_vllm
from paceline.target_model.vllm_side.paceline_memory import HEADER_BYTES, SharedStates, shared_files
from paceline.types import FeatureBatch, HostBatch

SIDE = Path(__file__).parent / "vllm_side"
"""Files that vLLM's interpreter runs."""
ATTEMPTS = 3
"""Times that a document is asked for, where the engine aborts its request."""
POLL_S = 0.0005
"""Between two looks at the marks."""
CAUSE = re.compile(r"\b([A-Z]\w*(?:Error|Exception|Exit)): (.+)")
"""An exception in vLLM's log."""
EFFECTS = ("Engine core initialization failed", "EngineCore encountered an issue", "cancelled", "leaked")
"""What vLLM says of an exception that it has logged before."""


class VllmTarget:
    """A frozen target with taps that vLLM runs in a process of its own.

    Args:
        settings: the target's.
        taps: tapped layer ids, in feature order.
        device: of the engine; several, joined by ``+``, share the target by tensor parallelism.
        with_last: whether the last layer's states are handed over too.
        longest: tokens of the longest document.
        log: file for what vLLM says.

    Raises:
        TargetError: vLLM is missing or too old, or does not load the target; one line.
    """

    def __init__(
        self, settings: TargetConfig, taps: Sequence[int], device: str, *, with_last: bool, longest: int, log: Path
    ) -> None:
        environment = find_vllm(settings)
        self.facts, self.taps, self.dtype = describe_target(settings), list(taps), torch_dtype(settings.dtype)
        self._settings, self._device, self._with_last, self._log = settings, device, with_last, log
        self._layers = sorted({tap + 1 for tap in taps} | ({self.facts.num_layers} if with_last else set()))
        self._ticket = 0
        self._shared_files: set[Path] = set()
        self._file = os.memfd_create("paceline-features")
        os.ftruncate(self._file, HEADER_BYTES)
        memory = f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory = SharedStates(memory)
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as said:
            self._process = subprocess.Popen(
                [environment.python, SIDE / "paceline_engine.py", str(theirs.fileno())],
                env=_variables(device),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        options = engine_options(settings, self.facts.max_position_embeddings, longest, device)
        self._connection.send(options | extraction(self._layers, memory, settings.dtype))
        try:
            found = self._answer("loads the target", patience_s=None)
        except TargetError:
            self.close()
            raise
        self._shared_files = shared_files(self._process.pid)
        self.version: str = found["version"]
        self._longest: int = found["max_model_len"] - 1

    def features(self, host: HostBatch, out: Tensor | None = None) -> FeatureBatch:
        """Tap outputs of the real tokens of a batch, on the host.

        Args:
            host: the batch, right-padded.
            out: buffer [S, N·H] of the target's type to write into; new memory where None.

        Raises:
            TargetError: the engine refuses, is gone, or makes no step for `target.vllm_patience_s`; one line.
        """
        lengths = np.asarray(host.lengths, dtype=np.int64)
        self._check(host, lengths)
        tokens, hidden = int(lengths.sum()), self.facts.hidden_size
        shape = (tokens, len(self._layers), hidden)
        size = HEADER_BYTES + tokens * len(self._layers) * hidden * self.dtype.itemsize
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self._run(host, lengths)
        states = self._memory.states(0, shape, self.dtype)
        features = torch.empty(tokens, len(self.taps) * hidden, dtype=self.dtype) if out is None else out
        for place, tap in enumerate(self.taps):
            features[:, place * hidden : (place + 1) * hidden] = states[:, self._layers.index(tap + 1)]
        last = states[:, -1].clone() if self._with_last else None
        return FeatureBatch(host=host, features=features, last_hidden=last)

    def close(self) -> None:
        """End the engine and all of its processes, and give the memory back."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._end_group()
        os.close(self._file)

    def _end_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for path in self._shared_files:  # vLLM's own, which it removes where it ends by itself
            path.unlink(missing_ok=True)

    def _check(self, host: HostBatch, lengths: np.ndarray) -> None:
        ids = np.asarray(host.ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.facts.vocab_size):
            raise TargetError(
                f"batch {host.planned.index}: token id {int(ids.max())} is outside the target's vocabulary of "
                f"{self.facts.vocab_size}; was the store made with another tokenizer?"
            )
        if lengths.max() > self._longest:
            row = int(np.asarray(host.planned.rows)[lengths.argmax()])
            raise TargetError(
                f"batch {host.planned.index}: sample {row} has {lengths.max()} tokens, and the engine takes "
                f"{self._longest}; raise target.vllm.max_model_len, or lower data.max_length"
            )

    def _run(self, host: HostBatch, lengths: np.ndarray) -> None:
        """Have the engine write the states of all documents; those whose requests it aborts are asked for again."""
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        missing = list(range(len(lengths)))
        for _ in range(ATTEMPTS):
            self._ticket += 1
            asked = [
                {
                    "ids": host.ids[row, : lengths[row]].tolist(),
                    "document": row,
                    "ticket": self._ticket,
                    "first_token": int(starts[row]),
                }
                for row in missing
            ]
            self._send(asked)
            self._answer(f"computes batch {host.planned.index}", self._settings.vllm_patience_s)
            self._await_marks(missing, host)
            missing = [row for row in missing if int(self._memory.marks[row]) != self._ticket]
            if not missing:
                return
        rows = np.asarray(host.planned.rows)[missing].tolist()
        raise TargetError(
            f"vLLM aborted samples {rows} of batch {host.planned.index} {ATTEMPTS} times; see {self._log}"
        )

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._gone("takes a batch")

    def _answer(self, doing: str, patience_s: float | None) -> dict[str, Any]:
        """The engine's answer to the last message."""
        for _ in self._waiting(doing, patience_s):
            try:
                if not self._connection.poll(0.05):
                    continue
                answer = self._connection.recv()
            except (EOFError, OSError):
                self._gone(doing)
            if "error" in answer:
                raise TargetError(f"vLLM failed while it {doing}: {self._cause(answer['error'])}; see {self._log}")
            return answer
        raise AssertionError("waits until it answers")

    def _await_marks(self, rows: list[int], host: HostBatch) -> None:
        """Until each of these documents is there, or aborted."""
        for _ in self._waiting(f"hands over batch {host.planned.index}", self._settings.vllm_patience_s):
            if bool((self._memory.marks[rows].abs() == self._ticket).all()):
                return
            time.sleep(POLL_S)

    def _waiting(self, doing: str, patience_s: float | None) -> Iterator[None]:
        """Goes round until its user has what it waits for; fails where the engine is gone or makes no step."""
        steps, since = int(self._memory.progress), time.monotonic()
        while True:
            yield
            if self._process.poll() is not None:
                self._gone(doing)
            if int(self._memory.progress) != steps:
                steps, since = int(self._memory.progress), time.monotonic()
            elif patience_s is not None and time.monotonic() - since > patience_s:
                self._end_group()
                raise TargetError(
                    f"vLLM made no step for {patience_s:g} s while it {doing}, and was ended; see {self._log}, or "
                    "raise target.vllm_patience_s"
                )

    def _gone(self, doing: str) -> NoReturn:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            code = None
        self._end_group()
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended ({code})"
        cause = self._cause("")
        raise TargetError(f"vLLM {how} while it {doing}{': ' + cause if cause else ''}; see {self._log}")

    def _cause(self, said: str) -> str:
        """The first exception in the engine's log that is no effect of another; what it `said` itself without one."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        lines = [line for line in text.splitlines() if " WARNING " not in line]
        found = [f"{kind}: {line.strip()}" for kind, line in CAUSE.findall("\n".join(lines))]
        causes = [line for line in found if not any(effect in line for effect in EFFECTS)]
        return next(iter(causes), (said.strip().splitlines() or [""])[0])[:500]


def engine_options(settings: TargetConfig, positions: int | None, longest: int, device: str) -> dict[str, Any]:
    """Options of ``vllm.LLM``: those of `target.vllm` before our own defaults.

    Args:
        settings: the target's.
        positions: that its configuration allows; None where it does not say.
        longest: tokens of the longest document; one more is generated.
        device: of the engine.
    """
    return {
        "max_model_len": min(longest + 1, positions or longest + 1),
        "tensor_parallel_size": len(devices_of(device)),
        "enforce_eager": device == "cpu",
        **settings.vllm,
        "model": str(resolve_folder(settings.path)),
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # tokens that are not computed have no states
    }


def extraction(layers: list[int], memory: str, dtype: str) -> dict[str, Any]:
    """Options of ``vllm.LLM`` that make it hand out states.

    Args:
        layers: whose outputs, ascending; vLLM counts from the embedding, so tap i is layer i + 1, and the last layer's
            output is before the final norm.
        memory: path of the memory that they are written into.
        dtype: their type, by name.
    """
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "PacelineConnector",
            "kv_connector_module_path": "paceline_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"memory": memory, "dtype": dtype},
        },
    }


def _variables(device: str) -> dict[str, str]:
    """Environment of the engine: no paths of this Python, and the cards of its worker alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept |= {"PYTHONPATH": str(SIDE), "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if device == "cpu":
        return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | kept
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [int(name.partition(":")[2] or 0) for name in devices_of(device)]
    cards = visible.split(",") if visible else [str(number) for number in range(max(numbers) + 1)]
    return kept | {"CUDA_VISIBLE_DEVICES": ",".join(cards[number] for number in numbers)}
