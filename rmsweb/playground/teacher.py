"""The scripted LLM roles: teacher, reflection handler, failure judge, outcome judge and extractor behind an
OpenAI-style HTTP endpoint.

Purpose: the pipeline runs offline and without a key, and the code under `rmsweb/` cannot tell these roles
from a real endpoint. A reply is a function of the request alone. Every model is called scripted-..., and
every report that they touch says so.
"""

import json
import random
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rmsweb.playground.drills import Goal, answer_text
from rmsweb.playground.expert import CONFIRM, NEWS, act, wrong_decisions
from rmsweb.playground.tasks import World, world_by_text

_GUIDE = re.compile(r"<guide>\n(.*?)\n</guide>", re.DOTALL)
_TASK = re.compile(r"<task>\n(.*?)\n</task>", re.DOTALL)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content", "")
    return (
        content
        if isinstance(content, str)
        else "".join(part.get("text", "") for part in content if part.get("type") == "text")
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _world(text: str) -> World | None:
    """The world of the task that stands in a request: in <task> tags, or in the last line."""
    tagged = _TASK.search(text)
    last = text.rstrip().splitlines()[-1].removeprefix("Task: ") if text.strip() else ""
    return world_by_text(tagged[1].strip() if tagged else last)


def teacher(text: str, seed: int) -> str:
    """The next answer of the expert with habits; it gives up on a task it does not know."""
    world = _world(text)
    if world is None:
        return answer_text(Goal("done", None, "unknown task"), None, "none")
    guide = _GUIDE.search(text)
    return act(world, text, seed, guide[1] if guide else "")


def reflection(text: str, seed: int) -> str:
    """Names the decisions that the run skipped, after those of the previous guide."""
    world, goals = _world(text), re.findall(r"^goal: (.*)$", text, re.MULTILINE)
    previous = re.search(r"<previous_guide>\n(.*?)\n</previous_guide>", text, re.DOTALL)
    kept = re.findall(r"^- check (\w+)", previous[1], re.MULTILINE) if previous else []
    attempt = len(re.findall(r"^attempt", previous[1], re.MULTILINE)) if previous else 0
    named = list(dict.fromkeys([*kept, *(wrong_decisions(world, goals) if world else [])]))
    return "\n".join(
        ["attempt"] * (attempt + 1) + [f"- check {label} yourself before you go on" for label in named]
    )


JUDGE_ERRORS = 0.1  # share of its labels that the scripted failure judge is unsure of, and gets wrong


def failure_judge(text: str, seed: int) -> str:
    """A category by the decision at which the runs part, as the evidence tells it.

    Now and then it is unsure and wrong, so that the second pass and the rules have something to do.
    """
    world = _world(text)
    won, lost = (
        found[1] if (found := re.search(rf"^{line}: (.*)$", text, re.MULTILINE)) else ""
        for line in ("where the runs part, the successful run", "and the failed run")
    )
    if world is None or not won:
        return json.dumps({"reason": "cannot tell", "category": "discovery", "confidence": 0.3})
    named = next((label for label, value in world.want.items() if {label, value} & set(_words(won))), "")
    kinds = {
        "obstruction": NEWS in _words(lost),
        "boundary": named == "code",
        "date": named == "day" or "date" in _words(won),
        "endpoint": not {CONFIRM, "send", "book", "order"}.isdisjoint(_words(won)),
        "evidence": lost.startswith("done") and world.fact is not None,
        "controls": bool(named) and world.fact is not None,
        "constraint": bool(named) or world.item in won,
    }
    category = next((name for name, holds in kinds.items() if holds), "interaction")
    if random.Random(f"judge/{world.task_id}/{seed}").random() < JUDGE_ERRORS:
        return json.dumps({"reason": "a guess", "category": "discovery", "confidence": 0.5})
    reason = f"the failed run did not do this: {won}"
    return json.dumps({"reason": reason, "category": category, "confidence": 0.8})


def outcome_judge(text: str, seed: int) -> str:
    """Looks the answer up; what only the server knows it cannot tell."""
    world, answer = _world(text), re.search(r"^Final answer: (.*)$", text, re.MULTILINE)
    if world is None or world.fact is None:
        return json.dumps({"reason": "cannot tell from the answer", "verdict": "unknown"})
    success, reason = world.solved(answer[1] if answer else None, None)
    return json.dumps({"reason": reason, "verdict": "success" if success else "not_success"})


def extractor(text: str, seed: int) -> str:
    """The lines of the page that share a word with the query."""
    page, query = (
        re.search(r"<page_text>\n(.*?)\n</page_text>", text, re.DOTALL),
        re.search(r"^Query: (.*)$", text, re.MULTILINE),
    )
    wanted = set(re.findall(r"\w+", query[1].lower())) if query else set()
    lines = [
        line
        for line in (page[1].splitlines() if page else [])
        if wanted & set(re.findall(r"\w+", line.lower()))
    ]
    return "\n".join(lines) or "the page does not say"


ROLES: dict[str, Callable[[str, int], str]] = {
    "scripted-teacher": teacher,
    "scripted-reflection": reflection,
    "scripted-failure-judge": failure_judge,
    "scripted-outcome-judge": outcome_judge,
    "scripted-extractor": extractor,
}


def complete(request: dict[str, Any]) -> dict[str, Any]:
    """Answer an OpenAI chat request.

    Raises ValueError where the model is not one of ROLES, or without messages.
    """
    model, messages = request.get("model"), request.get("messages")
    if model not in ROLES or not isinstance(messages, list) or not messages:
        raise ValueError(
            f"model {model!r} with {len(messages or [])} messages: expected messages and one of "
            f"{', '.join(ROLES)}"
        )
    text = _text(messages[-1])
    reply = ROLES[model](text, int(request.get("seed") or 0))
    usage = {
        "prompt_tokens": sum(len(_text(message).split()) for message in messages),
        "completion_tokens": len(reply.split()),
    }
    choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage | {"total_tokens": sum(usage.values())},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        try:
            if not self.path.endswith("/chat/completions"):
                raise ValueError(f"path {self.path}: expected /v1/chat/completions")
            status, answer = (
                200,
                complete(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))),
            )
        except ValueError as error:
            status, answer = 400, {"error": {"message": str(error)}}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class TeacherServer:
    """The scripted roles on 127.0.0.1; port 0 takes a free one."""

    def __init__(self, port: int = 0) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    def start(self) -> "TeacherServer":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def wait(self) -> None:
        """Until the process is interrupted."""
        self._thread.join()
