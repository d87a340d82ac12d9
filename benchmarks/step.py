"""Times one drafter step (forward, backward, optimizer) beside the bare matrix products and speculators' DFlash.

Usage, from the project's root:

    python benchmarks/step.py --size tiny mid --threads 1 2 --dtype float32 bfloat16 \\
        --peer "$(python scripts/oracle_env.py)" --memory-gib 15

Each contender runs in a process of its own on the same inputs (keyed by a seed); times are CPU seconds of the process
and wall seconds, memory is the process's peak. Without --peer (a Python that has speculators) only paceline and the
bare products run. On a machine that does other work, compare CPU seconds. The table above takes ten minutes on two
cores; `--shrink 4` takes a quarter of the batch.

Shape letters: B samples, L tokens a sample, A anchors a sample, K slots, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

TAPS = 5
LONG_S = 12.0
"""After this many seconds of a contender no further step is begun."""


@dataclass(frozen=True)
class Size:
    """One problem."""

    hidden: int
    layers: int
    block: int
    anchors: int
    length: int
    batch: int
    vocabulary: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int

    @property
    def positions(self) -> int:
        """Draft positions of a step."""
        return self.batch * self.anchors * self.block


SIZES = {
    "tiny": Size(128, 2, 8, 64, 512, 8, 4096, 4, 2, 32, 384),
    "mid": Size(576, 3, 16, 128, 1024, 4, 49152, 9, 3, 64, 1536),
}


def inputs(size: Size):
    """Features [B·L, taps·D], token ids [B, L], embedding and head [V, D]; logits of a usual spread."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(size.batch * size.length, TAPS * size.hidden, generator=generator)
    ids = torch.randint(0, size.vocabulary - 1, (size.batch, size.length), generator=generator)
    embedding = torch.randn(size.vocabulary, size.hidden, generator=generator) * 0.05
    head = torch.randn(size.vocabulary, size.hidden, generator=generator) * 0.05
    return features, ids, embedding, head


def timed(step, repeats: int) -> dict[str, float]:
    """CPU and wall seconds of the fastest of some steps after one warm-up; a warm-up above `LONG_S` is all."""
    best, begun = (float("inf"), float("inf")), time.perf_counter()
    for number in range(repeats + 1):
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        spent = (time.process_time() - cpu, time.perf_counter() - wall)
        best = spent if number == 1 else min(best, spent)
        if time.perf_counter() - begun > LONG_S:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"cpu_s": best[0], "wall_s": best[1], "peak_gib": peak}


def run_paceline(size: Size, dtype: str, repeats: int, whole: bool) -> dict[str, float]:
    """One micro-batch and the step; the micro-batch in one pass, or one document a pass with the same gradient."""
    from paceline.config import DrafterConfig, ObjectiveConfig, OptimizerConfig
    from paceline.drafter.anchors import sample_anchors
    from paceline.drafter.learner import Learner
    from paceline.drafter.spec import DrafterSpec
    from paceline.types import FeatureBatch, HostBatch, PlannedBatch, PlannedStep

    spec = DrafterSpec(
        num_layers=size.layers, block_size=size.block, hidden_size=size.hidden, intermediate_size=size.inner,
        num_attention_heads=size.heads, num_key_value_heads=size.key_heads, head_dim=size.head_dim,
        layers=("full",) * size.layers, causal=(False,) * size.layers, sliding_window=None, rope_theta=1e6,
        rms_norm_eps=1e-6, vocab_size=size.vocabulary, mask_token_id=size.vocabulary - 1, taps=tuple(range(TAPS)),
        num_target_layers=TAPS + 1,
    )  # fmt: skip
    features, ids, embedding, head = inputs(size)
    mask = np.ones((size.batch, size.length), bool)
    anchors = [sample_anchors(row, seed=0, epoch=0, sample=i, limit=size.anchors) for i, row in enumerate(mask)]
    tokens = size.batch * size.length
    planned = PlannedBatch(0, 0, 0, 0, 0, 0, np.arange(size.batch), size.length, tokens, tokens, size.positions)
    host = HostBatch(
        planned, ids.numpy(), mask, np.full(size.batch, size.length), np.concatenate(anchors),
        np.full(size.batch, size.anchors),
    )  # fmt: skip
    learner = Learner(
        spec, embedding=embedding, head=head,
        drafter=DrafterConfig(num_layers=size.layers, block_size=size.block, dtype=dtype, diagnose_every=0,
                              positions_per_pass=None if whole else size.anchors * size.block),
        objective=ObjectiveConfig(), optimizer=OptimizerConfig(), total_steps=100, seed=0,
    )  # fmt: skip
    batch = FeatureBatch(host, features.to(learner.dtype))
    del features, embedding, head
    count = [0]

    def step() -> None:
        learner.accumulate(batch)
        count[0] += 1
        learner.step(PlannedStep(count[0], 0, 0, range(0), save=False))

    return timed(step, repeats)


