"""Speed of decoding: against the published `dflash`, the loop's own share, several prompts at once, and draft trees.

    python benchmarks/decode.py [--pair demo | smollm | none] [--tokens N] [--rounds 5] [--vocabulary 150000]

Pairs: `demo` is the embedded target, `smollm` a random Llama of SmolLM2-135M's sizes; both with a random drafter, whose
drafts hardly ever stand, so that a token costs about one pass. The published package runs in the oracle environment
(scripts/oracle_env.py; without it that comparison is left out), on the same folders, threads and prompt, turn by turn
with ours: A B A B; both verify no drafts beyond the length limit. Answers must be equal. Beside wall time stands
processor time, which neighbours on a shared machine disturb less. The loop's share is what a pass takes beyond the
target's and the drafter's forward (embedding and head included), which are timed inside the same run. Trees are built
over random logits of 15 slots, flat ones and such with one probable token a slot.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.config import DrafterConfig, TargetConfig
from paceline.decode import chain
from paceline.decode.answers import Decoded
from paceline.decode.batched import batch_decode
from paceline.decode.chain import speculative_decode
from paceline.decode.draft_tree import build_tree
from paceline.decode.loop import greedy_decode
from paceline.decode.topk import Candidates
from paceline.drafter.network import Drafter
from paceline.drafter.spec import derive_spec
from paceline.export.zlab import write_zlab
from paceline.target_model.facts import describe
from paceline.target_model.load import load_target
from paceline.target_model.model import TargetModel
from paceline.target_model.taps import default_taps

ROOT = Path(__file__).resolve().parent.parent
SMOLLM = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 100_000.0,
}
DRAFTERS = {"demo": {"num_layers": 2, "block_size": 8}, "smollm": {"num_layers": 5, "block_size": 16}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=["demo", "smollm", "none"], default="demo")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    arguments = parser.parse_args()
    console = Console()
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if arguments.pair != "none":
        with tempfile.TemporaryDirectory() as place:
            pair(console, arguments.pair, Path(place), arguments.tokens, arguments.rounds)
    trees(console, arguments.vocabulary)


def pair(console: Console, name: str, place: Path, tokens: int, rounds: int) -> None:
    """Everything that needs a target and a drafter."""
    folder = ROOT / "src" / "paceline" / "assets" / "demo" / "target" if name == "demo" else smollm(place / "target")
    facts = describe(str(folder))
    taps = default_taps(facts.num_layers, DRAFTERS[name]["num_layers"])
    target = load_target(TargetConfig(path=str(folder)), taps, dtype="float32")
    network = Drafter(derive_spec(DrafterConfig(**DRAFTERS[name]), facts, taps, 3)).eval()
    write_zlab(place / "drafter", network.spec, network.state_dict(), facts, "float32")
    prompt = torch.randint(10, facts.vocab_size, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    against_published(console, name, target, network, prompt, (folder, place / "drafter"), tokens, rounds)
    own_share(console, target, network, prompt, tokens)
    together(console, target, network, prompt, tokens)


def smollm(folder: Path) -> Path:
    """Writes a random target of SmolLM2-135M's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMOLLM)).save_pretrained(str(folder))
    return folder


