"""Runs in the oracle environment: losses, weights and acceptance of the published `speculators` on given logits.

Reads ``request.json`` {logits, teacher: [A, K, V]; mask: [A, K]; gamma, alpha} from the folder given as argument and
writes ``answer.json``. Its labels are the teacher's argmax; slot 0 is the anchor.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash.metrics import compute_metrics

place = Path(sys.argv[1])
request = json.loads((place / "request.json").read_text())
mask = torch.tensor(request["mask"], dtype=torch.float64).reshape(1, -1)
block = len(request["mask"][0])
teacher = torch.tensor(request["teacher"], dtype=torch.float64).flatten(0, 1)[None]
answers = {}
for term in ("ce", "kl_div", "tv"):
    for weights in ("fixed-exp-decay", "dpace") if term == "ce" else ("fixed-exp-decay",):
        logits = torch.tensor(request["logits"], dtype=torch.float64).flatten(0, 1)[None].requires_grad_()
        loss, metrics = compute_metrics(
            logits,
            teacher,
            mask,
            block,
            gamma=request["gamma"],
            loss_config=resolve_loss_config(term, "eager"),
            per_position_loss_weight=weights,
            dpace_alpha=request["alpha"],
        )
        loss.backward()
        answers[f"{term} {weights}"] = {
            "loss": loss.item(),
            "gradient": logits.grad.reshape(-1, block, logits.shape[-1]).tolist(),
            "metrics": {name: float(value) for name, value in metrics.items()},
        }
(place / "answer.json").write_text(json.dumps(answers))
