"""micro_batches.jsonl in the run directory: the loss of each micro-batch, where `observe.micro_batches` asks for it.

One line a micro-batch: optimizer step, epoch, its place in the epoch's plan, loss, the loss weight behind it, samples.
The weighted mean of the losses of a step is that step's loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.atomic_files import open_itself
from paceline.errors import RunDirectoryError
from paceline.types import StepReport

MICRO_BATCHES_FILE = "micro_batches.jsonl"


class _StepOnly(msgspec.Struct):
    step: int


class MicroBatchFile:
    """Appends a line for each micro-batch.

    Args:
        path: the file; made if it is not there.
        first_step: step that the run continues from; what is behind it is cut off and written again.

    Raises:
        RunDirectoryError: it cannot be written, or is something else.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        try:
            self._descriptor = open_itself(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._descriptor, _length_to_keep(path, first_step))
        except OSError as error:
            if isinstance(error, RunDirectoryError):
                raise
            raise self._unwritable(error) from error

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Lines of `micro_batch_lines`.

        Raises:
            RunDirectoryError: disk full.
        """
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _unwritable(self, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(
            f"{self._path}: cannot be written ({error.strerror}); free space, or switch observe.micro_batches off"
        )


def micro_batch_lines(report: StepReport) -> Iterator[dict[str, Any]]:
    """A line for each micro-batch of a step, in the order in which they were trained."""
    for batch in report.batches:
        losses = report.sample_losses.get(batch)
        if losses is None:
            continue
        total, weight = (float(value) for value in losses.sum(axis=0))
        loss = total / weight if weight else None
        yield {
            "step": report.step,
            "epoch": report.epoch,
            "batch": int(batch),
            "loss": loss if loss is None or loss - loss == 0 else str(loss),  # JSON has no word for NaN and infinity
            "weight": weight,
            "samples": len(losses),
        }


def _length_to_keep(path: Path, first_step: int) -> int:
    keep = 0
    with path.open("rb") as file:
        for line in file:
            try:
                step = msgspec.json.decode(line, type=_StepOnly).step
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n"):  # cut off by a kill
                    break
                raise RunDirectoryError(f"{path}: not a file of micro-batches ({error}); move it away") from error
            if step > first_step:
                break
            keep += len(line)
    return keep
