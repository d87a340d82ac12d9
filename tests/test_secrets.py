"""Passwords and keys stay in the run's settings: not in copies, metrics, reports or on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from observed_runs import observed, plain_reports
from paceline.checkpoint.run_directory import open_run, read_run_settings
from paceline.config import Settings, settings_copy
from paceline.observe.observer import open_observer
from paceline.report.report import write_report

ADDRESS = "s3://me:hidden@bucket/chats.jsonl"


def settings_of(run_dir: Path, address: str = ADDRESS) -> Settings:
    return Settings(run_dir=str(run_dir), target={"path": "t"}, data={"train": [address]})


@pytest.mark.parametrize(("address", "mode"), [(ADDRESS, 0o600), ("/data/chats.jsonl", 0o644)])
def test_settings_with_a_secret_are_the_owners(tmp_path: Path, address: str, mode: int) -> None:
    settings = settings_of(tmp_path / "run", address)
    run_dir = open_run(settings, {"total_steps": 1})
    assert (run_dir / "settings.yaml").stat().st_mode & 0o777 == mode
    assert read_run_settings(run_dir).data.train == [address]  # the next start needs it
    open_run(settings, {"total_steps": 1})
    assert (run_dir / "settings.yaml").stat().st_mode & 0o777 == mode


def test_copies_have_no_secret(tmp_path: Path) -> None:
    copy = settings_copy(settings_of(tmp_path))
    assert copy["data"]["train"] == ["s3://***@bucket/chats.jsonl"] and copy["target"]["path"] == "t"


def test_metrics_and_report_have_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = open_run(settings_of(tmp_path / "run"), {"total_steps": 1})
    observed(run_dir, plain_reports(25), header={"source": ADDRESS})
    settings = settings_of(run_dir).observe
    observer = open_observer(settings, run_dir, total_steps=25, header={"source": ADDRESS}, first_step=25)
    observer.warn(f"{ADDRESS}: cannot be read")
    observer.event("failure", error=ADDRESS)
    observer.close(f"failed: {ADDRESS}")
    page = write_report(run_dir).read_text(encoding="utf-8")
    for text in ((run_dir / "metrics.jsonl").read_text(), page, capsys.readouterr().err):
        assert "***@bucket" in text and "hidden" not in text
