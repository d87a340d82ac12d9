"""Published prompt sets: files made here in the published formats, one question each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.errors import DataError
from paceline.evaluate.benchmarks import read_questions, set_of
from paceline.evaluate.prompts import PromptRenderer, render_prompts, with_later_turns

ROWS = {
    "gsm8k": {"question": "Ann has 2 pears and buys 3. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    "math-500": {
        "problem": "What is $1+1$?",
        "solution": "It is $\\boxed{2}$.",
        "answer": "2",
        "subject": "Counting & Probability",
        "level": 3,
        "unique_id": "test/made_up/1.json",
    },
    "humaneval": {
        "task_id": "HumanEval/900",
        "prompt": 'def twice(x):\n    """Twice x."""\n',
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "twice",
    },
    "mbpp": {
        "text": "Write a function that doubles a number.",
        "code": "def twice(x):\n    return 2 * x",
        "task_id": 901,
        "test_setup_code": "",
        "test_list": ["assert twice(2) == 4", "assert twice(0) == 0"],
        "challenge_test_list": [],
    },
    "mt-bench": {"question_id": 902, "category": "writing", "turns": ["Name a river.", "Where does it rise?"]},
}
TAGS = {
    "gsm8k": ("gsm8k",),
    "math-500": ("math-500", "math-500:counting-probability", "math-500:level-3"),
    "humaneval": ("humaneval",),
    "mbpp": ("mbpp",),
    "mt-bench": ("mt-bench", "mt-bench:writing"),
}
ASKED = {
    "gsm8k": ["2 pears and buys 3"],
    "math-500": ["What is $1+1$?", "\\boxed{}"],
    "humaneval": ['def twice(x):\n    """Twice x."""\n```'],
    "mbpp": ["doubles a number", "assert twice(2) == 4\nassert twice(0) == 0"],
    "mt-bench": ["Name a river."],
}


@pytest.fixture
def write(tmp_path: Path):
    """A function: set and rows → a JSONL file."""

    def written(name: str, *rows: object) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return written


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_a_question_with_the_tags_of_its_set(name, write):
    ((where, question),) = read_questions(name, write(name, ROWS[name]))
    assert question.tags == TAGS[name] and where.endswith(f"{name}.jsonl:1")
    assert all(words in question.turns[0] for words in ASKED[name])
    assert len(question.turns) == (2 if name == "mt-bench" else 1)
    assert (question.reference is None) == (name == "mt-bench")
    assert question.id == {"gsm8k": None, "math-500": "test/made_up/1.json", "humaneval": "HumanEval/900"}.get(
        name, f"{name}/{901 if name == 'mbpp' else 902}"
    )


@pytest.mark.parametrize("name", ROWS)
def test_every_form_of_a_file_reads_the_same(name, write, tmp_path):
    rows = [ROWS[name]] * 3
    expected = [question for _, question in read_questions(name, write(name, *rows))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set.parquet")
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(Path(write(name, *rows)).read_bytes()))
    (tmp_path / "set.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for file in ("set.parquet", "set.jsonl.gz", "set.json"):
        found = list(read_questions(name, str(tmp_path / file)))
        assert [question for _, question in found] == expected and len(found) == 3
        assert [where for where, _ in found] == [f"{tmp_path / file}:{number}" for number in (1, 2, 3)]


def test_the_names_of_fields_on_the_hub_are_known_too(write):
    sanitized = {"prompt": "Double it.", "code": "def f(x): ...", "task_id": 3, "test_imports": [], "test_list": ["a"]}
    ((_, question),) = read_questions("mbpp", write("mbpp", sanitized))
    assert question.turns[0].startswith("Double it.")
    hub = {"category": "stem", "prompt": ["One?", "Two?"], "reference": [], "prompt_id": 77}
    ((_, question),) = read_questions("mt-bench", write("mt-bench", hub))
    assert question.turns == ("One?", "Two?") and question.id == "mt-bench/77"
    ((_, question),) = read_questions("math-500", write("math-500", {**ROWS["math-500"], "level": "Level 3"}))
    assert question.tags == TAGS["math-500"]


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("gsm8k", ROWS["math-500"], "not a row of GSM8K: it has no text under 'question' (its keys: problem, solution"),
        ("math-500", ROWS["gsm8k"], "not a row of MATH-500: it has no text under 'subject'"),
        ("humaneval", {**ROWS["humaneval"], "entry_point": 4}, "not a row of HumanEval: it has no text under"),
        ("mbpp", {**ROWS["mbpp"], "test_list": "one"}, "not a row of MBPP: it has no list of texts under 'test_list'"),
        ("mt-bench", {**ROWS["mt-bench"], "turns": []}, "not a row of MT-Bench: it has no list of texts under 'turns'"),
        ("mt-bench", ["a", "b"], "not a row of MT-Bench: it is a list, not an object"),
    ],
)
def test_a_row_of_another_format_is_one_line_with_its_place(name, row, says, write):
    path = write(name, ROWS[name], row)
    with pytest.raises(DataError) as caught:
        list(read_questions(name, path))
    assert len(caught.value.errors) == 1 and caught.value.errors[0].startswith(f"{path}:2: {says}")
    assert "; a row has " in caught.value.errors[0]


def test_names_of_sets(tmp_path, write):
    assert set_of("gsm8k:a/b.jsonl") == ("gsm8k", "a/b.jsonl") and set_of("MT-Bench:q.jsonl") == ("mt-bench", "q.jsonl")
    assert set_of("chats.jsonl") is None and set_of("hub:owner/name") is None and set_of("s3://bucket/a.jsonl") is None
    with pytest.raises(DataError, match=r"no prompt set is called gsm9k; did you mean gsm8k\?"):
        set_of("gsm9k:test.jsonl")
    for text, says in (("", "is empty"), ("{oops\n", "it cannot be read as JSON")):
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=says):
            list(read_questions("gsm8k", str(tmp_path / "x.json")))


def test_files_are_drawn_in_turn_and_missing_ones_told_together(write, demo_assets):
    target = str(demo_assets / "target")
    one, other = write("gsm8k", *[ROWS["gsm8k"]] * 3), write("mbpp", *[ROWS["mbpp"]] * 3)
    prompts = render_prompts(
        [f"gsm8k:{one}", f"mbpp:{other}", str(demo_assets / "heldout.jsonl")], PromptRenderer(target), 8
    )
    first = [prompt.tags[0] for prompt in prompts]
    assert [tag for tag in first if tag in ("gsm8k", "mbpp")] == ["gsm8k", "mbpp"] * 3 and len(prompts) == 8
    assert first[:2] == first[3:5] == ["gsm8k", "mbpp"]
    with pytest.raises(DataError) as caught:
        render_prompts(["gsm8k:nowhere.jsonl", "none.jsonl"], PromptRenderer(target), None)
    assert caught.value.errors == (
        f"prompts: none.jsonl: no such file (looked at {Path('none.jsonl').absolute()})",
        "prompts: gsm8k:nowhere.jsonl: no such file",
    )


def test_the_second_turn_is_asked_after_the_answer_to_the_first(write, demo_assets):
    target = str(demo_assets / "target")
    file = write("mt-bench", ROWS["mt-bench"], {**ROWS["mt-bench"], "question_id": 3, "turns": ["Alone?"]})
    renderer = PromptRenderer(target)
    asked: list[list[int]] = []

    def answer(ids):
        asked.append(ids)
        return "The Inn."

    questions = render_prompts([f"mt-bench:{file}"], renderer, None)
    prompts = with_later_turns(questions, renderer, answer, None)
    assert [prompt.id for prompt in prompts] == ["mt-bench/902", "mt-bench/902#turn-2", "mt-bench/3"]
    first, second, alone = prompts
    assert asked == [first.ids]
    assert second.text.startswith(first.text) and "The Inn." in second.text[len(first.text) :]
    assert second.text.index("The Inn.") < second.text.index("Where does it rise?")
    assert first.tags == ("mt-bench", "mt-bench:writing", "mt-bench:turn-1")
    assert second.tags == ("mt-bench", "mt-bench:writing", "mt-bench:turn-2")
    assert alone.tags == ("mt-bench", "mt-bench:writing")
    silent = with_later_turns(questions, renderer, lambda ids: None, None)
    assert [prompt.id for prompt in silent] == ["mt-bench/902", "mt-bench/3"]
    asked.clear()
    assert [prompt.id for prompt in with_later_turns(questions, renderer, answer, 1)] == ["mt-bench/902"]
    assert asked == [], "an answer that nobody needs is not made"
