"""`paceline plan`: every source, every way to show it, and bad input in one line with exit code 1 or 2."""

import json

import msgspec
import numpy as np
import pytest
import yaml

from paceline.cli import main

LENGTHS = np.clip(np.random.default_rng(3).lognormal(6, 0.8, 4000), 3, 3000).astype(int)


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, LENGTHS)
    return str(path)


@pytest.fixture
def store(tmp_path):
    """The index and manifest of a store, which is all that planning reads."""
    import pyarrow as pa

    from paceline.data.readers import RowSource
    from paceline.data.report import PrepareReport
    from paceline.data.store import FORMAT, INDEX, INDEX_SCHEMA, MANIFEST, Manifest, write_table

    folder = tmp_path / "run" / "store"
    folder.mkdir(parents=True)
    count = 600
    index = {
        "part": [0] * count,
        "row": list(range(count)),
        "length": LENGTHS[:count].tolist(),
        "eligible": np.maximum(LENGTHS[:count] - 20, 0).tolist(),
        "supervised": LENGTHS[:count].tolist(),
        "source": [row % 2 for row in range(count)],
        "line": list(range(count)),
        "tags": ["code,en" if row % 3 == 0 else "" for row in range(count)],
    }
    write_table(pa.Table.from_pydict(index, INDEX_SCHEMA), folder / INDEX)
    sources = [RowSource(name, "jsonl", "x") for name in ("a.jsonl", "b.jsonl")]
    report = PrepareReport(str(folder), "x", count, count, count, {}, {}, 0, 0, 0)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(FORMAT, "x", {}, sources, {}, report)))
    return folder


def test_a_file_of_lengths_is_shown_with_its_buckets(lengths_file, capsys):
    assert main(["plan", lengths_file, "--plan.token_budget", "8192", "--epochs", "2", "--tokens-per-s", "1e5"]) == 0
    out = capsys.readouterr().out
    for words in (
        "grid × stratified",
        "4,000 of 4,000 samples",
        "█",
        "re-pairing",
        "step σ",
        "in 2 epochs",
        "time",
        "data.max_length",
    ):
        assert words in out


