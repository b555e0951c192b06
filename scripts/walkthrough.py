"""One RL step on four states, from prompt to update, with every number on the way.

`python scripts/walkthrough.py` prints what docs/walkthrough.md holds, in seconds on a CPU and without a
browser. The states are four mined ones of a real run, the policy is the tiny base of the playground. The
rollouts were sampled once and are kept beside the states, so that everybody reads the same text; `--sample`
draws them anew, `--write` writes docs/walkthrough.md. All values are computed by the functions that
train_rl.py uses."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rmsweb.engine.distributed import Ranks  # noqa: E402
from rmsweb.engine.lora import add_lora  # noqa: E402
from rmsweb.engine.policy import PolicyModel  # noqa: E402
from rmsweb.engine.sampler import Rollout  # noqa: E402
from rmsweb.engine.training import Optimizer  # noqa: E402
from rmsweb.jsonl import read_records, write_json  # noqa: E402
from rmsweb.records import MinedState, Text  # noqa: E402
from rmsweb.salvage.dynamics import masked_mean  # noqa: E402
from rmsweb.salvage.gating import deal_mini_batches, gate, select_groups  # noqa: E402
from rmsweb.salvage.objective import (  # noqa: E402
    Answer,
    Tokens,
    joint_loss,
    kl_terms,
    lay_out,
    policy_gradient_terms,
)
from rmsweb.salvage.reward import score  # noqa: E402
from rmsweb.salvage.states import Prompts, SampledGroup, State, make_state  # noqa: E402
from rmsweb.salvage.step import (  # noqa: E402
    StepConfig,
    TrainingGroup,
    generate,
    log_probs,
    old_and_reference,
    training_group,
    update,
)

FOLDER = ROOT / "docs" / "walkthrough"
ROLLOUTS = FOLDER / "rollouts.json"
PAGE = ROOT / "docs" / "walkthrough.md"
ALONE = Ranks(0, 1, torch.device("cpu"))
CONFIG = StepConfig(train_batch=4, mini_batch=2, max_generation_batches=1, response_budget=40, seed=0)
LEARNING_RATE = 3e-4  # the paper's is 8e-6; a larger one makes the ratios of the second update visible


@dataclass(frozen=True, slots=True)
class Walk:
    """The step in pieces: its groups in order of draw, and what each brings to the loss."""

    groups: list[SampledGroup]
    training: list[TrainingGroup]
    batches: list[tuple[int, ...]]


def load_policy() -> tuple[PolicyModel, list[State]]:
    """Return the tiny base with fresh adapters, and the four states."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = PolicyModel.load(ROOT / "rmsweb" / "playground" / "base")
    add_lora(policy.model, rank=32, alpha=64, scope="attn")
    states = [
        make_state(sample, FOLDER, policy, prompt_budget=400, response_budget=CONFIG.response_budget)
        for sample in read_records(FOLDER / "mined.jsonl", MinedState)
    ]
    return policy, [state for state in states if isinstance(state, State)]


def draw_groups(policy: PolicyModel, states: Sequence[State], *, anew: bool) -> list[SampledGroup]:
    """Return the groups in the order in which the step draws them: sampled now, or read from the file."""
    if anew:
        groups = generate(
            policy, ALONE, states, Prompts(policy), CONFIG, step=0, position=0, report=lambda text: None
        )
        stored = {
            group.state.sample.state_id: [rollout.ids.tolist() for rollout in group.rollouts]
            for group in groups
            if isinstance(group.state.sample, MinedState)
        }
        write_json(ROLLOUTS, stored)
        return groups
    by_id = {state.sample.state_id: state for state in states if isinstance(state.sample, MinedState)}
    return [
        read_group(policy, by_id[name], rollouts)
        for name, rollouts in json.loads(ROLLOUTS.read_text(encoding="utf-8")).items()
    ]


def read_group(policy: PolicyModel, state: State, stored: Sequence[Sequence[int]]) -> SampledGroup:
    """Score and gate stored rollouts, as `generate` does with fresh ones."""
    ids = [torch.tensor(numbers) for numbers in stored]
    rollouts = tuple(
        Rollout(numbers, torch.zeros(len(numbers)), policy.decode(numbers), "stop") for numbers in ids
    )
    rewards = tuple(score(rollout.text, state.target, state.indices) for rollout in rollouts)
    return SampledGroup(state, rollouts, rewards, gate([reward.value for reward in rewards]))


