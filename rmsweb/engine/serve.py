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
        decoding: the evaluation's by default (temperature 0.7, top-p 0.8, top-k 20).
        window_s: how long the first request of a batch waits for others.
        max_batch: requests answered at once.
    """

    def __init__(
        self,
        policy: PolicyModel,
        image_root: Path,
        *,
        decoding: Decoding = Decoding(temperature=0.7, top_p=0.8, top_k=20),  # noqa: B008 (frozen)
        window_s: float = 0.01,
        max_batch: int = 64,
    ) -> None:
        self.policy, self.image_root, self.decoding, self.window_s, self.max_batch = (
            policy,
            image_root,
            decoding,
            window_s,
            max_batch,
        )
        self.num_batches = 0
        self._waiting: list[_Request] = []
        self._task: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, "policy")

    async def __call__(
        self, messages: Sequence[Message], *, seed: int, purpose: str, max_tokens: int
    ) -> Reply:
        """Answers one request.

        Raises what makes this request impossible: ValueError, FileNotFoundError for its picture.
        """
        request = _Request(messages, seed, max_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        return await request.answer

    def close(self) -> None:
        """Ends the worker thread."""
        self._worker.shutdown(wait=True)

    async def _serve(self) -> None:
        """Answers batches until nobody waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(self.window_s)
            batch, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
            job = loop.run_in_executor(
                self._worker, self._answer, [(r.messages, r.seed, r.max_tokens) for r in batch]
            )
            await asyncio.wait([job])
            failure = job.exception()
            replies: Sequence[Reply | BaseException] = (
                [failure] * len(batch) if failure is not None else job.result()
            )
            self.num_batches += 1
            for request, reply in zip(batch, replies, strict=True):
                if request.answer.done():  # its asker was cancelled
                    continue
                if isinstance(reply, BaseException):
                    request.answer.set_exception(reply)
                else:
                    request.answer.set_result(reply)

    def _answer(self, batch: Sequence[tuple[Sequence[Message], int, int]]) -> list[Reply | BaseException]:
        """In the worker thread: a reply or the reason why there is none, for every request."""
        replies: list[Reply | BaseException] = []
        prompts: list[tuple[int, EncodedPrompt]] = []
        for number, (messages, _, _) in enumerate(batch):
            replies.append(RuntimeError("not answered"))
            try:
                prompts.append((number, self.policy.encode_prompt(messages, self.image_root)))
            except (ValueError, OSError) as error:
                replies[number] = error
        seeds, limits = (
            [batch[number][1] for number, _ in prompts],
            [batch[number][2] for number, _ in prompts],
        )
        encoded = [prompt for _, prompt in prompts]
        answers = sample(
            self.policy, encoded, n=1, max_new_tokens=limits, seeds=seeds, decoding=self.decoding
        )
        for (number, prompt), (rollout,) in zip(prompts, answers, strict=True):
            replies[number] = Reply(
                text=rollout.text,
                prompt_tokens=len(prompt),
                completion_tokens=len(rollout.ids),
                finish_reason=rollout.finish_reason,
                model=self.policy.name,
            )
        return replies
