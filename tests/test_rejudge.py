"""Laws of judging stored runs: no browser, no policy, old verdicts kept as history, summaries rewritten."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import Answer, ChatServer, chat_server, completion, refusal
from fake_world import TASK, CountingSession, done, trajectory
from fake_world import answer as says_agent

import collect
import evaluate
import mine
from rmsweb.config import flat, parse_config
from rmsweb.jsonl import write_json
from rmsweb.llm import ChatConfigError
from rmsweb.prompt import PromptConfig
from rmsweb.records import Judgement, Source, Trajectory, Verdict
from rmsweb.runs import RunFolder, RunWriter

SAYS: dict[str, Answer] = {}


def says(verdict: str) -> Answer:
    return completion(json.dumps({"reason": "seen", "verdict": verdict}))


@pytest.fixture
def server() -> Iterator[ChatServer]:
    """A judge that gives each run (by its task's text) the answer of SAYS, else success."""

    def answer(body: dict[str, Any], number: int) -> Answer:
        text = json.dumps(body["messages"])
        if body["model"] == "agent":
            return completion(says_agent(done()))
        if body["model"] == "coach":
            return completion("Take the other way.")
        return next((found for words, found in SAYS.items() if words in text), says("success"))

    SAYS.clear()
    with chat_server(answer) as running:
        yield running


def episode(name: str, script: str, **fields: Any) -> Trajectory:
    task = replace(TASK, task_id=name, text=f"do {name}.", split="train")
    run = trajectory(task=task, prompt_config=PromptConfig().hash)
    source = Source(script=script, policy="p", arm="reflection")
    return replace(run, trajectory_id=f"{name}.x.r1.n0", source=source, **fields)


def verdict_of(run: Trajectory, kind: str, verdict: Verdict) -> Judgement:
    return Judgement(trajectory_id=run.trajectory_id, judge=kind, model="old", verdict=verdict)


def stored(out: Path, script: Any, url: str, *flags: str) -> None:
    """A finished run of the live web: judged by a judge, by a check, by the rule, and not at all."""
    argv = ["--tasks", "gone.jsonl", "--out", "elsewhere", "--policy-url", "http://127.0.0.1:9/v1"]
    argv += ["--policy-model", "p", "--environment", "live", "--split", "train", "--judge-url", url, *flags]
    config = parse_config(script.Config, argv)
    name = script.__name__
    with RunWriter(out) as folder:
        folder.write_json("config.json", flat(config))
        write_json(out / "prompt_config.json", PromptConfig())
        for task, kind in (("lost", "outcome"), ("site", "check"), ("late", "rule"), ("open", "")):
            run = episode(task, name, ended="max_steps" if kind == "rule" else "done")
            folder.commit(run, verdict_of(run, kind, "not_success") if kind else None)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "judgements.rank0.jsonl").read_text().splitlines()[1:]]


