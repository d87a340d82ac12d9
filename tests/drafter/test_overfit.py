"""The gate before any long run: a drafter that is shown eight samples again and again drafts them whole."""

from __future__ import annotations

import random

import numpy as np

from batches import host_batch
from drafter_cases import close_window
from paceline.config import DrafterConfig, ObjectiveConfig, OptimizerConfig, TargetConfig
from paceline.decode.chain import speculative_decode
from paceline.decode.loop import greedy_decode
from paceline.drafter.anchors import sample_anchors
from paceline.drafter.learner import Learner
from paceline.drafter.spec import derive_spec
from paceline.target_model.load import load_target
from paceline.types import FeatureBatch, HostBatch
from tiny_targets import save_tiny

TAPS, BLOCK, STEPS, ANSWER = [0, 2], 5, 160, 30


def samples_as_batch(samples, prompts, epoch: int) -> HostBatch:
    masks = [np.arange(len(sample)) >= len(prompt) for sample, prompt in zip(samples, prompts, strict=True)]
    anchors = [sample_anchors(mask, seed=0, epoch=epoch, sample=row, limit=16) for row, mask in enumerate(masks)]
    return host_batch(samples, masks=masks, anchors=anchors, epoch=epoch)


def test_eight_samples_are_drafted_whole(tmp_path):
    """Decode τ above 0.9 × block size, with the target's own answers as samples."""
    target = load_target(TargetConfig(path=str(save_tiny(tmp_path, "qwen3")), dtype="float32"), TAPS)
    source = random.Random(3)
    prompts = [[source.randrange(4, 97) for _ in range(6)] for _ in range(8)]
    answers = [greedy_decode(target, prompt, max_new_tokens=ANSWER, stop_ids=()).ids for prompt in prompts]
    samples = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    config = DrafterConfig(num_layers=2, block_size=BLOCK, mask_token_id=3, dtype="float32", diagnose_every=0)
    learner = Learner(
        derive_spec(config, target.facts, TAPS, None), embedding=target.embedding, head=target.head, drafter=config,
        objective=ObjectiveConfig(), optimizer=OptimizerConfig(lr=5e-3), total_steps=STEPS, seed=0,
    )  # fmt: skip
    features = target.features(samples_as_batch(samples, prompts, 0)).features.clone()
    for step in range(1, STEPS + 1):
        host = samples_as_batch(samples, prompts, step)
        learner.accumulate(FeatureBatch(host, features))
        report = close_window(learner, step)
    decoded = [
        speculative_decode(target, learner.network, prompt, max_new_tokens=ANSWER, stop_ids=()) for prompt in prompts
    ]
    assert [answer.ids for answer in decoded] == answers
    tau = sum(sum(p.emitted for p in answer.passes) for answer in decoded) / sum(
        len(answer.passes) for answer in decoded
    )
    assert tau > 0.9 * BLOCK and 1 + report.ratios["acceptance/streak"].value > 0.85 * BLOCK
