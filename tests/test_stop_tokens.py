"""What ends an answer is the same for masks, regeneration, decoding and export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.config import DrafterConfig, TargetConfig
from paceline.data.encoder import Encoder
from paceline.data.tokenizer import end_token_ids, load_tokenizer
from paceline.drafter.spec import derive_spec
from paceline.errors import TargetError
from paceline.export.config_keys import qwen3_section
from paceline.stop_tokens import stop_token_ids
from paceline.target_model.facts import describe, describe_target


def edit(file: Path, **changes: object) -> None:
    held = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**held, **changes}), encoding="utf-8")


@pytest.fixture
def target(demo_assets: Path, tmp_path: Path) -> Path:
    """A target whose tokenizer, generation_config.json and config.json each name another end."""
    folder = tmp_path / "target"
    shutil.copytree(demo_assets / "target", folder)
    edit(folder / "generation_config.json", eos_token_id=[7, 8])
    edit(folder / "config.json", eos_token_id=[9, 8])
    return folder


def test_every_user_of_a_folder_has_the_same_ids(target: Path) -> None:
    tokenizer = load_tokenizer(str(target))
    expected = (2, 7, 8, 9)
    assert tokenizer.eos_token_id == 2 and end_token_ids(tokenizer) == expected
    assert Encoder(tokenizer).end_ids == set(expected)
    facts = describe_target(TargetConfig(path=str(target)))
    assert facts.eos_token_ids == expected
    spec = derive_spec(DrafterConfig(), facts, (0, 1), mask_token_id=4)
    assert spec.eos_token_ids == expected
    assert qwen3_section(spec, "float32")["eos_token_id"] == list(expected)


def test_a_folder_without_tokenizer_or_files_names_what_it_has(target: Path, tmp_path: Path) -> None:
    assert stop_token_ids(str(tmp_path), None, 10) == ()
    assert stop_token_ids(str(tmp_path), 3, 10) == (3,)
    edit(tmp_path / "config.json", eos_token_id=3, text_config={"eos_token_id": [4]})
    assert stop_token_ids(str(tmp_path), 5, 10) == (5, 3, 4)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (target / name).unlink()
    assert describe(str(target)).eos_token_ids == (9, 8)


@pytest.mark.parametrize("held", ["x", True, -1, 2048, 1.5, [3, None]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_id_that_is_not_a_token_is_refused(file: str, held: object, target: Path) -> None:
    edit(target / file, eos_token_id=held)
    with pytest.raises(TargetError, match=rf"{file}: eos_token_id holds .*which is not a token \(0 to 2047\)") as error:
        stop_token_ids(str(target), 2, 2048)
    assert len(error.value.errors) == 1