def against_published(
    console: Console,
    name: str,
    target: TargetModel,
    network: Drafter,
    prompt: list[int],
    folders: tuple[Path, Path],
    tokens: int,
    rounds: int,
) -> None:
    """Tokens per second of both, turn by turn."""
    python = Path(os.environ.get("PACELINE_ORACLE_VENV") or ROOT / ".venv-oracle") / "bin" / "python"
    if not python.is_file():
        console.print(f"published dflash: left out, {python} is missing; make it with scripts/oracle_env.py")
        return
    command = [str(python), str(ROOT / "benchmarks" / "peers" / "published_decode.py"), *map(str, folders)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        seconds: dict[str, list[tuple[float, float]]] = {"wall": [], "processor": []}
        for turn in range(rounds + 1):
            started, busy = time.perf_counter(), time.process_time()
            answer = speculative_decode(target, network, prompt, max_new_tokens=tokens)
            started, busy = time.perf_counter() - started, time.process_time() - busy
            peer.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
            peer.stdin.flush()
            other = json.loads(peer.stdout.readline())
            if answer.ids != other["ids"]:
                console.print("[bold red]answers differ: a near tie, or an error[/]")
            if turn:  # the first is warm-up
                seconds["wall"].append((started, other["seconds"]))
                seconds["processor"].append((busy, other["busy"]))
        peer.stdin.close()
    console.print(f"{name}: passes {len(answer.passes)} and {other['passes']} for {tokens} tokens")
    for kind, pairs in seconds.items():
        ours, theirs = (tokens / statistics.median(times) for times in zip(*pairs, strict=True))
        turns = ", ".join(f"{b / a:.2f}" for a, b in pairs)
        ratio = statistics.median(b / a for a, b in pairs)
        best = min(b for _, b in pairs) / min(a for a, _ in pairs)
        console.print(
            f"tokens/s, {kind} time: ours {ours:.1f}, published {theirs:.1f}; ratio {ratio:.2f}, of the best turns "
            f"{best:.2f} (turn by turn {turns})"
        )


def whole(answer: Decoded) -> float:
    """Seconds of an answer with its prompt."""
    return answer.seconds + answer.prompt_seconds


def own_share(console: Console, target: TargetModel, network: Drafter, prompt: list[int], tokens: int) -> None:
    """What the loop takes beyond both forwards."""
    inside = {"target": 0.0, "drafter": 0.0}
    kept = target.model.forward, network.extend, chain.draft_logits
    target.model.forward = clocked(target.model.forward, inside, "target")
    network.extend = clocked(network.extend, inside, "drafter")  # type: ignore[method-assign]
    chain.draft_logits = clocked(chain.draft_logits, inside, "drafter")
    shares: list[float] = []
    for _ in range(4):
        inside.update(target=0.0, drafter=0.0)
        answer = speculative_decode(target, network, prompt, max_new_tokens=tokens)
        shares.append(1 - sum(inside.values()) / whole(answer))
    target.model.forward, network.extend, chain.draft_logits = kept  # type: ignore[method-assign]
    passes = len(answer.passes)
    plain = greedy_decode(target, prompt, max_new_tokens=tokens)
    console.print(
        f"pass: {1e3 * answer.seconds / passes:.2f} ms (target {1e3 * inside['target'] / passes:.2f}, drafter "
        f"{1e3 * inside['drafter'] / passes:.2f}); the loop beyond both takes {statistics.median(shares[1:]):.1%}; "
        f"plain token {1e3 * plain.seconds / len(plain.ids):.2f} ms"
    )


def together(console: Console, target: TargetModel, network: Drafter, prompt: list[int], tokens: int) -> None:
    """Several prompts at once against one after another."""
    prompts = [prompt[: 8 * number] for number in range(1, 9)]
    rates = []
    for size in (1, 4, 8):
        started = time.perf_counter()
        answers = batch_decode(target, network, prompts, batch_size=size, max_new_tokens=tokens)
        rates.append(f"{size}: {sum(len(answer.ids) for answer in answers) / (time.perf_counter() - started):.1f}")
    console.print(f"prompts at a time, tokens/s over 8 prompts: {', '.join(rates)}")


def trees(console: Console, vocabulary: int) -> None:
    """Cost of building draft trees."""
    title = f"vocabulary {vocabulary:,}; ms, median (fastest)"
    table = Table("logits", "nodes", "build", "of which candidates", "mask", title=title)
    source = torch.Generator().manual_seed(0)
    flat = torch.randn(15, vocabulary, generator=source) * 3
    peaked = flat.clone()
    peaked[torch.arange(15), torch.randint(vocabulary, (15,), generator=source)] = 20.0
    for name, logits in (("flat", flat), ("peaked", peaked)):
        for budget in (16, 64, 256):
            tree = build_tree(logits, budget)
            depth = int(tree.depths.max())
            build = median_ms(functools.partial(build_tree, logits, budget))
            found = median_ms(functools.partial(candidates, logits, budget, depth))
            table.add_row(name, str(budget), build, found, median_ms(tree.visible))
    console.print(table)
    console.print(f"reading the logits once (their maximum): {median_ms(functools.partial(torch.amax, flat))} ms")


def candidates(logits: torch.Tensor, budget: int, depth: int) -> None:
    """The tables of the slots that a tree reaches."""
    table = Candidates(logits, budget)
    for slot in range(min(depth + 1, logits.shape[0])):
        table.widen(slot)


def clocked(function: Callable[..., Any], total: dict[str, float], name: str) -> Callable[..., Any]:
    """The function, adding its wall time to a total."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            total[name] += time.perf_counter() - started

    return call


def median_ms(call: Callable[[], Any], repeats: int = 51) -> str:
    """Median and shortest wall time of a call, in milliseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return f"{statistics.median(times):.2f} ({min(times):.2f})"


if __name__ == "__main__":
    main()
