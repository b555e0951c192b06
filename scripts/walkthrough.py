"""One RL step from prompt to update, with every number on the way.

    python scripts/walkthrough.py            prints the page docs/walkthrough.md: a CPU, seconds, no browser
    python scripts/walkthrough.py --write    writes the page
    python scripts/walkthrough.py --sample   draws the rollouts anew and keeps them for later runs

The states are four mined ones of a real run (docs/walkthrough/mined.jsonl), the policy is the tiny base of
the playground. The page tells the second training step: after the first one the policy is no longer its own
reference. Tokens of the rollouts are kept in docs/walkthrough/rollouts.json, because a processor that rounds
differently could sample another token; everything after sampling is computed anew, by the functions that
train_rl.py uses.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rmsweb.engine.distributed import Ranks  # noqa: E402  the checkout need not be installed
from rmsweb.engine.lora import add_lora  # noqa: E402
from rmsweb.engine.policy import PolicyModel  # noqa: E402
from rmsweb.engine.sampler import Rollout  # noqa: E402
from rmsweb.engine.training import Optimizer  # noqa: E402
from rmsweb.jsonl import read_records, write_json  # noqa: E402
from rmsweb.records import MinedState, Text, derive_seed  # noqa: E402
from rmsweb.salvage.dynamics import masked_mean  # noqa: E402
from rmsweb.salvage.gating import Selection, deal_mini_batches, needs_refill, select_groups  # noqa: E402
from rmsweb.salvage.objective import joint_loss, kl_terms, lay_out, policy_gradient_terms  # noqa: E402
from rmsweb.salvage.states import GroupLogProbs, Prompts, SampledGroup, State, make_state  # noqa: E402
from rmsweb.salvage.step import (  # noqa: E402
    StepConfig,
    TrainingGroup,
    drawn_states,
    generate,
    log_probs,
    old_and_reference,
    score_and_gate,
    training_group,
    update,
)

FOLDER = ROOT / "docs" / "walkthrough"
ROLLOUTS = FOLDER / "rollouts.json"
PAGE = ROOT / "docs" / "walkthrough.md"
ALONE = Ranks(0, 1, torch.device("cpu"))
SEED = (
    86  # one whose second step has an accepted group with three levels of reward, and both kinds of rejected
)
CONFIG = StepConfig(train_batch=2, mini_batch=2, max_generation_batches=3, response_budget=40, seed=SEED)
LEARNING_RATE = 1e-3  # a hundred times the paper's, so that the ratios of the second update are visible
LORA_RANK, LORA_ALPHA = 8, 16
STEPS = (0, 1)  # the first one happens in silence


@dataclass(frozen=True, slots=True)
class Step:
    """A training step before its updates; `log_probs` and `training` go by the group's draw."""

    number: int
    groups: list[SampledGroup]
    chosen: Selection
    batches: list[tuple[int, ...]]
    log_probs: dict[int, GroupLogProbs]
    training: dict[int, TrainingGroup]


# ------------------------------------------------------------------------------------------------- the step


def load_policy() -> PolicyModel:
    """Return the tiny base with fresh adapters; in float32 on one thread, so that sums keep their order."""
    torch.set_num_threads(1)
    policy = PolicyModel.load(ROOT / "rmsweb" / "playground" / "base")
    torch.manual_seed(SEED)
    add_lora(policy.model, rank=LORA_RANK, alpha=LORA_ALPHA, scope="attn")
    return policy


def load_states(policy: PolicyModel) -> list[State]:
    """Return the four states; ValueError names the reason why one cannot be trained on."""
    assert policy.prompt_config is not None
    states = []
    for sample in read_records(FOLDER / "mined.jsonl", MinedState):
        budget = policy.prompt_config.prompt_budget
        state = make_state(
            sample, FOLDER, policy, prompt_budget=budget, response_budget=CONFIG.response_budget
        )
        if isinstance(state, str):
            raise ValueError(f"{sample.state_id}: {state}")
        states.append(state)
    return states


def sample_groups(
    policy: PolicyModel, states: Sequence[State], step: int, position: int
) -> list[SampledGroup]:
    """Return the groups of a step, sampled now."""
    return generate(
        policy,
        ALONE,
        states,
        Prompts(policy),
        CONFIG,
        step=step,
        position=position,
        report=lambda phase: None,
    )


