"""Ask the demo target for the demo's chats: `chats.jsonl` to train a drafter on, `heldout.jsonl` to evaluate it on.

    demo=src/paceline/assets/demo
    python scripts/make_demo_chats.py --target $demo/target --out $demo --work runs/demo-chats

Prompts come from `demo_text.py`: training prompts from the documents that the target was trained on, evaluation
prompts from the held-out ones, so the two files share no document; a question that both happen to ask is left out
of the evaluation. Answers are the target's own: greedy for evaluation and for most of the training rows, sampled for
the rest. Evaluation rows also hold the text's own answers as `reference`. Rows with an answer cut by the
limit, and rows whose text does not give back the tokens that the target wrote, are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import demo_text
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from paceline.decode.generate import TargetGenerator
from paceline.regenerate.local import LocalAnswers
from paceline.regenerate.loop import RegenerateSettings, prompt_id, regenerate
from paceline.types import Sampling

log = logging.getLogger("make_demo_chats")

TRAINING_SHARES = {
    "class": 0.18,
    "code": 0.18,
    "docs": 0.18,
    "library": 0.12,
    "reference": 0.18,
    "small-talk": 0.16,
}
"""Share of each kind of chat among the training prompts; overviews are not asked for, as this target never ends one."""

ANSWER_LIMITS = {
    "class": 320,
    "code": 160,
    "docs": 96,
    "library": 192,
    "reference": 208,
    "small-talk": 64,
}
"""Limit of one answer in tokens, by kind: room for all but the longest proper answers, little for endless ones."""

SAMPLED_KINDS = frozenset({"code", "docs", "reference", "small-talk"})
SAMPLED_TENTHS = 4
"""Of ten training prompts of the sampled kinds, so many are answered by sampling; the prompt's id decides."""

MAX_CONTEXT_TOKENS = 1536
BATCH_SIZE = 96
SMALLEST_MARGIN = 1e-3
"""Evaluation rows with a closer choice between two tokens are left out: rounding could turn it on another machine."""


def prompts(chats: Sequence[demo_text.Chat], wanted: dict[str, int], seed: int) -> list[dict[str, Any]]:
    """Prompt rows drawn from chats: so many of each kind, without repeats; more of a kind adds to fewer.

    A row is `messages` (questions only), `tags`, `document` and `reference`: the answers of the text itself.
    """
    rng = random.Random(seed)
    kinds: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for chat in chats:
        messages = [{"role": role, "content": content} for role, content in chat.messages if role != "assistant"]
        reference = [content for role, content in chat.messages if role == "assistant"]
        row = {"messages": messages, "tags": list(chat.tags), "document": chat.document, "reference": reference}
        kinds[chat.tags[0]].setdefault(prompt_id(messages), row)
    chosen = []
    for kind, count in wanted.items():
        rows = list(kinds[kind].values())
        rng.shuffle(rows)
        chosen += rows[:count]
    return chosen


