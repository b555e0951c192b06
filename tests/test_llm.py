"""Laws of endpoints: what is retried and what is not, the concurrency cap, the cache, and that keys stay
secret.
"""

import asyncio
import json
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from chat_server import Answer, chat_server, completion, refusal

from rmsweb.llm import (
    ANY_KEY,
    FIRST_REFUSALS,
    KEY_VARIABLES,
    ChatConfigError,
    ChatError,
    ChatRefused,
    Endpoint,
    EndpointConfig,
    openai_messages,
    retry_after_s,
)
from rmsweb.records import Image, Message, Reply, Text, Usage

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
    """Many refusals without a single answer mean that the options are wrong; a few tasks may be refused."""
    with chat_server(lambda body, n: refusal(400)) as server:
        errors, _ = run(ask(server.url, count=FIRST_REFUSALS + 2))
    assert sum(isinstance(error, ChatConfigError) for error in errors) == 3
    with chat_server(lambda body, n: refusal(400) if n < 6 else completion("ok")) as server:
        answers, _ = run(ask(server.url, count=8))
    assert sum(isinstance(answer, ChatRefused) for answer in answers) == 6
    assert not any(isinstance(answer, ChatConfigError) for answer in answers)


def error_at(status: int, **fields: Any) -> Answer:
    return status, {}, json.dumps({"error": {"message": "the provider's words"} | fields})


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (error_at(429, code="insufficient_quota"), ChatConfigError),
        (error_at(429, type="insufficient_quota"), ChatConfigError),
        (error_at(400, code="unsupported_value", param="temperature"), ChatConfigError),
        (error_at(400, code="model_not_found"), ChatConfigError),
        (error_at(200, code=401), ChatConfigError),
        (error_at(200, code=400), ChatRefused),
        (error_at(200), ChatRefused),
        (error_at(400, code="content_filter"), ChatRefused),
        (error_at(400, code="context_length_exceeded"), ChatRefused),
        (error_at(429, code="rate_limit_exceeded"), ChatError),
        (error_at(200, code=429), ChatError),
        (error_at(200, code=503), ChatError),
    ],
)
def test_the_body_decides_what_an_answer_means(answer: Answer, outcome: type[Exception]) -> None:
    """Quota, key, model and options stop the run, a filtered request stops itself, trouble is retried."""
    with chat_server(lambda body, n: answer) as server:
        (error,), _ = run(ask(server.url))
    assert type(error) is outcome
    assert "the provider's words" in str(error)
    assert len(server.requests) == (4 if outcome is ChatError else 1)


def raw(status: int, body: Any, **headers: str) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, text


def choice(**fields: Any) -> Answer:
    return raw(200, {"choices": [{"message": {"content": ""}, "finish_reason": "stop"} | fields]})


