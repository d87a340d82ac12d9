"""Prefill of the tapped, early-stopped target against plain ``model(..., output_hidden_states=True)``.

    python benchmarks/target.py [--target FOLDER] [--device cuda:0] [--rows 4] [--length 512] [--repeats 10]

The same right-padded batches through both, in turns; prints real tokens per second (median over repeats), their ratio
beside the share of layers that are skipped, and the bytes of what each keeps alive at its end: features against all
hidden states and logits. On CUDA the peak of allocated memory is printed too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paceline.config import TargetConfig
from paceline.target.facts import describe
from paceline.target.load import load_target
from paceline.target.structure import row_arguments
from paceline.target.taps import default_taps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="src/paceline/assets/demo/target")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--taps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    facts = describe(arguments.target)
    taps = default_taps(facts.num_layers, arguments.taps)
    target = load_target(TargetConfig(path=arguments.target), taps, arguments.device, arguments.dtype)
    rng = np.random.default_rng(0)
    ids = torch.as_tensor(rng.integers(0, facts.vocab_size, (arguments.rows, arguments.length)), device=target.device)
    lengths = [arguments.length - (arguments.length // 16) * row for row in range(arguments.rows)]
    mask = (torch.arange(arguments.length)[None] < torch.tensor(lengths)[:, None]).long().to(target.device)

    @torch.no_grad()
    def plain() -> int:
        output = target.model(**row_arguments(target.model, ids), attention_mask=mask, output_hidden_states=True)
        kept = [*output.hidden_states, output.logits]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def tapped() -> int:
        features, _ = target.tap_rows(ids, lengths)
        return features.numel() * features.element_size()

    seconds: dict[str, list[float]] = {"plain": [], "tapped": []}
    size, peak = {}, {}
    for repeat in range(arguments.repeats + 1):
        for name, call in (("plain", plain), ("tapped", tapped)):
            size[name], took, peak[name] = timed(call, target.device)
            if repeat:
                seconds[name].append(took)
    real = sum(lengths)
    table = Table("forward", "real tokens/s", "bytes kept", "peak bytes", title=f"{arguments.target}, taps {taps}")
    for name, values in seconds.items():
        table.add_row(name, f"{real / statistics.median(values):,.0f}", f"{size[name]:,}", f"{peak[name]:,}")
    Console().print(table)
    ratio = statistics.median(seconds["plain"]) / statistics.median(seconds["tapped"])
    run = (max(taps) + 1) / facts.num_layers
    Console().print(
        f"tapped is {ratio:.2f}x as fast; {1 - run:.0%} of the layers are skipped (1/{run:.2f} = {1 / run:.2f})"
    )


def timed(call: Callable[[], int], device: torch.device) -> tuple[int, float, int]:
    """What a call returns, its seconds, and on CUDA the peak of allocated bytes (else 0)."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    value = call()
    if cuda:
        torch.cuda.synchronize(device)
    return value, time.perf_counter() - started, torch.cuda.max_memory_allocated(device) if cuda else 0


if __name__ == "__main__":
    main()