def stored_groups(
    policy: PolicyModel, states: Sequence[State], step: int, position: int
) -> list[SampledGroup]:
    """Return the groups of a step from the stored tokens, scored and gated as `generate` does."""
    groups: list[SampledGroup] = []
    for stored in json.loads(ROLLOUTS.read_text(encoding="utf-8"))[step]:
        state = states[drawn_states(len(states), SEED, position + len(groups), 1)[0]]
        rollouts = []
        for numbers in stored:
            ids = torch.tensor(numbers)
            ended = "stop" if numbers[-1] == policy.end_id else "length"
            rollouts.append(Rollout(ids, torch.full((len(ids),), torch.nan), policy.decode(ids), ended))
        groups.append(score_and_gate(state, rollouts, CONFIG))
    return groups


def prepare(policy: PolicyModel, number: int, groups: list[SampledGroup]) -> Step:
    """Select and deal the groups of a step and score them, as `rl_step` does."""
    accepted = [group.gate.accepted for group in groups]
    sizes = {"train_batch": CONFIG.train_batch, "mini_batch": CONFIG.mini_batch}
    chosen = select_groups(accepted, **sizes)
    batches = deal_mini_batches(chosen, mini_batch=CONFIG.mini_batch)
    places = [place for batch in batches for place in batch]
    found = old_and_reference(policy, ALONE, [groups[place] for place in places], Prompts(policy), CONFIG)
    known = dict(zip(places, found, strict=True))
    training = {place: training_group(known[place]) for place in places}
    return Step(number, groups, chosen, batches, known, training)


def run_update(
    policy: PolicyModel, step: Step, batch: Sequence[int], optimizer: Optimizer
) -> tuple[float, float]:
    """Make one update; return the loss of the mini-batch and the gradient norm."""
    groups = [step.training[place] for place in batch]
    sums, norm = update(policy, ALONE, groups, Prompts(policy), optimizer, CONFIG)
    return sums["loss"], norm


def log_probs_now(policy: PolicyModel, group: TrainingGroup) -> list[Tensor]:
    """Return the log-probs [R] of a group's answers under the policy as it is now."""
    return log_probs(policy, ALONE, [(group.state, list(group.ids))], Prompts(policy), CONFIG)[0]


def target_log_prob(policy: PolicyModel, state: State) -> float:
    """Return the mean log-prob of the target's action span under the policy as it is now."""
    (found,) = log_probs(policy, ALONE, [(state, [state.target_ids])], Prompts(policy), CONFIG)[0]
    return masked_mean(found, state.target_mask)


# ------------------------------------------------------------------------------------------ Markdown pieces


def decimals(value: float, digits: int = 4) -> str:
    """Return a number with a fixed count of decimals; a zero has no sign."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; a float gets four decimals, None an empty cell."""

    def line(cells: Sequence[object]) -> str:
        texts = [decimals(cell) if isinstance(cell, float) else str(cell) for cell in cells]
        return f"| {' | '.join(texts)} |".replace("| None ", "|  ")

    return "\n".join([line(header), f"|{'---|' * len(header)}", *map(line, rows)])


def paragraph(text: str) -> str:
    """Return a text in lines of at most 110 columns."""
    return textwrap.fill(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False)


def code(text: str) -> str:
    """Return a code block."""
    return f"```\n{text.rstrip()}\n```"


def tokens_of(policy: PolicyModel, ids: Tensor) -> list[str]:
    """Return the texts of single tokens, without the base's mark for the start of a word."""
    return [name.replace("▁", "") for name in policy.tokenizer.convert_ids_to_tokens(ids.tolist())]


def cell_of(token: str) -> str:
    """Return a token as code in a table, where a bar would end the cell."""
    return f"`{token}`".replace("|", "\\|")


def name_of(step: Step, place: int) -> str:
    """Return what the page calls a group."""
    return f"group {place} (`{step.groups[place].state.sample.task_id}`)"


# --------------------------------------------------------------------------------------------- the sections


def tell_introduction() -> Iterator[str]:
    """Say what the page is and what a run of the paper's size does differently."""
    yield "# One RL step, from prompt to update"
    yield paragraph(
        f"""Printed by `python scripts/walkthrough.py`, which computes every number with the functions that
        `train_rl.py` uses. The states are four mined ones of a real run (`docs/walkthrough/`); the policy is
        the tiny base of the playground with adapters of rank {LORA_RANK}, where a real run takes the merged
        SFT checkpoint. B = {CONFIG.train_batch} groups a step, M = {CONFIG.mini_batch} groups a mini-batch,
        n = {CONFIG.num_rollouts} rollouts a group, learning rate {LEARNING_RATE:g} (paper: 64, 16, 8, 8e-6).
        This is the second training step of the run; the first one has moved the policy away from its
        reference. `salvage.step.rl_step` is the same step without words."""
    )


