"""Checks of the data: what is left out, what is supervised, and whether training reads what a server would send."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np

from paceline.check.context import CheckContext
from paceline.check.results import CheckResult
from paceline.check.sample_data import tokens_of
from paceline.data.coverage import beyond_positions, warnings_of
from paceline.data.holdout import without_heldout
from paceline.data.prepare import other_target
from paceline.data.report import REASONS
from paceline.errors import DataError
from paceline.evaluate.prompts import PromptRenderer, render_prompts

LEFT_OUT = 0.05
"""Share of rows left out above which a person should look."""


def check_data(context: CheckContext) -> CheckResult:
    """Rows that can be used, and what of them is supervised."""
    material, store, settings = context.material, context.material.store, context.settings.data
    misfits = (
        other_target(store.path, context.facts.identity) if material.whole else None,
        beyond_positions(store, context.facts.max_position_embeddings),
        None if settings.heldout_share else without_heldout(settings.heldout, context.settings.store_path),
    )
    other = "; ".join(filter(None, misfits))
    if material.report is None or material.sample is None:
        lengths, supervised = int(store.lengths.sum()), int(store.supervised.sum())
        detail = (
            f"store {store.path}: {len(store):,} samples, {lengths:,} tokens, {supervised / lengths:.1%} supervised"
        )
        figures = {"samples": len(store), "tokens": lengths}
        return CheckResult("data", "warn" if other else "pass", detail, other, figures)
    report = material.report
    left = report.rows_in - report.rows_used
    share = left / report.rows_in
    detail = (
        f"{report.rows_used:,} of {report.rows_in:,} rows usable, {report.tokens:,} tokens, "
        f"{report.supervised_tokens / report.tokens:.1%} supervised"
    )
    figures = {"rows_in": report.rows_in, "rows_used": report.rows_used, "tokens": report.tokens}
    # The rows here were tokenized without holding any out.
    warnings = warnings_of(report, settings.model_copy(update={"heldout_share": 0.0}))
    if share <= LEFT_OUT and not warnings and not other:
        return CheckResult("data", "pass", detail, figures=figures)
    words = [
        f"{count.count} {REASONS[key]}, first {count.example}"
        for key, count in sorted(report.set_aside.items(), key=lambda item: -item[1].count)
    ]
    advice = "; ".join([*([other] if other else []), *words[:3], *warnings[:2]])
    if words or warnings:
        advice += "; see all with `paceline prepare`"
    return CheckResult("data", "warn", detail, advice, figures)


def check_template(context: CheckContext) -> CheckResult:
    """Whether samples begin as a server would render their prompts, supervised from the answer's first token on."""
    material, settings = context.material, context.settings
    if material.chats is None or material.sample is None:
        return CheckResult("template", "skipped", "data.train names no files, so there are no chats to render")
    try:
        target, data = settings.target, settings.data
        renderer = PromptRenderer(target.path, data.thinking, data.template_switches, target.trust_remote_code)
        prompts = render_prompts([str(material.chats)], renderer, None)
    except DataError:
        return CheckResult("template", "skipped", "the data holds no chats with a question; nothing is rendered")
    samples: dict[str, list[int]] = {}
    for row in range(len(material.sample)):
        samples.setdefault(Path(material.sample.origin(row)).name, []).append(row)
    compared, equal, first = 0, 0, ""
    switched: Counter[str] = Counter()
    for prompt in prompts:
        rows = samples.get(Path(prompt.id).name, [])
        if not rows:
            continue
        compared += 1
        if any(_continues(np.asarray(prompt.ids), *pair) for pair in material.sample.read(rows)):
            equal += 1
            switched.update(f"{name}={json.dumps(value)}" for name, value in prompt.variables.items())
        else:
            first = first or prompt.id
    if not compared:
        return CheckResult("template", "skipped", "no usable row has a question before its last answer")
    detail = f"{equal} of {compared} answers continue the prompt that a server renders, token for token"
    detail += "".join(f"; {count} with {variable}" for variable, count in switched.items())
    figures = {"compared": compared, "equal": equal, "switched": dict(switched)}
    if equal == compared and not switched:
        return CheckResult("template", "pass", detail, figures=figures)
    if equal == compared:
        advice = (
            f"servers send these prompts only with {' or '.join(switched)} in chat_template_kwargs; serve so, or set "
            "data.thinking or data.template_switches to what you serve"
        )
        return CheckResult("template", "warn", detail, advice, figures)
    advice = (
        f"first other: {first}; the drafter would learn behind another prompt than servers send (thinking switch, "
        "tools or system text); set data.thinking as you serve, and look with `paceline prepare --show 2`"
    )
    return CheckResult("template", "warn" if equal else "fail", detail, advice, figures)


def _continues(prompt: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> bool:
    end = len(prompt)
    same = len(ids) > end and bool((np.asarray(ids[:end]) == prompt).all())
    return same and bool(mask[end]) and not bool(mask[end - 1])


def check_mask_token(context: CheckContext) -> CheckResult:
    """The token of the draft slots: inside the vocabulary, never in text, with an embedding."""
    spec, facts = context.spec, context.facts
    token = spec.mask_token_id
    if token >= facts.vocab_size:
        detail = f"id {token} is outside the embedding of {facts.vocab_size} rows"
        return CheckResult("mask token", "fail", detail, "give drafter.mask_token_id an unused id below that")
    used = int((tokens_of(context.material.store) == token).sum())
    row = context.target.embedding[token].float()
    figures = {"id": token, "times_in_text": used, "norm": float(row.norm())}
    detail = f"id {token}, {used} times in the text, embedding norm {float(row.norm()):.3g}"
    if token in facts.eos_token_ids:
        advice = "it ends answers, so servers cannot put it into draft slots; give drafter.mask_token_id another id"
        return CheckResult("mask token", "fail", detail, advice, figures)
    if used:
        advice = "the drafter could not tell it from text; give drafter.mask_token_id an id that never occurs"
        return CheckResult("mask token", "fail", detail, advice, figures)
    if not bool(row.isfinite().all()):
        return CheckResult("mask token", "fail", detail, "its embedding is not finite; give another id", figures)
    if float(row.norm()) == 0.0:
        advice = "its embedding is all zero, so slots tell nothing of their kind; another unused id may train better"
        return CheckResult("mask token", "warn", detail, advice, figures)
    return CheckResult("mask token", "pass", detail, figures=figures)
