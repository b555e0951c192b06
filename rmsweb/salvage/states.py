"""The data of an RL step: a prompt with its verified answer, a group of rollouts, and the group's log-probs.

Purpose: the small types that the step and its statistics share, in the order in which a step makes them.

Place in the paper: section "The Salvage-DS RL Algorithm", App. G (budgets).
Letters: n rollouts a group, R tokens of an answer, A the target's action span.
"""

import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsweb.browser.actions import parse_agent_output
from rmsweb.engine.packing import Bundle, EncodedPrompt, Packable
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import Rollout
from rmsweb.jsonl import dumps
from rmsweb.records import AgentOutput, MinedState, ParseFailure, StepSample, sha256_text
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
    prompt_key: str  # hash of the prompt's content: equal for equal prompts, whatever they are called

    @property
    def name(self) -> str:
        """The record's id."""
        return self.sample.name

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
    key = sha256_text(dumps(sample.messages))
    return State(sample, root, target, ids, mask, prompt_length, indices, key)


def check_unique(states: Sequence[State]) -> None:
    """Refuse two different records of one name, which would be confused in every file and figure.

    Raises: ValueError naming both folders.
    """
    known: dict[str, State] = {}
    for state in states:
        other = known.setdefault(state.name, state)
        if (other.prompt_key, other.sample.target_text) != (state.prompt_key, state.sample.target_text):
            raise ValueError(
                f"{state.name}: {other.root} and {state.root} hold different records of this name; "
                "collections with different seeds or teachers cannot be mixed"
            )


def choose_dev(states: Sequence[State], count: int, seed: int) -> dict[str, list[State]]:
    """Draw equally many mined and ordinary dev states by seed, at most `count` together.

    Where one kind is missing, all are of the other.

    ours: the reward on mined states alone rises while episodes get worse.
    """
    mined, ordinary = (
        [state for state in states if isinstance(state.sample, MinedState) == is_mined]
        for is_mined in (True, False)
    )
    half = min(count // 2, len(mined), len(ordinary)) if mined and ordinary else count
    return {
        name: random.Random(seed).sample(kind, min(half, len(kind)))
        for name, kind in (("dev_mined", mined), ("dev_ordinary", ordinary))
    }


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

    def described(self) -> dict[str, Any]:
        """Return what a person wants to see: answers, rewards with their reasons, the verdict."""
        rollouts = [
            {"reward": reward.value, "why": reward.explanation, "text": rollout.text}
            for rollout, reward in zip(self.rollouts, self.rewards, strict=True)
        ]
        target = self.state.sample.target_text
        facts = {"state": self.state.name, "category": self.state.category, "gate": self.gate.cell}
        return {**facts, "target": target, "rollouts": rollouts}


@dataclass(frozen=True, slots=True)
class Probe:
    """An answer whose log-probs are measured for the statistics; it takes no part in the loss."""

    ids: Tensor  # [R] int64
    mask: Tensor  # [R] bool: the target's action span A


@dataclass(frozen=True, slots=True)
class GroupLogProbs:
    """Log-probs of a group's answers, [R] each and without gradient, from before a step's first update."""

    group: SampledGroup
    old: tuple[Tensor, ...]  # of the rollouts under the policy: log pi_old of Eq. 2
    reference: tuple[Tensor, ...]  # of the rollouts under the frozen SFT policy: log pi_ref of the KL
    probes: tuple[Probe, ...]
    probed: tuple[Tensor, ...]  # of the probes under the policy


class Prompts:
    """Encoded prompts of a step, made in a worker thread: once announced, or else once needed.

    They are kept by content, never by the name of a record. ours: pictures of the next refill are read while
    the model samples.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._kept: dict[str, Future[EncodedPrompt]] = {}
        self._worker = ThreadPoolExecutor(1, "prompts")

    def announce(self, states: Iterable[State]) -> None:
        """Start to encode the prompts of states that will be needed soon."""
        for state in states:
            if state.prompt_key not in self._kept:
                encode = self._policy.encode_prompt
                self._kept[state.prompt_key] = self._worker.submit(encode, state.sample.messages, state.root)

    def __call__(self, state: State) -> EncodedPrompt:
        """Return the encoded prompt of a state."""
        self.announce([state])
        return self._kept[state.prompt_key].result()

    def packable(self, state: State, ids: Sequence[Tensor]) -> Packable:
        """Return a state with some answers, whose prompt only the rank that packs it encodes."""
        return Packable((state.prompt_length, tuple(map(len, ids))), lambda: Bundle(self(state), tuple(ids)))
