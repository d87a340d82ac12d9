"""Runs in vLLM's environment: engines decode prompts greedily in float32, with or without a drafter.

Reads a folder PLACE from each line of standard input and prints the exit code of the engine that ran for it. Every
engine is a fork of this process, because importing vLLM takes as long as all the rest. PLACE/request.json has `target`
(folder), `model_impl`, `drafter` (folder or null), `tokens` (speculative tokens), `prompts` (token ids), `stops` (stop
token ids of each prompt), `max_tokens`. Writes PLACE/answer.json: `answers` (token ids), `accepted` (drafts of each
step of each answer) and the engine's counters; and PLACE/log.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from vllm import LLM, SamplingParams

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def main(place: Path) -> None:
    request = json.loads((place / "request.json").read_text())
    drafter = request["drafter"]
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": request["tokens"]}
    engine = LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        model_impl=request["model_impl"],
        max_model_len=256,
        enforce_eager=True,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed" if drafter else "none",
        speculative_config=speculative if drafter else None,
    )
    sampling = [
        SamplingParams(temperature=0, max_tokens=request["max_tokens"], stop_token_ids=stops, detokenize=False)
        for stops in request["stops"]
    ]
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling, use_tqdm=False)
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    found = {"answers": [list(output.outputs[0].token_ids) for output in outputs]}
    if drafter:
        found |= {name: metrics[f"vllm:spec_decode_{name}"].value for name in COUNTERS}
        found["accepted"] = [output.outputs[0].spec_decode_metrics.per_step_accepted for output in outputs]
        found["by_slot"] = list(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values)
    (place / "answer.json").write_text(json.dumps(found))


def fork(place: Path) -> int:
    """Exit code of `main` in a process of its own."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        main(place)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        print(fork(Path(line.strip())), flush=True)