def by_length(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows ordered by kind and length of the questions, so that batches end at about the same time."""
    return sorted(
        rows, key=lambda row: (row["tags"], len(row["messages"]), sum(len(m["content"]) for m in row["messages"]))
    )


def gives_back(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the answers' text, tokenized again, has as many tokens as the target wrote."""
    answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    counts = [len(tokenizer.encode(answer, add_special_tokens=False)) for answer in answers]
    return counts == row["answer_tokens"] and all(answer.strip() == answer and answer for answer in answers)


def answered(
    rows: list[dict[str, Any]],
    temperature: float,
    seed: int,
    work: Path,
    generate: TargetGenerator,
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """The rows with the target's answers, kind by kind; cut and ambiguous ones left out and counted in the log.

    Args:
        rows: prompts.
        temperature: 0 for greedy answers.
        seed: of the sampling.
        work: folder where answers are kept, so that a run which was ended, or one with more rows, goes on from them.
        generate: the target.
        tokenizer: its tokenizer.
    """
    kept = []
    for kind, limit in ANSWER_LIMITS.items():
        asked = [row for row in rows if row["tags"][0] == kind]
        if not asked:
            continue
        sampling = Sampling(limit, temperature=temperature, seed=seed)
        settings = RegenerateSettings(sampling, max_context_tokens=MAX_CONTEXT_TOKENS)
        answers = LocalAnswers(generate, tokenizer, settings, BATCH_SIZE)
        output = work / f"{kind}-{temperature}.jsonl"
        report = regenerate(by_length(asked), answers, settings, output, tokenizer=tokenizer)
        made = [without_ids(json.loads(line)) for line in output.read_text(encoding="utf-8").splitlines()]
        wanted = {prompt_id(row["messages"]) for row in asked}
        whole = [row for row in made if row["id"] in wanted and gives_back(row, tokenizer)]
        log.info("%s at %s: %s, %d of %d kept", kind, temperature, report, len(whole), len(asked))
        kept += whole
    return kept


def without_ids(row: dict[str, Any]) -> dict[str, Any]:
    """The row without the token ids of its answers: `gives_back` says that their text gives the same."""
    turns = [{key: value for key, value in turn.items() if key != "token_ids"} for turn in row["messages"]]
    return {**row, "messages": turns}


def write(path: Path, rows: list[dict[str, Any]], seed: int) -> None:
    """Write rows in a fixed random order, one JSON object a line."""
    rows = sorted(rows, key=lambda row: row["id"])
    random.Random(seed).shuffle(rows)
    first = ("id", "document", "tags", "messages")
    ordered = [{**{key: row[key] for key in first}, **row} for row in rows]
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in ordered)
    path.write_text(text, encoding="utf-8")


@torch.no_grad()
def smallest_margin(row: dict[str, Any], model: Any, tokenizer: PreTrainedTokenizerBase) -> float:
    """The smallest gap between the best and second-best logit over a row's answer tokens."""
    made = tokenizer.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    best = model(input_ids=made["input_ids"], use_cache=False).logits[0, :-1].topk(2, dim=-1).values
    answer = torch.as_tensor(made["assistant_masks"]).bool().reshape(-1)[1:]
    return (best[:, 0] - best[:, 1])[answer].min().item()


@torch.no_grad()
def predictability(rows: list[dict[str, Any]], model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """How sure the target is of its greedy answers: over all answer tokens, and by first tag."""
    best: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for row in rows:
        made = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        probabilities = model(input_ids=made["input_ids"], use_cache=False).logits[0, :-1].softmax(-1).amax(-1)
        kept = probabilities[torch.as_tensor(made["assistant_masks"]).bool().reshape(-1)[1:]]
        best["all"].append(kept)
        best[row["tags"][0]].append(kept)
    joined = {tag: torch.cat(parts) for tag, parts in sorted(best.items())}
    return {
        tag: {
            "tokens": len(values),
            "mean_probability": round(values.mean().item(), 4),
            "share_over_0.9": round((values > 0.9).float().mean().item(), 4),
        }
        for tag, values in joined.items()
    }


def lengths(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Deciles of the rows' lengths in tokens."""
    rendered = [tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"] for row in rows]
    counts = sorted(map(len, rendered))
    last = len(counts) - 1
    return {f"{percent}%": counts[last * percent // 100] for percent in range(0, 101, 10)}


def command(options: argparse.Namespace) -> str:
    """The command line that repeats this run, every option written out but the folders."""
    chosen = {name: value for name, value in vars(options).items() if name not in ("target", "out", "work")}
    flags = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(
        ["python", "scripts/make_demo_chats.py", "--target", "FOLDER", "--out", "FOLDER", "--work", "FOLDER", *flags]
    )


def main() -> None:
    """Command line: prompts, answers, two files, and CHATS.json with what they hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the demo target")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the files to")
    parser.add_argument("--work", type=Path, required=True, help="folder for answers under way")
    parser.add_argument("--rows", type=int, default=1200, help="training prompts asked")
    parser.add_argument("--held-out-rows", type=int, default=96, help="evaluation prompts asked")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sampled training rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    generate = TargetGenerator(model, tokenizer.pad_token_id, [tokenizer.eos_token_id])
    chats = demo_text.chats(options.seed)
    ask = partial(answered, seed=options.seed, generate=generate, tokenizer=tokenizer)
    even = dict.fromkeys(TRAINING_SHARES, -(-options.held_out_rows // len(TRAINING_SHARES)))
    known = {content for chat in chats if not chat.held_out for role, content in chat.messages if role == "user"}
    held_out = [
        row
        for row in prompts([chat for chat in chats if chat.held_out], even, options.seed)
        if not any(message["content"] in known for message in row["messages"])
    ]
    evaluation = ask(held_out, 0.0, work=options.work / "heldout")
    evaluation = [row for row in evaluation if smallest_margin(row, model, tokenizer) > SMALLEST_MARGIN]
    write(options.out / "heldout.jsonl", evaluation, options.seed)
    log.info("%d evaluation rows", len(evaluation))
    wanted = {tag: round(options.rows * share) for tag, share in TRAINING_SHARES.items()}
    training = []
    groups: dict[float, list[dict[str, Any]]] = {0.0: [], options.temperature: []}
    for row in prompts([chat for chat in chats if not chat.held_out], wanted, options.seed):
        drawn = int(prompt_id(row["messages"]), 16) % 10 < SAMPLED_TENTHS
        sampled = drawn and row["tags"][0] in SAMPLED_KINDS
        groups[options.temperature if sampled else 0.0].append(row)
    for temperature, rows in groups.items():
        training += ask(rows, temperature, work=options.work / "chats")
    for row in training:
        del row["reference"]
    write(options.out / "chats.jsonl", training, options.seed)
    report = {
        "command": command(options),
        "training_rows": len(training),
        "training_rows_by_tag": dict(sorted(Counter(row["tags"][0] for row in training).items())),
        "training_rows_sampled": sum(row["sampling"]["temperature"] > 0 for row in training),
        "training_lengths_tokens": lengths(training, tokenizer),
        "held_out_rows": len(evaluation),
        "held_out_lengths_tokens": lengths(evaluation, tokenizer),
        "held_out_predictability": predictability(evaluation, model, tokenizer),
    }
    (options.out / "CHATS.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    log.info("%s", json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
