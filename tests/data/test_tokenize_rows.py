"""What the policies keep and lose, in supervised tokens, against the samples that they would be without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import template_families as families
from paceline.config import DataConfig
from paceline.data.prepare import prepare
from paceline.data.report import PrepareReport
from paceline.data.store import TokenStore, open_store
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter.anchors import count_eligible

Write = Callable[..., str]


def turns(*answers: str, **more: Any) -> dict[str, Any]:
    messages = []
    for number, answer in enumerate(answers):
        messages += [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


def run(files: str, store: Path, tokenizer: str, **settings: Any) -> tuple[PrepareReport, TokenStore]:
    report = prepare([files], store, tokenizer, DataConfig(**settings), count_eligible=count_eligible)
    return report, open_store(store)


LONG = turns("one two three", "word " * 20, "the third answer", tags=["long"])
ROWS = [LONG, turns("a short answer", tags=["short"]), turns("word " * 70, tags=["long", "one"])]
LIMIT = 100


@pytest.mark.parametrize("policy", ["drop", "turns", "cut"])
def test_long_samples_lose_what_the_policy_says(policy: str, tmp_path: Path, chatml: str, write_rows: Write) -> None:
    files = write_rows(ROWS)
    _, whole = run(files, tmp_path / "whole", chatml)
    report, store = run(files, tmp_path / "store", chatml, max_length=LIMIT, on_too_long=policy)
    (long, short, single) = whole.read(range(3))
    assert len(long[0]) > LIMIT and len(single[0]) > LIMIT >= len(short[0])
    found = store.read(range(len(store)))
    wanted = {"drop": [short], "turns": [long, short], "cut": [long, short, single]}[policy]
    assert len(found) == len(wanted)
    for (ids, mask), (all_ids, all_mask) in zip(found, wanted, strict=True):
        assert np.array_equal(ids, all_ids[: len(ids)]) and np.array_equal(mask, all_mask[: len(ids)])
    if policy == "turns":
        text = load_tokenizer(chatml).decode(found[0][0].tolist())
        assert text.endswith("one two three<|im_end|>") and "question 1" not in text
    lost = int(sum(mask.sum() for _, mask in (long, short, single)) - sum(mask.sum() for _, mask in found))
    assert report.lost_supervised_tokens == lost > 0
    assert report.tags["short"].lost == 0 and report.tags["long"].lost == lost
    assert report.tags["one"].lost == lost - int(long[1].sum() - (found[0][1].sum() if policy != "drop" else 0))
    counts = [*report.set_aside.values(), *report.notes.values()]
    assert sum(count.lost for count in counts) == lost == sum(count.lost_by_tag.get("long", 0) for count in counts)
    assert any(
        line.startswith(f"{max(count.lost for count in counts):,} supervised tokens (") for line in report.warnings
    )


def test_answers_that_were_cut_and_rewritten_turns_count_too(
    tmp_path: Path, family_folder: Callable[[families.Family], str], write_rows: Write
) -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    ask = [{"role": "user", "content": "2 + 2?"}]
    rows = [
        {"messages": [*ask, thought, *ask, thought], "tags": ["twice"]},
        {"messages": [*ask, thought], "finish_reason": "length", "tags": ["ended"]},
    ]
    files, folder = write_rows(rows), family_folder(families.THINKING)
    kept, whole = run(files, tmp_path / "whole", folder, on_cut_answer="keep", duplicates="keep")
    assert kept.lost_supervised_tokens == 0 and len(whole) == 3
    report, store = run(files, tmp_path / "store", folder, on_rewrite="last")
    assert report.set_aside["rewritten"].lost == whole.supervised[0] and report.notes["only_last_supervised"].count == 1
    assert report.set_aside["cut_answer"].lost == whole.supervised[2] + 1, "with the end token that `keep` takes away"
    assert store.supervised.tolist() == [whole.supervised[1]]
    assert report.lost_supervised_tokens == report.tags["twice"].lost + report.tags["ended"].lost


def test_duplicates_and_weights_count_too(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    rows = [turns(f"the answer is {n}", tags=[f"t{n % 2}"]) for n in range(30)]
    _, whole = run(write_rows(rows), tmp_path / "whole", chatml)
    report, store = run(write_rows([*rows, *rows[:9]]) + "#weight=0.5", tmp_path / "store", chatml)
    assert report.set_aside["duplicate"].lost == whole.supervised[:9].sum()
    assert report.set_aside["weight"].lost == whole.supervised.sum() - store.supervised.sum()
    odd = whole.supervised[1::2].sum() + whole.supervised[1:9:2].sum()
    assert report.tags["t1"].lost + report.tags["t1"].supervised_tokens == odd


def test_token_ids_that_occur_are_noted(tmp_path: Path, chatml: str, write_rows: Write) -> None:
    rows = [turns(f"the answer is {n}") for n in range(30)]
    _, store = run(write_rows(rows), tmp_path / "store", chatml)
    assert store.used_ids.tolist() == sorted({int(token) for ids, _ in store.read(range(30)) for token in ids})
