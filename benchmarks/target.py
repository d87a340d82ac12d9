"""Prefill of the tapped, early-stopped target against plain ``model(..., output_hidden_states=True)``.

    python benchmarks/target.py [--target FOLDER] [--device cuda:0] [--rows 4] [--length 512] [--repeats 10]

The same right-padded batches through both, in turns; prints real tokens per second (median over repeats), their ratio
beside the share of layers that are skipped, and the memory of each: the bytes that it keeps alive at its end (features
against all hidden states and logits), and how far it rises while it runs. On CUDA that is the peak of allocated memory
above the weights; on the CPU the peak of resident memory above that of the loaded model, each forward in a process of
its own (Linux only).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paceline.config import TargetConfig
from paceline.target_model.facts import describe
from paceline.target_model.introspect import row_arguments
from paceline.target_model.load import load_target
from paceline.target_model.taps import default_taps


def options() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="src/paceline/assets/demo/target")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--taps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rise-of", choices=("plain", "tapped"), help=argparse.SUPPRESS)
    return parser.parse_args()


class Forwards:
    """Both forwards over one batch."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.facts = describe(arguments.target)
        self.taps = default_taps(self.facts.num_layers, arguments.taps)
        settings = TargetConfig(path=arguments.target)
        self.target = load_target(settings, self.taps, arguments.device, arguments.dtype)
        rng = np.random.default_rng(0)
        ids = rng.integers(0, self.facts.vocab_size, (arguments.rows, arguments.length))
        self.ids = torch.as_tensor(ids, device=self.target.device)
        self.lengths = [arguments.length - (arguments.length // 16) * row for row in range(arguments.rows)]
        real = torch.tensor(self.lengths)[:, None]
        self.mask = (torch.arange(arguments.length)[None] < real).long().to(self.target.device)

    @torch.no_grad()
    def plain(self, width: int | None = None) -> int:
        """All hidden states and logits; gives their bytes."""
        ids, mask = self.ids[:, :width], self.mask[:, :width]
        output = self.target.model(
            **row_arguments(self.target.model, ids), attention_mask=mask, output_hidden_states=True
        )
        return sum(tensor.numel() * tensor.element_size() for tensor in [*output.hidden_states, output.logits])

    def tapped(self, width: int | None = None) -> int:
        """Features; gives their bytes."""
        lengths = [min(length, width or length) for length in self.lengths]
        features, _ = self.target.tap_rows(self.ids[:, :width], lengths)
        return features.numel() * features.element_size()


def main() -> None:
    """Measure and print."""
    arguments = options()
    if arguments.rise_of:
        print(rise_of(Forwards(arguments), arguments.rise_of))
        return
    forwards = Forwards(arguments)
    seconds: dict[str, list[float]] = {"plain": [], "tapped": []}
    size, peak = {}, {}
    for repeat in range(arguments.repeats + 1):
        for name, call in (("plain", forwards.plain), ("tapped", forwards.tapped)):
            size[name], took, peak[name] = timed(call, forwards.target.device)
            if repeat:
                seconds[name].append(took)
    if forwards.target.device.type == "cpu":
        peak = {name: rise_elsewhere(name) for name in seconds}
    table = Table("forward", "real tokens/s", "MB kept", "MB rise", title=f"{arguments.target}, taps {forwards.taps}")
    for name, values in seconds.items():
        speed = sum(forwards.lengths) / statistics.median(values)
        table.add_row(name, f"{speed:,.0f}", f"{size[name] / 1e6:,.1f}", f"{peak[name] / 1e6:,.1f}")
    Console().print(table)
    ratio = statistics.median(seconds["plain"]) / statistics.median(seconds["tapped"])
    run = (max(forwards.taps) + 1) / forwards.facts.num_layers
    rise, kept = peak["tapped"] / max(1, peak["plain"]), size["tapped"] / size["plain"]
    Console().print(
        f"tapped is {ratio:.2f}x as fast; {1 - run:.0%} of the layers are skipped (1/{run:.2f} = {1 / run:.2f}); "
        f"its peak rises by {rise:.0%} of plain's; it keeps {kept:.0%} of plain's bytes"
    )


def rise_of(forwards: Forwards, name: str) -> int:
    """Bytes by which resident memory rises while one forward runs; a short one before it settles what is lazy."""
    call = getattr(forwards, name)
    call(8)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = status_bytes("VmRSS")
    call()
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    """An entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(key + ":")).split()[1]) * 1024


def rise_elsewhere(name: str) -> int:
    """`rise_of` in a process of its own, so that neither forward finds memory that the other has left."""
    words = [sys.executable, __file__, *sys.argv[1:], "--rise-of", name]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def timed(call: Callable[[], int], device: torch.device) -> tuple[int, float, int]:
    """What a call returns, its seconds, and on CUDA by how many bytes allocated memory rises meanwhile (else 0)."""
    cuda = device.type == "cuda"
    held = 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    value = call()
    if cuda:
        torch.cuda.synchronize(device)
    return value, time.perf_counter() - started, torch.cuda.max_memory_allocated(device) - held if cuda else 0


if __name__ == "__main__":
    main()
