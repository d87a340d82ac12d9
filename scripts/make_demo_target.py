"""Train the demo's target: a small Qwen3-architecture language model with a tokenizer and chat template of its own.

    python scripts/make_demo_target.py --out src/paceline/assets/demo/target

Needs the packages `chatterbot-corpus` and PyYAML beside paceline itself. The model's text comes from `demo_text.py`;
every ninth library module and three dialog files are held out whole. Writes an `AutoModelForCausalLM` folder and
`TRAINING.json` with the held-out loss beside that of an interpolated bigram model counted on the same training
tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import platform
import random
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import demo_text
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

log = logging.getLogger("make_demo_target")

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
VOCABULARY = 2048
MAX_TOKENS = 1024
PROMPT_WEIGHT = 0.1
"""Weight of a token outside the answers in the training loss; an answer's token has weight 1."""
REPEATS = {"docs": 3, "small-talk": 4}
"""How often an epoch shows the chats whose answers cannot be read off the question."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{%- else -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

Row = tuple[list[int], list[bool]]
"""Token ids of a chat, and for each whether it belongs to an answer (its end token included)."""


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` entries over the given texts, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, chats: Sequence[demo_text.Chat]) -> list[Row | None]:
    """Each chat through the chat template; None for a chat over `MAX_TOKENS`."""
    rows: list[Row | None] = []
    for chat in chats:
        messages = [{"role": role, "content": content} for role, content in chat.messages]
        made = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, answer = list(made["input_ids"]), [bool(flag) for flag in made["assistant_masks"]]
        rows.append((ids, answer) if len(ids) <= MAX_TOKENS else None)
    return rows


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The demo target's shape: 1.84 M parameters, embedding and head tied."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def batches(rows: Sequence[Row], budget: int, rng: random.Random) -> Iterator[list[Row]]:
    """Endless batches of rows of like length, about `budget` padded tokens each, in random order."""
    while True:
        order = sorted(rows, key=lambda row: (len(row[0]) + rng.randint(0, 16), rng.random()))
        groups: list[list[Row]] = [[]]
        for row in order:
            if groups[-1] and (len(groups[-1]) + 1) * max(len(row[0]), len(groups[-1][-1][0]) + 16) > budget:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from groups


def padded(rows: Sequence[Row], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, S]; loss weight [B, S] of each token as a label, 0 on padding; answer flags [B, S]."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), length), pad)
    weight = torch.zeros(len(rows), length)
    answer = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, (row, flags) in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        answer[index, : len(row)] = torch.tensor(flags)
        weight[index, : len(row)] = torch.where(torch.tensor(flags), 1.0, PROMPT_WEIGHT)
    return ids, weight, answer


def schedule(step: int, steps: int) -> float:
    """Learning-rate factor: 30 steps of warm-up, constant, then linear to zero over the last 45 %."""
    return min((step + 1) / 30, 1.0, (steps - step) / (0.45 * steps))


def train(
    model: Qwen3ForCausalLM, rows: Sequence[Row], steps: int, budget: int, rates: tuple[float, float], seed: int
) -> None:
    """Train in place: Muon for the layers' matrices, AdamW for the rest; right padding needs no mask here."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=rates[0], weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rates[1], betas=(0.9, 0.98), weight_decay=0.0),
    ]
    source = batches(rows, budget, random.Random(seed))
    model.train()
    started, running, seen = time.monotonic(), 0.0, 0
    for step in range(steps):
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(step, steps)
        ids, weight, answer = padded(next(source), model.config.pad_token_id)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        kept = weight[:, 1:] > 0
        losses = torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept], reduction="none")
        chosen = weight[:, 1:][kept]
        loss = (losses * chosen).sum() / chosen.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen += int(kept.sum())
        on_answers = losses.detach()[answer[:, 1:][kept]].mean().item()
        running = on_answers if step == 0 else 0.95 * running + 0.05 * on_answers
        if step % 25 == 24:
            log.info("step %d answer loss %.3f, %.1f s, %d tokens", step + 1, running, time.monotonic() - started, seen)


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> dict[str, float]:
    """Mean loss in nats per answer token and per any token, and how sure the model is of its best token in answers."""
    model.eval()
    answer_losses, all_losses, best = [], [], []
    for start in range(0, len(rows), 8):
        ids, weight, answer = padded(rows[start : start + 8], model.config.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        losses = -logits.gather(-1, ids[:, 1:, None])[..., 0]
        all_losses.append(losses[weight[:, 1:] > 0])
        answer_losses.append(losses[answer[:, 1:]])
        best.append(logits.amax(-1).exp()[answer[:, 1:]])
    sure = torch.cat(best)
    return {
        "answer_loss": torch.cat(answer_losses).mean().item(),
        "all_loss": torch.cat(all_losses).mean().item(),
        "mean_best_probability": sure.mean().item(),
        "share_best_probability_over_0.9": (sure > 0.9).float().mean().item(),
        "answer_tokens": len(sure),
    }


def bigram_loss(train_rows: Sequence[Row], rows: Sequence[Row]) -> dict[str, float]:
    """The same losses for a bigram model with Witten-Bell interpolation to an add-one unigram model.

    p(w | v) = (c(v, w) + T(v) p(w)) / (c(v) + T(v)), with T(v) the number of kinds of tokens seen after v.
    """
    pairs: defaultdict[int, Counter[int]] = defaultdict(Counter)
    single: Counter[int] = Counter()
    for ids, _ in train_rows:
        single.update(ids[1:])
        for left, right in itertools.pairwise(ids):
            pairs[left][right] += 1
    total, counts = sum(single.values()), {left: sum(after.values()) for left, after in pairs.items()}
    losses: dict[bool, list[float]] = {True: [], False: []}
    for ids, answer in rows:
        for left, right, flag in zip(ids[:-1], ids[1:], answer[1:], strict=True):
            unigram = (single[right] + 1) / (total + VOCABULARY)
            kinds = len(pairs[left])
            known = counts.get(left, 0) + kinds
            probability = (pairs[left][right] + kinds * unigram) / known if known else unigram
            losses[flag].append(-math.log(probability))
    everything = losses[True] + losses[False]
    return {"answer_loss": sum(losses[True]) / len(losses[True]), "all_loss": sum(everything) / len(everything)}


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder: weights stored in bfloat16 and declared float32, so that loading computes in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    model.to(torch.float32)


def by_tag(chats: Sequence[demo_text.Chat], limit: int, seed: int) -> list[demo_text.Chat]:
    """At most `limit` chats of each first tag, drawn without replacement."""
    rng = random.Random(seed)
    groups: defaultdict[str, list[demo_text.Chat]] = defaultdict(list)
    for chat in chats:
        groups[chat.tags[0]].append(chat)
    return [chat for tag in sorted(groups) for chat in rng.sample(groups[tag], min(limit, len(groups[tag])))]


def command(options: argparse.Namespace) -> str:
    """The command line that repeats this run, every option written out but the place of the folder."""
    chosen = {name: value for name, value in vars(options).items() if name not in ("out", "start")}
    start = [] if options.start is None else ["--start", "EARLIER"]
    flags = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(["python", "scripts/make_demo_target.py", "--out", "FOLDER", *start, *flags])


def parsed() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--start", type=Path, help="folder of an earlier run to go on from (its tokenizer is kept)")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="padded tokens a step")
    parser.add_argument("--matrix-rate", type=float, default=8e-3, help="Muon learning rate")
    parser.add_argument("--other-rate", type=float, default=4e-3, help="AdamW learning rate of embedding and norms")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measured-per-tag", type=int, default=60, help="held-out chats measured of each tag")
    return parser.parse_args()


def main() -> None:
    """Command line: build text, tokenizer and model, train, measure, save."""
    options = parsed()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.monotonic()
    chats = demo_text.chats(options.seed)
    training = [chat for chat in chats if not chat.held_out]
    earlier = None
    if options.start is None:
        tokenizer = train_tokenizer([content for chat in training for _, content in chat.messages])
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.start)
        earlier = json.loads((options.start / "TRAINING.json").read_text(encoding="utf-8"))
    steps_before = earlier["steps"] if earlier else 0
    once = list(zip(training, tokenize(tokenizer, training), strict=True))
    rows = [row for chat, row in once for _ in range(REPEATS.get(chat.tags[0], 1)) if row]
    held_out = [chat for chat in chats if chat.held_out]
    log.info("%d rows and %d tokens an epoch", len(rows), sum(len(ids) for ids, _ in rows))
    model = (
        Qwen3ForCausalLM(model_config(tokenizer))
        if options.start is None
        else Qwen3ForCausalLM.from_pretrained(options.start)
    )
    rates = (options.matrix_rate, options.other_rate)
    train(model, rows, options.steps, options.batch_tokens, rates, options.seed + steps_before)
    save(model, tokenizer, options.out)
    measured = by_tag(held_out, options.measured_per_tag, options.seed)
    tagged = [(chat.tags[0], row) for chat, row in zip(measured, tokenize(tokenizer, measured), strict=True) if row]
    measured_rows = [row for _, row in tagged]
    stored = Qwen3ForCausalLM.from_pretrained(options.out)
    report = {
        "commands": [*(earlier["commands"] if earlier else []), command(options)],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in stored.parameters()),
        "training_rows_an_epoch": len(rows),
        "training_tokens_an_epoch": sum(len(ids) for ids, _ in rows),
        "steps": options.steps + steps_before,
        "wall_s": round(time.monotonic() - started) + (earlier["wall_s"] if earlier else 0),
        "held_out_documents": sorted({chat.document for chat in held_out}),
        "held_out_chats_measured": len(measured_rows),
        "loss_unit": "nats per token",
        "target": held_out_loss(stored, measured_rows),
        "bigram": bigram_loss([row for _, row in once if row], measured_rows),
        "target_by_tag": {
            tag: held_out_loss(stored, [row for other, row in tagged if other == tag])
            for tag in sorted({tag for tag, _ in tagged})
        },
    }
    (options.out / "TRAINING.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    log.info("target %s\nbigram %s", report["target"], report["bigram"])


if __name__ == "__main__":
    main()