def products(size: Size, anchors: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(times, M, N, K) of the matrix products that a step cannot avoid.

    Projections of blocks and context three times (forward, by input, by weight; the features need no gradient), the
    frozen head twice over the supervised slots, attention over the visible pairs (forward 2, backward 4 products; no
    recomputation).
    """
    slots, tokens = size.positions, size.batch * size.length
    query, keys = size.heads * size.head_dim, size.key_heads * size.head_dim
    found = [(2, tokens, size.hidden, TAPS * size.hidden)]
    for _ in range(size.layers):
        found += [(3, slots, query, size.hidden), (3, slots, size.hidden, query)]
        found += [(6, slots, keys, size.hidden), (6, tokens, keys, size.hidden)]
        found += [(6, slots, size.inner, size.hidden), (3, slots, size.hidden, size.inner)]
    supervised = int(np.minimum(size.length - 1 - anchors, size.block - 1).sum()) * size.batch
    found += [(2, supervised, size.vocabulary, size.hidden)]
    pairs = int(anchors.mean()) + size.block
    found += [(6 * size.layers * size.batch * size.heads, size.anchors * size.block, pairs, size.head_dim)]
    return found


def run_products(size: Size, dtype: str, repeats: int) -> dict[str, float]:
    """The bare products, one after another, outputs written to reused memory."""
    from paceline.drafter.anchors import sample_anchors

    kind = getattr(torch, dtype)
    anchors = sample_anchors(np.ones(size.length, bool), seed=0, epoch=0, sample=0, limit=size.anchors)
    made = []
    for times, m, n, k in products(size, anchors):
        # The head's product is made in pieces of its rows, as no one needs all logits at once.
        rows = min(m, 2048)
        left, right = torch.randn(rows, k, dtype=kind), torch.randn(k, n, dtype=kind)
        made.append((times * m / rows, left, right, torch.empty(rows, n, dtype=kind)))

    def step() -> None:
        for times, left, right, out in made:
            whole = int(times)
            for _ in range(whole):
                torch.mm(left, right, out=out)
            rest = round((times - whole) * left.shape[0])
            if rest:
                torch.mm(left[:rest], right, out=out[:rest])

    return timed(step, repeats)


def run_speculators(size: Size, dtype: str, repeats: int, packed: bool) -> dict[str, float]:
    """speculators' model, loss and AdamW: packed in one row, or one document a forward pass with summed gradients."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from transformers import Qwen3Config

    layer = Qwen3Config(
        hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.key_heads, head_dim=size.head_dim,
        vocab_size=size.vocabulary, max_position_embeddings=4096,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=size.vocabulary, block_size=size.block,
        aux_hidden_state_layer_ids=list(range(1, TAPS + 1)), mask_token_id=size.vocabulary - 1,
    )  # fmt: skip
    features, ids, embedding, head = inputs(size)
    torch.manual_seed(0)
    model = DFlashDraftModel(config)
    model.embed_tokens.weight.data.copy_(embedding)
    model.lm_head.weight.data.copy_(head)
    model.verifier_lm_head.weight.data.copy_(head)
    del embedding, head
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=6e-4)
    kind, loss = getattr(torch, dtype), resolve_loss_config("ce", "eager")
    rows = size.batch * size.length if packed else size.length
    anchors = size.anchors * (size.batch if packed else 1)
    count = 1 if packed else size.batch
    last = torch.randn(size.batch * size.length, size.hidden)
    documents = torch.arange(size.batch).repeat_interleave(size.length)
    places = torch.arange(size.length).repeat(size.batch)

    def step() -> None:
        for i in range(count):
            part = slice(i * rows, (i + 1) * rows)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
                _, value, _ = model(
                    hidden_states=features[part][None], input_ids=ids.reshape(1, -1)[:, part],
                    loss_mask=torch.ones(1, rows), verifier_last_hidden_states=last[part][None],
                    document_ids=documents[part][None], position_ids=places[part][None], loss_config=loss,
                    gamma=7.0, max_anchors=anchors,
                )  # fmt: skip
            (value / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, repeats)


