"""Writes checkpoints in the background, one at a time; training stops only while the state is copied to the host.

The copy is the caller's: nobody changes its tensors before `wait` has returned (`Learner.save`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint import checkpoints
from paceline.checkpoint.retention import Best
from paceline.config import CheckpointConfig


class CheckpointWriter:
    """Writes the checkpoints of a run; pickles as long as it has written nothing.

    Args:
        run_dir: the run.
        config: how much is kept.
        best: how the best is found, where it is kept.
        note: plain values that every checkpoint carries.
        export: writes the drafter folder of a step from its tensors, once the checkpoint is there.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        *,
        best: Best | None = None,
        note: Mapping[str, Any] | None = None,
        export: Callable[[int, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._run_dir, self._config, self._best = run_dir, config, best
        self._note, self._export = dict(note or {}), export
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._newest: int | None = None

    def put(self, step: int, state: Mapping[str, Any], note: Mapping[str, Any] | None = None) -> None:
        """Begin to write; waits only where the write before is not done. A step that was put before is left alone.

        Args:
            step: optimizer steps done.
            state: a copy of the learner's.
            note: further plain values for this checkpoint.

        Raises:
            PacelineError: the write before failed.
        """
        self.wait()
        if step == self._newest:
            return
        if self._newest is None:
            checkpoints.clear_unfinished(self._run_dir)
        self._newest = step
        arguments = (step, state, {**self._note, **(note or {})})
        self._thread = threading.Thread(target=self._write, args=arguments, name="paceline checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Never waits.

        Raises:
            PacelineError: a write has failed since the last look.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until everything is on disk.

        Raises:
            PacelineError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, step: int, state: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        config = self._config
        try:
            checkpoints.write_checkpoint(
                self._run_dir,
                step,
                state,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                keep_best=self._best,
                note=note,
            )
            if self._export is not None:
                self._export(step, state["network"])
        except Exception as error:  # noqa: BLE001 - raised by the next look
            self._error = error
