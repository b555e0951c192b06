"""Laws of the hooks for other trainers: they say what our reward and our gates say."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsweb import hooks
from rmsweb.salvage.gating import gate
from rmsweb.salvage.reward import score

CLICK = '{"action":[{"click_element_by_index":{"index":%d}}]}'
ANSWERS = (CLICK % 5, CLICK % 6, CLICK % 99, "no json", '{"action":[{"done":{"text":"x","success":true}}]}')
TARGET, SHOWN = CLICK % 5, [5, 6]
rewards = st.lists(st.sampled_from([0.0, 0.3, 0.65, 0.7, 1.0]), min_size=1, max_size=16)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), hooks.RewardHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_hook_gives_our_reward(answer: str, url: str) -> None:
    """verl, TRL (texts and messages), slime and the HTTP server return `score` of the same three things."""
    expected = score(answer, TARGET, SHOWN).value
    assert hooks.verl_compute_score("x", answer, TARGET, {"prompt_indices": SHOWN})["score"] == expected
    message = [{"role": "assistant", "content": answer}]
    columns: dict[str, Any] = {"prompts": ["p"] * 2, "target": [TARGET] * 2, "prompt_indices": [SHOWN] * 2}
    assert hooks.trl_reward(completions=[answer, message], **columns) == [expected, expected]
    sample = SimpleNamespace(response=answer, label=TARGET, metadata={"prompt_indices": SHOWN})
    assert asyncio.run(hooks.slime_rm(None, sample)) == expected
    asked = {"prompt": "p", "response": answer, "label": TARGET, "prompt_indices": SHOWN}
    assert httpx.post(url, json=asked).json() == expected


def test_unknown_indices_are_allowed() -> None:
    """Rows without `prompt_indices` are scored as if every index were on the page."""
    assert hooks.verl_compute_score("x", CLICK % 99, TARGET)["score"] == score(CLICK % 99, TARGET).value
    assert hooks.trl_reward(completions=[TARGET], target=[TARGET]) == [1.0]


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"not json", json.dumps({"response": 1, "label": 2}).encode()]
)
def test_a_bad_request_is_answered_with_its_reason(body: bytes, url: str) -> None:
    """The server says what was wrong and stays up."""
    answer = httpx.post(url, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert httpx.post(url, json={"response": TARGET, "label": TARGET}).json() == 1.0


@given(rewards)
def test_the_filter_keeps_what_our_gates_accept(values: list[float]) -> None:
    """slime's filter is Eq. 1, and a dropped group says which gate stopped it."""
    found = hooks.slime_filter(None, [SimpleNamespace(reward=value) for value in values])
    assert found.keep == gate(values).accepted
    assert (found.reason is None) == found.keep
