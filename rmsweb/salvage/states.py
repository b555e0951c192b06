"""RL prompts: a record with its verified answer in tokens, and the rollouts sampled on it.

Purpose: the small data types that the step and its statistics share.

Place in the paper: section "The Salvage-DS RL Algorithm", App. G (budgets).
Letters: n rollouts a group, R tokens of an answer.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rmsweb.browser.actions import parse_agent_output
from rmsweb.engine.packing import EncodedPrompt
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import Rollout
from rmsweb.records import AgentOutput, MinedState, ParseFailure, StepSample
from rmsweb.salvage.gating import Gate
from rmsweb.salvage.reward import Reward, score


@dataclass(frozen=True, slots=True)
class State:
    """An RL prompt with its verified answer, in tokens where they are short."""

    sample: StepSample
    root: Path  # folder that the sample's image paths are relative to
    target: AgentOutput
    target_ids: Tensor  # [R] int64: the whole verified answer, end-of-turn included
    target_mask: Tensor  # [R] bool: the action span A, where the salvage anchor acts
    prompt_length: int  # tokens
    indices: frozenset[int]  # element indices that the prompt shows

    @property
    def category(self) -> str:
        """The failure mode of a mined state, "ordinary" for any other."""
        return self.sample.category if isinstance(self.sample, MinedState) else "ordinary"


def make_state(
    sample: StepSample, root: Path, policy: PolicyModel, *, prompt_budget: int, response_budget: int
) -> State | str:
    """Return the state of a record, or the reason why it cannot be trained on.

    Reasons: an extraction, a target that is no answer, an index that the prompt does not show, a prompt or an
    answer beyond its budget in tokens.
    """
    if sample.kind != "action" or sample.action_span is None:
        return "not an action state"
    target = parse_agent_output(sample.target_text)
    if isinstance(target, ParseFailure):
        return "target is no valid answer"
    indices = frozenset(sample.prompt_indices)
    if score(target, target, indices).value < 1.0:
        return "target's index is not in the prompt"
    prompt_length, ids = policy.prompt_length(sample.messages), policy.encode_response(sample.target_text)
    if prompt_length > prompt_budget:
        return "prompt too long"
    if len(ids) > response_budget:
        return "target too long"
    mask = span_mask(policy, sample.target_text, sample.action_span, len(ids))
    return State(sample, root, target, ids, mask, prompt_length, indices)


def span_mask(policy: PolicyModel, text: str, span: tuple[int, int], num_tokens: int) -> Tensor:
    """Return the tokens of an answer that overlap a character span of its text, [R] bool.

    From characters to tokens: the closing brackets of the action list are in, end-of-turn is not.
    """
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[slice(*policy.token_span(text, span))] = True
    return mask


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """A state's n rollouts, their rewards, and the verdict of the gates (Eq. 1)."""

    state: State
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]
    gate: Gate


class Prompts:
    """Encoded prompts of a step, made in a worker thread: once announced, or else once needed.

    ours: pictures of the next refill are read while the model samples.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._kept: dict[str, Future[EncodedPrompt]] = {}
        self._worker = ThreadPoolExecutor(1, "prompts")

    def announce(self, states: Iterable[State]) -> None:
        """Start to encode the prompts of states that will be needed soon."""
        for state in states:
            if state.sample.sample_id not in self._kept:
                encode = self._policy.encode_prompt
                self._kept[state.sample.sample_id] = self._worker.submit(
                    encode, state.sample.messages, state.root
                )

    def __call__(self, state: State) -> EncodedPrompt:
        """Return the encoded prompt of a state."""
        self.announce([state])
        return self._kept[state.sample.sample_id].result()
