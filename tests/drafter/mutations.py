"""Puts each classic error into a copy of the package and runs the tests that must fail.

Usage: `python tests/drafter/mutations.py [WORD ...]`; words choose errors by name.

An error is a list of (file, text, replacement); `test_mutations.py` keeps the texts true to the source. Give names as
arguments to run some errors only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Fault:
    """One error.

    Attributes:
        name: what is wrong.
        edits: (file under the room, text that occurs once, replacement).
        tests: pytest arguments under the room's tests of which one must fail.
        room: where both are.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: str
    room: str = "drafter"

    def source(self, name: str, root: Path = PROJECT / "src") -> Path:
        """A file of the room."""
        return root / "paceline" / self.room / name

    def files(self) -> list[Path]:
        """Files that hold the tests."""
        return [PROJECT / "tests" / self.room / file for file in self.tests.partition(" -k ")[0].split()]


FAULTS = (
    Fault(
        "context includes the anchor (dense)",
        (("attention/dense.py", "(context[None, :] < anchor[:, None])", "(context[None, :] <= anchor[:, None])"),),
        "test_attention.py -k mask_is_the_rule",
    ),
    Fault(
        "context includes the anchor (split and its layout)",
        (
            (
                "attention/layout.py",
                "start + int(self.anchors[last - 1])))",
                "start + int(self.anchors[last - 1]) + 1))",
            ),
            (
                "attention/layout.py",
                "self.tensor(self.starts + self.anchors)",
                "self.tensor(self.starts + self.anchors + 1)",
            ),
        ),
        "test_network.py -k own_past",
    ),
    Fault(
        "context by the last anchor of a group",
        (("attention/split.py", "if tail < width:", "if tail > width:"),),
        "test_network.py -k own_past",
    ),
    Fault(
        "labels shifted by one",
        (("block_inputs.py", "host.anchors[:, None] + 1 + np", "host.anchors[:, None] + np"),),
        "test_anchors.py -k labels",
    ),
    Fault(
        "label of the slot before",
        (("block_inputs.py", "draft + spec.first_draft_slot", "draft"),),
        "test_anchors.py test_objectives.py -k labels_are or definition",
    ),
    Fault(
        "window from the anchor (dense)",
        (
            (
                "attention/dense.py",
                "slot[:, None] - context[None, :] < window",
                "anchor[:, None] - context[None, :] < window",
            ),
        ),
        "test_attention.py -k mask_is_the_rule",
    ),
    Fault(
        "window from the anchor (split)",
        (
            (
                "attention/split.py",
                "earliest = layout.slot_positions[first:last] +",
                "earliest = layout.slot_positions[first:last, :1] + 0 * layout.slot_positions[first:last] +",
            ),
        ),
        "test_attention.py -k split_equals",
    ),
    Fault(
        "blocks see each other (dense)",
        (
            (
                "attention/dense.py",
                "sees_slots = block[:, None] == block[None, :]",
                "sees_slots = document[:, None] == document[None, :]",
            ),
        ),
        "test_attention.py -k mask_is_the_rule",
    ),
    Fault(
        "blocks see each other (flex)",
        (("attention/flex.py", "(block_of[row] == block_of[other])", "(starts[row] == starts[other])"),),
        "test_attention.py -k flex_masks",
    ),
    Fault(
        "labels cross a document and run over gaps",
        (
            (
                "block_inputs.py",
                "inside = positions < host.lengths[documents][:, None]",
                "inside = positions < host.ids.shape[1]",
            ),
            ("block_inputs.py", "inside & host.loss_mask[documents[:, None], safe]", "inside"),
        ),
        "test_anchors.py -k labels",
    ),
    Fault(
        "a block goes on after a gap in the mask",
        (("block_inputs.py", "np.logical_and.accumulate(supervised, axis=1)", "supervised"),),
        "test_anchors.py -k labels_are",
    ),
    Fault(
        "mean of means",
        (
            (
                "learner.py",
                "        return total\n",
                "        return total / weights.sum()\n",
            ),
            ("learner.py", "total, weights.sum())", "total, torch.ones_like(weights.sum()))"),
        ),
        "test_learner.py -k partition",
    ),
    Fault(
        "gradient to the frozen head",
        (
            (
                "loss/tiled_ce.py",
                "ctx.mark_non_differentiable(correct)",
                "ctx.mark_non_differentiable(correct); ctx.head = head",
            ),
            (
                "loss/tiled_ce.py",
                "(slope * gradients[0][:, None]).to(slope.dtype), None, None, None",
                "(slope * gradients[0][:, None]).to(slope.dtype), ctx.head * 0.1, None, None",
            ),
        ),
        "test_head.py -k frozen",
    ),
    Fault(
        "bfloat16 masters",
        (("learner.py", "seed=seed).to(self.device)", "seed=seed).to(self.device, self.dtype)"),),
        "test_learner.py -k masters",
    ),
    Fault(
        "rotary tables in bfloat16",
        (("layers.py", "    kind = accumulation_dtype(dtype)\n    steps", "    kind = dtype\n    steps"),),
        "test_network.py -k rotary",
    ),
    Fault(
        "rotary position of a block off by one while decoding",
        (("network.py", "np.asarray(positions, np.int64),", "np.asarray(positions, np.int64) - 1,"),),
        "test_network.py -k training_equals",
    ),
    Fault(
        "rotary position of joined rows off by one while decoding",
        (("fast_draft.py", "cos[start : start + count]", "cos[start + 1 : start + count + 1]"),),
        "test_decoding.py -k slow_path",
    ),
    Fault(
        "copied weights that outlive the weights",
        (
            (
                "network.py",
                "if self._copied is None or self._copied.key != weights_key(self, like.dtype):",
                "if self._copied is None:",
            ),
        ),
        "test_decoding.py -k anew",
    ),
    Fault(
        "the block stays in the cache",
        (("fast_draft.py", "cache.settle(new)", "cache.settle(new + 1)"),),
        "test_decoding.py -k leaves_nothing",
    ),
    Fault(
        "waiting features are not taken back",
        (("context_cache.py", "kept.append(part[:room])", "kept.append(part)"),),
        "test_decoding.py -k leaves_nothing",
    ),
    Fault(
        "the window of a draft layer reaches too far while decoding",
        (("fast_draft.py", "slots - columns < window", "slots - columns <= window"),),
        "test_decoding.py -k slow_path",
    ),
    Fault(
        "taps in another order",
        (
            (
                "network.py",
                "context = self.context(features)\n        table = self._table(layout",
                "context = self.context(features.roll(self.spec.hidden_size, 1))\n        table = self._table(layout",
            ),
        ),
        "test_network.py -k training_equals",
    ),
    Fault(
        "anchors whose next token is not supervised",
        (
            (
                "anchors.py",
                "return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int64)",
                "return np.flatnonzero(mask[:-1]).astype(np.int64)",
            ),
        ),
        "test_anchors.py -k eligible",
    ),
    Fault(
        "one anchor too few",
        (("anchors.py", 'kind="stable")[:limit]', 'kind="stable")[: limit - 1]'),),
        "test_anchors.py -k exactly_as_many",
    ),
    Fault(
        "teacher of the label's own position",
        (("block_inputs.py", "host.anchors[anchor] + draft,", "host.anchors[anchor] + draft + 1,"),),
        "test_terms.py -k token_before",
    ),
    Fault(
        "streak from marginals",
        (("metrics.py", "accepted = torch.cumprod(hits.long(), dim=1)", "accepted = hits.long()"),),
        "test_objectives.py -k acceptance_metrics",
    ),
    Fault(
        "D-PACE without the later drafts",
        (("loss/dpace.py", "reach.flip(1).cumsum(1).flip(1) * live", "reach * live"),),
        "test_objectives.py -k dpace",
    ),
    Fault(
        "the last moments are not resumed",
        (("learner.py", 'self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))', "pass"),),
        "test_learner.py -k resume",
    ),
    Fault(
        "steps that are not finite are taken",
        (("learner.py", "if finite and weight:", "if weight:"),),
        "test_learner.py -k not_finite",
    ),
    Fault(
        "only the first budget rank of each depth in the tree",
        (("tree.py", "for j in range(min(tokens, budget // (i + 1)))", "for j in range(min(tokens, 1))"),),
        "test_tree.py -k enumeration",
    ),
    Fault(
        "tap off by one",
        (("model.py", "layers[at].register_forward_hook(tap", "layers[at - 1].register_forward_hook(tap"),),
        "test_features.py -k equal_hidden_states or final_norm",
        room="target_model",
    ),
    Fault(
        "taps in the order of layers, not of the list",
        (("model.py", "for place, at in enumerate(self.taps)]", "for place, at in enumerate(sorted(self.taps))]"),),
        "test_features.py -k equal_hidden_states",
        room="target_model",
    ),
    Fault(
        "expected tree depth of blocks that end early",
        (("tree_metrics.py", "Ratio(realised, expected)", "Ratio(streaks, surrogates)"),),
        "test_terms.py -k diagnosis_agrees",
    ),
)


def caught(error: Fault) -> bool:
    """Whether the tests fail on a copy of the package with the error."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(PROJECT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "assets"))
        for name, text, replacement in error.edits:
            file = error.source(name, source)
            whole = file.read_text(encoding="utf-8")
            if whole.count(text) != 1:
                raise SystemExit(f"{error.name}: {name} holds the text {whole.count(text)} times: {text}")
            file.write_text(whole.replace(text, replacement), encoding="utf-8")
        choice = error.tests.partition(" -k ")[2]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
        command += [*map(str, error.files()), "-k", choice]
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{error.name}: pytest could not run:\n{done.stdout[-2000:]}")
        return done.returncode == 1


def main(names: list[str]) -> int:
    """Runs all errors, or those whose name holds one of the words; 1 where one goes unnoticed."""
    unnoticed = 0
    for error in FAULTS:
        if not names or any(word in error.name for word in names):
            found = caught(error)
            unnoticed += not found
            print(f"{'caught   ' if found else 'UNNOTICED'}  {error.name}", flush=True)
    return min(1, unnoticed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
