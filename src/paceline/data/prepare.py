"""From data files to the tokenized store.

Files are cut into shards; each shard becomes one part of the store, written aside with its tally, in this process or in
several. A run that was ended resumes with the shards that are missing. At the end duplicates are found over all parts,
the index and the manifest are written, and the folder is renamed to its place. The store's bytes do not depend on the
number of processes. One process at a time prepares a store: another one waits, and then finds it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace as with_changes
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import numpy as np

from paceline import atomic_files
from paceline.config import DataConfig
from paceline.data.dedup import HeldOutPrompts, content_hash, prompt_of
from paceline.data.files import DataFile, check_apart, find_files
from paceline.data.finalize import UnfinishedStore, finalize, sweep, unfinished_folder
from paceline.data.readers import RowSource, Shard, read_shard, scan
from paceline.data.report import PrepareReport
from paceline.data.rows import Conversation, ReadyTokens, RowRejected, read_row
from paceline.data.store import FORMAT, MANIFEST, read_manifest
from paceline.data.tokenize_rows import (
    RowTokenizer,
    ShardWorker,
    start_worker,
    store_folder,
    tally_path,
    tokenize_shard,
)
from paceline.data.tokenizer import fingerprint_template, fingerprint_tokenizer, load_tokenizer
from paceline.errors import DataError, PacelineError
from paceline.text import absent, first_line
from paceline.types import JsonDict, differing_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SETTINGS = (
    "max_length",
    "on_too_long",
    "on_rewrite",
    "on_cut_answer",
    "duplicates",
    "near_duplicates",
    "thinking",
    "template_switches",
    "on_not_written",
    "heldout_share",
)
"""Settings that decide what is in the store."""

_REMEDY = "give another data.store, or run `paceline prepare --replace`"
_RESUME = "fix that and run the same command to resume with what is missing"
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

Progress = Callable[[str, int, int], None]
"""Stage, done and total: `reading` (bytes), `waiting` (for another process, once), `tokenizing` (shards) or `finishing`
(steps)."""


def prepare(
    files: Sequence[str],
    store: Path,
    tokenizer_path: str,
    settings: DataConfig,
    *,
    count_eligible: Callable[[np.ndarray], int],
    trust_remote_code: bool = False,
    progress: Progress = lambda stage, done, total: None,
    replace: bool = False,
    target: Mapping[str, str] | None = None,
    expected: str | None = None,
) -> PrepareReport:
    """Tokenize data files into a store.

    Args:
        files: data files or folders of such.
        store: folder to make; its parent is made too.
        tokenizer_path: folder or hub name of the target.
        settings: lengths and policies; `heldout` names files whose prompts must not be trained on.
        count_eligible: eligible anchors of a loss mask; picklable where `settings.workers` > 1.
        trust_remote_code: whether code that comes with the target may run.
        progress: is called with how far it is.
        replace: put the new store in the place of one that was made from something else.
        target: identity of the target whose answers these are, part by part; noted in the manifest.
        expected: fingerprint that the store must have, where a run that was started with it needs it again.

    Returns:
        The report; `reused` where the store was there with the same fingerprint.

    Raises:
        DataError: files missing or empty, no tokenizer, no chat template for chats, nothing usable left, or a store
            that was made from something else, or not the store that was expected.
    """
    paths = find_files(files)
    held_paths = find_files(settings.heldout, "data.heldout") if settings.heldout else []
    check_apart(paths, held_paths)
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
    before = _stamps(paths)
    sources, shards = scan(paths, lambda done, total: progress("reading", done, total))
    held_sources, held_shards = scan(held_paths) if held_paths else ([], [])
    ingredients = _ingredients(sources, held_sources, tokenizer, settings)
    fingerprint = hashlib.blake2b(json.dumps(ingredients, sort_keys=True).encode(), digest_size=16).hexdigest()
    if expected not in (None, fingerprint):
        raise DataError(
            f"{store}: the run was started with another store than these files and settings make: its data, held-out "
            "data, tokenizer, chat template or data settings have changed; put them back, or give another run_dir"
        )
    with _one_line(store), _locked(store, lambda: progress("waiting", 0, 1)):
        if (found := _found_store(store, fingerprint, ingredients, replace=replace)) is not None:
            return found
        folder = unfinished_folder(store, fingerprint)
        store_folder(folder).mkdir(parents=True, exist_ok=True)
        row_tokenizer = RowTokenizer(tokenizer_path, trust_remote_code, settings)
        heldout, warnings = _held_out(held_sources, held_shards, row_tokenizer)
        worker = ShardWorker(tokenizer_path, trust_remote_code, settings, count_eligible, folder, heldout)
        _tokenize_all(shards, worker, progress)
        _check_unchanged(paths, before, folder)
        made = UnfinishedStore(
            folder, store, sources, shards, settings, fingerprint, ingredients, dict(target or {}), warnings
        )
        return finalize(made, progress)


def check_store(path: Path, tokenizer_path: str, settings: DataConfig, *, trust_remote_code: bool = False) -> None:
    """Refuse a store that was made with another tokenizer, template or other settings than those given.

    Raises:
        DataError: what differs.
    """
    manifest = read_manifest(path)
    wanted = _ingredients([], [], load_tokenizer(tokenizer_path, trust_remote_code), settings)
    if errors := _differences({**manifest.ingredients, "rows": [], "heldout": []}, wanted):
        raise DataError(f"{path}: the store was made with other ingredients ({'; '.join(errors)}); {_REMEDY}")


def other_target(path: Path, target: Mapping[str, str]) -> str | None:
    """One line where a store was prepared for another target than this one, as far as both are known; else None.

    Tokens depend on the tokenizer alone, which `check_store` compares; but the answers should be the target's own.
    """
    noted = read_manifest(path).target
    known = noted.keys() & target.keys()
    parts = differing_parts({name: noted[name] for name in known}, {name: target[name] for name in known})
    if not parts:
        return None
    return (
        f"{path}: prepared for another target, which differs in {', '.join(parts)}; its answers should be written by "
        "the target that is trained for: regenerate them unless they are"
    )


def _ingredients(
    sources: Sequence[RowSource],
    heldout: Sequence[RowSource],
    tokenizer: PreTrainedTokenizerBase,
    settings: DataConfig,
) -> JsonDict:
    return {
        "format": FORMAT,
        "rows": [[source.digest, source.weight, list(source.tags)] for source in sources],
        "heldout": [source.digest for source in heldout],
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "template": fingerprint_template(tokenizer),
        "settings": {name: getattr(settings, name) for name in _SETTINGS},
    }


def _differences(theirs: JsonDict, ours: JsonDict) -> list[str]:
    names = {"rows": "data", "heldout": "held-out data", "tokenizer": "tokenizer", "template": "chat template"}
    errors = [f"another {word}" for key, word in names.items() if theirs.get(key) != ours[key]]
    before = theirs.get("settings", {})
    errors += [
        f"data.{name} {before.get(name)} there, {value} asked"
        for name, value in ours["settings"].items()
        if before.get(name) != value
    ]
    return errors


def _found_store(store: Path, fingerprint: str, ingredients: JsonDict, *, replace: bool) -> PrepareReport | None:
    """The report of a store that is already there, or None where there is nothing (or something to be replaced)."""
    if store.is_symlink() and not store.exists():
        raise DataError(f"{store}: {absent(store, 'store')}; make that folder, or give another data.store")
    if not store.exists() or (store.is_dir() and not any(store.iterdir())):
        return None
    if not (store / MANIFEST).exists():
        raise DataError(f"{store}: is there and is not a store; give another data.store, or move it away")
    manifest = read_manifest(store)
    if manifest.fingerprint == fingerprint:
        if os.access(store.parent, os.W_OK):
            sweep(store, fingerprint)
        return with_changes(manifest.report, store=str(store), reused=True)
    if replace:
        return None
    differences = "; ".join(_differences(manifest.ingredients, ingredients))
    raise DataError(f"{store}: a store made from something else is there ({differences}); {_REMEDY}")


@contextmanager
def _locked(store: Path, waiting: Callable[[], None]) -> Generator[None]:
    """Hold the lock of a store: the file `.NAME.lock` beside it, which the system frees when a process ends.

    Where nothing can be written beside a store that is there, none is needed; disks that know no locks are trusted.

    Args:
        store: folder of the store; its parent is made.
        waiting: called once where another process holds the lock, before waiting for it.

    Raises:
        DataError: no file can be made beside the store.
    """
    path = store.with_name(f".{store.name}.lock")
    lock = filelock.FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(atomic_files.open_itself(path, os.O_WRONLY | os.O_CREAT))
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            waiting()
            lock.acquire()
    except OSError as error:
        needless = error.errno in _WITHOUT_LOCKS or (store.exists() and error.errno in _NOT_WRITABLE)
        if not needless:
            raise DataError(
                f"{path}: cannot be made or locked ({first_line(error)}); give a data.store on a disk that allows it"
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _one_line(store: Path) -> Generator[None]:
    """One line where the system refuses to read or write, for example because the disk is full."""
    try:
        yield
    except PacelineError:
        raise
    except BrokenProcessPool as error:
        raise DataError(
            f"{store}: a process that tokenized was ended from outside, perhaps for its memory; {_RESUME}"
        ) from error
    except OSError as error:
        raise DataError(f"{store}: cannot be made: {first_line(error)}; {_RESUME}") from error


def _stamps(files: Sequence[DataFile]) -> list[tuple[int, int]]:
    """Size and time of the last change of each file."""
    return [(found.st_size, found.st_mtime_ns) for found in (named.path.stat() for named in files)]


def _check_unchanged(paths: Sequence[DataFile], before: Sequence[tuple[int, int]], folder: Path) -> None:
    """Refuse files that changed while they were read, and remove what was made of them.

    Raises:
        DataError: some parts may be of other bytes than the fingerprint says.
    """
    for named, *stamps in zip(paths, before, _stamps(paths), strict=True):
        if stamps[0] != stamps[1]:
            atomic_files.remove(folder)
            raise DataError(f"{named.name}: changed while it was read; run the same command when it is complete")


def _held_out(
    sources: Sequence[RowSource], shards: Sequence[Shard], tokenizer: RowTokenizer
) -> tuple[HeldOutPrompts, list[str]]:
    """What must not be trained on, and a line for each held-out file without chats."""
    prompts: list[bytes] = []
    hashes: list[int] = []
    chats, others = [0] * len(sources), [0] * len(sources)
    for shard in shards:
        for line, values in read_shard(shard):
            if isinstance(values, RowRejected):
                raise DataError(f"{shard.name}:{line}: held-out row is not valid JSON; repair or remove the line")
            try:
                row = read_row(values, answered=False)
                if isinstance(row, Conversation):
                    prompts.append(prompt_of(row))
                    chats[shard.source] += 1
                else:
                    ids = row.ids if isinstance(row, ReadyTokens) else tokenizer.samples(row)[0].ids
                    hashes.append(content_hash(np.asarray(ids, dtype=np.int32)))
                    others[shard.source] += 1
            except RowRejected:
                continue
    warnings: list[str] = []
    for source, num_chats, num_others in zip(sources, chats, others, strict=True):
        if not num_chats and not num_others:
            raise DataError(f"data.heldout: {source.path}: no row that can be read; give chats, text or tokens")
        if not num_chats:
            warnings.append(
                f"{source.path} holds no chat: training rows with exactly the same tokens are left out, and its loss "
                "can be measured, but it asks nothing, so `paceline evaluate` has no prompt in it"
            )
    return HeldOutPrompts(prompts, hashes), warnings


def _tokenize_all(shards: Sequence[Shard], worker: ShardWorker, progress: Progress) -> None:
    missing = [shard for shard in shards if not tally_path(worker.folder, shard.number).exists()]
    done, workers = len(shards) - len(missing), worker.settings.workers
    progress("tokenizing", done, len(shards))
    if workers == 1 or len(missing) <= 1:
        start_worker(worker)
        for shard in missing:
            tokenize_shard(shard)
            done += 1
            progress("tokenizing", done, len(shards))
        return
    # Fresh processes: a fork would copy the threads' locks of whatever this process has loaded.
    with ProcessPoolExecutor(
        min(workers, len(missing), os.cpu_count() or 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(worker,),
    ) as pool:
        waiting = [pool.submit(tokenize_shard, shard) for shard in missing]
        try:
            for future in as_completed(waiting):
                future.result()
                done += 1
                progress("tokenizing", done, len(shards))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
