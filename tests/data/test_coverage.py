"""What the anchor cap leaves, against all draws; sentences beside recipes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.data.coverage import (
    anchor_coverage,
    beyond_positions,
    cap_lines,
    check_mask_token,
    losses,
    passes_sentence,
)
from paceline.data.report import Cap, Count, PrepareReport, TagTokens
from paceline.errors import DataError


@pytest.mark.parametrize(("num_anchors", "block_size"), [(1, 2), (2, 3), (3, 4), (9, 4)])
def test_coverage_is_the_mean_over_all_draws(num_anchors: int, block_size: int) -> None:
    eligible = np.array([1, 4, 6, 6])
    reached = 0.0
    for total in eligible.tolist():
        draws = list(itertools.combinations(range(total), min(total, num_anchors)))
        for draw in draws:
            labels = {a + k for a in draw for k in range(1, block_size) if a + k <= total}
            reached += len(labels) / len(draws)
    found = anchor_coverage(eligible, num_anchors=num_anchors, block_size=block_size)
    assert found.covered_labels == pytest.approx(reached / eligible.sum())
    assert found.anchors == sum(min(e, num_anchors) for e in eligible.tolist())
    assert found.eligible == 17 and found.capped_samples == sum(e > num_anchors for e in eligible.tolist())


def test_a_row_cap_leaves_most_labels_of_long_samples_out() -> None:
    short = anchor_coverage(np.array([186]), num_anchors=512, block_size=16)
    long = anchor_coverage(np.array([100_000]), num_anchors=512, block_size=16)
    assert short.covered_labels == 1.0 and short.anchors == 186
    assert 0.05 < long.covered_labels < 0.08 and long.anchors == 512


def test_rows_and_epochs_stand_beside_published_recipes() -> None:
    assert passes_sentence(1_600_000, 8).startswith("1,600,000 rows × 8 epochs = 12,800,000 rows trained; published")
    assert "48,000 rows trained, 1.0% of the smallest recipe; published" in passes_sentence(8000, 6)


def report_of(**changes: object) -> PrepareReport:
    values = dict.fromkeys(PrepareReport.__dataclass_fields__, 0) | {
        "set_aside": {}, "notes": {}, "caps": [], "tags": {}, "warnings": [], "rows_in": 10, "rows_used": 10**7,
        "samples": 10, "supervised_tokens": 480, "lost_supervised_tokens": 520,
    }  # fmt: skip
    return PrepareReport(**{**values, **changes})


def test_a_loss_is_said_in_tokens_share_and_tags() -> None:
    counts = {
        "too_long": Count(27, "a:3", "", 510, {"code": 500, "chat": 10}),
        "cut_answer": Count(1, "a:4", "", 5, {}),
        "duplicate": Count(1, "a:5", "", 5, {}),
    }
    tags = {"code": TagTokens(9, 500, 300, 500), "chat": TagTokens(9, 500, 190, 10)}
    (sentence,) = losses(report_of(set_aside=counts, tags=tags))
    assert sentence == (
        "510 supervised tokens (51 %) are lost in 27 samples: longer than data.max_length; by tag: code 62 %, "
        "chat 5.0 %; raise data.max_length, or keep the first turns that fit with data.on_too_long: turns"
    )


def test_caps_are_drawn_up_to_the_longest_sample() -> None:
    assert cap_lines(report_of(caps=[Cap(900, 10, 50, 50, 50)])) == []
    _, *lines = cap_lines(report_of(caps=[Cap(2048, 5, 10, 20, 30), Cap(3000, 10, 40, 40, 40)]))
    assert [line.split() for line in lines] == [
        ["2,048", "50", "%", "25", "%,", "50", "%,", "75", "%"],
        ["3,000", "100", "%", "100", "%,", "100", "%,", "100", "%"],
    ]


class Store:
    """What the checks read of a store."""

    path = "somewhere/store"
    lengths = np.array([10, 2048, 2049, 5000])
    supervised = np.array([10, 20, 30, 40])
    used_ids = np.array([0, 3, 4, 9])


def test_samples_beyond_the_positions_are_said() -> None:
    assert beyond_positions(Store(), None) is None and beyond_positions(Store(), 5000) is None
    sentence = beyond_positions(Store(), 2048)
    assert sentence.startswith("2 samples (70 % of the supervised tokens) are longer than the target's 2,048 positions")


def test_a_mask_token_that_is_in_the_text_is_refused() -> None:
    check_mask_token(Store(), 5, 10)
    with pytest.raises(DataError, match=r"token 9 occurs in the text of somewhere/store; give .* for example 8"):
        check_mask_token(Store(), 9, 10)
