"""Runs in vLLM's environment: one engine decodes prompts greedily in float32, with or without a drafter.

Usage: python run_vllm.py PLACE, where PLACE/request.json has `target` (folder), `drafter` (folder or null), `tokens`
(speculative tokens), `prompts` (token ids), `stops` (stop token ids of each prompt), `max_tokens`. Writes
PLACE/answer.json: `answers` (token ids), `accepted` (drafts of each step of each answer) and the engine's counters.
"""

from __future__ import annotations

import json
import sys
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
