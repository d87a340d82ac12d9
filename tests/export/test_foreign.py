"""Checkpoints of other trainers: found, read under our names, refused where they do not hold together."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import foreign_layouts
from paceline.errors import ExportError
from paceline.export.foreign import find_foreign, read_foreign

EXACT = ("SpecForge", "DeepSpec", "TorchSpec", "NeMo AutoModel")
"""Layouts that keep float32 masters and moments; speculators rounds both to bfloat16."""


@pytest.fixture
def drafter(make_spec, make_state) -> tuple[Any, dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    spec = make_spec()
    state = make_state(spec)
    generator = torch.Generator().manual_seed(3)
    moments = {
        name: {
            "step": torch.tensor(40.0),
            "exp_avg": torch.randn(tensor.shape, generator=generator),
            "exp_avg_sq": torch.rand(tensor.shape, generator=generator),
        }
        for name, tensor in state.items()
    }
    return spec, state, moments


@pytest.fixture
def write(tmp_path: Path, drafter, make_facts):
    spec, state, moments = drafter

    def made(trainer: str, step: int = 40, **more: Any) -> Path:
        if trainer == "speculators":
            more["facts"] = make_facts(spec)
        return foreign_layouts.WRITERS[trainer](tmp_path / "theirs", spec, state, moments, step, 2, **more)

    return made


@pytest.mark.parametrize("trainer", foreign_layouts.WRITERS)
def test_weights_and_moments_come_under_our_names(trainer: str, write, drafter, tmp_path: Path) -> None:
    spec, state, moments = drafter
    folder = write(trainer)
    assert find_foreign(folder) == (trainer, folder) and find_foreign(tmp_path / "theirs") == (trainer, folder)
    found = read_foreign(tmp_path / "theirs")
    assert found is not None and found.trainer == trainer and found.state.keys() == found.moments.keys() == state.keys()
    for name, tensor in state.items():
        mine, entry = found.state[name], found.moments[name]
        there = tensor if trainer in EXACT else tensor.to(torch.bfloat16).float()
        assert mine.dtype == torch.float32 and torch.equal(mine, there), name
        for key in ("exp_avg", "exp_avg_sq"):
            average = moments[name][key]
            assert torch.equal(entry[key], average if trainer in EXACT else average.to(torch.bfloat16).float()), name
        assert float(entry["step"]) == 40
    assert found.step == 40
    assert found.epoch == (None if trainer in ("DeepSpec", "TorchSpec") else 2)
    if found.spec is not None:
        assert found.spec.taps == spec.taps and found.spec.block_size == spec.block_size
        assert found.spec.sample_from_anchor is (trainer == "DeepSpec")
    left = {"DeepSpec": ("embed_tokens.weight", "lm_head.weight"), "TorchSpec": ("embed_tokens.weight",)}
    left["speculators"] = ("embed_tokens.weight", "verifier_norm.weight")
    assert found.left_over == left.get(trainer, ())


def test_parts_of_several_ranks_are_put_together(write, drafter) -> None:
    found = read_foreign(write("SpecForge", ranks=3))
    assert found is not None
    for name, entry in drafter[2].items():
        assert torch.equal(found.state[name], drafter[1][name]) and torch.equal(
            found.moments[name]["exp_avg"], entry["exp_avg"]
        )


def test_one_state_for_all_ranks_is_read(write, drafter) -> None:
    """SpecForge without shards keeps the optimizer once, beside the weights."""
    folder = write("SpecForge")
    path, rank = folder / "training_state.pt", folder / "training_state_rank0.pt"
    shared, mine = (torch.load(name, weights_only=False) for name in (path, rank))
    torch.save({**shared, "world_size": 8, "replicated_optimizer_state": mine["optimizer"]}, path)
    rank.unlink()
    found = read_foreign(folder)
    assert found is not None and len(found.moments) == len(drafter[1])


def test_the_newest_of_several_is_taken(write, tmp_path: Path) -> None:
    write("SpecForge", step=40)
    newest = write("SpecForge", step=100)
    assert find_foreign(tmp_path / "theirs") == ("SpecForge", newest)
    (tmp_path / "theirs" / "mine-step100").rename(tmp_path / "theirs" / "other-step100")
    with pytest.raises(ExportError, match="checkpoints of several runs"):
        find_foreign(tmp_path / "theirs")


def test_a_lost_rank_is_refused(write) -> None:
    folder = write("DeepSpec")
    (folder / "training_state.rank1.pt").unlink()
    with pytest.raises(ExportError, match="with the files of all ranks"):
        read_foreign(folder)


def test_masters_in_another_order_are_refused(write) -> None:
    """q_proj and o_proj have one shape here and k_proj and v_proj too: only the values tell them apart."""
    folder = write("SpecForge")
    path = folder / "training_state_rank0.pt"
    mine = torch.load(path, weights_only=False)
    masters = mine["optimizer"]["fp32_params"]
    assert masters[1].shape == masters[2].shape
    masters[1], masters[2] = masters[2], masters[1]
    torch.save(mine, path)
    with pytest.raises(ExportError, match=r"master 1 of its optimizer is not layers\.0\.self_attn\.k_proj\.weight"):
        read_foreign(folder)


def test_a_file_that_would_run_code_is_refused(write, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = write("TorchSpec")
    (folder / "optimizer" / ".metadata").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(ExportError, match=r"posix\.mkdir, which no checkpoint needs"):
        read_foreign(folder)
    other = write("NeMo AutoModel")
    (other / "dflash_meta.pt").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(ExportError, match="cannot be read"):
        read_foreign(other)
    assert not (tmp_path / "ran").exists()


def test_another_kind_of_drafter_is_refused(write) -> None:
    folder = write("DeepSpec")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"markov_rank": 0', '"markov_rank": 16'))
    with pytest.raises(ExportError, match="another kind of drafter"):
        read_foreign(folder)


def test_a_drafter_folder_is_nobodys_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_foreign(tmp_path) is None and read_foreign(tmp_path / "nothing") is None
