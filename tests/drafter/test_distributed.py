"""Two drafter ranks share a window: the gradient and the report are those of one rank."""

from __future__ import annotations

import pytest
import torch

from drafter_cases import close_window, make_learner
from drafter_ranks import batches, train_together
from paceline.drafter.distributed import collective_errors
from paceline.errors import PeerError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_ranks_together_equal_one_rank(tmp_path):
    found = train_together(tmp_path, {})
    spec, parts = batches()
    single = make_learner(spec)
    for step in (1, 2):
        for batch in parts:
            single.accumulate(batch)
        expected = close_window(single, step)
    for rank in range(2):
        report, state, _ = found[rank]
        assert report == found[0][0]
        assert report.loss.value == pytest.approx(expected.loss.value, rel=1e-5)
        assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
        assert (report.batches, report.samples, report.max_length) == ([0, 1, 2], 6, 60)
        assert report.ratios["acceptance/streak"] == expected.ratios["acceptance/streak"]
        assert {n: (b.samples, b.anchors) for n, b in report.buckets.items()} == {
            n: (b.samples, b.anchors) for n, b in expected.buckets.items()
        }
        for name, value in single.network.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(state["network"][name]), value, rtol=1e-3, atol=1e-4)
            assert (state["network"][name] == found[0][1]["network"][name]).all()


def test_an_error_of_the_own_card_is_not_a_missing_rank():
    for error in (
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("NCCL error in: ..., unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    ):
        with pytest.raises(type(error)), collective_errors():
            raise error
    gone = r"another drafter rank is gone \(Connection closed by peer\)"
    with pytest.raises(PeerError, match=gone), collective_errors():
        raise RuntimeError("Connection closed by peer")