@pytest.mark.parametrize("script", [evaluate, collect])
def test_stored_runs_are_judged_again_without_browser_or_policy(
    script: Any,
    server: ChatServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A copied folder is enough. What a judge decided or nobody did is asked; the site's check and the rule
    stay; the old lines stay as history, and the summary is that of the new verdicts.
    """
    monkeypatch.setattr("rmsweb.runner.find_chromium", None)
    stored(tmp_path / "first", script, server.url)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    shutil.rmtree(tmp_path / "first")
    flags = ["--rejudge", "--out", str(tmp_path / "copy"), "--judge-url", server.url]
    assert script.main([*flags, "--judge-model", "other", "--judge-extra", '{"reasoning_effort":"low"}']) == 0
    assert {request["model"] for request in server.requests} == {"other"}
    assert all(request["reasoning_effort"] == "low" for request in server.requests)
    folder = RunFolder(tmp_path / "copy")
    found = {name.split(".")[0]: (item.judge, item.verdict) for name, item in folder.judgements().items()}
    assert found == {
        "lost": ("outcome", "success"),
        "open": ("outcome", "success"),
        "site": ("check", "not_success"),
        "late": ("rule", "not_success"),
    }
    assert len(server.requests) == 2
    assert [line["verdict"] for line in lines(tmp_path / "copy") if "lost" in line["trajectory_id"]] == [
        "not_success",
        "success",
    ]
    shown = capsys.readouterr().out
    assert "judged 2 runs again" in shown
    assert "1 by check, 1 by rule" in shown
    summary = folder.json("summary.json")
    if script is evaluate:
        assert (summary["pass1"], summary["unjudged"], summary["tasks"]) == (0.5, 0, 4)
    else:
        assert summary["successes"] == 2
        assert "samples.jsonl" in shown
    assert script.main(flags) == 0
    assert len(server.requests) == 4, "judging again asks again, cache or not"


@pytest.mark.parametrize(
    "answer",
    [
        refusal(400, "no"),
        refusal(429),
        completion(""),
        completion("{", finish_reason="length"),
        completion(None, finish_reason="content_filter"),
    ],
)
def test_a_judge_that_gives_no_verdict_leaves_what_there_was(
    answer: Answer,
    server: ChatServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run keeps its verdict, or has none; the exit code is 1 and the last line says how many."""
    monkeypatch.setattr("rmsweb.llm.Endpoint.max_attempts", 1)
    stored(tmp_path / "run", evaluate, server.url)
    SAYS["do open."] = answer
    flags = ["--rejudge", "--out", str(tmp_path / "run"), "--judge-url", server.url]
    assert evaluate.main(flags) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "1 unfinished; --resume goes on with them"
    summary = RunFolder(tmp_path / "run").json("summary.json")
    assert (summary["unjudged"], summary["runs"], summary["unparsed"]) == (1, 3, 0)
    SAYS.clear()
    assert evaluate.main(flags) == 0
    assert RunFolder(tmp_path / "run").json("summary.json")["unjudged"] == 0


def test_an_unreadable_verdict_is_unparsed(server: ChatServer, tmp_path: Path) -> None:
    """Whole words without a verdict are the judge's answer."""
    stored(tmp_path / "run", evaluate, server.url)
    SAYS["do open."] = completion("It went well.")
    evaluate.main(["--rejudge", "--out", str(tmp_path / "run")])
    summary = RunFolder(tmp_path / "run").json("summary.json")
    assert (summary["unjudged"], summary["unparsed"]) == (0, 1)


def test_what_rejudging_needs_is_named(tmp_path: Path) -> None:
    """A folder without a run, and a run without a judge, end with one sentence."""
    with pytest.raises(FileNotFoundError, match="no run in"):
        evaluate.main(["--rejudge", "--out", str(tmp_path)])
    with RunWriter(tmp_path) as folder:
        argv = ["--tasks", "t", "--out", "o", "--policy-url", "http://h/v1", "--policy-model", "m"]
        folder.write_json("config.json", flat(parse_config(evaluate.Config, argv)))
    with pytest.raises(ValueError, match="--judge-url"):
        evaluate.main(["--rejudge", "--out", str(tmp_path)])


# ---------------------------------------------------------------------------------------- while a run goes on


@pytest.fixture
def world(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags of a run of two tasks of the web, in sessions without a browser."""

    @asynccontextmanager
    async def launch() -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(restarts=0)

    async def open_session(browser: object, name: str) -> CountingSession:
        return CountingSession()

    monkeypatch.setattr("rmsweb.runner.browser_pool", lambda *_, **__: (launch, open_session))
    monkeypatch.setattr("rmsweb.runner.find_chromium", lambda: None)
    monkeypatch.setattr("rmsweb.llm.Endpoint.max_attempts", 1)
    tasks = [{"task_id": name, "text": f"do {name}."} for name in ("open", "late")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    flags = {"tasks": tmp_path / "tasks.jsonl", "out": tmp_path / "run", "policy-url": server.url}
    flags |= {"policy-model": "agent", "environment": "live", "judge-url": server.url, "concurrency": 1}
    return [f"--{name}={value}" for name, value in flags.items()]


def asked(server: ChatServer, model: str) -> int:
    return sum(request["model"] == model for request in server.requests)


@pytest.mark.parametrize("answer", [refusal(400), refusal(500), completion("")])
def test_a_run_without_verdict_is_kept_and_judged_at_the_next_start(
    answer: Answer, world: list[str], server: ChatServer, tmp_path: Path
) -> None:
    """The other runs go on; the next start asks the judge alone, which may be another one."""
    SAYS["do open."] = answer
    assert evaluate.main([*world, "--runs=1"]) == 1
    summary = RunFolder(tmp_path / "run").json("summary.json")
    assert (summary["unjudged"], summary["missing"], summary["pass1"]) == (1, 0, 1.0)
    episodes = asked(server, "agent")
    SAYS.clear()
    assert evaluate.main([*world, "--runs=1", "--resume", "--judge-model=other"]) == 0
    summary = RunFolder(tmp_path / "run").json("summary.json")
    assert (summary["unjudged"], summary["runs"], summary["pass1"]) == (0, 2, 1.0)
    assert (asked(server, "agent"), asked(server, "other")) == (episodes, 1)


def test_a_judge_whose_key_is_wrong_ends_the_run_and_loses_no_episode(
    world: list[str], tmp_path: Path
) -> None:
    """The first episode is on disk when the run ends with the variable's name."""
    SAYS["do "] = refusal(401)
    with pytest.raises(ChatConfigError, match="RMSWEB_JUDGE_API_KEY"):
        evaluate.main([*world, "--runs=1"])
    assert len(RunFolder(tmp_path / "run").finished()) == 1
    SAYS.clear()
    assert evaluate.main([*world, "--runs=1", "--resume"]) == 0


def test_a_collected_attempt_without_verdict_waits_with_its_guide(
    world: list[str], server: ChatServer, tmp_path: Path
) -> None:
    """Its task has no further round before it is judged; the guide for that round is not lost."""
    flags = [*world, "--reflection-model=coach", "--rounds=2"]
    SAYS["do open."] = refusal(500)
    assert collect.main(flags) == 1
    folder = RunFolder(tmp_path / "run")
    assert folder.json("summary.json")["rejected"]["unjudged"] == 1
    assert sorted(folder.finished()) == [
        "late.reflection.r1.n0",
        "late.reflection.r2.n0",
        "open.reflection.r1.n0",
    ]
    SAYS["do open."] = says("not_success")
    assert collect.main([*flags, "--resume"]) == 0
    folder = RunFolder(tmp_path / "run")
    assert folder.trajectory("open.reflection.r2.n0").guide_in == "Take the other way."
    assert "unjudged" not in folder.json("summary.json")["rejected"]


def test_every_role_of_a_collection_sends_its_key(
    world: list[str], server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reflection handler has the teacher's URL, and so the teacher's key until it has one of its own."""
    for name in ("TEACHER", "JUDGE"):
        monkeypatch.setenv(f"RMSWEB_{name}_API_KEY", name)
    SAYS["do "] = says("not_success")
    flags = [*world, "--reflection-model=coach", "--reflection-temperature=0.3", "--judge-temperature=none"]
    assert collect.main([*flags, "--rounds=2"]) == 0
    sent = zip(server.requests, server.headers, strict=True)
    keys = {(request["model"], headers["authorization"]) for request, headers in sent}
    assert keys == {("agent", "Bearer TEACHER"), ("coach", "Bearer TEACHER"), ("gpt-4o", "Bearer JUDGE")}
    temperatures = {request["model"]: request.get("temperature") for request in server.requests}
    assert temperatures == {"agent": None, "coach": 0.3, "gpt-4o": None}
    monkeypatch.setenv("RMSWEB_REFLECTION_API_KEY", "own")
    assert collect.main([*flags, "--rounds=3", f"--out={world[1][6:]}2"]) == 0
    sent = zip(server.requests, server.headers, strict=True)
    assert ("coach", "Bearer own") in {(body["model"], headers["authorization"]) for body, headers in sent}


def test_an_interruption_says_how_much_is_on_disk(
    world: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number is that of the finished episodes, none included."""

    async def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main(world)
    assert "holds 0 finished episodes; --resume goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "names"),
    [
        (evaluate, ("POLICY", "JUDGE")),
        (collect, ("TEACHER", "REFLECTION", "EXTRACTION", "JUDGE")),
        (mine, ("FAILURE_JUDGE",)),
    ],
)
def test_help_names_the_variables_of_the_keys(
    script: Any, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each role of the script has its own, and no heading ends in two signs."""
    with pytest.raises(SystemExit):
        script.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"RMSWEB_{name}_API_KEY, else" in shown for name in names)
    assert ".:" not in shown
