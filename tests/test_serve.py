"""Laws of serving."""

import asyncio

import pytest
from tiny_model import tiny_policy

from rmsweb.engine import serve
from rmsweb.engine.sampler import Decoding, sample
from rmsweb.engine.serve import CheckpointPolicy
from rmsweb.records import Image, Message, Text

EVALUATION = Decoding(temperature=0.7, top_p=0.8, top_k=20)


def ask(text):
    return [Message(role="user", parts=(Text(tag="task", text=text),))]


def test_concurrent_requests_share_a_batch_and_get_their_own_answers(tmp_path, monkeypatch):
    """Twelve requests at once make few batches; each answer is that of its prompt and seed alone."""
    model = tiny_policy()
    served = CheckpointPolicy(model, tmp_path, EVALUATION)
    monkeypatch.setattr(serve, "WINDOW_S", 0.05)
    batches = []

    def counted(policy, prompts, **options):
        batches.append(len(prompts))
        return sample(policy, prompts, **options)

    monkeypatch.setattr(serve, "sample", counted)

    async def everybody():
        return await asyncio.gather(
            *(served(ask(f"task {i}"), seed=i, purpose="action", max_tokens=4 + i % 3) for i in range(12))
        )

    replies = asyncio.run(everybody())
    served.close()
    assert len(batches) <= 2
    assert sum(batches) == 12
    for i, reply in enumerate(replies):
        prompt = model.encode_prompt(ask(f"task {i}"), tmp_path)
        ((rollout,),) = sample(
            model,
            [prompt],
            n=1,
            max_new_tokens=4 + i % 3,
            seeds=[i],
            decoding=EVALUATION,
        )
        assert reply.text == rollout.text
        assert (reply.prompt_tokens, reply.completion_tokens, reply.finish_reason) == (
            len(prompt),
            len(rollout.ids),
            rollout.finish_reason,
        )
        assert reply.model == "tiny"


def test_a_bad_request_fails_alone(tmp_path, monkeypatch):
    """A request whose picture is missing raises for its asker; its neighbours and later requests are
    answered.
    """
    monkeypatch.setattr(serve, "MAX_BATCH", 2)
    served = CheckpointPolicy(tiny_policy(), tmp_path, EVALUATION)
    gone = [Message(role="user", parts=(Image(path="gone.png", sha256="", width=8, height=8),))]

    async def everybody():
        requests = [
            served(ask("a"), seed=1, purpose="action", max_tokens=2),
            served(gone, seed=1, purpose="action", max_tokens=2),
        ]
        first = await asyncio.gather(*requests, return_exceptions=True)
        return [*first, await served(ask("b"), seed=1, purpose="action", max_tokens=2)]

    good, bad, later = asyncio.run(everybody())
    served.close()
    assert good.completion_tokens >= 1
    assert isinstance(bad, FileNotFoundError)
    assert later.completion_tokens >= 1


def test_an_impossible_batch_is_an_error_for_its_askers(tmp_path):
    """A failure of the whole batch reaches those who asked, and serving goes on."""
    served = CheckpointPolicy(tiny_policy(), tmp_path, EVALUATION)

    async def run():
        with pytest.raises(ValueError, match="limits"):
            await served(ask("a"), seed=1, purpose="action", max_tokens=0)
        cancelled = asyncio.ensure_future(served(ask("b"), seed=1, purpose="action", max_tokens=2))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await served(ask("c"), seed=1, purpose="action", max_tokens=2)

    assert asyncio.run(run()).completion_tokens >= 1
    served.close()
