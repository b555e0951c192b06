"""LLM roles behind OpenAI-compatible endpoints: retries, a concurrency cap, and a cache of replies on disk.

Purpose: every LLM role of the paper (teacher, reflection handler, judges, extraction) is one `Endpoint`; a
local server of a trained policy is one more. An endpoint is a `records.Policy`. Pictures travel as data URLs,
unresized: the endpoint's own image processor holds the pixel cap.

Keys come from the environment alone (KEY_VARIABLES) and are in no message, cache entry or exception.

ours: bounded retries with jitter where RULES says so, honouring Retry-After. ours: tokens that are not
reported are unknown.
"""

import asyncio
import base64
import email.utils
import hashlib
import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import httpx

from rmsweb.config import Config, opt
from rmsweb.jsonl import dumps, from_json, inside, replace_file
from rmsweb.pictures import load_picture
from rmsweb.records import Image, Message, Reply

# Finish reasons of answers that may come out otherwise next time, so that no cache keeps them.
UNFINISHED = frozenset({"length", "content_filter"})
# So many requests refused for no reason of RULES, without one answer, mean that the options are wrong.
FIRST_REFUSALS = 20
LENGTH_FIELD, NEW_LENGTH_FIELD = "max_tokens", "max_completion_tokens"  # newer models renamed it
MAX_WAIT_S = 60.0
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
MIME = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
Outcome = Literal["retry", "next", "stop"]
# Where each role's key comes from. A role that has no URL of its own uses another role's endpoint, and there
# also that role's key, which is the second name.
# fmt: off
KEY_VARIABLES: dict[str, tuple[str, ...]] = {
    "policy": ("RMSWEB_POLICY_API_KEY",),
    "teacher": ("RMSWEB_TEACHER_API_KEY",),
    "reflection": ("RMSWEB_REFLECTION_API_KEY", "RMSWEB_TEACHER_API_KEY"),
    "extraction": ("RMSWEB_EXTRACTION_API_KEY", "RMSWEB_TEACHER_API_KEY"),
    "judge": ("RMSWEB_JUDGE_API_KEY",),
    "failure judge": ("RMSWEB_FAILURE_JUDGE_API_KEY",),
}
# fmt: on
ANY_KEY = "OPENAI_API_KEY"  # of every role without a key of its own


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What follows from an answer that is no plain completion.

    It fits an answer with one of its codes (code, type or status of the error object, or a finish reason, in
    lower case), with one of its words in the body, or with one of its statuses.
    """

    then: Outcome  # ask again; give up this request; give up all
    codes: str = ""
    words: tuple[str, ...] = ()
    statuses: Sequence[int] = ()

    def fits(self, status: int, codes: Sequence[str], body: str) -> bool:
        """Say whether the rule is about an answer."""
        named = not set(self.codes.split()).isdisjoint(codes)
        return named or status in self.statuses or any(words in body for words in self.words)


# The first rule that fits decides; where none does, this one request was refused ("next"). Bodies are read in
# lower case. `event_stream` and `no_completion` are our own codes for bodies that no request asked for.
# fmt: off
RULES = (
    # quota, key and model
    Rule(then="stop", codes="insufficient_quota billing_hard_limit_reached billing_error billing_not_active "
                            "account_deactivated arrearage access_terminated"),
    Rule(then="stop", codes="invalid_api_key invalidapikey authentication_error permission_error "
                            "permission_denied model_not_found not_found_error deploymentnotfound"),
    Rule(then="stop", words=("credit balance is too low", "insufficient balance", "api_key_invalid",
                             "api key not valid", "incorrect api key")),
    # options
    Rule(then="stop", codes="unsupported_parameter unsupported_value unknown_parameter event_stream",
                      words=("only support stream", "extra inputs are not permitted")),
    # the request itself: filtered or too long
    Rule(then="next", codes="content_filter content_policy_violation responsibleaipolicyviolation "
                            "invalid_prompt data_inspection_failed datainspectionfailed refusal safety "
                            "recitation prohibited_content blocklist sensitive",
                      words=("input was flagged", "flagged_input")),
    Rule(then="next", codes="context_length_exceeded exceed_context_size_error request_too_large "
                            "string_above_max_length",
                      words=("maximum context length",), statuses=(413,)),
    # trouble that may pass
    Rule(then="retry", codes="rate_limit_exceeded rate_limit_error overloaded_error server_error api_error "
                             "internal_server_error timeout_error unavailable_error resource_exhausted "
                             "error abort insufficient_system_resource no_completion"),
    Rule(then="retry", statuses=(408, 409, 425, 429, *range(500, 600))),
    # redirects, keys, money, URL, method
    Rule(then="stop", statuses=(*range(300, 400), 401, 402, 403, 404, 405, 407, 410)),
)
# fmt: on


def outcome_of(status: int, codes: Sequence[str], body: str = "") -> Outcome | None:
    """Return what follows from an answer by RULES, None where no rule is about it."""
    return next((rule.then for rule in RULES if rule.fits(status, codes, body)), None)


def key_variables(role: str, *, shares_key: bool) -> tuple[str, ...]:
    """Return the environment variables that may hold a role's key; the first that is set counts."""
    return (*KEY_VARIABLES[role][: 2 if shares_key else 1], ANY_KEY)