@dataclass(frozen=True)
class Case:
    """One comparison."""

    size: str
    dtype: str
    threads: int


CONTENDERS = {
    "paceline": lambda *a: run_paceline(*a, whole=True),
    "paceline, one document a pass": lambda *a: run_paceline(*a, whole=False),
    "bare products": run_products,
    "speculators, packed": lambda *a: run_speculators(*a, packed=True),
    "speculators, one document a pass": lambda *a: run_speculators(*a, packed=False),
}


def child(name: str, case: Case, arguments: argparse.Namespace) -> dict[str, float] | None:
    """A contender in a process of its own; None where it needs more memory than it may have."""
    python = arguments.peer if name.startswith("speculators") else sys.executable
    command = [python, __file__, "--only", name, "--size", case.size, "--threads", str(case.threads)]
    command += ["--dtype", case.dtype, "--repeats", str(arguments.repeats), "--shrink", str(arguments.shrink)]
    if arguments.memory_gib:
        command += ["--memory-gib", str(arguments.memory_gib)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads), "TORCH_COMPILE_DISABLE": "1"}
    source = str(Path(__file__).parent.parent / "src")
    environment["PYTHONPATH"] = os.pathsep.join([source, environment.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and arguments.memory_gib and ("MemoryError" in done.stderr or "allocate memory" in done.stderr):
        return None
    if done.returncode:
        raise SystemExit(f"{name} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def shown(case: Case, size: Size, rows: dict[str, dict[str, float] | None]) -> Iterator[str]:
    """Lines of a Markdown table."""
    products_row, context = rows["bare products"], size.batch * size.length
    bare = products_row["cpu_s"] if products_row else float("nan")
    for name, row in rows.items():
        if row is None:
            yield f"| {case.size}, {case.dtype}, {case.threads} | {name} | out of memory" + " | – " * 6 + " |"
            continue
        cells = (
            f"{case.size}, {case.dtype}, {case.threads}", name, f"{row['cpu_s']:.2f}", f"{row['wall_s']:.2f}",
            f"{size.positions / row['cpu_s']:.0f}", f"{size.positions / row['wall_s']:.0f}",
            f"{context / row['wall_s']:.0f}", f"{row['peak_gib']:.2f}", f"{row['cpu_s'] / bare:.2f}",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Runs the contenders of every case and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["tiny"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peer", help="a python that has speculators 0.9.0")
    parser.add_argument("--shrink", type=int, default=1, help="divide the samples of the batch, for a quick look")
    parser.add_argument("--memory-gib", type=int, help="contenders that need more address space are shown as such")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [Case(*parts) for parts in product(arguments.size, arguments.dtype, arguments.threads)]
    if not (arguments.only or arguments.json):
        print("| size, type, threads | who | CPU s | wall s | positions / CPU s | positions / s | ", end="")
        print("context tokens / s | peak GiB | × bare, CPU |\n|---|---" + "|---:" * 7 + "|")
    for case in cases:
        size = SIZES[case.size]
        size = replace(size, batch=max(1, size.batch // arguments.shrink))
        if arguments.only:
            if arguments.memory_gib:
                resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_gib * 2**30,) * 2)
            torch.set_num_threads(case.threads)
            print(json.dumps(CONTENDERS[arguments.only](size, case.dtype, arguments.repeats)))
            return
        names = [name for name in CONTENDERS if arguments.peer or not name.startswith("speculators")]
        rows = {name: child(name, case, arguments) for name in names}
        if arguments.json:
            print(json.dumps({**asdict(case), "shape": asdict(size), "rows": rows}), flush=True)
        else:
            print("\n".join(shown(case, size, rows)), flush=True)


if __name__ == "__main__":
    main()
