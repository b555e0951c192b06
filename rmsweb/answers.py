"""What a chat endpoint's answer means: a reply, or by one table what follows from anything else.

ours: the table holds what OpenAI, Azure, Anthropic, Google, DashScope, DeepSeek, OpenRouter, vLLM, llama.cpp
and proxies answer; the body decides before the status does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from rmsweb.records import Reply

Outcome = Literal["retry", "next", "stop"]


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