class ChatError(ConnectionError):
    """The endpoint gave no answer after all attempts; trying again later may help."""


class ChatRefused(ChatError):
    """The endpoint refused this one request: the same request will be refused again."""


class ChatConfigError(ValueError):
    """Key, quota, URL, model or options are wrong: no request can succeed."""


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """An answer that is no completion: its status, and what follows; None where no rule is about it."""

    status: int
    then: Outcome | None


def read_answer(response: httpx.Response, model: str) -> Reply | Unanswered:
    """Return an endpoint's answer as a reply, or what follows from it by RULES.

    Some servers answer 200 with an error object, beside the choices or in one: its own code is the status
    then, 400 if it has none.
    """
    status, body, codes = response.status_code, response.text.lower(), list[str]()
    try:
        data = _first(response.json())
    except (ValueError, RecursionError):
        data = None
    choice = _first(_get(data, "choices"))
    bare = data if _get(data, "object") == "error" else None
    if error := _get(data, "error") or _get(choice, "error") or bare:
        found = [_get(error, name) for name in ("code", "type", "status")]
        codes = [str(value).lower() for value in found if value]
        if status == 200:
            status = next((int(code) for code in codes if code.isdigit() and int(code) >= 300), 400)
    elif status == 200:
        reply = _reply(data, choice, model)
        if reply and outcome_of(200, [reply.finish_reason.lower()]) != "retry":
            return reply
        codes = ["event_stream" if body.lstrip().startswith("data:") else "no_completion"]
    return Unanswered(status=status, then=outcome_of(status, codes, body))


def _reply(data: Any, choice: Any, model: str) -> Reply | None:
    """Return a chat completion as a reply, None for anything else."""
    message, usage = _get(choice, "message"), _get(data, "usage")
    if not isinstance(message, dict):
        return None
    text = message.get("content") or ""
    if isinstance(text, list):  # parts, as some servers send them
        text = "".join(str(_get(part, "text") or "") for part in text if _get(part, "type") != "thinking")
    if not isinstance(text, str):
        return None
    finish = str(choice.get("finish_reason") or "")
    filtered = finish if outcome_of(200, [finish.lower()]) == "next" else ""
    if not text and (refusal := message.get("refusal") or filtered):
        finish = f"refused: {refusal}"
    counts = [_get(usage, name) for name in ("prompt_tokens", "completion_tokens")]
    known = all(type(count) is int and count >= 0 for count in counts)
    prompt_tokens, completion_tokens = counts if known else (0, 0)
    return Reply(
        text=text,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        usage_unknown=int(not known),
        finish_reason=finish,
        model=str(_get(data, "model") or model),
    )


