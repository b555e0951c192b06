"""docs/using.md in small: three pages of one's own, scripted endpoints, a tiny Qwen3-VL, the five scripts."""

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chat_server import Answer, chat_server, completion
from tiny_model import tiny_checkpoint

from rmsweb.jsonl import write_json, write_records
from rmsweb.prompt import load_prompt_config
from rmsweb.records import Task

ROOT = Path(__file__).parent.parent
PROMPT = replace(
    load_prompt_config(ROOT / "scripts" / "demo_prompt.json"), prompt_budget=6_000, response_budget=200
)
PAGES = {
    "index.html": "<h1>Shop</h1><a href=lamps.html>lamps</a> <a href=vases.html>vases</a>",
    "lamps.html": "<h1>Lamps</h1><a href=red.html>red lamp</a> <a href=index.html>back</a>",
    "red.html": "<h1>Red lamp</h1><p>Price: 42 dollars</p><a href=index.html>back</a>",
    "vases.html": "<h1>Vases</h1><p>Price: 17 dollars</p><a href=index.html>back</a>",
}
RUN_FILES = re.compile(r"`([^`\s]+)`")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of three pages and a wrong one."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name, body in PAGES.items():
        (folder / name).write_text(f"<!doctype html><title>{name}</title>{body}")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://localhost:{http.server_address[1]}/index.html"
    http.shutdown()
    http.server_close()


def answer(body: dict[str, Any], number: int) -> Answer:
    """What the endpoints say: a teacher that finds the lamp, a sloppy policy that takes the vase, judges."""
    contents = [message["content"] for message in body["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    text = "\n".join(
        [*(x for x in contents if isinstance(x, str)), *(part.get("text", "") for part in parts)]
    )
    if body["model"] == "judge":
        verdict = "success" if "42" in text else "not_success"
        if "Categories" in text:
            return completion('{"reason":"wrong page","category":"constraint","confidence":0.9}')
        return completion(json.dumps({"reason": "seen", "verdict": verdict}))
    wanted = ("red lamp", "lamps") if body["model"] == "teacher" else ("vases",)
    action: dict[str, Any] = {}
    for label in wanted:
        if found := re.search(rf"\[(\d+)\]<a[^>]*>\s*{label}", text):
            action = {"click_element_by_index": {"index": int(found[1])}}
            break
    if not action:
        price = "42" if body["model"] == "teacher" else "17"
        action = {"done": {"text": f"It costs {price} dollars.", "success": True}}
    reply = {"evaluation_previous_goal": "ok", "memory": "", "next_goal": "go on", "action": [action]}
    return completion(json.dumps(reply))


def run(*words: object) -> None:
    """Run a script as a user does."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.browser
def test_the_commands_of_using_lead_from_pages_to_an_evaluation(tmp_path: Path, site: str) -> None:
    """collect, train_sft, pool, mine, train_rl, evaluate; the table of files names all that is written."""
    task = Task(
        task_id="lamp", text="What does the red lamp cost?", start_url=site, split="train", benchmark="own"
    )
    write_records(tmp_path / "train.jsonl", Task, [task])
    prompt, runs = tmp_path / "prompt.json", tmp_path / "runs"
    write_json(prompt, PROMPT)
    model = tiny_checkpoint(tmp_path / "base", prompt_config=PROMPT)
    with chat_server(answer) as server:
        url, judge = server.url, ["--judge-url", server.url, "--judge-model", "judge"]
        live = ["--tasks", tmp_path / "train.jsonl", "--max-steps", 6, *judge]
        run(
            "collect.py", "--environment", "live", *live, "--policy-url", url, "--policy-model", "teacher",
            "--prompt-config", prompt, "--out", runs / "collect", "--successes", 2,
        )  # fmt: skip
        small = ["--lora-rank", 2, "--device", "cpu", "--threads", 1]
        run(
            "train_sft.py", "--model", model, "--samples", runs / "collect/samples.jsonl", "--epochs", 1,
            "--out", runs / "sft", *small,
        )  # fmt: skip
        run(
            "evaluate.py", "--environment", "live", *live, "--split", "train", "--policy-url", url,
            "--policy-model", "sloppy", "--prompt-config", prompt, "--runs", 1, "--out", runs / "pool",
        )  # fmt: skip
        run(
            "mine.py",
            "--pool",
            runs / "collect",
            runs / "pool",
            *judge,
            "--out",
            runs / "mined",
            "--followers",
            1,
        )
        run(
            "train_rl.py", "--model", runs / "sft/checkpoint-best", "--states", runs / "mined/mined.jsonl",
            "--max-steps", 1, "--train-batch", 1, "--mini-batch", 1, "--num-rollouts", 2,
            "--max-generation-batches", 1, "--response-budget", 200, "--out", runs / "rl", *small,
        )  # fmt: skip
        run(
            "evaluate.py", "--environment", "live", *live, "--split", "train", "--policy",
            runs / "rl/checkpoint-best", "--runs", 1, "--out", runs / "eval",
        )  # fmt: skip
    run("-m", "rmsweb.report", runs / "eval", "--out", tmp_path / "report")
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    section = page.partition("## What a run folder holds\n")[2].partition("\n## ")[0]
    named = {
        name.rstrip("/")
        for row in section.splitlines()
        for name in RUN_FILES.findall(row.split("|")[1] if "|" in row else "")
    }
    written = {path.name for folder in runs.iterdir() for path in folder.iterdir()}
    assert written <= named