def prepare(policy: PolicyModel, groups: list[SampledGroup]) -> Walk:
    """Compute old and reference log-probs and deal the groups, as `rl_step` does."""
    sizes = {"train_batch": CONFIG.train_batch, "mini_batch": CONFIG.mini_batch}
    chosen = select_groups([group.gate.accepted for group in groups], **sizes)
    found = old_and_reference(policy, ALONE, groups, Prompts(policy), CONFIG)
    training = [training_group(log_probs_of_group) for log_probs_of_group in found]
    return Walk(groups, training, deal_mini_batches(chosen, mini_batch=CONFIG.mini_batch))


# ------------------------------------------------------------------------------------------------- the text


def paragraph(text: str) -> str:
    """Return a text as one line."""
    return " ".join(text.split())


def number_text(value: float) -> str:
    """Return a number with four decimals, without the sign of a zero."""
    return f"{round(value, 4) + 0.0:.4f}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; numbers get four decimals."""

    def line(cells: Sequence[object]) -> str:
        shown = (number_text(cell) if isinstance(cell, float) else str(cell) for cell in cells)
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(header), f"|{'---|' * len(header)}", *map(line, rows)])


def describe_prompt(policy: PolicyModel, group: SampledGroup) -> Iterator[str]:
    """Tell prompt, target and action span of a state."""
    state = group.state
    sample = state.sample
    shown = "".join(
        part.text if isinstance(part, Text) else "[screenshot]\n"
        for message in sample.messages
        for part in message.parts
    )
    yield f"`{sample.sample_id}`, mined as `{state.category}`, a prompt of {state.prompt_length} tokens:"
    yield f"```\n{shown.strip()}\n```"
    yield f"The verified answer (`target_text`):\n\n```\n{sample.target_text}\n```"
    assert sample.action_span is not None
    start, end = sample.action_span
    first, stop = policy.token_span(sample.target_text, sample.action_span)
    yield paragraph(
        f"""Its action span A is characters {start} to {end}, `{sample.target_text[start:end]}`: tokens
        {first} to {stop} of {len(state.target_ids)}. The brackets are in; the reasoning before and
        end-of-turn after are not (`records.StepSample.action_span`, `engine.policy.token_span`,
    `salvage.states.span_mask`)."""
    )