def _first(value: Any) -> Any:
    """Return the first item of a list, the value itself where it is none."""
    return next(iter(value), None) if isinstance(value, list) else value


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def retry_after_s(value: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for (a number or an HTTP date), within 0..60.

    None where it is missing or unreadable.

    >>> retry_after_s("2.5"), retry_after_s("soon"), retry_after_s("-1")
    (2.5, None, 0.0)
    """
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = date.timestamp() - time.time()
    return min(MAX_WAIT_S, max(0.0, seconds)) if seconds == seconds else None


def data_url(image: Image, root: Path) -> str:
    """Return a picture as a data URL, index boxes drawn.

    Raises FileNotFoundError, and ValueError for a file of an unknown kind.
    """
    path = inside(root, image.path)
    mime = MIME.get(path.suffix.lower())
    if mime is None:
        kind = path.suffix or "nameless"
        raise ValueError(f"{path}: found a {kind} file, expected one of {', '.join(MIME)}")
    data = path.read_bytes()
    if image.boxes:
        drawn = BytesIO()
        load_picture(image, root).save(drawn, format="PNG")
        mime, data = "image/png", drawn.getvalue()
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def openai_messages(messages: Sequence[Message], image_root: Path) -> list[dict[str, Any]]:
    """Return messages in the OpenAI chat format.

    Neighbouring texts are joined without a separator; a message without a picture is a plain string.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, Image):
                content.append({"type": "image_url", "image_url": {"url": data_url(part, image_root)}})
            elif content and "text" in content[-1]:
                content[-1]["text"] += part.text
            else:
                content.append({"type": "text", "text": part.text})
        plain = len(content) == 1 and "text" in content[0]
        result.append({"role": message.role, "content": content[0]["text"] if plain else content})
    return result


@dataclass(kw_only=True)
class Endpoint:
    """The endpoint of one role, as a Policy. Use as `async with Endpoint(...) as endpoint`.

    `url` is everything before /chat/completions. `options` (temperature, top_p, top_k, ...) go with every
    request, but those that are None. `shares_key`: it is the endpoint of the role that this one falls back
    to. `image_root` is the folder that paths of pictures are relative to. `cache` is a folder of replies,
    None for no cache. `backoff_s` is the first pause between attempts.

    Raises ValueError for settings with which no request can succeed.
    """

    role: str
    url: str
    model: str
    image_root: Path = Path()
    options: dict[str, Any] = field(default_factory=dict)
    length_field: str = LENGTH_FIELD
    shares_key: bool = False
    cache: Path | None = None
    concurrency: int = 16
    max_attempts: int = 6
    timeout_s: float = 120.0
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self._variables = key_variables(self.role, shares_key=self.shares_key)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{self.role} endpoint {self.url!r} is not an http(s) URL, such as http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password or parts.query:
            raise ValueError(
                f"the {self.role} endpoint's URL holds credentials or a query; give the key in "
                f"{self._variables[0]} instead"
            )
        if not self.model:
            raise ValueError(f"the {self.role} endpoint needs a model name")
        keys = (os.environ.get(variable, "").strip() for variable in self._variables)
        self._key = next(filter(None, keys), None)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A proxy from the environment must not see requests to this machine.
        self._http = httpx.AsyncClient(
            headers=headers, timeout=self.timeout_s, trust_env=parts.hostname not in LOOPBACK
        )
        self._slots = asyncio.Semaphore(self.concurrency)
        self._answered, self._refusals = False, 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def __call__(
        self, messages: Sequence[Message], *, seed: int, purpose: str, max_tokens: int
    ) -> Reply:
        """Return one answer.

        A request that the endpoint refuses (too long, filtered) is an empty answer: the model's failure, not
        the run's.
        """
        try:
            return await self.chat(
                openai_messages(messages, self.image_root), max_tokens=max_tokens, seed=seed
            )
        except ChatRefused as error:
            return Reply(text="", finish_reason=f"refused: {error}", model=self.model)

    async def chat(self, messages: list[dict[str, Any]], *, max_tokens: int, seed: int) -> Reply:
        """Ask the endpoint, or the cache, with messages in the OpenAI chat format.

        Raises ChatError after `max_attempts`, ChatRefused for a request that is not acceptable,
        ChatConfigError for a wrong key, URL or model.
        """
        fields = {"model": self.model, "messages": messages, "seed": seed, **self.options}
        body = {name: value for name, value in fields.items() if value is not None}
        entry = self._entry(body | {LENGTH_FIELD: max_tokens})
        reply = _stored(entry) if entry else None
        if reply is None:
            async with self._slots:
                reply = await self._ask(body, max_tokens)
            self._answered = True
            if entry and reply.text and reply.finish_reason not in UNFINISHED:
                with replace_file(entry) as temporary:
                    temporary.write_text(dumps(reply), encoding="utf-8")
        return reply

    def _entry(self, body: dict[str, Any]) -> Path | None:
        """Return the cache file of a request: its name is the sha256 of URL and body, pictures included."""
        if self.cache is None:
            return None
        request = json.dumps([self.url.rstrip("/"), body], sort_keys=True, ensure_ascii=False)
        return self.cache / f"{hashlib.sha256(request.encode('utf-8', 'surrogatepass')).hexdigest()}.json"

    async def _ask(self, body: dict[str, Any], max_tokens: int) -> Reply:
        """Send a request until it is answered or refused."""
        url, problem, wait = self.url.rstrip("/") + "/chat/completions", "", 0.0
        for attempt in range(self.max_attempts):
            if attempt:
                await asyncio.sleep(wait)
            # Jitter: callers that wait do not return together.
            wait = min(MAX_WAIT_S, self.backoff_s * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                response = await self._http.post(url, json={self.length_field: max_tokens} | body)
            except httpx.RequestError as error:  # timeouts included
                problem = f"{type(error).__name__} {self._safe(str(error))}".strip()
                continue
            if isinstance(answer := read_answer(response, self.model), Reply):
                return answer
            words = response.headers.get("location") or response.text
            problem = f"HTTP {response.status_code} {self._safe(words)}"
            if answer.status == 400 and self.length_field == LENGTH_FIELD and NEW_LENGTH_FIELD in words:
                self.length_field, wait = NEW_LENGTH_FIELD, 0.0
            elif answer.then == "retry":
                wait = retry_after_s(response.headers.get("retry-after")) or wait
            else:
                self._refuse(f"{self.role} endpoint {response.url}: {problem}", answer)
        raise ChatError(
            f"{self.role} endpoint {url}: no answer after {self.max_attempts} attempts; last: {problem}"
        )

    def _refuse(self, problem: str, answer: "Unanswered") -> None:
        """Raise for an answer that a retry cannot change."""
        self._refusals += answer.then is None
        if answer.then == "stop" or (not self._answered and self._refusals >= FIRST_REFUSALS):
            source = f"; the key comes from {', else '.join(self._variables)}"
            raise ChatConfigError(problem + (source if answer.status in (401, 403) else ""))
        raise ChatRefused(problem)

    def _safe(self, text: str) -> str:
        """Return a server's words, shortened, without the key."""
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:300]