WORDS = {"message": "the provider's words"}
# (what a provider sends, what follows); the provider that was seen to send it stands behind
PROVIDERS = [
    # OpenAI
    (raw(429, {"error": WORDS | {"type": "insufficient_quota", "code": "insufficient_quota"}}), "stop"),
    (raw(401, {"error": WORDS | {"type": "invalid_request_error", "code": "invalid_api_key"}}), "stop"),
    (raw(404, {"error": WORDS | {"code": "model_not_found"}}), "stop"),
    (raw(400, {"error": WORDS | {"code": "unsupported_value", "param": "temperature"}}), "stop"),
    (raw(400, {"error": WORDS | {"code": "unsupported_parameter", "param": "top_k"}}), "stop"),
    (raw(400, {"error": WORDS | {"code": "context_length_exceeded"}}), "next"),
    (raw(400, {"error": WORDS | {"code": "invalid_prompt"}}), "next"),
    (raw(429, {"error": WORDS | {"type": "requests", "code": "rate_limit_exceeded"}}), "retry"),
    # Azure
    (raw(400, {"error": WORDS | {"code": "content_filter", "innererror": {}}}), "next"),
    (raw(401, {"error": WORDS | {"code": "401"}}), "stop"),
    (raw(404, {"error": WORDS | {"code": "DeploymentNotFound"}}), "stop"),
    (raw(429, {"error": WORDS | {"code": "429"}}, retry_after="0"), "retry"),
    # vLLM, old and new
    (raw(400, {"object": "error", "type": "BadRequestError", "code": 400} | WORDS), "next"),
    (raw(404, {"object": "error", "type": "NotFoundError", "code": 404} | WORDS), "stop"),
    (raw(400, {"error": {"message": "the provider's words: maximum context length is 4"}}), "next"),
    (raw(401, {"error": "the provider's words"}), "stop"),
    # llama.cpp
    (raw(503, {"error": WORDS | {"code": 503, "type": "unavailable_error"}}), "retry"),
    (raw(400, {"error": WORDS | {"code": 400, "type": "exceed_context_size_error"}}), "next"),
    # Anthropic
    (raw(529, {"type": "error", "error": WORDS | {"type": "overloaded_error"}}), "retry"),
    (raw(200, {"type": "error", "error": WORDS | {"type": "overloaded_error"}}), "retry"),
    (raw(401, {"type": "error", "error": WORDS | {"type": "authentication_error"}}), "stop"),
    (raw(400, {"error": {"message": "the provider's words: Your credit balance is too low"}}), "stop"),
    (raw(413, {"type": "error", "error": WORDS | {"type": "request_too_large"}}), "next"),
    # OpenRouter
    (raw(200, {"error": WORDS | {"code": 502}}), "retry"),
    (raw(200, {"error": WORDS | {"code": 429}}), "retry"),
    (raw(200, {"error": WORDS | {"code": 400}}), "next"),
    (raw(200, {"error": WORDS}), "next"),
    (raw(200, {"error": WORDS | {"code": 402}}), "stop"),
    (raw(402, {"error": WORDS | {"code": 402}}), "stop"),
    (raw(403, {"error": WORDS | {"code": 403, "metadata": {"flagged_input": "x"}}}), "next"),
    (choice(error=WORDS | {"code": 502}, finish_reason="error"), "retry"),
    # Google
    (raw(400, [{"error": WORDS | {"code": 400, "details": [{"reason": "API_KEY_INVALID"}]}}]), "stop"),
    (raw(429, [{"error": WORDS | {"code": 429, "status": "RESOURCE_EXHAUSTED"}}]), "retry"),
    # DashScope, DeepSeek
    (raw(400, {"error": WORDS | {"code": "data_inspection_failed"}}), "next"),
    (raw(400, {"error": WORDS | {"code": "Arrearage"}}), "stop"),
    (raw(400, {"error": {"message": "the provider's words: This model only support stream mode"}}), "stop"),
    (choice(finish_reason="insufficient_system_resource"), "retry"),
    # proxies, other servers, a wrong URL
    (raw(502, "<html>the provider's words</html>", content_type="text/html"), "retry"),
    (raw(200, "<html>the provider's words</html>", content_type="text/html"), "retry"),
    (raw(404, "<html>the provider's words</html>"), "stop"),
    (raw(405, {"detail": "the provider's words"}), "stop"),
    (raw(407, "the provider's words"), "stop"),
    (raw(301, "", location="https://elsewhere/the provider's words"), "stop"),
    (raw(200, 'data: {"choices": [{"delta": {"content": "the provider\'s words"}}]}\n\n'), "stop"),
    (raw(422, {"detail": [{"msg": "the provider's words"}]}), "next"),
    (raw(200, "[" * 100_000 + "the provider's words"), "retry"),
]


@pytest.mark.parametrize(("answer", "then"), PROVIDERS)
def test_each_providers_answer_is_retried_skipped_or_ends_the_run(answer: Answer, then: str) -> None:
    """What passes is asked again, what belongs to a request ends that request, the rest ends the run; each
    time with the provider's words.
    """
    with chat_server(lambda body, n: answer) as server:
        (error,), _ = run(ask(server.url))
    assert type(error) is {"retry": ChatError, "next": ChatRefused, "stop": ChatConfigError}[then]
    assert len(server.requests) == (4 if then == "retry" else 1)
    if len(answer[2]) < 300 and "finish_reason" not in answer[2]:
        assert "the provider's words" in str(error)


def test_filtered_requests_alone_never_end_a_run() -> None:
    """Any number of filtered requests says nothing about the options."""
    filtered = error_at(400, code="content_filter")
    with chat_server(lambda body, n: filtered) as server:
        errors, _ = run(ask(server.url, count=FIRST_REFUSALS + 2))
    assert {type(error) for error in errors} == {ChatRefused}


@pytest.mark.parametrize("finish", ["content_filter", "safety", "SAFETY", "refusal"])
def test_a_filtered_empty_answer_is_a_refusal(finish: str) -> None:
    """Whatever word a provider has for its filter."""
    with chat_server(lambda body, n: completion(None, finish_reason=finish)) as server:
        (answer,), _ = run(ask(server.url))
    assert (answer.text, answer.finish_reason) == ("", f"refused: {finish}")


@pytest.mark.parametrize(
    "usage",
    [
        "missing",
        None,
        {},
        {"prompt_tokens": 3},
        {"prompt_tokens": None, "completion_tokens": None},
        {"prompt_tokens": "3", "completion_tokens": "4"},
        {"prompt_tokens": -1, "completion_tokens": 4},
        [],
    ],
)
def test_tokens_that_are_not_reported_are_unknown(usage: Any) -> None:
    """An answer without readable usage is an answer, and its tokens are unknown rather than 0."""
    data = json.loads(completion("hi")[2]) | {"usage": usage}
    if usage == "missing":
        del data["usage"]
    with chat_server(lambda body, n: raw(200, data)) as server:
        (answer,), _ = run(ask(server.url))
    assert (answer.text, answer.usage_unknown) == ("hi", 1)
    assert Usage.of(answer, Reply(text="", prompt_tokens=2), answer).usage_unknown == 2
    with chat_server(lambda body, n: completion("hi")) as server:
        (answer,), _ = run(ask(server.url))
    assert answer.usage_unknown == 0


