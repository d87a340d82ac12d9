"""How fast data is prepared and read, and what it costs in memory.

    python benchmarks/prepare.py                        # speed against datasets.map, opening and reading
    python benchmarks/prepare.py memory --rows 1000000  # peak memory of preparing, in a process of its own
    python benchmarks/prepare.py finish --rows 1000000  # peak memory of its last part, which grows with rows

Text is drawn from Python's standard library, tokenised with the demo target's tokenizer and chat template. Speeds are
CPU time of one process; the best of several interleaved rounds, so that other load on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from paceline.config import DataConfig
from paceline.data.finish import finish
from paceline.data.prepare import prepare
from paceline.data.report import Tally
from paceline.data.sources import Piece, Source
from paceline.data.store import (
    FORMAT,
    INDEX,
    INDEX_SCHEMA,
    MANIFEST,
    PART_SCHEMA,
    open_store,
    part_name,
    write_table,
)
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter.anchors import count_eligible

TARGET = Path(__file__).parent.parent / "src" / "paceline" / "assets" / "demo" / "target"


def chats(rows: int, words: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of one to three turns; a question of `words` / 8 words and an answer of about `words`."""
    rng = random.Random(seed)
    library = Path(sysconfig.get_path("stdlib"))
    text = " ".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(library.glob("*.py"))[:60])
    pool = text.split(" ")

    def draw(count: int) -> str:
        start = rng.randrange(len(pool) - count)
        return " ".join(pool[start : start + count]).strip() or "nothing"

    for _ in range(rows):
        turns: list[dict[str, str]] = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            turns.append({"role": "user", "content": draw(max(1, words // 8))})
            turns.append({"role": "assistant", "content": draw(rng.randint(max(1, words // 2), words * 3 // 2))})
        yield {"messages": turns}


def write_chats(path: Path, rows: int, words: int) -> None:
    """A JSONL file of `chats`."""
    with path.open("w", encoding="utf-8") as file:
        for row in chats(rows, words):
            file.write(json.dumps(row) + "\n")


def best_of(rounds: int, **jobs: Callable[[int], int]) -> dict[str, float]:
    """Tokens per CPU second of each job, the best of interleaved rounds."""
    best = dict.fromkeys(jobs, 0.0)
    for number in range(rounds):
        for name, job in jobs.items():
            start = time.process_time()
            tokens = job(number)
            best[name] = max(best[name], tokens / (time.process_time() - start))
    return best


def speed(rows: int, rounds: int) -> None:
    """`prepare` against `datasets.map` of the same rows, without a mask and with the template's tags as mask."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(str(TARGET))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chats(folder / "rows.jsonl", rows, 200)
        raw = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=name)

        def ours(number: int) -> int:
            settings = DataConfig(duplicates="keep")
            store = folder / f"store-{number}"
            return prepare(
                [str(folder / "rows.jsonl")], store, str(TARGET), settings, count_eligible=count_eligible
            ).tokens

        def ids_only(row: dict[str, Any]) -> dict[str, Any]:
            return {"input_ids": tokenizer.apply_chat_template(row["messages"], return_dict=False)}

        def tagged(row: dict[str, Any]) -> dict[str, Any]:
            made = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
            return {"input_ids": made["input_ids"], "loss_mask": made["assistant_masks"]}

        def prefixes(row: dict[str, Any]) -> dict[str, Any]:
            messages = row["messages"]
            ids = tokenizer.apply_chat_template(messages, return_dict=False)
            mask = [0] * len(ids)
            for place, turn in enumerate(messages):
                if turn["role"] == "assistant":
                    before = tokenizer.apply_chat_template(
                        messages[:place], add_generation_prompt=True, return_dict=False
                    )
                    after = tokenizer.apply_chat_template(messages[: place + 1], return_dict=False)
                    mask[len(before) : len(after)] = [1] * (len(after) - len(before))
            return {"input_ids": ids, "loss_mask": mask}

        def mapped(function: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[int], int]:
            def job(number: int) -> int:
                made = raw.map(
                    function,
                    remove_columns=["messages"],
                    load_from_cache_file=False,
                    cache_file_name=str(folder / f"map-{function.__name__}-{number}.arrow"),
                )
                return pa.compute.sum(pa.compute.list_value_length(made.data["input_ids"])).as_py()

            return job

        found = best_of(
            rounds, prepare=ours, map_ids=mapped(ids_only), map_tags=mapped(tagged), map_prefixes=mapped(prefixes)
        )
    for name, words in (
        ("prepare", "prepare: ids, mask, checks, near-duplicate signatures"),
        ("map_ids", "datasets.map: ids, no mask"),
        ("map_tags", "datasets.map: ids and mask by generation tags"),
        ("map_prefixes", "datasets.map: ids and mask by rendering prefixes"),
    ):
        print(
            f"{words:<58} {found[name] / 1e3:8.0f} k tokens/s a core   prepare is {found['prepare'] / found[name]:.2f}×"
        )


def synthetic_store(folder: Path, rows: int, mean_length: int, rows_a_part: int = 4096) -> None:
    """A store of random tokens with the shape of a real one."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    parts: list[pa.Table] = []
    for number, start in enumerate(range(0, rows, rows_a_part)):
        count = min(rows_a_part, rows - start)
        lengths = np.clip(rng.lognormal(np.log(mean_length), 0.6, size=count), 8, 20 * mean_length).astype(np.int32)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        spans = np.stack([lengths // 4, lengths], axis=1).astype(np.int32).ravel()
        zeros = np.zeros(count, dtype=np.int32)
        columns = {
            "input_ids": pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(rng.integers(0, 2048, size=offsets[-1], dtype=np.int32))
            ),
            "loss_mask": pa.ListArray.from_arrays(
                pa.array(np.arange(0, 2 * count + 1, 2, dtype=np.int32)), pa.array(spans)
            ),
            "length": lengths,
            "eligible": lengths - lengths // 4 - 1,
            "supervised": lengths - lengths // 4,
            "source": zeros,
            "line": np.arange(start + 1, start + count + 1),
            "tags": [""] * count,
            "content_hash": np.arange(start, start + count, dtype=np.uint64),
            "signature": pa.ListArray.from_arrays(
                pa.array(np.zeros(count + 1, dtype=np.int32)), pa.array([], pa.uint32())
            ),
        }
        write_table(pa.table(columns, schema=PART_SCHEMA), folder / part_name(number))
        index = {name: columns[name] for name in INDEX_SCHEMA.names if name in columns}
        index |= {"part": np.full(count, number, dtype=np.int32), "row": np.arange(count, dtype=np.int32)}
        index |= {name: columns[name].astype(np.int64) for name in ("length", "eligible")}
        parts.append(pa.table({name: index[name] for name in INDEX_SCHEMA.names}, schema=INDEX_SCHEMA))
    write_table(pa.concat_tables(parts), folder / INDEX)
    manifest = {"format": FORMAT, "fingerprint": "synthetic", "sources": [{"path": "synthetic"}]}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def reading(rows: int, rounds: int) -> None:
    """Opening a store of `rows` rows, and reading random batches of 32 from one."""
    with tempfile.TemporaryDirectory() as name:
        synthetic_store(Path(name) / "long", 20_000, 1000)
        synthetic_store(Path(name) / "many", rows, 40)
        opening_s = min(_opening_s(Path(name) / "many") for _ in range(rounds))
        print(f"{f'open a store of {rows:,} rows':<58} {opening_s * 1e3:8.1f} ms")
        store = open_store(Path(name) / "long")
        order = np.random.default_rng(1).permutation(len(store))

        def read(number: int) -> int:
            batches = np.roll(order, 1000 * number)[:6400].reshape(-1, 32)
            return sum(len(ids) for batch in batches for ids, _ in store.read(batch))

        read(0)
        found = best_of(rounds, read=read)["read"]
        print(f"{'read random batches of 32 rows of 1,000 tokens':<58} {found / 1e6:8.0f} M tokens/s a core")


def _opening_s(folder: Path) -> float:
    start = time.perf_counter()
    store = open_store(folder)
    assert int(store.lengths.sum()) > 0
    return time.perf_counter() - start


def memory(rows: int, words: int) -> None:
    """Peak memory of preparing `rows` rows and half of them, each in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        for count in (rows // 4, rows):
            file = Path(name) / f"rows-{count}.jsonl"
            write_chats(file, count, words)
            command = [sys.executable, __file__, "child", "--file", str(file), "--store", f"{name}/store-{count}"]
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"{count:>10,} rows, {file.stat().st_size / 1e6:8.1f} MB: peak {result['peak_mb']:.0f} MB "
                f"({result['before_mb']:.0f} before the first row), {result['tokens']:,} tokens in {result['s']:.0f} s"
            )


def child(file: str, store: str) -> None:
    """Prepare one file and print the peak memory as JSON."""
    load_tokenizer(str(TARGET))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    report = prepare([file], Path(store), str(TARGET), DataConfig(), count_eligible=count_eligible)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.perf_counter() - start
    print(json.dumps({"before_mb": before / 1024, "peak_mb": peak / 1024, "tokens": report.tokens, "s": seconds}))


def unfinished_parts(folder: Path, rows: int, rows_a_part: int = 16_384) -> list[Piece]:
    """Parts of short random samples with tallies, as tokenising leaves them."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    pieces: list[Piece] = []
    for number, start in enumerate(range(0, rows, rows_a_part)):
        count = min(rows_a_part, rows - start)

        def lists(width: int, values: np.ndarray, count: int = count) -> pa.ListArray:
            return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * width), pa.array(values))

        columns = {
            "input_ids": lists(22, rng.integers(0, 2048, 22 * count, dtype=np.int32)),
            "loss_mask": lists(2, np.tile(np.array([10, 22], dtype=np.int32), count)),
            "length": np.full(count, 22, dtype=np.int32),
            "eligible": np.full(count, 11, dtype=np.int32),
            "supervised": np.full(count, 12, dtype=np.int32),
            "source": np.zeros(count, dtype=np.int32),
            "line": np.arange(start + 1, start + count + 1),
            "tags": ["English"] * count,
            "content_hash": rng.integers(0, 2**63, count, dtype=np.uint64),
            "signature": lists(32, rng.integers(0, 2**32, 32 * count, dtype=np.uint32)),
        }
        write_table(pa.table(columns, schema=PART_SCHEMA), folder / part_name(number))
        (folder / f"part-{number:06d}.json").write_text(json.dumps(Tally(rows_in=count).to_json()), encoding="utf-8")
        pieces.append(Piece(number, 0, "rows.jsonl", "jsonl", 0, 1, start + 1))
    return pieces


def finishing(rows: int) -> None:
    """Peak memory of finishing a store whose parts are there; one count a process, as the peak never falls."""
    with tempfile.TemporaryDirectory() as name:
        aside = Path(name) / ".store.0123456789ab.unfinished"
        pieces = unfinished_parts(aside, rows)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sources = [Source("rows.jsonl", "jsonl", "synthetic")]
        store = Path(name) / "store"
        finish(aside, store, pieces, sources, "synthetic", {}, DataConfig(), progress=lambda *_: None)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{rows:>10,} rows: {(peak - before) / 1024:.0f} MB beyond {before / 1024:.0f} MB before")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("speed", "memory", "finish", "child"), default="speed")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the store that is opened, or prepared")
    parser.add_argument("--words", type=int, default=12, help="words of an answer in `memory`")
    parser.add_argument("--sample", type=int, default=600, help="rows that are tokenised in `speed`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "child":
        child(options.file, options.store)
    elif options.what == "finish":
        finishing(options.rows)
    elif options.what == "memory":
        memory(options.rows, options.words)
    else:
        reading(options.rows, options.rounds)
        speed(options.sample, options.rounds)


if __name__ == "__main__":
    main()
