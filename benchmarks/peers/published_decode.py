"""Runs in the oracle environment, for `benchmarks/decode.py`: the published `dflash` answers prompts when told to.

Usage: python published_decode.py TARGET DRAFTER. Each line of standard input is {"prompt": ids, "tokens": N}; each line
of standard output {"ids": new ids, "passes": P, "seconds": wall time, "busy": processor time}, the prompt included.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from dflash import model as package
from transformers import AutoModelForCausalLM


def main(target_folder: str, drafter_folder: str) -> None:
    """Load both models, then answer line by line."""
    package._cuda_time = time.perf_counter
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    drafter = package.DFlashDraftModel.from_pretrained(drafter_folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = torch.tensor([asked["prompt"]])
        started, busy = time.perf_counter(), time.process_time()
        done = package.dflash_generate(drafter, target, prompt, asked["tokens"], None, return_stats=True)
        seconds, busy = time.perf_counter() - started, time.process_time() - busy
        ids = done.output_ids[0, prompt.shape[1] :].tolist()
        found = {"ids": ids, "passes": len(done.acceptance_lengths), "seconds": seconds, "busy": busy}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
