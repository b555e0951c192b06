"""Laws of endpoints: what is retried and what is not, the concurrency cap, the cache, and that keys stay
secret.
"""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from chat_server import chat_server, completion, refusal

from rmsweb.llm import ChatConfigError, ChatError, ChatRefused, Endpoint, openai_messages, retry_after_s
from rmsweb.records import Image, Message, Text

T = TypeVar("T")
HELLO = [{"role": "user", "content": "hello"}]
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSWEB_JUDGE_API_KEY", KEY)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def ask(
    url: str, count: int = 1, messages: list[dict[str, Any]] | None = None, **settings: Any
) -> tuple[list[Any], Endpoint]:
    """`count` requests at the same time; exceptions are results."""
    settings = {"backoff_s": 0.01, "max_attempts": 4, "options": {"top_k": 20, "top_p": None}} | settings
    async with Endpoint(url=url, model="m", role="judge", **settings) as endpoint:
        work = (endpoint.chat(messages or HELLO, max_tokens=5, seed=3) for _ in range(count))
        return await asyncio.gather(*work, return_exceptions=True), endpoint


def test_a_request_carries_the_options_that_are_set() -> None:
    """The request carries model, seed, limit and the options that are set; the answer carries text, tokens
    and model.
    """
    with chat_server(lambda body, n: completion("hi")) as server:
        (answer,), _ = run(ask(server.url))
    assert server.requests == [{"model": "m", "messages": HELLO, "max_tokens": 5, "seed": 3, "top_k": 20}]
    assert (
        answer.text,
        answer.prompt_tokens,
        answer.completion_tokens,
        answer.model,
        answer.finish_reason,
    ) == ("hi", 7, 3, "served-model", "stop")
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_passing_trouble_is_retried(status: int) -> None:
    """A status that may pass is tried again until there is an answer."""
    with chat_server(lambda body, n: refusal(status) if n < 2 else completion("ok")) as server:
        (answer,), _ = run(ask(server.url))
    assert answer.text == "ok"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ChatRefused),
        (401, ChatConfigError),
        (403, ChatConfigError),
        (404, ChatConfigError),
        (413, ChatRefused),
    ],
)
def test_refusals_are_not_retried(status: int, kind: type[Exception]) -> None:
    """A refusal that a retry cannot change is one request, and its message names role and status."""
    with chat_server(lambda body, n: refusal(status, "bad")) as server:
        (error,), _ = run(ask(server.url))
    assert type(error) is kind
    assert len(server.requests) == 1
    assert "judge" in str(error)
    assert str(status) in str(error)


def test_every_request_refused_is_a_config_error() -> None:
    """Refusals without a single answer mean that the options are wrong: the run must not go on with empty
    answers.
    """
    with chat_server(lambda body, n: refusal(400)) as server:
        errors, _ = run(ask(server.url, count=5))
    assert sum(isinstance(error, ChatConfigError) for error in errors) == 3


def test_gives_up_after_the_last_attempt() -> None:
    """An endpoint that never answers ends in ChatError after max_attempts requests."""
    with chat_server(lambda body, n: refusal(500)) as server:
        (error,), _ = run(ask(server.url))
    assert type(error) is ChatError
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    "body", ["", "[]", "{}", '{"choices":[]}', '{"choices":[{"message":{"content":5}}]}', "<html>"]
)
def test_what_is_no_completion_is_retried(body: str) -> None:
    """A 200 that holds no completion is trouble that may pass."""
    with chat_server(lambda request, n: (200, {}, body) if n == 0 else completion(None)) as server:
        (answer,), _ = run(ask(server.url))
    assert answer.text == ""
    assert len(server.requests) == 2


def test_closed_port_and_timeout_are_retried() -> None:
    """No connection and no timely answer are trouble that may pass."""
    (error,), _ = run(ask("http://127.0.0.1:9/v1"))
    assert type(error) is ChatError

    def slow(body: dict[str, Any], number: int) -> Any:
        time.sleep(0.5 if number == 0 else 0)
        return completion("late")

    with chat_server(slow) as server:
        (answer,), _ = run(ask(server.url, timeout_s=0.2))
    assert answer.text == "late"
    assert len(server.requests) == 2


