"""Runs in the oracle environment: `speculators` loads drafter folders, runs its training forward, and converts z-lab
folders.

Usage: python run_speculators.py PLACE, where PLACE/request.json has `drafters` (name → speculators folder),
`documents` (token rows, packed one after another), `anchors` (per document, ascending), `convert` (name → z-lab
folder) and `target` (folder). PLACE/inputs.safetensors has `features` [S, N·D]. Writes PLACE/NAME.safetensors (hidden
states [A, K, D], logits [A, K, V], indices and mask of the labels) and PLACE/converted-NAME (folders).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.convert.dflash import DFlashConverter


@torch.no_grad()
def forward(folder, features, documents, anchors):
    """The package's training forward over packed documents, with exactly these anchors."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    lengths = [len(row) for row in documents]
    ids = torch.tensor([[token for row in documents for token in row]])
    chosen = torch.zeros_like(ids)
    start = 0
    for length, positions in zip(lengths, anchors, strict=True):
        chosen[0, [start + position for position in positions]] = 1
        start += length
    count = int(chosen.sum())
    hidden, logits, targets, mask, _ = model._backbone_forward(
        features[None],
        ids,
        chosen,
        features[None, :, : model.hidden_size],
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
        torch.cat([torch.arange(length) for length in lengths])[None],
        max_anchors=count,
    )
    return {
        "hidden": hidden[0].unflatten(0, (count, -1)),
        "logits": logits[0].unflatten(0, (count, -1)),
        "targets": targets[0].unflatten(0, (count, -1)),
        "mask": mask[0].unflatten(0, (count, -1)),
    }


def main(place: Path) -> None:
    request = json.loads((place / "request.json").read_text())
    features = load_file(request["inputs"])["features"]
    for name, folder in request["drafters"].items():
        made = forward(folder, features, request["documents"], request["anchors"])
        save_file({key: value.contiguous() for key, value in made.items()}, place / f"{name}.safetensors")
    for name, folder in request["convert"].items():
        DFlashConverter().convert(folder, place / f"converted-{name}", request["target"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
