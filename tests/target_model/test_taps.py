"""Which layers are tapped, and which requests are refused."""

from __future__ import annotations

import json

import pytest

from paceline.errors import TargetError
from paceline.target_model.taps import check_taps, default_taps

PUBLISHED = {
    24: [1, 6, 11, 16, 21],
    28: [1, 7, 13, 19, 25],
    32: [1, 8, 15, 22, 29],
    36: [1, 9, 17, 25, 33],
    40: [1, 10, 19, 28, 37],
    64: [1, 16, 31, 46, 61],
}


@pytest.mark.parametrize("num_layers", PUBLISHED)
def test_default_taps_are_those_of_the_published_drafters(num_layers):
    assert default_taps(num_layers, 5) == PUBLISHED[num_layers]


def test_one_tap_is_the_middle():
    assert default_taps(36, 1) == [18]
    assert default_taps(7, 1) == [3]


@pytest.mark.parametrize(("num_layers", "num_taps"), [(4, 5), (5, 5), (3, 2), (6, 4)])
def test_too_many_taps_for_the_depth_are_refused(num_layers, num_taps):
    with pytest.raises(TargetError, match=r"lower num_taps or list `target.taps`") as error:
        default_taps(num_layers, num_taps)
    assert len(error.value.errors) == 1
    check_taps(json.loads(str(error.value).rpartition("for example target.taps: ")[2]), num_layers)


@pytest.mark.parametrize(
    ("taps", "says"),
    [
        ([], "no layer is tapped"),
        ([1, 4], "no such layer 4"),
        ([-1, 2], "no such layer -1"),
        ([0, 2, 2], r"must ascend, each layer once, .*; write \[0, 2\]"),
        ([3, 1], r"must ascend, each layer once, .*; write \[1, 3\]"),
    ],
)
def test_impossible_taps_are_refused_in_one_line(taps, says):
    with pytest.raises(TargetError, match=says) as error:
        check_taps(taps, 4)
    assert len(error.value.errors) == 1 and "\n" not in str(error.value)


def test_ascending_taps_are_fine():
    check_taps([0, 1, 3], 4)
