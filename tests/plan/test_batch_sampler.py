"""The batch sampler in a plain DataLoader with workers, over ranks, resumed, and in the HF Trainer."""

import sys
from itertools import chain

import numpy as np
import pytest

from paceline.config.schema import PlanConfig
from paceline.errors import PlanError
from paceline.plan.batch_sampler import PlanBatchSampler

LENGTHS = np.random.default_rng(2).integers(5, 400, 700)
SMALL = PlanConfig(token_budget=2048, width_multiple=16, accumulate=2)


def test_yields_the_plan_and_counts_it():
    sampler = PlanBatchSampler(LENGTHS, SMALL, seed=3)
    batches = list(sampler)
    assert len(batches) == len(sampler) == sampler.plan.num_batches
    assert sorted(chain(*batches)) == list(range(700))
    assert all(type(row) is int for row in batches[0])
    assert list(sampler) == batches
    sampler.set_epoch(1)
    assert list(sampler) != batches


@pytest.mark.parametrize("replicas", [2, 3, 5, 8])
def test_ranks_share_every_window_and_train_each_sample_once(replicas):
    samplers = [PlanBatchSampler(LENGTHS, SMALL, num_replicas=replicas, rank=rank) for rank in range(replicas)]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        plan = samplers[0].plan
        rounds, short = divmod(plan.num_batches, replicas)
        assert {len(share) for share in shares} == {len(samplers[0])} == {rounds + bool(short)}
        seen = list(chain(*chain(*shares)))
        last = sum(len(plan.rows(index)) for index in range(rounds * replicas, plan.num_batches))
        repeated = max(replicas - last, 0) if short else 0  # where the last round has fewer samples than ranks
        assert set(seen) == set(range(700)) and len(seen) == 700 + repeated
        for rank, share in enumerate(shares):
            assert share[:rounds] == [plan.rows(index).tolist() for index in range(rank, rounds * replicas, replicas)]
            assert all(batch and len(batch) * -(-LENGTHS[batch].max() // 16) * 16 <= 2048 for batch in share)


def test_ranks_repeat_samples_where_the_last_batches_are_too_few():
    shares = [list(PlanBatchSampler([5, 6, 7], SMALL, num_replicas=8, rank=rank)) for rank in range(8)]
    assert all(len(share) == 1 and len(share[0]) == 1 for share in shares)
    assert {share[0][0] for share in shares} == {0, 1, 2}


def test_resumes_at_every_position():
    whole = PlanBatchSampler(LENGTHS, SMALL, seed=3)
    whole.set_epoch(2)
    batches = list(whole)
    for position in range(len(batches) + 1):
        resumed = PlanBatchSampler(LENGTHS, SMALL, seed=3)
        resumed.load_state_dict(whole.state_dict(consumed=position))
        resumed.set_epoch(2)
        assert list(resumed) == batches[position:]
        assert list(resumed) == batches, "only the first pass goes on in the middle"


def test_state_counts_what_was_handed_out_over_two_resumes():
    sampler = PlanBatchSampler(LENGTHS, SMALL)
    batches = list(sampler)
    handed = iter(sampler)
    assert [next(handed) for _ in range(3)] == batches[:3]
    second = PlanBatchSampler(LENGTHS, SMALL)
    second.load_state_dict(sampler.state_dict())
    handed = iter(second)
    assert [next(handed) for _ in range(4)] == batches[3:7]
    third = PlanBatchSampler(LENGTHS, SMALL)
    third.load_state_dict(second.state_dict())
    assert list(third) == batches[7:]
    third.set_epoch(1)
    assert len(list(third)) == len(third)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_documented_loop_goes_on_after_any_interruption(workers):
    """Interrupted twice in one epoch, between two epochs and once in a later epoch: nothing twice, nothing missing."""
    from torch.utils.data import DataLoader

    whole = PlanBatchSampler(LENGTHS, SMALL, seed=3)
    expected = []
    for epoch in range(3):
        whole.set_epoch(epoch)
        expected += list(whole)
    size = len(whole)
    trained, state = [], None
    for stop in (4, 3, size - 7, size + 5, 2, None):
        sampler = PlanBatchSampler(LENGTHS, SMALL, seed=3)
        loader = DataLoader(Padded(), batch_sampler=sampler, collate_fn=Padded.collate, num_workers=workers)
        if state is not None:
            sampler.load_state_dict(state)
        left = stop
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            for done, batch in enumerate(loader, 1):
                trained.append(batch["rows"].tolist())
                state = sampler.state_dict(consumed=done)
                left = None if left is None else left - 1
                if left == 0:
                    break
            if left == 0:
                break
    assert trained == expected


def test_consumed_is_checked():
    sampler = PlanBatchSampler(LENGTHS, SMALL, seed=3)
    whole = len(sampler)
    sampler.load_state_dict(sampler.state_dict(consumed=5))
    assert sampler.state_dict(consumed=2)["position"] == 7
    for wrong in (-1, whole - 4):
        with pytest.raises(PlanError, match=f"consumed {wrong}: allowed in epoch 0: 0 to {whole - 5}"):
            sampler.state_dict(consumed=wrong)


def test_foreign_states_and_ranks_are_refused():
    state = PlanBatchSampler(LENGTHS, SMALL, seed=3).state_dict()
    with pytest.raises(PlanError, match="belongs to another plan"):
        PlanBatchSampler(LENGTHS, SMALL, seed=4).load_state_dict(state)
    with pytest.raises(PlanError, match="position 9999 is not in epoch 0"):
        PlanBatchSampler(LENGTHS, SMALL, seed=3).load_state_dict({**state, "position": 9999})
    with pytest.raises(PlanError, match="rank 3: allowed: 0 to 2, for num_replicas 3"):
        PlanBatchSampler(LENGTHS, SMALL, num_replicas=3, rank=3)
    with pytest.raises(PlanError, match="epoch -1: allowed: 0 or more"):
        PlanBatchSampler(LENGTHS, SMALL).set_epoch(-1)


def test_planning_imports_no_torch():
    import subprocess

    code = (
        "import sys; from paceline.plan.batch_sampler import PlanBatchSampler; list(PlanBatchSampler([3, 4, 5])); "
        "import paceline.plan.forecast, paceline.plan.plots, paceline.plan.lengths_file, paceline.plan.edges; "
        "assert not {'torch', 'matplotlib', 'pyarrow', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Padded:
    """Rows of ones, and a collate that pads; both pickle into workers."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, row):
        import torch

        return {"row": row, "ids": torch.ones(int(LENGTHS[row]), dtype=torch.long)}

    @staticmethod
    def collate(samples):
        import torch

        ids = torch.nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
        return {"rows": torch.tensor([sample["row"] for sample in samples]), "ids": ids}


def test_works_in_a_data_loader_with_workers():
    from torch.utils.data import DataLoader

    sampler = PlanBatchSampler(LENGTHS, SMALL)
    loader = DataLoader(Padded(), batch_sampler=sampler, collate_fn=Padded.collate, num_workers=2)
    assert len(loader) == len(sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(loader)
        assert [batch["rows"].tolist() for batch in batches] == list(sampler)
        assert all(batch["ids"].numel() <= 2048 for batch in batches)


def test_works_in_the_hf_trainer_by_the_documented_recipe(tmp_path):
    pytest.importorskip("accelerate")
    import torch
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainerCallback, TrainingArguments

    sampler = PlanBatchSampler(LENGTHS, SMALL)
    trained = []

    class Planned(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            sampler.set_epoch(int(state.epoch + 1e-6))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, rows, ids):
            trained.append(rows.tolist())
            return {"loss": (self.weight - 1) ** 2}

    arguments = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=2, gradient_accumulation_steps=SMALL.accumulate,
        remove_unused_columns=False, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Planned(Model(), arguments, train_dataset=Padded(), data_collator=Padded.collate, callbacks=[Epochs()])
    trainer.train()
    expected, steps = [], 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected += list(sampler)
        steps += sampler.plan.num_windows
    assert trained == expected
    assert trainer.state.global_step == steps
