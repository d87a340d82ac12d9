"""Settings of the drafter, objective and optimizer: what means nothing is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.config import ObjectiveConfig


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"terms": {}}, "one above 0"),
        ({"terms": {"ce": -1.0, "kl": 2.0}}, "no negative share"),
        ({"terms_end": {"ce": 0.0}}, "terms_end must have"),
        ({"name": "dpace", "gamma": 3.0}, "no part in dpace"),
        ({"terms": {"mse": 1.0}}, "'ce', 'kl', 'tv' or 'lk'"),
    ],
)
def test_objectives_that_are_refused(values, text):
    with pytest.raises(ValidationError, match=text):
        ObjectiveConfig(**values)
