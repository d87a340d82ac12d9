"""Pushing a drafter folder: whole, in one commit, against a folder that stands in for the hub."""

from __future__ import annotations

import inspect

import pytest
from huggingface_hub import HfApi

from paceline.errors import ExportError
from paceline.export.formats import read_drafter
from paceline.export.hub import LocalHub, push
from paceline.export.weights import content_hash
from paceline.export.zlab import write_zlab


@pytest.fixture
def drafter(tmp_path, make_spec, make_state):
    spec = make_spec()

    def extras(folder, stored) -> None:
        (folder / "golden").mkdir()
        (folder / "golden" / "golden.json").write_text("{}")

    write_zlab(tmp_path / "drafter", spec, make_state(spec), extras=extras)
    return tmp_path / "drafter"


def test_the_folder_arrives_whole_and_is_replaced_whole(tmp_path, drafter, make_spec, make_state) -> None:
    hub = LocalHub(tmp_path / "hub")
    address = push(drafter, "someone/drafter", hub=hub)
    assert address == str(tmp_path / "hub" / "someone" / "drafter")
    names = {str(path.relative_to(address)) for path in (tmp_path / "hub" / "someone" / "drafter").rglob("*")}
    assert names == {"config.json", "model.safetensors", "golden", "golden/golden.json"}
    assert content_hash(read_drafter(address)[1]) == content_hash(read_drafter(drafter)[1])
    write_zlab(drafter, make_spec(), make_state(make_spec(), 8))
    push(drafter, "someone/drafter", hub=hub)
    assert not (tmp_path / "hub" / "someone" / "drafter" / "golden").exists()
    assert content_hash(read_drafter(address)[1]) == content_hash(read_drafter(drafter)[1])


def test_the_stand_in_takes_what_the_real_client_takes() -> None:
    for name in ("create_repo", "upload_folder"):
        ours = set(inspect.signature(getattr(LocalHub, name)).parameters)
        assert ours <= set(inspect.signature(getattr(HfApi, name)).parameters)


def test_errors_are_one_line(tmp_path, drafter) -> None:
    with pytest.raises(ExportError, match="give the repository as owner/name"):
        push(drafter, "drafter", hub=LocalHub(tmp_path))
    with pytest.raises(ExportError, match="only a drafter folder can be pushed"):
        push(tmp_path, "someone/drafter", hub=LocalHub(tmp_path))


def test_without_a_hub_the_real_client_says_why_in_one_line(drafter, monkeypatch) -> None:
    """The suite runs with HF_HUB_OFFLINE: the real client is called and refuses."""
    monkeypatch.setenv("HF_TOKEN", "none")
    with pytest.raises(ExportError, match=r"push someone/drafter: .*; the folder .* is complete") as caught:
        push(drafter, "someone/drafter")
    assert len(caught.value.errors) == 1 and "\n" not in str(caught.value)
