"""Serving: a checkpoint as the `Policy` that the agent loop calls.

Purpose: evaluation and pool runs drive many browsers at once; each asks for one answer at a time. Requests
that arrive within a short window are answered as one batch by the sampler, in a worker thread, while the
browsers go on in the event loop. A request's answer depends on its messages and its seed alone, not on the
batch it came in.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rmsweb.engine.packing import EncodedPrompt
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import Decoding, sample
from rmsweb.records import Message, Reply

WINDOW_S = 0.01  # how long the first request of a batch waits for others
MAX_BATCH = 64  # requests answered at once


@dataclass(frozen=True, slots=True)
class _Request:
    messages: Sequence[Message]
    seed: int
    max_tokens: int
    answer: asyncio.Future[Reply]


class CheckpointPolicy:
    """Implements `records.Policy` on a loaded checkpoint.

    Args:
        policy: the model; nobody else may use it while requests are open.
        image_root: folder that the pictures' paths are relative to (the run folder).
        decoding: how answers are sampled.
    """

    def __init__(self, policy: PolicyModel, image_root: Path, decoding: Decoding) -> None:
        self.policy, self.image_root, self.decoding = policy, image_root, decoding
        self._waiting: list[_Request] = []
        self._task: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, "policy")

    async def __call__(
        self, messages: Sequence[Message], *, seed: int, purpose: str, max_tokens: int
    ) -> Reply:
        """Answer one request.

        Raises what makes this request impossible: ValueError, FileNotFoundError for its picture.
        """
        request = _Request(messages, seed, max_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        return await request.answer

    def close(self) -> None:
        """End the worker thread."""
        self._worker.shutdown(wait=True)

    async def _serve(self) -> None:
        """Answer batches until nobody waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(WINDOW_S)
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            job = loop.run_in_executor(self._worker, self._answer, batch)
            await asyncio.wait([job])
            failure = job.exception()  # of the whole batch
            for number, request in enumerate(batch):
                reply = failure or job.result()[number]
                if request.answer.done():  # its asker was cancelled
                    continue
                if isinstance(reply, BaseException):
                    request.answer.set_exception(reply)
                else:
                    request.answer.set_result(reply)

    def _answer(self, batch: Sequence[_Request]) -> list[Reply | Exception]:
        """Return a reply, or the reason why there is none, for every request; runs in the worker thread."""
        prompts: dict[int, EncodedPrompt] = {}
        replies: dict[int, Reply | Exception] = {}
        for number, request in enumerate(batch):
            try:
                prompts[number] = self.policy.encode_prompt(request.messages, self.image_root)
            except (ValueError, OSError) as error:
                replies[number] = error
        answers = sample(
            self.policy,
            list(prompts.values()),
            n=1,
            max_new_tokens=[batch[number].max_tokens for number in prompts],
            seeds=[batch[number].seed for number in prompts],
            decoding=self.decoding,
        )
        for (number, prompt), (rollout,) in zip(prompts.items(), answers, strict=True):
            replies[number] = Reply(
                text=rollout.text,
                prompt_tokens=len(prompt),
                completion_tokens=len(rollout.ids),
                finish_reason=rollout.finish_reason,
                model=self.policy.name,
            )
        return [replies[number] for number in range(len(batch))]
