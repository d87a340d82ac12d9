"""Cost of decoding: the loop around its two forwards, and building draft trees at a large vocabulary.

    python benchmarks/decode.py [--target FOLDER] [--tokens 64] [--vocabulary 150000]

The loop's share is what a speculative pass takes beyond the drafter's and the target's own forward, which are timed
inside the same run by wrapping them. Trees are built over random logits of 15 slots; the reduction to the most probable
tokens (which runs where the logits lie) is given apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.config import DrafterConfig, TargetConfig
from paceline.drafter.network import Drafter
from paceline.drafter.spec import derive_spec
from paceline.evaluate.candidates import Candidates
from paceline.evaluate.decode import greedy_decode, speculative_decode
from paceline.evaluate.tree import build_tree
from paceline.target.facts import describe
from paceline.target.load import load_target
from paceline.target.session import TargetSession
from paceline.target.taps import default_taps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="src/paceline/assets/demo/target")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--mask-token", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    arguments = parser.parse_args()
    facts = describe(arguments.target)
    taps = default_taps(facts.num_layers, 3)
    target = load_target(TargetConfig(path=arguments.target), taps, dtype="float32")
    network = Drafter(derive_spec(DrafterConfig(num_layers=2, block_size=8), facts, taps, arguments.mask_token))
    prompt = list(range(10, 74))
    inside = [0.0]
    network.draft = clocked(network.draft, inside)  # type: ignore[method-assign]
    network.extend = clocked(network.extend, inside)  # type: ignore[method-assign]
    TargetSession.read = clocked(TargetSession.read, inside)  # type: ignore[method-assign]
    speculative_decode(target, network, prompt, max_new_tokens=8)
    inside[0] = 0.0
    answer = speculative_decode(target, network, prompt, max_new_tokens=arguments.tokens)
    whole, forwards = answer.seconds + answer.prompt_seconds, inside[0]
    plain = greedy_decode(target, prompt, max_new_tokens=arguments.tokens)
    Console().print(
        f"pass: {1e3 * answer.seconds / max(1, len(answer.passes)):.2f} ms over {len(answer.passes)} passes; "
        f"the loop beyond both forwards takes {(whole - forwards) / whole:.1%}; "
        f"plain token: {1e3 * plain.seconds / len(plain.ids):.2f} ms"
    )
    table = Table(
        "nodes", "build, ms", "of which reduction, ms", title=f"draft tree, vocabulary {arguments.vocabulary:,}"
    )
    logits = torch.randn(15, arguments.vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    for budget in (16, 64, 256):
        total = [seconds(lambda budget=budget: build_tree(logits, budget)) for _ in range(9)]
        reduction = [seconds(lambda budget=budget: Candidates(logits, budget)) for _ in range(9)]
        table.add_row(str(budget), f"{1e3 * statistics.median(total):.2f}", f"{1e3 * statistics.median(reduction):.2f}")
    Console().print(table)


def clocked(function: Callable[..., Any], total: list[float]) -> Callable[..., Any]:
    """The function, adding its wall time to a total."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            total[0] += time.perf_counter() - started

    return call


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
