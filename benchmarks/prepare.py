"""How fast data is prepared and read, and what it costs in memory.

    python benchmarks/prepare.py                        # speed against datasets.map, opening and reading
    python benchmarks/prepare.py memory --rows 1000000  # peak memory of preparing, in a process of its own
    python benchmarks/prepare.py finish --rows 1000000  # peak memory of its last part, which grows with rows

Text is drawn from Python's standard library, tokenized with the demo target's tokenizer and chat template. Speeds are
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
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from paceline.config import DataConfig
from paceline.data.finalize import UnfinishedStore, finalize
from paceline.data.loss_mask import Sample
from paceline.data.prepare import prepare
from paceline.data.readers import RowSource, Shard
from paceline.data.report import PrepareReport, Tally
from paceline.data.store import (
    FORMAT,
    INDEX,
    INDEX_SCHEMA,
    PART_SCHEMA,
    USED_IDS,
    Manifest,
    file_hash,
    open_store,
    part_name,
    write_manifest,
    write_table,
)
from paceline.data.tokenize_rows import PartWriter, store_folder, tally_path
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


COMPARED = (
    ("prepare", "prepare: ids, mask, checks, near-duplicate signatures"),
    ("map_ids", "datasets.map: ids, no mask"),
    ("map_tags", "datasets.map: ids and mask by generation tags"),
    ("map_prefixes", "datasets.map: ids and mask by rendering prefixes"),
)


def speed(rows: int, words: int, rounds: int) -> None:
    """`prepare` against `datasets.map` of the same rows, without a mask and with masks made in two ways."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(str(TARGET))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chats(folder / "rows.jsonl", rows, words)
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
    for name, title in COMPARED:
        print(
            f"{title:<58} {found[name] / 1e3:8.0f} k tokens/s a core   prepare is {found['prepare'] / found[name]:.2f}×"
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
        columns = {
            "input_ids": pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(rng.integers(0, 2048, size=offsets[-1], dtype=np.int32))
            ),
            "loss_mask": pa.ListArray.from_arrays(
                pa.array(np.arange(0, 2 * count + 1, 2, dtype=np.int32)), pa.array(spans)
            ),
        }
        write_table(pa.table(columns, schema=PART_SCHEMA), folder / part_name(number))
        index = {
            "part": np.full(count, number, dtype=np.int32),
            "row": np.arange(count, dtype=np.int32),
            "length": lengths.astype(np.int64),
            "eligible": lengths.astype(np.int64) - lengths // 4 - 1,
            "supervised": lengths - lengths // 4,
            "source": np.zeros(count, dtype=np.int32),
            "line": np.arange(start + 1, start + count + 1),
            "tags": [""] * count,
        }
        parts.append(pa.table(index, schema=INDEX_SCHEMA))
    write_table(pa.concat_tables(parts).unify_dictionaries(), folder / INDEX)
    np.save(folder / USED_IDS, np.arange(2048, dtype=np.int32))
    report = PrepareReport(str(folder), "synthetic", rows, rows, rows, {}, {}, 0, 0, 0)
    source = RowSource("synthetic", "jsonl", "synthetic")
    write_manifest(folder, Manifest(FORMAT, "synthetic", {}, [source], {}, report))


def reading(rows: int, rounds: int) -> None:
    """Opening a store of `rows` rows, and reading random batches of 32 from one."""
    with tempfile.TemporaryDirectory() as name:
        synthetic_store(Path(name) / "long", 20_000, 1000)
        synthetic_store(Path(name) / "many", rows, 40)
        many = Path(name) / "many"
        opening_s = min(_seconds(lambda: open_store(many).lengths.sum()) for _ in range(rounds))
        print(f"{f'open a store of {rows:,} rows':<58} {opening_s * 1e3:8.1f} ms")
        files = list((Path(name) / "long").glob("*.arrow"))
        seconds = min(_seconds(lambda: [file_hash(file) for file in files]) for _ in range(rounds))
        size_gb = sum(file.stat().st_size for file in files) / 1e9
        print(f"{'verify a store before its first use':<58} {size_gb / seconds:8.2f} GB/s a core")
        store = open_store(Path(name) / "long", verify=False)
        order = np.random.default_rng(1).permutation(len(store))

        def read(number: int) -> int:
            batches = np.roll(order, 1000 * number)[:6400].reshape(-1, 32)
            return sum(len(ids) for batch in batches for ids, _ in store.read(batch))

        read(0)
        found = best_of(rounds, read=read)["read"]
        print(f"{'read random batches of 32 rows of 1,000 tokens':<58} {found / 1e6:8.0f} M tokens/s a core")


