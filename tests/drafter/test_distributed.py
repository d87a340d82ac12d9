"""Two drafter ranks share a window: the gradient and the report are those of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as multiprocessing

from drafter_cases import close_window, make_learner
from drafter_ranks import batches, work


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ranks_together_equal_one_rank(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=work, args=(rank, str(tmp_path / "store"), queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = {rank: rest for rank, *rest in (queue.get() for _ in workers)}
    for worker in workers:
        worker.join(timeout=250)
        assert worker.exitcode == 0
    spec, parts = batches()
    single = make_learner(spec)
    for step in (1, 2):
        for batch in parts:
            single.accumulate(batch)
        expected = close_window(single, step)
    for rank in range(2):
        report, state = found[rank]
        assert report == found[0][0]
        assert report.loss.value == pytest.approx(expected.loss.value, rel=1e-5)
        assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
        assert (report.batches, report.samples, report.max_length) == ([0, 1, 2], 6, 60)
        assert report.ratios["acceptance/streak"] == expected.ratios["acceptance/streak"]
        assert {n: (b.samples, b.anchors) for n, b in report.buckets.items()} == {
            n: (b.samples, b.anchors) for n, b in expected.buckets.items()
        }
        for name, value in single.network.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(state[name]), value, rtol=1e-3, atol=1e-4)
            assert (state[name] == found[0][1][name]).all()
