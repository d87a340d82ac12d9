"""A drafter folder is pushed whole, in one commit; what cannot be pushed is one line."""

from __future__ import annotations

import pytest

from paceline.errors import ExportError
from paceline.export.folder import push
from paceline.export.formats import read_drafter
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


def test_the_folder_arrives_whole(drafter, hub) -> None:
    assert push(drafter, "someone/drafter") == "commit of someone/drafter"
    arrived = hub / "someone" / "drafter"
    names = {str(path.relative_to(arrived)) for path in arrived.rglob("*")}
    assert names == {"config.json", "model.safetensors", "golden", "golden/golden.json"}
    assert content_hash(read_drafter(arrived)[1]) == content_hash(read_drafter(drafter)[1])


def test_push_errors_are_one_line(tmp_path, drafter) -> None:
    with pytest.raises(ExportError, match="give the repository as owner/name"):
        push(drafter, "drafter")
    with pytest.raises(ExportError, match="only a drafter folder can be pushed"):
        push(tmp_path, "someone/drafter")


def test_without_a_network_the_hub_client_says_why(drafter, monkeypatch) -> None:
    """The suite runs with HF_HUB_OFFLINE: the real client is called and refuses."""
    monkeypatch.setenv("HF_TOKEN", "none")
    with pytest.raises(ExportError, match=r"push someone/drafter: .*; the folder .* is complete") as caught:
        push(drafter, "someone/drafter")
    assert len(caught.value.errors) == 1 and "\n" not in str(caught.value)