def _seconds(job: Callable[[], object]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


class Peak:
    """The most memory of this process, in MB, while the block runs: in all, and without mapped files (sampled)."""

    def __enter__(self) -> Peak:
        self.before_mb = _memory_mb()
        self.own_mb = self.before_mb
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._sample, daemon=True)
        self._watch.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self.own_mb = max(self.own_mb, _memory_mb())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.join()
        self.all_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _memory_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no RssAnon")


def memory(rows: int, words: int) -> None:
    """Peak memory of preparing `rows` rows and a quarter of them, each in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        for count in (rows // 4, rows):
            file = Path(name) / f"rows-{count}.jsonl"
            write_chats(file, count, words)
            command = [sys.executable, __file__, "child", "--file", str(file), "--store", f"{name}/store-{count}"]
            result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(f"{count:>10,} rows, {file.stat().st_size / 1e6:8.1f} MB: {result['words']}", flush=True)


def child(file: str, store: str) -> None:
    """Prepare one file and print the peak memory as JSON."""
    load_tokenizer(str(TARGET))
    start_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    with Peak() as peak:
        report = prepare([file], Path(store), str(TARGET), DataConfig(), count_eligible=count_eligible)
    words = (
        f"peak {peak.all_mb:.0f} MB ({start_mb:.0f} before the first row); without mapped files {peak.own_mb:.0f} MB "
        f"({peak.before_mb:.0f} before); {report.tokens:,} tokens in {time.perf_counter() - start:.0f} s"
    )
    print(json.dumps({"words": words}))


def unfinished_store(path: Path, rows: int, rows_a_part: int = 16_384) -> UnfinishedStore:
    """A store whose parts of short random samples are there, as tokenizing leaves them."""
    folder = path.with_name(f".{path.name}.0123456789ab.unfinished")
    store_folder(folder).mkdir(parents=True)
    rng = np.random.default_rng(0)
    shards: list[Shard] = []
    spans = np.array([10, 22], dtype=np.int32)
    for number, start in enumerate(range(0, rows, rows_a_part)):
        count = min(rows_a_part, rows - start)
        part = PartWriter()
        for row, ids in enumerate(rng.integers(0, 2048, (count, 22), dtype=np.int32)):
            part.append(Sample(ids, spans, tags=("English",)), 11, 0, start + row + 1)
        part.write(folder, number, near=True)
        tally_path(folder, number).write_bytes(msgspec.json.encode(Tally(rows_in=count)))
        shards.append(Shard(number, 0, "rows.jsonl", Path("rows.jsonl"), "jsonl", 0, 1, start + 1))
    sources = [RowSource("rows.jsonl", "jsonl", "synthetic")]
    return UnfinishedStore(folder, path, sources, shards, DataConfig(), "0123456789ab", {})


def finishing(rows: int) -> None:
    """Peak memory of finishing a store whose parts are there; one count a process, as the peak never falls."""
    with tempfile.TemporaryDirectory() as name:
        made = unfinished_store(Path(name) / "store", rows)
        start_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        start = time.perf_counter()
        with Peak() as peak:
            finalize(made, lambda *_: None)
    print(
        f"{rows:>10,} rows: {peak.all_mb - start_mb:.0f} MB beyond {start_mb:.0f} MB before; without mapped files "
        f"{peak.own_mb - peak.before_mb:.0f} MB; {time.perf_counter() - start:.1f} s"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("speed", "memory", "finish", "child"), default="speed")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the store that is opened, or prepared")
    parser.add_argument("--words", type=int, default=12, help="words of an answer in `memory`")
    parser.add_argument("--sample", type=int, default=600, help="rows that are tokenized in `speed`")
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
        for words, count in ((6, 10 * options.sample), (200, options.sample)):
            print(f"chats of about {words} words an answer")
            speed(count, words, options.rounds)


if __name__ == "__main__":
    main()
