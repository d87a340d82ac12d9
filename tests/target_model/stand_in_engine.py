"""Started by a false vLLM environment: speaks like `paceline_engine`, with states that follow from the token ids.

State n of a token is its id + 1000 · layer. The first token of a batch says what goes wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from paceline_memory import SharedStates

ABORTS, ALWAYS_ABORTS, FAILS, DIES, HANGS = 90, 91, 92, 93, 94
NO_ROOM = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."


def main(connection: Connection) -> None:
    options = connection.recv()
    extra = options["kv_transfer_config"]["kv_connector_extra_config"]
    layers = options["speculative_config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    memory = SharedStates(extra["memory"])
    if options.get("no_room"):
        print(f"(EngineCore pid=7) ERROR {NO_ROOM}", flush=True)
        print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        connection.send({"error": "RuntimeError: Engine core initialization failed. See root cause above."})
        return
    connection.send({"version": "0.32.0", "max_model_len": options["max_model_len"]})
    attempts = 0
    while True:
        documents = connection.recv()
        behavior = documents[0]["ids"][0]
        if behavior == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if behavior == HANGS:
            time.sleep(60)
        if behavior == FAILS:
            connection.send({"error": "EngineDeadError: EngineCore encountered an issue."})
            continue
        connection.send({})
        for document in reversed(documents):
            if behavior == ALWAYS_ABORTS or (behavior == ABORTS and document["document"] == 0 and attempts == 0):
                attempts += 1
                memory.marks[document["document"]] = -document["ticket"]
                continue
            write(memory, document, layers, getattr(torch, extra["dtype"]))
            memory.marks[document["document"]] = document["ticket"]


def write(memory: SharedStates, document: dict[str, Any], layers: list[int], dtype: torch.dtype) -> None:
    ids, hidden = torch.tensor(document["ids"]), 32
    states = ids[:, None, None] + 1000 * torch.tensor(layers)[None, :, None] + torch.zeros(1, 1, hidden)
    first = document["first_token"] * len(layers) * hidden
    memory.states(first, tuple(states.shape), dtype).copy_(states)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