def describe_rewards(group: SampledGroup) -> Iterator[str]:
    """Tell rollouts, rewards, gates and advantages of a group."""
    found = group.gate
    rows = []
    for number, reward in enumerate(group.rewards):
        why = reward.failure or "; ".join(part.why for part in reward.components)
        rows.append(
            (number + 1, f"`{group.rollouts[number].text}`", reward.value, why, found.advantages[number])
        )
    yield table(("i", "rollout", "reward", "why", "advantage A"), rows)
    yield paragraph(
        f"""Mean {found.mean:.4f}, Bessel-corrected sigma {found.std:.4f}, best {found.best:.4f}. sigma >=
        0.10: {"yes" if found.has_contrast else "no"}; best >= 0.55: {
            "yes" if found.is_competent else "no"
        }. So k_g = {int(found.accepted)}: the group is **{"accepted" if found.accepted else "rejected"}**
        (`{found.cell}`)."""
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One answer of a group in the loss: token means of its terms, and the sum of its weights."""

    name: str
    old: float | None
    reference: float | None
    new: float
    ratio: float | None
    surrogate: float | None
    kl: float | None
    nll: float | None


def rows_of(policy: PolicyModel, group: TrainingGroup) -> list[Row]:
    """Return the terms of Eq. 2 and 3 of every answer under the policy as it is now."""
    new = log_probs(policy, ALONE, [(group.state, list(group.ids))], Prompts(policy), CONFIG)[0]
    rows = []
    for number, (answer, values) in enumerate(zip(group.answers, new, strict=True), 1):
        if answer.old is None or answer.ref is None:
            nll = -masked_mean(values, answer.mask)
            rows.append(Row("target, on A", None, None, -nll, None, None, None, nll))
            continue
        advantage = torch.full_like(values, answer.advantage)
        surrogate, _, _ = policy_gradient_terms(values, answer.old, advantage, CONFIG.loss)
        kl, _ = kl_terms(values, answer.ref)
        ratio = float((values - answer.old).exp().mean())
        means = (float(answer.old.mean()), float(answer.ref.mean()), float(values.mean()))
        shown = float(surrogate.mean()) if answer.accepted else None
        rows.append(Row(f"rollout {number}", *means, ratio, shown, float(kl.mean()), None))
    return rows


def describe_terms(policy: PolicyModel, group: TrainingGroup) -> Iterator[str]:
    """Tell the three loss terms of a group and the group's loss."""
    rows = rows_of(policy, group)
    header = ("answer", "old", "reference", "new", "ratio", "PG", "KL", "NLL")
    cells = [
        [
            "" if value is None else value
            for value in (
                row.name,
                row.old,
                row.reference,
                row.new,
                row.ratio,
                row.surrogate,
                row.kl,
                row.nll,
            )
        ]
        for row in rows
    ]
    yield table(header, cells)
    rollouts = [row for row in rows if row.kl is not None]
    surrogate = sum(row.surrogate or 0.0 for row in rollouts) / len(rollouts)
    kl = sum(row.kl or 0.0 for row in rollouts) / len(rollouts)
    nll = sum(row.nll or 0.0 for row in rows)
    weights = CONFIG.loss
    loss = surrogate + weights.salvage_weight * nll + weights.kl_weight * kl
    yield paragraph(
        f"""Loss of the group: PG {number_text(surrogate)} + {weights.salvage_weight} x NLL
        {number_text(nll)} + {weights.kl_weight} x KL {number_text(kl)} = **{number_text(loss)}**."""
    )


def weights_of(group: TrainingGroup) -> Tokens:
    """Return the constants of a group's tokens in the loss."""
    return lay_out(group.answers, num_groups=CONFIG.mini_batch, num_rollouts=CONFIG.num_rollouts)


def describe_weights(group: TrainingGroup) -> Iterator[str]:
    """Tell the weights of the first rollout's tokens and of the target's."""
    tokens, length = weights_of(group), len(group.ids[0])
    share = 1 / (CONFIG.mini_batch * CONFIG.num_rollouts * length)
    yield paragraph(
        f"""Rollout 1 has R = {length} tokens. With M = {CONFIG.mini_batch} and n = {CONFIG.num_rollouts},
        1 / (M n R) = {share:.6f}; each token weighs {float(tokens.pg_weight[0]):.6f} in PG and
        {float(tokens.kl_weight[0]):.6f} in KL."""
    )
    if group.answers[-1].is_target:
        yield paragraph(
            f"""The target's action span has |A| = {int(group.answers[-1].mask.sum())} tokens; each weighs
            1 / (M |A|) = {float(tokens.nll_weight.max()):.6f} in NLL, every other token of the target 0."""
        )


def mini_batch_loss(policy: PolicyModel, groups: Sequence[TrainingGroup]) -> float:
    """Return the loss of a mini-batch under the policy as it is now (Eq. 2-3)."""
    answers: list[Answer] = [answer for group in groups for answer in group.answers]
    found = log_probs(policy, ALONE, [(g.state, list(g.ids)) for g in groups], Prompts(policy), CONFIG)
    new: Tensor = torch.cat([values for values_of_group in found for values in values_of_group])
    tokens = lay_out(answers, num_groups=CONFIG.mini_batch, num_rollouts=CONFIG.num_rollouts)
    return float(joint_loss(new, tokens, CONFIG.loss)[0])


def describe_update(policy: PolicyModel, walk: Walk, number: int, optimizer: Optimizer) -> Iterator[str]:
    """Tell a mini-batch and what its update did."""
    places = walk.batches[number]
    groups = [walk.training[place] for place in places]
    names = " and ".join(f"group {place + 1}" for place in places)
    yield f"### Mini-batch {number + 1}: {names}"
    for place, group in zip(places, groups, strict=True):
        yield f"Group {place + 1}:"
        if number == 0:
            yield from describe_weights(group)
        yield from describe_terms(policy, group)
    before = mini_batch_loss(policy, groups)
    _, norm = update(policy, ALONE, groups, Prompts(policy), optimizer, CONFIG)
    after = mini_batch_loss(policy, groups)
    yield paragraph(
        f"""Loss of the mini-batch, the mean over its M = {CONFIG.mini_batch} groups:
        **{number_text(before)}**. Gradient norm {norm:.4f}, one AdamW step at {LEARNING_RATE:g}; the same
        mini-batch afterwards: {number_text(after)}."""
    )


def target_logprob(policy: PolicyModel, state: State) -> float:
    """Return the mean log-prob of the target's action span."""
    found = log_probs(policy, ALONE, [(state, [state.target_ids])], Prompts(policy), CONFIG)[0][0]
    return masked_mean(found, state.target_mask)


INTRODUCTION = f"""
Printed by `python scripts/walkthrough.py`, which computes every number below with the functions that
`train_rl.py` uses. Four states of a real run (`docs/walkthrough/`), n = {CONFIG.num_rollouts} rollouts each,
B = {CONFIG.train_batch}, M = {CONFIG.mini_batch}; the policy is the tiny base with fresh adapters, so before
the first update it equals its reference. The rollouts are kept in a file, because another processor may round
differently and sample another token; the last digits of other numbers may differ for the same reason.
"""
GATES = """
`salvage.step.generate` samples, `salvage.reward.score` compares with the target (Table 4), and
`salvage.gating.gate` is Eq. 1: k_g = 1[sigma >= 0.10] 1[max r >= 0.55], A = k_g (r - mean) / (sigma + 1e-6).
"""
TERMS = """
Old log-probs are the trainer's own, before the first update; reference log-probs are those without adapters
(`salvage.step.old_and_reference`). A row shows token means of an answer: log-probs, the importance ratio,
PG = -min(ratio A, clip(ratio, 0.8, 1.32) A) of Eq. 2, the KL estimate k3, and the NLL of the target's action
span, which Eq. 3 adds for rejected groups alone (`salvage.objective`).
"""
FIRST_UPDATE = """
In the first mini-batch policy, old policy and reference are the same: every ratio is 1, every KL 0, and PG is
-A. Only the gradient tells what will be learnt. In the second one the first update has moved the policy.
"""


def describe_selection(walk: Walk) -> str:
    """Tell refill, selection and dealing."""
    accepted = sum(group.gate.accepted for group in walk.groups)
    rejected = len(walk.groups) - accepted
    retained = sum(len(batch) for batch in walk.batches) - accepted
    dealt = [" + ".join(f"group {place + 1}" for place in batch) for batch in walk.batches]
    return paragraph(
        f"""{accepted} of {len(walk.groups)} groups are accepted. With B = {CONFIG.train_batch} the step would
        draw another batch of prompts (`salvage.gating.needs_refill`), had it not reached its cap of
        {CONFIG.max_generation_batches} here. S = M floor(min(D, B) / M) = {retained} of the D = {rejected}
        rejected groups are kept for the salvage anchor (`salvage.gating.num_retained`). Accepted, then
        retained groups are dealt round-robin: {", ".join(dealt)} (`salvage.gating.deal_mini_batches`)."""
    )


def sections(policy: PolicyModel, walk: Walk) -> Iterator[str]:
    """Tell the whole step."""
    yield "# One RL step, from prompt to update"
    yield paragraph(INTRODUCTION)
    yield "## 1. A prompt and its verified answer"
    yield from describe_prompt(policy, next(group for group in walk.groups if group.gate.accepted))
    yield "## 2. Eight rollouts of each prompt, their rewards, and the gates"
    yield paragraph(GATES)
    for number, group in enumerate(walk.groups, 1):
        yield f"### Group {number}: `{group.state.sample.sample_id}`"
        yield from describe_rewards(group)
    yield "## 3. Refill, selection, dealing"
    yield describe_selection(walk)
    yield "## 4. Log-probs, loss terms and updates"
    yield paragraph(TERMS)
    yield paragraph(FIRST_UPDATE)
    adapters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = Optimizer(adapters, ALONE, lambda step: LEARNING_RATE)
    before = [target_logprob(policy, group.state) for group in walk.groups]
    for number in range(len(walk.batches)):
        yield from describe_update(policy, walk, number, optimizer)
    after = [target_logprob(policy, group.state) for group in walk.groups]
    yield "## 5. What the step did"
    yield "Mean log-prob of the verified action (the tokens of A), before and after the step:"
    rows = [
        (f"group {n}", "accepted" if g.gate.accepted else "rejected, salvaged", a, b)
        for n, (g, a, b) in enumerate(zip(walk.groups, before, after, strict=True), 1)
    ]
    yield table(("group", "gate", "before", "after"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the walkthrough, or write it to docs/walkthrough.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", action="store_true", help="draw the rollouts anew and keep them")
    parser.add_argument("--write", action="store_true", help="write docs/walkthrough.md")
    options = parser.parse_args(argv)
    policy, states = load_policy()
    walk = prepare(policy, draw_groups(policy, states, anew=options.sample))
    text = "\n\n".join(sections(policy, walk)) + "\n"
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
