"""`paceline evaluate` on the embedded target: table, JSON, and one line for each error."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from paceline.cli import evaluate as command
from paceline.cli import main
from paceline.cli.evaluate import device_of
from paceline.config import load_settings
from paceline.evaluate.evaluator import conditions_of
from paceline.target_model.facts import describe
from small_runs import export_random_drafter

LIMITS = ["--evaluate.num_prompts", "2", "--evaluate.max_new_tokens", "6"]


@pytest.fixture(scope="module")
def target(demo_assets):
    return str(demo_assets / "target")


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """An exported random drafter of the embedded target."""
    return export_random_drafter(tmp_path_factory.mktemp("drafter") / "zlab", target)


def test_json_and_table(target, folder, demo_assets, capsys):
    words = ["evaluate", folder, "--target", target, "--prompts", str(demo_assets / "heldout.jsonl"), *LIMITS]
    assert main([*words, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out).values()
    assert report["num_prompts"] == len(report["rows"]) == 2
    assert report["lossless"]["prompts"] == 2 and report["lossless"]["errors"] == 0
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "τ, over target passes" in shown and "2 of 2" in shown


def test_trees_and_sampling_from_the_command_line(target, folder, demo_assets, capsys):
    words = ["evaluate", folder, "--target", target, "--prompts", str(demo_assets / "heldout.jsonl"), *LIMITS]
    trees = [*words, "--evaluate.tree_budget", "16", "--evaluate.tree_chain_seed", "true"]
    assert main([*trees, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out).values()
    assert report["tree"]["budget"] == 16 and report["tree"]["chain_seed"] is True
    assert report["tree"]["lossless"] == report["lossless"] and report["lossless"]["prompts"] == 2
    assert report["tree_tau"] == report["tree"]["tau_micro"] >= 1
    assert main(trees) == 0
    shown = capsys.readouterr().out
    assert "τ with trees of 16 nodes" in shown and "chain first" in shown and shown.count("2 of 2") == 2
    assert main([*words, "--evaluate.temperature", "0.8", "--evaluate.seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert "sampled at temperature 0.8" in shown and "equal to the target's own" not in shown


def test_a_lossy_tree_ends_with_a_error(target, folder, demo_assets, capsys, monkeypatch):
    from paceline.evaluate import evaluate as module

    original = module.tree_decode

    def lossy(*args, **more):
        found = original(*args, **more)
        return dataclasses.replace(found, ids=found.ids[:-1])

    monkeypatch.setattr(module, "tree_decode", lossy)
    words = ["evaluate", folder, "--target", target, "--prompts", str(demo_assets / "heldout.jsonl"), *LIMITS]
    assert main([*words, "--evaluate.tree_budget", "4"]) == 1
    assert "errors: differences beyond rounding" in capsys.readouterr().out


def test_several_drafters_stand_side_by_side(target, folder, demo_assets, tmp_path, capsys):
    other = shutil.copytree(folder, tmp_path / "other")
    words = ["evaluate", folder, str(other), "--target", target, "--prompts", str(demo_assets / "heldout.jsonl")]
    words += [*LIMITS, "--plot", str(tmp_path / "tau.svg")]
    assert main([*words, "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert list(reports) == [folder, str(other)]
    taus = {report["tau_micro"] for report in reports.values()}
    assert len(taus) == 1, "the same drafter twice"
    assert main(words) == 0
    shown = capsys.readouterr()
    line = next(line for line in shown.out.splitlines() if line.startswith("τ, over target passes"))
    assert line.split()[-2:] == [f"{taus.pop():.3f}"] * 2
    assert f"drawn: {tmp_path / 'tau.svg'}" in shown.err
    drawn = (tmp_path / "tau.svg").read_text(encoding="utf-8")
    assert f"{folder}: τ" in drawn and f"{other}: τ" in drawn


def test_prompt_sets_give_their_tags_and_later_turns(target, folder, tmp_path, capsys):
    sums, talk = tmp_path / "test.jsonl", tmp_path / "question.jsonl"
    sums.write_text(json.dumps({"question": "What is 1 and 1?", "answer": "#### 2"}) + "\n", encoding="utf-8")
    row = {"question_id": 5, "category": "stem", "turns": ["What is rain?", "And snow?"]}
    long = {"question_id": 6, "category": "stem", "turns": ["rain " * 3000, "And snow?"]}
    talk.write_text(json.dumps(long) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    words = ["evaluate", folder, "--target", target, "--prompts", f"gsm8k:{sums}", f"mt-bench:{talk}"]
    assert main([*words, "--json", "--evaluate.max_new_tokens", "6"]) == 0
    shown = capsys.readouterr()
    (report,) = json.loads(shown.out).values()
    assert "prompt mt-bench/6: set aside; it has" in shown.err
    assert [row["id"] for row in report["rows"]] == [f"{sums}:1", "mt-bench/5", "mt-bench/5#turn-2"]
    assert list(report["by_tag"]) == ["gsm8k", "mt-bench", "mt-bench:stem", "mt-bench:turn-1", "mt-bench:turn-2"]
    passes = {tag: group["passes"] for tag, group in report["by_tag"].items()}
    assert passes["mt-bench"] == passes["mt-bench:turn-1"] + passes["mt-bench:turn-2"]
    assert passes["gsm8k"] + passes["mt-bench"] == report["passes"]
    assert report["lossless"]["errors"] == 0


def test_a_prompt_longer_than_the_context_is_set_aside(target, folder, tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    texts = ["What is rain?", "rain and snow " * 3000]
    chats = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]} for text in texts]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    words = ["evaluate", folder, "--target", target, "--prompts", str(file), *LIMITS]
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    (report,) = json.loads(shown.out).values()
    assert len(report["rows"]) == 1
    (line,) = report["set_aside"]
    assert "set aside; it has" in line and "has 2048 positions" in line and line in shown.err
    file.write_text(json.dumps(chats[1]) + "\n", encoding="utf-8")
    assert main(words) in (1, 2)
    shown = capsys.readouterr().err
    assert "no prompt fits into the target's positions" in shown and "Traceback" not in shown


def test_another_target_than_the_folder_notes_is_refused(target, folder, demo_assets, tmp_path, capsys):
    other = shutil.copytree(folder, tmp_path / "other")
    identity = {**describe(target).identity, "weights": "0" * 64}
    (other / "paceline.json").write_text(json.dumps({"target": {"identity": identity}}), encoding="utf-8")
    words = ["evaluate", str(other), "--target", target, "--prompts", str(demo_assets / "heldout.jsonl"), *LIMITS]
    assert main(words) in (1, 2)
    shown = capsys.readouterr().err
    assert shown.count("error:") == 1 and "they differ in weights" in " ".join(shown.split())
    assert main([*words, "--other-target"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{folder}", "--prompts", "x.jsonl"], "name its target with --target"),
        (["{folder}", "--target", "{target}"], "give files with --prompts"),
        (["{folder}", "--target", "{target}", "--step", "3", "--prompts", "x"], "only runs have steps"),
        (["{folder}", "--target", "{target}", "--prompts", "x", "--plot", "tau.pdf"], "written as .png or .svg"),
        (
            ["{folder}", "--target", "{target}", "--prompts", "x", "--plot", "{folder}/config.json/tau.svg"],
            "be written",
        ),
        (["{folder}", "--target", "{target}", "--prompts", "x", "--device", "cuda:99"], "no CUDA device"),
        (["{folder}", "--target", "{target}", "--prompts", "x", "--device", "tpu"], "not a device of paceline"),
        (["{folder}", "--target", "{target}", "--prompts", "x", "--evaluate.tree_budget", "0"], "evaluate.tree_budget"),
        (
            ["{folder}", "--target", "{target}", "--evaluate.tree_budget", "9", "--evaluate.batch_size", "2"],
            "trees decode one prompt at a time",
        ),
        (["{folder}", "--target", "{target}", "--evaluate.tree_chain_seed", "true"], "set tree_budget"),
        (["{folder}", "--target", "{target}", "--evaluate.tree_temperature", "0.5"], "set tree_budget"),
        (["{folder}", "--target", "{target}", "--evaluate.seed", "5"], "set temperature above 0"),
        (["nowhere"], "neither a run directory nor a drafter folder"),
        (["{folder}", "--target", "nowhere/at/all", "--prompts", "x"], "no such"),
        (["{folder}", "--target", "{target}", "--prompts", "gsm9k:x"], "no prompt set is called gsm9k"),
        (["{folder}", "--target", "{target}", "--prompts", "gsm8k:{target}/config.json"], "not a row of GSM8K"),
    ],
)
def test_errors_are_one_line(target, folder, capsys, words, says):
    code = main(["evaluate", *(word.format(folder=folder, target=target) for word in words)])
    shown = capsys.readouterr().err
    assert code in (1, 2) and says in shown and shown.count("error:") == 1


def test_all_drafters_are_checked_before_the_first_decodes(target, folder, demo_assets, tmp_path, capsys, monkeypatch):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"none")
    decoded: list[str] = []
    monkeypatch.setattr(command, "evaluate_drafter", lambda *_, title, **__: decoded.append(title))
    words = ["evaluate", folder, str(other), "--target", target, "--prompts", str(demo_assets / "heldout.jsonl")]
    assert main(words) in (1, 2)
    assert "cannot be read as safetensors" in " ".join(capsys.readouterr().err.split()) and not decoded


@pytest.mark.parametrize(
    ("devices", "cards", "expected", "said"),
    [
        (["cuda:1", "cuda:2"], 4, "cuda:1", ""),
        (["cuda:0+cuda:1"], 2, "cuda:0+cuda:1", ""),
        (["cuda:1"], 1, "cpu", "decoding on cpu in bfloat16: cuda:1: this machine has 1 CUDA device"),
        (["cpu"], 4, "cpu", ""),
    ],
)
def test_a_run_is_decoded_as_it_was_trained(devices, cards, expected, said, capsys, monkeypatch):
    monkeypatch.setattr("paceline.device.num_cards", lambda: cards)
    settings = load_settings(None, {"run_dir": ".", "target.path": "x", "flow.target_devices": json.dumps(devices)})
    assert device_of(settings) == expected
    assert capsys.readouterr().err.startswith(said)
    assert settings.decode_dtype == conditions_of(settings.target, settings.evaluate)["dtype"] == "bfloat16"
    exact = load_settings(None, {"run_dir": ".", "target.path": "x", "evaluate.dtype": "float64"})
    assert conditions_of(exact.target, exact.evaluate)["dtype"] == "float64"


def test_the_target_is_loaded_in_its_own_type(target, folder, demo_assets, capsys):
    words = [folder, "--target", target, "--prompts", str(demo_assets / "heldout.jsonl"), "--json"]
    assert main(["evaluate", *words, *LIMITS, "--target.dtype", "float32"]) == 0
    (report,) = json.loads(capsys.readouterr().out).values()
    assert report["dtype"] == report["conditions"]["dtype"] == "float32"
