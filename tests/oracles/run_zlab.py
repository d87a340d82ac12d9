"""Runs in the oracle environment: the published `dflash` loads drafter folders, drafts and generates.

Usage: python run_zlab.py PLACE, where PLACE/request.json has `target` (folder), `drafters` (name → folder) and `rows`
({"prompt": ids, "context": number of tokens, "row": ids}). Writes PLACE/NAME.safetensors (float32 hidden states and
logits of one block behind each row's context) and PLACE/answers.json (per drafter and row: tokens and accepted
lengths in float64).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from dflash import model as package
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


@torch.no_grad()
def draft(model, target, row, context):
    """Hidden states and logits of the block whose anchor is row[context]; the taps are the package's own reading."""
    ids = torch.tensor([row[: context + 1]])
    states = target(ids, output_hidden_states=True).hidden_states
    features = package.extract_context_feature(states, model.target_layer_ids)[:, :context]
    block = torch.full((1, model.block_size), model.mask_token_id)
    block[:, 0] = row[context]
    hidden = model(
        target_hidden=features,
        noise_embedding=target.get_input_embeddings()(block),
        position_ids=torch.arange(context + model.block_size)[None],
    )
    return {"features": features[0], "hidden": hidden[0], "logits": model.compute_logits(hidden, target.lm_head)[0]}


def main(place: Path) -> None:
    request = json.loads((place / "request.json").read_text())
    package._cuda_time = time.perf_counter
    answers = {}
    targets = {
        dtype: AutoModelForCausalLM.from_pretrained(request["target"], dtype=dtype).eval()
        for dtype in (torch.float32, torch.float64)
    }
    for name, folder in request["drafters"].items():
        model = package.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
        tensors = {}
        for index, row in enumerate(request["rows"]):
            made = draft(model, targets[torch.float32], row["row"], row["context"])
            tensors |= {f"{index}.{key}": value.contiguous() for key, value in made.items()}
        save_file(tensors, place / f"{name}.safetensors")
        model = model.double()
        answers[name] = []
        for row in request["rows"]:
            count = len(row["row"]) - len(row["prompt"])
            done = package.dflash_generate(
                model, targets[torch.float64], torch.tensor([row["prompt"]]), count, None, return_stats=True
            )
            plain = model.spec_generate(targets[torch.float64], torch.tensor([row["prompt"]]), count, None)
            assert torch.equal(plain, done.output_ids)
            answers[name].append({"ids": done.output_ids[0].tolist(), "accepted": done.acceptance_lengths})
    (place / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