def tell_prompt(state: State) -> Iterator[str]:
    """Show a prompt, cut in the middle."""
    yield "## 1. The prompt"
    messages = state.sample.messages
    parts = [part for message in messages for part in message.parts]
    text = "".join(part.text if isinstance(part, Text) else "[screenshot]\n" for part in parts)
    lines = text.strip().splitlines()
    shown = [*lines[:6], f"... {len(lines) - 14} lines ...", *lines[-8:]]
    assert isinstance(state.sample, MinedState)
    yield paragraph(
        f"""`{state.sample.sample_id}` was mined as a failure of mode `{state.category}`. The prompt is the
        one that the agent saw (`prompt.build_prompt`), {state.prompt_length} tokens with those of the
        picture (`engine.policy.PolicyModel.encode_prompt`):"""
    )
    yield code("\n".join(shown))


def tell_target(policy: PolicyModel, state: State) -> Iterator[str]:
    """Show the verified answer, its action span as text, and the same span as tokens."""
    yield "## 2. The target and its action span"
    text, span = state.sample.target_text, state.sample.action_span
    assert span is not None
    yield "The answer that the successful run gave here (`target_text` of the state), canonical JSON:"
    yield code(text)
    first, stop = policy.token_span(text, span)
    yield paragraph(
        f"""The action span is the value of `"action"`, brackets included: characters {span[0]} to {span[1]}
        (`browser.actions.action_span`), tokens {first} to {stop - 1} of 0 to {len(state.target_ids) - 1}
        (`engine.policy.PolicyModel.token_span`, `salvage.states.span_mask`). Every token that overlaps it is
        in, so the one that also ends the reasoning is; end-of-turn is not. A salvage anchor on this target
        would act on these {int(state.target_mask.sum())} tokens alone, shown in brackets:"""
    )
    names = tokens_of(policy, state.target_ids)
    marked = [f"[{name}]" if inside else name for name, inside in zip(names, state.target_mask, strict=True)]
    yield code(" ".join(marked))


def tell_rollouts(group: SampledGroup, step: int, place: int) -> Iterator[str]:
    """Show the answers to a prompt, and what each is worth and why."""
    rows = []
    for number, (rollout, reward) in enumerate(zip(group.rollouts, group.rewards, strict=True)):
        parts = [f"{part.name} {part.level:g}: {part.why}" for part in reward.components]
        why = reward.failure or "; ".join(parts)
        seed = derive_seed(SEED, step, place, number)
        rows.append((number + 1, seed, len(rollout.ids), f"{reward.value:g}", why))
    yield code("\n".join(f"{n}  {rollout.text}" for n, rollout in enumerate(group.rollouts, 1)))
    yield table(("rollout", "seed", "tokens", "reward", "why"), rows)


def tell_groups(step: Step, accepted: int, rejected: int) -> Iterator[str]:
    """Show the rollouts of an accepted and a rejected group, the gates of all, and what becomes of them."""
    yield "## 3. Eight rollouts and their rewards"
    yield paragraph(
        """`salvage.step.generate` draws prompts from a shuffled stream (`salvage.step.drawn_states`) and
        samples at temperature 1 (`engine.sampler.sample`). A rollout draws its random numbers from (seed,
        step, draw, rollout) alone (`records.derive_seed`), so neither batch nor rank changes it.
        `salvage.reward.score` compares its actions with the target's (Table 4): the reasoning earns
        nothing, and the index must be one that the prompt shows."""
    )
    for place, kind in ((accepted, "accepted"), (rejected, "rejected")):
        yield f"### Rollouts of {name_of(step, place)}, which will be {kind}"
        if place != accepted:  # whose target stands above
            yield f"The target:\n\n{code(step.groups[place].state.sample.target_text)}\n\nThe answers:"
        yield from tell_rollouts(step.groups[place], step.number, place)