def test_retry_after_is_honoured() -> None:
    """The pause is the one that the server asks for, not the client's own."""
    pauses: list[float] = []

    async def note(seconds: float, sleep: Any = asyncio.sleep) -> None:
        pauses.append(seconds)
        await sleep(0)

    with (
        chat_server(lambda body, n: refusal(429, Retry_After="7") if n == 0 else completion("ok")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("rmsweb.llm.asyncio.sleep", note)
        run(ask(server.url))
    assert 7.0 in pauses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 10.0)
        assert retry_after_s("Thu, 01 Jan 1970 00:00:30 GMT") == 20.0
    assert retry_after_s("1e9") == 60.0
    assert retry_after_s("nan") is None


def test_no_more_requests_are_open_than_the_cap_allows() -> None:
    """No more requests are open at a time than the cap allows."""

    def slow(body: dict[str, Any], number: int) -> Any:
        time.sleep(0.02)
        return completion("ok")

    with chat_server(slow) as server:
        answers, _ = run(ask(server.url, count=12, concurrency=3))
    assert len(answers) == len(server.requests) == 12
    assert server.most_at_once <= 3


def test_an_endpoint_that_renamed_the_length_field_gets_its_name() -> None:
    """An endpoint that wants max_completion_tokens gets it, from then on without being asked."""

    def picky(body: dict[str, Any], number: int) -> Any:
        return (
            completion("ok")
            if "max_completion_tokens" in body
            else refusal(400, "use 'max_completion_tokens' instead of 'max_tokens'")
        )

    with chat_server(picky) as server:
        (answer,), _ = run(ask(server.url))
    assert answer.text == "ok"
    assert "max_tokens" not in server.requests[-1]


def test_cache_answers_the_same_request_once(tmp_path: Path) -> None:
    """The full request is the key: the same one costs nothing, a changed one is asked, a broken entry counts
    as absent.
    """
    with chat_server(lambda body, n: completion(f"answer {n}")) as server:
        (first,), _ = run(ask(server.url, cache=tmp_path))
        (again,), _ = run(ask(server.url, cache=tmp_path))
        assert len(server.requests) == 1
        (other,), _ = run(ask(server.url, cache=tmp_path, messages=[{"role": "user", "content": "hello!"}]))
        assert (first.text, again.text, other.text) == ("answer 0", "answer 0", "answer 1")
        for entry in tmp_path.iterdir():
            entry.write_text("{tor")
        (repaired,), _ = run(ask(server.url, cache=tmp_path))
        assert repaired.text == "answer 2"


def test_keys_are_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is in no exception (even where the server repeats it), no cache entry and no repr; a URL with
    credentials is refused.
    """
    with chat_server(lambda body, n: refusal(401, f"wrong key {KEY}")) as server:
        (error,), client = run(ask(server.url))
    assert KEY not in str(error) + repr(client)
    with chat_server(lambda body, n: completion("ok")) as server:
        run(ask(server.url, cache=tmp_path))
    assert all(KEY not in entry.read_text() for entry in tmp_path.iterdir())
    with pytest.raises(ValueError, match="credentials") as caught:
        Endpoint(url=f"http://me:{KEY}@host/v1", model="m", role="judge")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("settings", [{"url": "host/v1"}, {"model": ""}])
def test_wrong_settings_are_refused_before_anything_is_sent(settings: dict[str, Any]) -> None:
    """Wrong settings are a ValueError before anything is sent."""
    with pytest.raises(ValueError, match="judge"):
        Endpoint(**({"url": "http://h/v1", "model": "m", "role": "judge"} | settings))


# -------------------------------------------------------------------------------------- records over the wire


def test_texts_are_joined_and_pictures_are_data_urls(tmp_path: Path) -> None:
    """Texts are joined without a separator, pictures are data URLs, texts alone are a string."""
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    shot = Image(path="a.png", sha256="", width=1, height=1)
    messages = [
        Message(role="system", parts=(Text(tag="system", text="a"), Text(tag="schema", text="b"))),
        Message(role="user", parts=(shot, Text(tag="task", text="c"), Text(tag="state", text="d"))),
    ]
    assert openai_messages(messages, tmp_path) == [
        {"role": "system", "content": "ab"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}},
                {"type": "text", "text": "cd"},
            ],
        },
    ]
    with pytest.raises(FileNotFoundError):
        openai_messages(
            [Message(role="user", parts=(Image(path="b.png", sha256="", width=1, height=1),))], tmp_path
        )


def test_refused_request_is_an_empty_answer(tmp_path: Path) -> None:
    """A request that the endpoint refuses is the model's failure, told in finish_reason."""
    asked = [Message(role="user", parts=(Text(tag="task", text="t"),))]

    async def talk(url: str) -> tuple[Any, Any]:
        options = {"temperature": 0.7}
        async with Endpoint(role="judge", url=url, model="m", image_root=tmp_path, options=options) as policy:
            fine, refused = [await policy(asked, seed=1, purpose="act", max_tokens=9) for _ in range(2)]
            return fine, refused

    with chat_server(lambda body, n: completion("fine") if n == 0 else refusal(400, "filtered")) as server:
        fine, refused = run(talk(server.url))
    assert (fine.text, fine.model) == ("fine", "served-model")
    assert refused.text == ""
    assert refused.finish_reason.startswith("refused")
    assert server.requests[0]["temperature"] == 0.7
