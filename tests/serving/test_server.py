"""A real vLLM server, started by `paceline serve`, measured by `paceline evaluate --server`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.checkpoint.run_directory import read_evaluations
from paceline.cli import main

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]


def test_a_server_is_measured_as_paceline_decodes(run_dir, server, plain_server, capsys) -> None:
    assert main(["evaluate", str(run_dir), "--server", server, "--baseline", plain_server, "--json"]) == 0
    served: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(run_dir), "--device", "cpu", "--json"]) == 0
    (ours,) = json.loads(capsys.readouterr().out).values()
    print(f"\ntau {served['tau_micro']} here {ours['tau_micro']}, by vLLM's count {served['counted_tau']}")
    print([slot["accepted"] for slot in served["slots"]], [slot["accepted"] for slot in ours["slots"]])
    print(served["speeds"], served["baseline_speeds"], served["notes"])
    assert (served["engine"], served["num_prompts"], served["num_drafts"]) == ("vLLM", 2, 7)
    assert served["equal_answers"] == 2 and served["differing"] == [] and served["notes"] == []
    assert served["new_tokens"] == ours["new_tokens"]
    # vLLM's products on a CPU are not exact: test_vllm.py compares pass by pass.
    assert abs(served["passes"] - ours["passes"]) <= 2
    for theirs, own in zip(served["slots"], ours["slots"], strict=True):
        assert abs(theirs["accepted"] - own["accepted"]) <= 4, "two answers end in a block, two passes may differ"
    assert served["counted_tau"] >= served["tau_micro"] > 1.5
    for speeds in (served["speeds"], served["baseline_speeds"]):
        assert [(speed["concurrency"], speed["requests"]) for speed in speeds] == [(1, 2), (4, 4)]
        assert all(0 < speed["first_token_s"] <= speed["first_token_s_90"] for speed in speeds)
        assert all(speed["tokens_per_second"] > 0 for speed in speeds)
    (entry,) = read_evaluations(run_dir, "servers")
    assert (entry["step"], entry["tau_micro"]) == (40, served["tau_micro"])
    assert entry["conditions"]["concurrency"] == [1, 4] and entry["conditions"]["baseline"] is True
    assert main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert "Running servers" in page and "2 of 2" in page and "Speed of the server" in page


def test_a_server_without_a_drafter_and_another_model(run_dir, server, plain_server, capsys) -> None:
    assert main(["evaluate", str(run_dir), "--server", plain_server]) == 1
    assert "this vLLM serves without a drafter" in capsys.readouterr().err
    assert main(["evaluate", str(run_dir), "--server", server, "--baseline", server]) == 1
    assert "drafts too" in capsys.readouterr().err
    assert main(["evaluate", str(run_dir), "--server", server, "--target", "models/other"]) == 1
    assert "serves" in capsys.readouterr().err