def tell_gates(step: Step, accepted: int) -> Iterator[str]:
    """Show Eq. 1 for every group of the step, and the advantages of one."""
    yield "## 4. The two gates and the advantages (Eq. 1)"
    yield paragraph(
        """`salvage.gating.gate`: k = 1[sigma >= 0.10] * 1[max r >= 0.55], sigma with n - 1 in the
        denominator. The first factor asks for contrast, the second for one competent rollout: without it,
        being less wrong than the others would be taught as success."""
    )
    rows = []
    for place, group in enumerate(step.groups):
        found = group.gate
        rewards = " ".join(f"{reward.value:g}" for reward in group.rewards)
        k = int(found.accepted)
        rows.append((place, rewards, found.mean, found.std, f"{found.best:g}", found.cell, k))
    yield table(("group", "rewards", "mean", "sigma", "max r", "cell of the gates", "k"), rows)
    found = step.groups[accepted].gate
    levels = dict(zip((r.value for r in step.groups[accepted].rewards), found.advantages, strict=True))
    each = ", ".join(f"{level:g} -> {decimals(levels[level])}" for level in sorted(levels, reverse=True))
    yield paragraph(
        f"""Advantages are A = (r - mean) / (sigma + 1e-6) in an accepted group and exactly 0 in a rejected
        one. In group {accepted}, by reward: {each}. An answer below the mean is pushed down."""
    )


