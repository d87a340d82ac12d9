"""Runs in vLLM's environment: one engine with little cache, whose requests are cut, preempted and aborted.

Reads PLACE/request.json: `options` of ``vllm.LLM``, and `documents`, what `paceline_engine` gets for a batch. Asks for
all of them, aborts them while they are computed, then asks again. Writes PLACE/found.json: `preempted` (how often),
`marks` after the abort, and `steps` of the engine for the second time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import paceline_engine
from paceline_memory import SharedStates
from vllm import LLM, SamplingParams


def main(place: Path) -> None:
    request = json.loads((place / "request.json").read_text())
    llm = LLM(**request["options"])
    memory = SharedStates(request["options"]["kv_transfer_config"]["kv_connector_extra_config"]["memory"])
    documents = request["documents"]
    for document in documents:
        where = {name: document[name] for name in ("document", "ticket", "first_token")}
        extra = {"kv_transfer_params": {"paceline": where}}
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=extra)
        llm.llm_engine.add_request(str(document["document"]), {"prompt_token_ids": document["ids"]}, params)
    before = int(memory.progress)
    while int(memory.progress) < before + 3:
        time.sleep(0.001)
    llm.llm_engine.abort_request([str(document["document"]) for document in documents])
    marks = marks_of(memory, documents)
    before = int(memory.progress)
    again = [{**document, "ticket": document["ticket"] + 1} for document in documents]
    paceline_engine.answer(llm, again)
    marks_of(memory, again)
    preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    found = {"preempted": preempted, "marks": marks, "steps": int(memory.progress) - before}
    (place / "found.json").write_text(json.dumps(found))


def marks_of(memory: SharedStates, documents: list[dict[str, Any]]) -> list[int]:
    """The marks of the documents, once each is there or aborted."""
    while any(abs(int(memory.marks[entry["document"]])) != entry["ticket"] for entry in documents):
        time.sleep(0.001)
    return memory.marks[: len(documents)].tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