def test_json_is_the_forecast(lengths_file, capsys):
    arguments = ["plan", lengths_file, "--json", "--edges", "--plan.num_buckets", "3", "--plan.accumulate", "2"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_samples"] == 4000
    assert len(told["buckets"]) == 3
    assert told["accumulate"] == 2
    assert [len(row["edges"]) for row in told["best_edges"]["by_buckets"]] == [1, 2, 3]
    assert told["best_edges"]["smallest_all_distinct"] >= 2


def test_edges_are_shown_for_people(lengths_file, capsys):
    assert main(["plan", lengths_file, "--edges", "--plan.num_buckets", "2"]) == 0
    assert "are the fewest with which every window of 4" in capsys.readouterr().out


def test_comparison_shows_all_strategies_and_schedules(capsys, tmp_path):
    picture, lengths_file = tmp_path / "compare.svg", str(tmp_path / "some.npy")
    np.save(lengths_file, LENGTHS[:600])
    assert main(["plan", lengths_file, "--compare", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    for name in ("grid", "packed", "mixed", "round_robin", "curriculum", "meet again"):
        assert name in out
    assert picture.read_text().startswith("<?xml")
    assert main(["plan", lengths_file, "--compare", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 48


def test_comparison_says_which_strategies_cannot_be_planned(tmp_path, capsys):
    path = tmp_path / "two.txt"
    path.write_text("60\n" * 30 + "130\n" * 30)
    flags = ["--plan.edges", "optimal", "--plan.num_buckets", "9"]
    assert main(["plan", str(path), "--compare", *flags]) == 1
    assert "num_buckets 9 is larger than the 2 distinct widths" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_plan_is_drawn(lengths_file, tmp_path, kind, capsys):
    picture = tmp_path / "new" / f"plan.{kind}"
    assert main(["plan", lengths_file, "--plot", str(picture)]) == 0
    first = picture.read_bytes()
    assert len(first) > 10_000
    if kind == "svg":
        assert main(["plan", lengths_file, "--plot", str(picture)]) == 0
        assert picture.read_bytes() == first, "the same plan is the same picture"


def test_a_store_and_a_run_are_planned_from_their_index(store, tmp_path, capsys):
    assert main(["plan", str(store), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_rows"] == 600
    assert told["left_out"].get("without_anchors", 0) == int((LENGTHS[:600] <= 20).sum())
    run = tmp_path / "run.yaml"
    settings = {
        "run_dir": str(store.parent),
        "target": {"path": "unused"},
        "plan": {"accumulate": 2, "weights": {"code": 2.0, "b.jsonl": 0.5}},
        "flow": {"drafter_devices": ["cpu", "cpu"]},
        "train": {"epochs": 3},
    }
    run.write_text(yaml.safe_dump(settings))
    assert main(["plan", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["accumulate"], told["replicas"], told["epochs"]) == (2, 2, 3)
    folder = tmp_path / "started"
    folder.mkdir()
    (folder / "settings.yaml").write_text(run.read_text())
    (folder / "run.json").write_text(json.dumps({"replicas": 6}))
    assert main(["plan", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"] == 6
    alive = [row for row in range(600) if LENGTHS[row] > 20]
    halves = sum(row % 3 != 0 and row % 2 == 1 for row in alive)
    doubled = sum(row % 3 == 0 for row in alive)
    assert told["num_samples"] == len(alive) + doubled - halves + halves // 2


def test_groups_of_a_file_take_weights(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"length": 10 + row, "lang": "de" if row < 30 else "en"}) for row in range(90))
    )
    assert main(["plan", str(path), "--group", "lang", "--plan.weights", "{de: 3}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 150


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere.npy"], 1, "nowhere.npy: no such file; give a store, a run's YAML, or a file of lengths"),
        (["nowhere.yaml"], 2, "no such settings file"),
        (["{file}", "--plan.strategy", "gird"], 2, "--plan.strategy"),
        (["{file}", "--plan.edges", "[30, 20]"], 2, "edges do not increase"),
        (["{file}", "--plan.edges", "[30, 40]"], 1, "plan.edges end at 40 but the longest sample has"),
        (["{file}", "--plan.token_budget", "100"], 1, "token_budget 100 is smaller than the longest sample"),
        (["{file}", "--plot", "x.pdf"], 2, "x.pdf: a picture is written as .png or .svg"),
        (["{file}", "--epochs", "0"], 2, "--epochs 0: must be more than 0"),
        (["{file}", "--tokens-per-s", "-1"], 2, "--tokens-per-s -1.0: must be more than 0"),
        (["{file}", "--column", "x"], 1, "has no columns"),
        (["{file}", "--bugdet", "5"], 2, "--bugdet: unknown flag"),
    ],
)
def test_bad_input_is_refused_in_one_line(lengths_file, capsys, words, code, said):
    assert main(["plan", *(word.replace("{file}", lengths_file) for word in words)]) == code
    err = capsys.readouterr().err
    assert said in err.replace("\n", "")
    assert "Traceback" not in err


def test_help_shows_examples_and_the_settings_of_the_plan(capsys):
    for words, shown in ((["--help"], "paceline plan lengths.npy --compare"), (["--help", "plan"], "plan.antithetic")):
        with pytest.raises(SystemExit) as caught:
            main(["plan", *words])
        assert caught.value.code == 0
        assert shown in capsys.readouterr().out


def test_a_run_folder_is_read_from_its_store(store, capsys):
    assert main(["plan", str(store.parent), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["plan", str(store), "--json"]) == 0
    assert told == json.loads(capsys.readouterr().out)
    (store.parent / "settings.yaml").write_text("run_dir: elsewhere\ntarget: {path: x}\nplan: {token_budget: 8192}\n")
    assert main(["plan", str(store.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_batches"] > told["num_batches"]


@pytest.mark.parametrize("option", [["--edges"], ["--epochs", "2"]])
def test_compare_takes_no_options_of_a_single_plan(lengths_file, capsys, option):
    assert main(["plan", lengths_file, "--compare", *option]) in (1, 2)
    told = capsys.readouterr().err.strip()
    assert f"{option[0]} does not go with --compare" in " ".join(told.split())
    assert "Traceback" not in told


def test_one_sample_is_shown_without_numbers_that_do_not_exist(tmp_path, capsys):
    np.save(tmp_path / "one.npy", np.array([7]))
    for extra in ([], ["--compare"]):
        assert main(["plan", str(tmp_path / "one.npy"), *extra]) == 0
        assert "nan" not in capsys.readouterr().out
