"""Servers that answer, count and fail: what `paceline evaluate --server` makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evaluate.counting_server import NUM_DRAFTS, CountingServer, expected_tau, serve
from paceline.checkpoint.run_directory import open_run, read_evaluations
from paceline.cli import main
from paceline.config import DrafterConfig, EvaluateConfig, Settings
from paceline.data.rows import Conversation
from paceline.drafter.spec import derive_spec
from paceline.errors import DataError
from paceline.evaluate.prompts import Prompt
from paceline.evaluate.server import check_counters, check_model, fitting_prompts, measure_server, num_requests
from paceline.evaluate.server_client import MeasuredServer
from paceline.evaluate.server_counters import read_counters
from paceline.target_model.facts import describe

LIMITS = EvaluateConfig(max_new_tokens=12, concurrency=[1, 2, 8])


def prompt(name: str, length: int) -> Prompt:
    return Prompt(name, list(range(10, 10 + length)), "", None, (), Conversation([]))


PROMPTS = [prompt("a", 9), prompt("b", 5), prompt("c", 20)]


@pytest.fixture
def start() -> Iterator[Callable[..., MeasuredServer]]:
    running: list[CountingServer] = []
    clients: list[MeasuredServer] = []

    def begin(*words: str, **more) -> MeasuredServer:
        clients.append(MeasuredServer(serve(running, CountingServer(*words, **more)).url))
        return clients[-1]

    yield begin
    for client in clients:
        client.close()
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tau_slots_and_speed_from_counters(start, engine) -> None:
    server, plain = start(engine), start(engine, drafts=False)
    server.answer("target", [1, 2, 3, 4, 5, 6], 6)  # what was counted before is not these prompts'
    assert check_counters(server, drafts=True) == check_counters(plain, drafts=False) != "unknown"
    done: list[None] = []
    report = measure_server(
        server,
        server.model(),
        PROMPTS,
        LIMITS,
        baseline=(plain, plain.model()),
        num_drafts=NUM_DRAFTS,
        progress=lambda: done.append(None),
    )
    tokens, passes = expected_tau([entry.ids for entry in PROMPTS], 12)
    assert (report.new_tokens, report.passes) == (tokens, passes) == (26, 12)
    assert report.tau_micro == (tokens - 3) / passes and report.equal_answers == 3 and report.notes == []
    assert [(speed.concurrency, speed.requests) for speed in report.speeds] == [(1, 3), (2, 3), (8, 8)]
    assert len(done) == 2 * num_requests(3, LIMITS) == 28
    assert report.speeds[1].tau == report.tau_micro and report.baseline_speeds[0].tau is None
    if engine == "sglang":
        assert report.slots == [] and report.counted_tau is None and report.num_drafts is None
        return
    assert [(slot.reached, slot.accepted) for slot in report.slots] == [(12, 8), (8, 5), (5, 2)]
    assert report.counted_tau == 1 + 15 / 12 and report.num_drafts == NUM_DRAFTS


def test_prompts_are_sent_as_ids_and_share_no_cache() -> None:
    running: list[CountingServer] = []
    raw = serve(running, CountingServer())
    server = MeasuredServer(f"{raw.url}/v1")
    try:
        limits = EvaluateConfig(max_new_tokens=12, concurrency=[4], temperature=0.5, seed=7)
        measure_server(server, server.model(), PROMPTS, limits)
    finally:
        server.close()
        raw.shutdown()
        raw.server_close()
    _, *bodies = raw.bodies
    assert sorted(body["prompt"] for body in bodies) == sorted(entry.ids for entry in (*PROMPTS, PROMPTS[0])), (
        "again from the first, until so many can be under way"
    )
    assert len({(body["cache_salt"], tuple(body["prompt"])) for body in bodies}) == 4
    assert {(body["temperature"], body["top_p"], body["top_k"]) for body in bodies} == {(0.5, 1.0, -1)}
    assert {tuple(body["prompt"]): body["seed"] for body in bodies}[tuple(PROMPTS[2].ids)] == 9


def test_answers_that_differ_are_named(start) -> None:
    server, plain = start(), start(drafts=False)
    original = plain.answer
    plain.answer = lambda model, ids, *rest, **more: original(model, [*ids[:-1], 3], *rest, **more)
    report = measure_server(server, server.model(), PROMPTS, LIMITS, baseline=(plain, plain.model()))
    assert report.equal_answers == 1 and report.differing == ["a", "b"], "the last token of c is behind the limit"


def test_notes_on_drafts_and_other_users(start) -> None:
    server = start(error="others")
    report = measure_server(server, server.model(), PROMPTS, LIMITS, num_drafts=7)
    assert report.notes[0] == "The server makes 3 drafts a pass, the drafter was trained for 7."
    assert "others use it" in report.notes[1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("code", r"/v1/completions: HTTP 500 .*out of memory.*\(prompt a\)$"),
        ("said", r"it sent no piece of an answer, but .*the engine died"),
        ("cut", r"RemoteProtocolError.*is the server still running there\? \(prompt a\)$"),
        ("uncounted", "without a count of them"),
        ("idle", "drafted nothing in 3 answers"),
    ],
)
def test_a_server_that_fails_is_one_line(start, error, words) -> None:
    server = start(error=error)
    with pytest.raises(DataError, match=words) as caught:
        measure_server(server, server.model(), PROMPTS, LIMITS)
    assert len(caught.value.errors) == 1


def test_servers_that_cannot_be_measured(start) -> None:
    for error, words in (
        ("no_metrics", "no counters of vLLM or SGLang"),
        ("strange_metrics", "not in Prometheus' format"),
    ):
        with pytest.raises(DataError, match=words):
            check_counters(start(error=error), drafts=True)
    with pytest.raises(
        DataError, match=r"this vLLM serves without a drafter.*as `paceline serve RUN` prints it, or give"
    ):
        check_counters(start(drafts=False), drafts=True)
    with pytest.raises(DataError, match=r"this SGLang serves without a drafter.*with --enable-metrics"):
        check_counters(start("sglang", drafts=False), drafts=True)
    busy = start()
    busy.answer("target", [1, 2, 3, 4], 4)
    with pytest.raises(DataError, match="drafts too; --baseline is the same target served without a drafter"):
        check_counters(busy, drafts=False)
    assert check_counters(start(error="no_metrics"), drafts=False) == "unknown"
    with pytest.raises(DataError, match="no list of models"):
        start(error="no_models").model()
    with pytest.raises(DataError, match="no model other there; it names target"):
        start().model("other")
    gone = start()
    gone.close()
    with pytest.raises(DataError, match="ConnectError"):
        MeasuredServer("http://127.0.0.1:9").model()


def test_another_model_and_prompts_that_are_too_long(start) -> None:
    server = start()
    model = server.model()
    check_model(server, model, ["/elsewhere/target", "target"])
    with pytest.raises(DataError, match=r"serves target, but the target is big; .*--other-target"):
        check_model(server, model, ["/models/big", "big"])
    kept, notes = fitting_prompts([*PROMPTS, prompt("d", 60)], model, 12)
    assert kept == PROMPTS and notes[0].startswith("1 prompts left out")
    with pytest.raises(DataError, match="no prompt fits: the server takes 64 tokens"):
        fitting_prompts(PROMPTS, model, 100)


def test_counters_are_summed_over_ranks() -> None:
    text = "".join(
        f'sglang:generation_tokens_total{{tp_rank="{rank}"}} 1.2e+03\n'
        f'sglang:spec_verify_calls_total{{tp_rank="{rank}"}} 5\n'
        for rank in (0, 1)
    )
    found = read_counters(text)
    assert found is not None and (found.engine, found.generated, found.passes) == ("SGLang", 2400, 10)
    assert read_counters("process_start_time_seconds 1.7e9\n") is None


@pytest.fixture
def run_dir(tmp_path: Path, demo_assets: Path) -> Path:
    target = demo_assets / "target"
    settings = Settings.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "target": {"path": str(target), "taps": [1, 5]},
            "data": {"heldout": [str(demo_assets / "heldout.jsonl")]},
            "evaluate": {"num_prompts": 3, "max_new_tokens": 8, "concurrency": [1, 4]},
        }
    )
    facts = describe(str(target))
    spec = derive_spec(DrafterConfig(num_layers=1, block_size=NUM_DRAFTS + 1), facts, [1, 5], 3)
    return open_run(settings, {"drafter": spec.to_dict(), "target": dict(facts.identity)})


def test_the_command_shows_and_keeps_what_it_found(run_dir, start, capsys) -> None:
    server, plain = start(max_model_len=2048), start(drafts=False, max_model_len=2048)
    words = ["evaluate", str(run_dir), "--server", server.url, "--baseline", plain.url]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_prompts"] == 3 and report["equal_answers"] == 3
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "τ, over target passes" in shown.out and "3 of 3" in shown.out and "speedup" in shown.out
    assert "among the servers" in shown.err
    (entry,) = read_evaluations(run_dir, "servers")
    assert entry["step"] == 0 and entry["conditions"]["concurrency"] == [1, 4]
    assert read_evaluations(run_dir) == read_evaluations(run_dir, "others") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--baseline", "http://127.0.0.1:9"], "--baseline: belongs to --server"),
        (["--server", "localhost:8000"], "not an address of a server"),
        (["--server", "http://127.0.0.1:9", "--plot", "a.png"], "--plot: not with --server"),
        (["--server", "http://127.0.0.1:9", "--key-variable", "NO_SUCH_KEY"], "no such environment variable"),
        (["--server", "http://127.0.0.1:9"], "ConnectError"),
    ],
)
def test_misuse_is_one_line(run_dir, capsys, words, said) -> None:
    assert main(["evaluate", str(run_dir), *words]) != 0
    err = capsys.readouterr().err.strip()
    assert said in err and len(err.splitlines()) == 1