def _stored(entry: Path) -> Reply | None:
    """Return a cached reply; a file that a killed writer left broken counts as absent."""
    with suppress(OSError, ValueError):
        return from_json(Reply, json.loads(entry.read_bytes()))
    return None


@dataclass(frozen=True, kw_only=True)
class EndpointConfig(Config):
    """Endpoint of a role. A subclass names the role and, as `prefix`, what its flags begin with."""

    role: ClassVar[str]
    url: str | None = opt(None, "OpenAI-compatible endpoint, such as https://host/v1")
    model: str | None = opt(None, "model name there")
    length_field: str | None = opt(
        None,
        "request field that limits the answer (without it max_tokens, or max_completion_tokens if asked)",
    )
    extra: dict[str, Any] | None = opt(
        None,
        'further fields of the request, such as \'{"reasoning_effort":"low"}\'; they win over those of '
        "other flags, and null leaves a field out",
    )

    @classmethod
    def title(cls) -> str:
        """Return the heading in --help, with the names of the key's variables."""
        return f"{super().title()} (key: {', else '.join(key_variables(cls.role, shares_key=True))})"

    def or_else(self, other: "EndpointConfig") -> Self:
        """Return the config with the other role's values where it has none.

        The request fields are the other role's only at the other role's endpoint.
        """
        own = {name: value for name, value in vars(self).items() if value is not None}
        same = self.url in (None, other.url)
        there = {name: vars(other)[name] for name in ("url", "model", "length_field", "extra")}
        return replace(self, **((there if same else {"model": other.model}) | own))

    def open(self, root: Path, concurrency: int, *, shares_key: bool = False, **options: Any) -> Endpoint:
        """Return the endpoint of a run in folder `root`; nothing is sent yet."""
        return Endpoint(
            role=self.role,
            url=self.url or "",
            model=self.model or "",
            image_root=root,
            concurrency=concurrency,
            length_field=self.length_field or LENGTH_FIELD,
            shares_key=shares_key,
            options=options | (self.extra or {}),
        )
