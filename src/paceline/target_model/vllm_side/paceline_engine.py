"""The engine's process: token ids come in over a socket, vLLM computes, its connector hands the states on.

Started with the number of the socket. First message: the options of ``vllm.LLM``. Answer: ``{"version",
"max_model_len"}``. Then, for each batch, a list of ``{"ids", "document", "ticket", "first_token"}``. Answer: ``{}``
once vLLM has answered all. ``{"error"}`` where either fails. When the socket closes, this process ends with all that
it started.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from paceline_memory import shared_files

PATIENCE_S = 10.0
"""For vLLM's processes to end, before they are killed."""


def read(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Fill the inbox until the socket closes; then end the group of this process."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        end()


def end() -> None:
    """End vLLM's processes politely, then with SIGKILL, and this one; vLLM leaves files in shared memory even so."""
    shared = shared_files(os.getpid())
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while living_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    for path in shared:
        path.unlink(missing_ok=True)
    os.killpg(0, signal.SIGKILL)


def living_children() -> bool:
    """Whether a child is left; those that have ended are taken off the system's list."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue
    except ChildProcessError:  # there are none
        return False
    return True


def main(connection: Connection) -> None:
    """Load the engine, then answer batches."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=read, args=(connection, inbox), daemon=True).start()
    options = inbox.get()
    try:
        import vllm

        llm = vllm.LLM(**options)
        connection.send({"version": vllm.__version__, "max_model_len": llm.model_config.max_model_len})
        while True:
            answer(llm, inbox.get())
            connection.send({})
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}"})
        raise


def answer(llm: Any, documents: list[dict[str, Any]]) -> None:
    """Run a batch; returns when vLLM has answered all, a step before the last states are handed over."""
    from vllm import SamplingParams

    sampling = []
    for document in documents:
        place = {name: document[name] for name in ("document", "ticket", "first_token")}
        extra = {"kv_transfer_params": {"paceline": place}}
        sampling.append(SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=extra))
    prompts = [{"prompt_token_ids": document["ids"]} for document in documents]
    llm.generate(prompts, sampling, use_tqdm=False)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