class Helper(EndpointConfig):
    """Reflection."""

    role = "reflection"
    prefix = "reflection_"


class Main(EndpointConfig):
    """Teacher."""

    role = "teacher"
    prefix = "policy_"


@pytest.mark.parametrize("role", KEY_VARIABLES)
def test_each_role_has_a_key_of_its_own(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role sends its own key, without one OPENAI_API_KEY, and its refusal names both variables."""
    own = KEY_VARIABLES[role][0]
    assert own.isidentifier()

    async def key(url: str) -> str:
        async with Endpoint(url=url, model="m", role=role, backoff_s=0.01) as endpoint:
            with pytest.raises(ChatConfigError, match=f"{own}, else {ANY_KEY}"):
                await endpoint.chat(HELLO, max_tokens=1, seed=0)
        return server.headers[-1].get("authorization", "")

    with chat_server(lambda body, n: refusal(401)) as server:
        for name in [name for names in KEY_VARIABLES.values() for name in names]:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(ANY_KEY, "common\n")
        assert run(key(server.url)) == "Bearer common"
        monkeypatch.setenv(own, " own ")
        assert run(key(server.url)) == "Bearer own"


def test_a_role_at_anothers_url_has_the_others_key_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a URL of its own it has the other's endpoint, key and fields; a foreign URL gets none."""
    monkeypatch.setenv("RMSWEB_TEACHER_API_KEY", "teachers")
    monkeypatch.setenv(ANY_KEY, "common")
    teacher = Main(url="http://a/v1", model="t", extra={"x": 1}, length_field="limit")
    alone = Helper().or_else(teacher)
    assert (alone.url, alone.model, alone.extra, alone.length_field) == (
        "http://a/v1",
        "t",
        {"x": 1},
        "limit",
    )
    assert Helper(extra={"y": 2}, model="h").or_else(teacher).extra == {"y": 2}
    away = Helper(url="http://b/v1").or_else(teacher)
    assert (away.url, away.model, away.extra, away.length_field) == ("http://b/v1", "t", None, None)

    async def authorization(helper: EndpointConfig, url: str) -> str:
        own = replace(helper, url=url)
        async with own.open(Path(), 1, shares_key=helper.url == teacher.url) as endpoint:
            await endpoint.chat(HELLO, max_tokens=1, seed=0)
        return server.headers[-1]["authorization"]

    with chat_server(lambda body, n: completion("ok")) as server:
        assert run(authorization(alone, server.url)) == "Bearer teachers"
        assert run(authorization(away, server.url)) == "Bearer common"


def test_further_fields_win_and_null_leaves_one_out() -> None:
    """Temperature, limit and seed may be replaced or left out for models that refuse them."""
    extra = {"temperature": None, "seed": None, "max_tokens": 9, "reasoning_effort": "low"}

    async def talk(url: str) -> None:
        config = Main(url=url, model="m", extra=extra)
        async with config.open(Path(), 1, temperature=0.5) as endpoint:
            await endpoint.chat(HELLO, max_tokens=1, seed=0)

    with chat_server(lambda body, n: completion("ok")) as server:
        run(talk(server.url))
    assert server.requests == [{"model": "m", "messages": HELLO, "max_tokens": 9, "reasoning_effort": "low"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}], "ab"),
        ([], ""),
        (None, ""),
    ],
)
def test_content_may_be_a_list_of_parts(content: Any, text: str) -> None:
    """The text parts of an answer are joined."""
    with chat_server(lambda body, n: completion(content)) as server:
        (answer,), _ = run(ask(server.url))
    assert answer.text == text


def test_a_filtered_answer_says_so() -> None:
    """An empty answer with the finish reason content_filter is a refusal in the model's place."""
    with chat_server(lambda body, n: completion(None, finish_reason="content_filter")) as server:
        (answer,), _ = run(ask(server.url))
    assert answer.finish_reason == "refused: content_filter"


@pytest.mark.parametrize(
    "reply", [completion(""), completion("half", finish_reason="length"), completion(None)]
)
def test_the_cache_keeps_no_empty_or_cut_answer(reply: Answer, tmp_path: Path) -> None:
    """What may come out otherwise next time is asked again."""
    with chat_server(lambda body, n: reply if n == 0 else completion("whole")) as server:
        for _ in range(3):
            (answer,), _ = run(ask(server.url, cache=tmp_path))
    assert answer.text == "whole"
    assert len(server.requests) == 2


def test_a_refused_key_names_its_variable() -> None:
    """A 401 says where the key of this role comes from."""
    with chat_server(lambda body, n: refusal(401)) as server:
        (error,), _ = run(ask(server.url))
    assert "RMSWEB_JUDGE_API_KEY" in str(error)


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