def tell_selection(step: Step) -> Iterator[str]:
    """Show refill, S, and dealing."""
    yield "## 5. Refill, salvage selection, dealing"
    size, k = CONFIG.train_batch, [int(group.gate.accepted) for group in step.groups]
    rounds = []
    for drawn in range(size, len(k) + 1, size):
        found, limits = sum(k[:drawn]), {"train_batch": size, "max_batches": CONFIG.max_generation_batches}
        more = needs_refill(found, drawn // size, **limits)
        rounds.append(f"after {drawn} prompts {found} accepted, so {'on' if more else 'stop'}")
    chosen, dealt = step.chosen, " and ".join(f"({', '.join(map(str, batch))})" for batch in step.batches)
    yield paragraph(
        f"""A generation batch is B = {size} prompts; the step goes on until B groups are accepted
        (`salvage.gating.needs_refill`): {"; ".join(rounds)}. Of D = {len(chosen.retained + chosen.unused)}
        rejected groups S = M floor(min(D, B) / M) = {len(chosen.retained)} are kept, the first to arrive
        (`salvage.gating.num_retained`, `salvage.gating.select_groups`). Accepted and then retained groups
        are dealt round-robin into mini-batches of at most M = {CONFIG.mini_batch}
        (`salvage.gating.deal_mini_batches`): {dealt}. So each mini-batch has one group of each kind."""
    )


def tell_log_probs(step: Step, accepted: int) -> Iterator[str]:
    """Show old and reference log-probs of an accepted group."""
    yield "## 6. Old and reference log-probs"
    yield paragraph(
        f"""Before the first update of the step `salvage.step.old_and_reference` computes the log-prob of
        every rollout token twice: with the adapters (pi_old of Eq. 2) and with them switched off
        (`engine.lora.disabled`), which is the frozen SFT policy (pi_ref). Means over the tokens of each
        rollout of group {accepted}, in nats:"""
    )
    group = step.groups[accepted]
    rows = [
        (number, f"{reward.value:g}", float(old.mean()), float(ref.mean()), float((old - ref).mean()))
        for number, (reward, old, ref) in enumerate(
            zip(group.rewards, step.log_probs[accepted].old, step.log_probs[accepted].reference, strict=True),
            1,
        )
    ]
    yield table(("rollout", "reward", "old", "reference", "old - reference"), rows)


@dataclass(frozen=True, slots=True)
class Terms:
    """The parts of a group's loss: means as Eq. 2 and 3 take them."""

    surrogate: float
    nll: float
    kl: float

    @property
    def loss(self) -> float:
        """The group's share of Eq. 3 before the mean over groups."""
        weights = CONFIG.loss
        return self.surrogate + weights.salvage_weight * self.nll + weights.kl_weight * self.kl


def terms_of(policy: PolicyModel, group: TrainingGroup) -> Terms:
    """Return the terms of a group under the policy as it is now."""
    new = torch.cat(log_probs_now(policy, group))
    tokens = lay_out(group.answers, num_groups=1, num_rollouts=CONFIG.num_rollouts)
    _, sums = joint_loss(new, tokens, CONFIG.loss)
    return Terms(sums["pg"], sums["nll"], sums["kl"])


def tell_objective() -> Iterator[str]:
    """Say what the loss is made of."""
    yield "## 7. The loss (Eq. 2-3) and the updates"
    yield paragraph(
        f"""`salvage.objective.lay_out` gives every token its weights, `salvage.objective.joint_loss` sums.
        A group's loss is k * PG + (1 - k) * {CONFIG.loss.salvage_weight:g} * NLL +
        {CONFIG.loss.kl_weight:g} * KL; the mini-batch's is the mean over its M = {CONFIG.mini_batch} groups.
        PG is the mean over rollouts of the token mean of -min(rho A, clip(rho, 0.8, 1.32) A), with rho =
        exp(new - old) (`salvage.objective.policy_gradient_terms`); KL the same mean of k3 = exp(d) - d - 1,
        d = reference - new (`salvage.objective.kl_terms`); NLL the mean of -new over the action span of the
        target, which is one more answer of a rejected group (`salvage.step.training_group`)."""
    )


def tell_anchor(policy: PolicyModel, step: Step, place: int) -> Iterator[str]:
    """Show the NLL of a rejected group's target, token by token."""
    group = step.training[place]
    new, mask = log_probs_now(policy, group)[-1], group.answers[-1].mask
    weight = CONFIG.loss.salvage_weight / (CONFIG.mini_batch * int(mask.sum()))
    names = tokens_of(policy, group.ids[-1])
    rows = [
        (cell_of(name), float(value), weight if inside else 0.0)
        for name, value, inside in zip(names, new, mask, strict=True)
    ]
    yield paragraph(
        f"""The anchor of group {place}, token by token: the target is teacher-forced as a whole, and each
        token of its action span weighs lambda / (M * length of the span) = {CONFIG.loss.salvage_weight:g} /
        ({CONFIG.mini_batch} * {int(mask.sum())}) = {decimals(weight)}. The reasoning stays in context and is
        not imitated."""
    )
    yield table(("token of the target", "log-prob", "weight"), rows)


def tell_surrogate(policy: PolicyModel, step: Step, place: int, number: int) -> Iterator[str]:
    """Show ratio, PG and KL of one rollout, token by token."""
    group = step.training[place]
    answer, new = group.answers[number], log_probs_now(policy, group)[number]
    assert answer.old is not None
    assert answer.ref is not None
    advantage = torch.full_like(new, answer.advantage)
    surrogate, clipped, _ = policy_gradient_terms(new, answer.old, advantage, CONFIG.loss)
    kl, _ = kl_terms(new, answer.ref)
    ratio = (new - answer.old).exp()
    names = tokens_of(policy, group.ids[number])
    rows = []
    for t, name in enumerate(names):
        log_probs_of = (float(answer.old[t]), float(answer.ref[t]), float(new[t]))
        rho = decimals(float(ratio[t]), 3)
        bound = "yes" if clipped[t] else "no"
        rows.append((cell_of(name), *log_probs_of, rho, bound, float(surrogate[t]), float(kl[t])))
    weight = 1 / (CONFIG.mini_batch * CONFIG.num_rollouts * len(new))
    yield paragraph(
        f"""Rollout {number + 1} of group {place}, token by token, now that the first update has moved the
        policy: A = {decimals(answer.advantage)}, and each of the R = {len(new)} tokens weighs 1 / (M n R) =
        {decimals(weight, 5)}."""
    )
    yield table(("token", "old", "reference", "new", "rho", "clipped", "PG", "KL"), rows)


def tell_update(policy: PolicyModel, step: Step, number: int, optimizer: Optimizer) -> Iterator[str]:
    """Show the loss of a mini-batch by groups and terms, and make its update."""
    batch = step.batches[number]
    rows, total = [], 0.0
    for place in batch:
        terms, accepted = terms_of(policy, step.training[place]), step.groups[place].gate.accepted
        total += terms.loss / CONFIG.mini_batch
        surrogate, nll = (terms.surrogate, None) if accepted else (None, terms.nll)
        rows.append((name_of(step, place), int(accepted), surrogate, nll, terms.kl, terms.loss))
    yield table(("group", "k", "PG", "NLL", "KL", "loss of the group"), rows)
    weights = [parameter.detach().clone() for parameter in optimizer.parameters]
    loss, norm = run_update(policy, step, batch, optimizer)
    moved = torch.stack(
        [(now - before).norm() for now, before in zip(optimizer.parameters, weights, strict=True)]
    )
    scale = (
        f"scaled down to {optimizer.clip:g}"
        if norm > optimizer.clip
        else f"below {optimizer.clip:g}, left alone"
    )
    yield paragraph(
        f"""Mean over the groups: {decimals(total)}. `salvage.step.update` computes the same loss,
        {decimals(loss)}, in one packed forward pass, and its gradient: norm {decimals(norm)}, {scale}. One
        AdamW step at learning rate {LEARNING_RATE:g} (`engine.training.Optimizer`) moves the adapters by
        {decimals(float(moved.detach().norm()))} (Euclidean norm)."""
    )


def tell_updates(
    policy: PolicyModel, step: Step, accepted: int, rejected: int, optimizer: Optimizer
) -> Iterator[str]:
    """Make the updates of the step and show them."""
    yield from tell_objective()
    values = [reward.value for reward in step.groups[accepted].rewards]
    for number, batch in enumerate(step.batches):
        yield f"### Mini-batch {number + 1}: groups {' and '.join(map(str, batch))}"
        if number == 0:
            yield paragraph(
                """In the first mini-batch of a step the policy is still pi_old: every rho is 1, PG is -A,
                and its mean is 0 because advantages sum to 0. The gradient is not: each rollout's log-prob
                is pushed up or down by its A. KL is what the steps before have done."""
            )
        if rejected in batch:
            yield from tell_anchor(policy, step, rejected)
        if accepted in batch:
            yield from tell_surrogate(policy, step, accepted, values.index(max(values)))
        yield from tell_update(policy, step, number, optimizer)


def tell_outcome(policy: PolicyModel, step: Step, accepted: int, before: Sequence[float]) -> Iterator[str]:
    """Show log-probs after the step."""
    yield "## 8. After the step"
    yield "Mean log-prob of the target's action span, before and after the two updates:"
    rows = []
    for place in step.training:
        group, old = step.groups[place], before[place]
        now = target_log_prob(policy, group.state)
        rows.append((name_of(step, place), group.gate.cell, old, now, now - old))
    yield table(("group", "cell of the gates", "before", "after", "change"), rows)
    yield f"Mean log-prob of the rollouts of group {accepted}, each weighted by its advantage in the loss:"
    new, group = log_probs_now(policy, step.training[accepted]), step.groups[accepted]
    yield table(
        ("rollout", "reward", "A", "before", "after", "change"),
        [
            (n, f"{reward.value:g}", advantage, float(o.mean()), float(w.mean()), float((w - o).mean()))
            for n, (reward, advantage, o, w) in enumerate(
                zip(group.rewards, group.gate.advantages, step.log_probs[accepted].old, new, strict=True), 1
            )
        ],
    )
    yield paragraph(
        """The anchor's gradient is large where the target's action is unlikely, which teaches a hard state,
        and nearly 0 where it is certain, which keeps a mastered one. On another machine the last digits may
        differ, because processors and versions of torch sum in another order. The rollouts are read from a
        file for the same reason. A test compares words exactly and numbers with a tolerance
        (`test_walkthrough.py::test_the_page_is_what_the_script_prints`)."""
    )


# ---------------------------------------------------------------------------------------------------- main


def sections(*, sample: bool) -> Iterator[str]:
    """Run the steps of STEPS and tell the last one."""
    policy = load_policy()
    states = load_states(policy)
    adapters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = Optimizer(adapters, ALONE, lambda step: LEARNING_RATE)
    drawn, position = [], 0
    for number in STEPS:
        groups = (sample_groups if sample else stored_groups)(policy, states, number, position)
        position += len(groups)
        drawn.append([[rollout.ids.tolist() for rollout in group.rollouts] for group in groups])
        step = prepare(policy, number, groups)
        if number != STEPS[-1]:
            for batch in step.batches:
                run_update(policy, step, batch, optimizer)
    if sample:
        write_json(ROLLOUTS, drawn)
    if not step.chosen.accepted or not step.chosen.retained:
        raise ValueError("the step has not both an accepted and a retained group: choose another SEED")
    accepted, rejected = step.chosen.accepted[-1], step.chosen.retained[0]
    before = [target_log_prob(policy, group.state) for group in step.groups]
    yield from tell_introduction()
    yield from tell_prompt(step.groups[accepted].state)
    yield from tell_target(policy, step.groups[accepted].state)
    yield from tell_groups(step, accepted, rejected)
    yield from tell_gates(step, accepted)
    yield from tell_selection(step)
    yield from tell_log_probs(step, accepted)
    yield from tell_updates(policy, step, accepted, rejected, optimizer)
    yield from tell_outcome(policy, step, accepted, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", action="store_true", help="draw the rollouts anew and keep them")
    parser.add_argument("--write", action="store_true", help="write docs/walkthrough.md")
    options = parser.parse_args(argv)
    text = "\n\n".join(sections(sample=options.sample)) + "\n"
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
