"""From data files to the tokenized store.

Files are cut into pieces; each piece becomes one part of the store, written aside with its tally, in this process or
in several. A run that was ended goes on with the pieces that are missing. At the end duplicates are found over all
parts, the index and the manifest are written, and the folder is renamed to its place. The store's bytes do not depend
on the number of processes. One process at a time prepares a store; another one waits, and then finds it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.config import DataConfig
from paceline.data import store as stored
from paceline.data.dedup import HeldOut, content_hash, prompt_of
from paceline.data.finalize import finalize, sweep
from paceline.data.lock import store_lock
from paceline.data.readers import DataFile, RowSource, Shard, find_files, read_shard, scan
from paceline.data.report import PrepareReport
from paceline.data.rows import Conversation, ReadyTokens, RowRejected, read_row
from paceline.data.tokenize_rows import RowTokenizer, ShardWorker, finished, start_worker, store_folder, tokenize_shard
from paceline.data.tokenizer import fingerprint_template, fingerprint_tokenizer, load_tokenizer
from paceline.errors import DataError, PacelineError
from paceline.types import JsonDict, differing_parts

_SETTINGS = (
    "max_length",
    "on_too_long",
    "on_rewrite",
    "on_cut_answer",
    "duplicates",
    "near_duplicates",
    "thinking",
    "heldout_share",
)
"""Settings that decide what is in the store."""


class Progress(Protocol):
    """Hears how far preparing is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`stage` is `reading` (bytes), `waiting` (for another process, once), `tokenizing` (pieces) or `finishing`
        (steps)."""
        ...


def prepare(
    files: Sequence[str],
    store: Path,
    tokenizer_path: str,
    settings: DataConfig,
    *,
    count_eligible: Callable[[np.ndarray], int],
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    replace: bool = False,
    target: Mapping[str, str] | None = None,
) -> PrepareReport:
    """Tokenize data files into a store.

    Args:
        files: data files or folders of such.
        store: folder to make; its parent is made too.
        tokenizer_path: folder or hub name of the target.
        settings: lengths and policies; `heldout` names files whose prompts must not be trained on.
        count_eligible: eligible anchors of a loss mask; picklable where `settings.workers` > 1.
        trust_remote_code: whether code that comes with the target may run.
        progress: hears how far it is.
        replace: put the new store in the place of one that was made from something else.
        target: identity of the target whose answers these are, part by part; noted in the manifest.

    Returns:
        The report; `reused` where the store was there with the same fingerprint.

    Raises:
        DataError: files missing or empty, no tokenizer, no chat template for chats, nothing usable left, or a store
            that was made from something else.
    """
    paths = find_files(files)
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
    hear, before = progress or _silence, _stamps(paths)
    sources, pieces = scan(paths, lambda done, total: hear("reading", done, total))
    held_sources, held_pieces = scan(find_files(settings.heldout, "data.heldout")) if settings.heldout else ([], [])
    ingredients = _ingredients(sources, held_sources, tokenizer, settings)
    fingerprint = hashlib.blake2b(json.dumps(ingredients, sort_keys=True).encode(), digest_size=16).hexdigest()
    with _told(store), store_lock(store, lambda: hear("waiting", 0, 1)):
        if (found := _found_store(store, fingerprint, ingredients, replace=replace)) is not None:
            return found
        aside = _aside(store, fingerprint)
        tokeniser = RowTokenizer(tokenizer_path, trust_remote_code, settings)
        heldout, warnings = _held_out(held_sources, held_pieces, tokeniser)
        worker = ShardWorker(tokenizer_path, trust_remote_code, settings, count_eligible, str(aside), heldout)
        _tokenize_all(pieces, worker, settings.workers, aside, hear)
        _check_unchanged(paths, before, aside)
        return finalize(
            aside,
            store,
            pieces,
            sources,
            fingerprint,
            ingredients,
            settings,
            target=target or {},
            progress=hear,
            warnings=warnings,
        )


def _aside(store: Path, fingerprint: str) -> Path:
    """Folder of an unfinished store; made where it is not there."""
    aside = store.with_name(f".{store.name}.{fingerprint[:12]}.unfinished")
    store_folder(aside).mkdir(parents=True, exist_ok=True)
    return aside


def _check_unchanged(paths: Sequence[DataFile], before: Sequence[tuple[int, int]], aside: Path) -> None:
    """Refuse files that changed while they were read, and remove what was made of them.

    Raises:
        DataError: some parts may be of other bytes than the fingerprint says.
    """
    for named, *stamps in zip(paths, before, _stamps(paths), strict=True):
        if stamps[0] != stamps[1]:
            shutil.rmtree(aside)
            raise DataError(f"{named.path}: changed while it was read; run the same command when it is complete")


def check_store(path: Path, tokenizer_path: str, settings: DataConfig, *, trust_remote_code: bool = False) -> None:
    """Refuse a store that was made with another tokenizer, template or other settings than those given.

    Raises:
        DataError: what differs.
    """
    manifest = stored.read_manifest(path)
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
    wanted = _ingredients([], [], tokenizer, settings)
    errors = _differences({**manifest["ingredients"], "rows": [], "heldout": []}, wanted)
    if errors:
        raise DataError(f"{path}: the store was made with other ingredients ({'; '.join(errors)}); {_REMEDY}")


def other_target(path: Path, target: Mapping[str, str]) -> str | None:
    """One line where a store was prepared for another target than this one, as far as both are known; else None.

    Tokens depend on the tokenizer alone, which `check_store` compares; but the answers should be the target's own.
    """
    noted = stored.read_manifest(path).get("target", {})
    known = noted.keys() & target.keys()
    parts = differing_parts({name: noted[name] for name in known}, {name: target[name] for name in known})
    if not parts:
        return None
    return (
        f"{path}: prepared for another target, which differs in {', '.join(parts)}; its answers should be the "
        "own of the target that is trained for: regenerate them unless they are"
    )


_REMEDY = "give another data.store, or run `paceline prepare --replace`"


@contextmanager
def _told(store: Path) -> Generator[None, None, None]:
    """One line where the system refuses to read or write, for example because the disk is full."""
    try:
        yield
    except PacelineError:
        raise
    except BrokenProcessPool as error:
        raise DataError(
            f"{store}: a process that tokenized was ended from outside, perhaps for its memory; {_GO_ON}"
        ) from error
    except OSError as error:
        raise DataError(f"{store}: cannot be made: {error.strerror or error}; {_GO_ON}") from error


_GO_ON = "mend that and run the same command to go on with what is missing"


def _stamps(files: Sequence[DataFile]) -> list[tuple[int, int]]:
    """Size and time of the last change of each file."""
    return [(found.st_size, found.st_mtime_ns) for found in (named.path.stat() for named in files)]


def _silence(stage: str, done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _ingredients(
    sources: Sequence[RowSource], heldout: Sequence[RowSource], tokenizer: Any, settings: DataConfig
) -> JsonDict:
    return {
        "format": stored.FORMAT,
        "rows": [[source.digest, source.weight, list(source.tags)] for source in sources],
        "heldout": [source.digest for source in heldout],
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "template": fingerprint_template(tokenizer),
        "settings": {name: getattr(settings, name) for name in _SETTINGS},
    }


def _found_store(store: Path, fingerprint: str, ingredients: JsonDict, *, replace: bool) -> PrepareReport | None:
    """The report of a store that is already there, or None where there is nothing (or something to be replaced)."""
    if not store.exists() or (store.is_dir() and not any(store.iterdir())):
        return None
    if not (store / stored.MANIFEST).exists():
        raise DataError(f"{store}: is there and is no store; give another data.store, or move it away")
    manifest = stored.read_manifest(store)
    if manifest["fingerprint"] == fingerprint:
        if os.access(store.parent, os.W_OK):
            sweep(store, fingerprint[:12])
        return PrepareReport.from_json({**manifest["report"], "store": str(store), "reused": True})
    if replace:
        return None
    differences = "; ".join(_differences(manifest["ingredients"], ingredients))
    raise DataError(f"{store}: a store made from something else is there ({differences}); {_REMEDY}")


def _differences(theirs: JsonDict, ours: JsonDict) -> list[str]:
    errors = [
        f"another {word}"
        for key, word in (
            ("rows", "data"),
            ("heldout", "held-out data"),
            ("tokenizer", "tokenizer"),
            ("template", "chat template"),
            ("format", "format"),
        )
        if theirs.get(key) != ours[key]
    ]
    before = theirs.get("settings", {})
    errors += [
        f"data.{name} {before.get(name)} there, {value} asked"
        for name, value in ours["settings"].items()
        if before.get(name) != value
    ]
    return errors


def _held_out(
    sources: Sequence[RowSource], pieces: Sequence[Shard], tokeniser: RowTokenizer
) -> tuple[HeldOut, list[str]]:
    """What must not be trained on, and a line for each held-out file without chats."""
    prompts: list[bytes] = []
    hashes: list[int] = []
    chats, others = [0] * len(sources), [0] * len(sources)
    for piece in pieces:
        for line, values in read_shard(piece):
            if isinstance(values, RowRejected):
                raise DataError(f"{piece.path}:{line}: held-out row is not valid JSON; repair or remove the line")
            try:
                row = read_row(values, answered=False)
                if isinstance(row, Conversation):
                    prompts.append(prompt_of(row))
                    chats[piece.source] += 1
                else:
                    ids = row.ids if isinstance(row, ReadyTokens) else tokeniser.samples(row)[0].ids
                    hashes.append(content_hash(np.asarray(ids, dtype=np.int32)))
                    others[piece.source] += 1
            except RowRejected:
                continue
    said: list[str] = []
    for source, asked, told in zip(sources, chats, others, strict=True):
        if not asked and not told:
            raise DataError(f"data.heldout: {source.path}: no row that can be read; give chats, text or tokens")
        if not asked:
            said.append(
                f"{source.path} holds no chat: training rows with exactly the same tokens are left out, and its loss "
                "can be measured, but it asks nothing, so `paceline evaluate` has no prompt in it"
            )
    return HeldOut(prompts, hashes), said


def _tokenize_all(pieces: Sequence[Shard], worker: ShardWorker, workers: int, aside: Path, hear: Progress) -> None:
    missing = [piece for piece in pieces if not finished(aside, piece)]
    done = len(pieces) - len(missing)
    hear("tokenizing", done, len(pieces))
    if workers == 1 or len(missing) <= 1:
        start_worker(worker)
        for piece in missing:
            tokenize_shard(piece)
            done += 1
            hear("tokenizing", done, len(pieces))
        return
    # Fresh processes: a fork would copy the threads' locks of whatever this process has loaded.
    with ProcessPoolExecutor(
        min(workers, len(missing), os.cpu_count() or 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(worker,),
    ) as pool:
        waiting = [pool.submit(tokenize_shard, piece) for piece in missing]
        try:
            for future in as_completed(waiting):
                future.result()
                done += 1
                hear("tokenizing", done, len(pieces))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
