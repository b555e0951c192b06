"""The reward and the gates as hooks of other trainers: verl, TRL, slime, or anything that can POST JSON.

Purpose: a lab that has a trainer needs our reward, not our loop. Nothing here imports torch or a trainer;
signatures are duck-typed. Rows come from `python -m rmsweb.collection.exporters`: the target is the JSON text
of the verified answer, and `prompt_indices` are the indices that the prompt shows.

    verl   reward.custom_reward_function.path=rmsweb/hooks.py reward.custom_reward_function.name=verl_compute_score
    TRL    GRPOTrainer(..., reward_funcs=[rmsweb.hooks.trl_reward])
    slime  --custom-rm-path rmsweb.hooks.slime_rm --dynamic-sampling-filter-path rmsweb.hooks.slime_filter
    HTTP   python -m rmsweb.hooks --port 8200        (slime: --rm-type remote_rm --rm-url http://127.0.0.1:8200)
"""  # noqa: E501

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rmsweb.salvage.gating import gate
from rmsweb.salvage.reward import score


def _text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the words of a completion, which some trainers give as a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def verl_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, float]:
    """Return the reward in [0, 1] as verl's `compute_score`; 0 for an answer that does not parse.

    >>> verl_compute_score("rmsweb", '{"action":[{"go_back":{}}]}', '{"action":[{"go_back":{}}]}')
    {'score': 1.0, 'parsed': 1.0}
    """
    found = score(solution_str, ground_truth, (extra_info or {}).get("prompt_indices"))
    return {"score": found.value, "parsed": float(found.failure is None)}


def trl_reward(
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    target: Sequence[str],
    prompt_indices: Sequence[Sequence[int] | None] | None = None,
    **_: Any,
) -> list[float]:
    """Return the rewards in [0, 1] as a TRL reward function; the other arguments are columns of the dataset.

    >>> trl_reward([[{"role": "assistant", "content": "?"}]], target=['{"action":[{"go_back":{}}]}'])
    [0.0]
    """
    known = prompt_indices or [None] * len(target)
    texts = map(_text, completions)
    return [score(text, *row).value for text, row in zip(texts, zip(target, known, strict=True), strict=True)]


async def slime_rm(args: object, sample: Any) -> float:
    """Return the reward in [0, 1] as slime's `custom_rm`: `sample.label` is the target.

    >>> import asyncio
    >>> from types import SimpleNamespace
    >>> answer = '{"action":[{"wait":{"seconds":1}}]}'
    >>> asyncio.run(slime_rm(None, SimpleNamespace(response=answer, label=answer, metadata={})))
    1.0
    """
    return score(sample.response, sample.label, (sample.metadata or {}).get("prompt_indices")).value


@dataclass(frozen=True)
class FilterOutput:  # what slime expects of a dynamic filter
    keep: bool
    reason: str | None = None


def slime_filter(args: object, samples: Sequence[Any], **_: Any) -> FilterOutput:
    """Return whether a group passes contrast and competence gate, as slime's dynamic sampling filter.

    >>> from types import SimpleNamespace
    >>> slime_filter(None, [SimpleNamespace(reward=0.7)] * 8)
    FilterOutput(keep=False, reason='no contrast')
    """
    found = gate([float(sample.reward) for sample in samples])
    return FilterOutput(found.accepted, None if found.accepted else found.cell)


class RewardHandler(BaseHTTPRequestHandler):
    """POST {"response", "label", "prompt_indices"?} -> the reward as a JSON number; 400 with the reason."""

    def do_POST(self) -> None:
        try:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            found = score(asked["response"], asked["label"], asked.get("prompt_indices"))
            status, answer = 200, json.dumps(found.value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            status, answer = 400, json.dumps({"error": f"{type(error).__name__}: {error}"})
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: object) -> None:  # a trainer asks a thousand times a minute
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the reward over HTTP until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rmsweb.hooks", description=main.__doc__)
    parser.add_argument("--port", type=int, default=8200)
    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args(argv).port), RewardHandler)
    print(f"reward server at http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
