from __future__ import annotations

import string

import pytest

from paceline.errors import MetricError
from paceline.observe.catalogue import CATALOGUE, REDUCTION_TEXT, find, number_of


def test_every_entry_says_what_it_is():
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.unit and metric.meaning and metric.population, metric.name
        assert metric.reduction in REDUCTION_TEXT


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_name_finds_its_own_entry_and_no_other(metric):
    fields = {name for _, name, _, _ in string.Formatter().parse(metric.name) if name}
    words = {
        "stage": "target",
        "state": "busy",
        "device": "cuda:0",
        "queue": "features",
        "term": "ce",
        "tag": "code",
    } | {"worker": "target_0"}
    name = metric.name.format(**{field: words.get(field, "7") for field in fields})
    assert find(name) is metric


@pytest.mark.parametrize("name", ["", "los", "loss/bucket_x", "loss/bucket_3/extra", "Loss", "accuracy/slot_", "tau "])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(MetricError, match="not in the metric catalogue"):
        find(name)


def test_numbers_are_read_from_names():
    assert number_of("loss/bucket_12", "loss/bucket_{bucket}") == 12
    assert number_of("loss", "loss/bucket_{bucket}") is None
