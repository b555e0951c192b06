"""Measurements of the training engine against the plain way, through the same weights.

Run by `python scripts/benchmark.py sampler|update|memory|sft|step [--pairs N]`. The plain way is `generate`
and one sequence an answer. Each line compares the medians of N interleaved pairs of runs, after a check that
both sides compute the same (`spread`: lowest and highest ratio of a pair). On a CPU a tiny Qwen3-VL of 5M
parameters, float32, one thread; on a GPU the shape of Qwen3-VL-8B with random weights, bfloat16 and
recomputed layers.

It is no straw man: right-padded batches, so that SDPA's causal kernel needs no mask, and the engine's own
chunked log-probabilities.
"""

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 (the checkout need not be installed)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration  # noqa: E402

from rmsweb.engine.attention import use_segment_attention  # noqa: E402
from rmsweb.engine.distributed import Ranks  # noqa: E402
from rmsweb.engine.lora import Scope, add_lora  # noqa: E402
from rmsweb.engine.packing import (  # noqa: E402
    Bundle,
    EncodedPrompt,
    Pack,
    Packable,
    bundles_in,
    make_pack,
    plan_packs,
)
from rmsweb.engine.policy import PolicyModel, recompute_layers, token_logprobs  # noqa: E402
from rmsweb.engine.sampler import Decoding, Rollout, sample  # noqa: E402
from rmsweb.engine.training import Optimizer  # noqa: E402
from rmsweb.prompt import PromptConfig  # noqa: E402
from rmsweb.records import Message, StepSample, Text  # noqa: E402
from rmsweb.salvage import step as rl  # noqa: E402
from rmsweb.salvage.states import State, make_state  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TINY = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY |= {"vocab_size": 2048}
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LARGE |= {"vocab_size": 151_936}
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}  # dense bfloat16, by a part of the device's name
Line = dict[str, Any]

# -------------------------------------------------------------------------------------------------- the model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte, and the control tokens."""
    alphabet = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(list(CONTROL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def build(scope: Scope) -> tuple[PolicyModel, list[torch.nn.Parameter]]:
    """Return a policy with random weights and adapters, and the adapters' parameters.

    B is not zero, so that the adapters count. The vision tower is small: no benchmark uses it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, text = byte_tokenizer(), LARGE if GPU else TINY
    third = text["head_dim"] // 6
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_interleaved": True,
        "mrope_section": [text["head_dim"] // 2 - 2 * third, third, third],
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config={**text, "max_position_embeddings": 32_768, "rope_parameters": rope},
        vision_config={**vision, "num_position_embeddings": 256},
        image_token_id=CONTROL.index("<|image_pad|>"),
        video_token_id=CONTROL.index("<|video_pad|>"),
        vision_start_token_id=CONTROL.index("<|vision_start|>"),
        vision_end_token_id=CONTROL.index("<|vision_end|>"),
        tie_word_embeddings=not GPU,
    )
    with DEVICE:
        model = Qwen3VLForConditionalGeneration._from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16 if GPU else torch.float32
        )
    policy = PolicyModel(model, tokenizer, prompt_config=PromptConfig(), device=DEVICE, name="benchmark")
    rank = text["hidden_size"] // 64  # the paper's 64 at 4,096
    parameters = add_lora(model, rank=rank, alpha=2 * rank, scope=scope)
    for parameter in parameters[1::2]:
        torch.nn.init.normal_(parameter, std=0.02)
    if GPU:
        recompute_layers(model)
        model.train()  # layers are recomputed in training mode only; there is no dropout
    return policy, parameters


def random_bundle(prompt: int, answers: Sequence[int]) -> Bundle:
    """Return a prompt and answers of random tokens."""
    ids = torch.randint(len(CONTROL), TINY["vocab_size"], (prompt + sum(answers),))
    encoded = EncodedPrompt(ids[:prompt], torch.arange(prompt).expand(3, -1), prompt, ids[:0])
    return Bundle(encoded, tuple(ids[prompt:].split(list(answers))) if answers else ())


# ---------------------------------------------------------------------------------------------- the plain way


@contextmanager
def library_attention(policy: PolicyModel) -> Iterator[None]:
    """Let the text model compute attention as transformers does with SDPA."""
    config = policy.text.config
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        use_segment_attention(config)


def separate(policy: PolicyModel, pack: Pack) -> Tensor:
    """Return the log-probabilities [N] of a pack's answers as separate sequences in one right-padded batch.

    Each answer has its own copy of the prompt.
    """
    rows, places, start = [], [], 0
    for prompt, answers in pack.layout.bundles:
        head, start = torch.arange(start, start + prompt), start + prompt
        for length in answers:
            rows.append(torch.cat([head, torch.arange(start, start + length)]))
            places.append(torch.arange(prompt - 1, prompt + length - 1))
            start += length
    index = pad_sequence(rows, batch_first=True).to(DEVICE)  # [sequences, longest], places in the row
    source = torch.cat([place + number * index.shape[1] for number, place in enumerate(places)]).to(DEVICE)
    with library_attention(policy):
        hidden = policy.text(
            input_ids=pack.ids[0, index], position_ids=pack.positions[:, 0, index], use_cache=False
        ).last_hidden_state
    return token_logprobs(hidden.flatten(0, 1)[source], policy.model.lm_head, pack.targets)


@torch.no_grad()
def generate(
    policy: PolicyModel,
    prompts: Sequence[EncodedPrompt],
    *,
    n: int,
    max_new_tokens: int,
    seeds: Sequence[int] = (),
    decoding: Decoding = Decoding(),  # noqa: B008 (frozen)
) -> list[list[Rollout]]:
    """Do what `sampler.sample` does by transformers' own `generate`, without log-probabilities.

    All prompts have the same length.
    """
    ids = torch.stack([prompt.ids for prompt in prompts]).to(DEVICE)
    how = (
        {"do_sample": True, "top_k": 0, "num_return_sequences": n}
        if decoding.temperature
        else {"do_sample": False}
    )
    with library_attention(policy):
        out = policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=policy.end_id,
            pad_token_id=0,
            **how,
        )
    answers = []
    for row in out[:, ids.shape[1] :].cpu():
        ends = (row == policy.end_id).nonzero()
        own = row[: int(ends[0]) + 1] if len(ends) else row
        answers.append(
            Rollout(own, torch.zeros(len(own)), policy.decode(own), "stop" if len(ends) else "length")
        )
    each = len(answers) // len(prompts)
    return [answers[first : first + each] for first in range(0, len(answers), each)]


# ------------------------------------------------------------------------------------------------ measurement


def compare(ours: Callable[[], object], baseline: Callable[[], object], repeats: int) -> Line:
    """Return the medians of interleaved runs in seconds; the callers have run both sides once before.

    On a CPU these are the process's CPU seconds: with one thread that is the time on a quiet machine, and
    other load disturbs it less.
    """
    clock = time.perf_counter if GPU else time.process_time

    def seconds(work: Callable[[], object]) -> float:
        start = clock()
        work()
        if GPU:
            torch.cuda.synchronize()
        return clock() - start

    pairs = [(seconds(ours), seconds(baseline)) for _ in range(repeats)]
    ratios = sorted(b / a for a, b in pairs)
    a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "ratio": round(b / a, 2),
        "ours_s": round(a, 4),
        "baseline_s": round(b, 4),
        "spread": [round(ratios[0], 2), round(ratios[-1], 2)],
        "repeats": repeats,
    }


def line(name: str, prompt: int, response: int, n: int, token_ratio: float, measured: Line) -> Line:
    """Return the fields of a result line in their order."""
    device = torch.cuda.get_device_name() if GPU else "cpu, 1 thread"
    sizes = {
        "benchmark": name,
        "prompt_tokens": prompt,
        "response_tokens": response,
        "num_rollouts": n,
        "token_ratio": round(token_ratio, 2),
    }
    return {**sizes, **measured, "device": device}


def mfu(policy: PolicyModel, packs: Sequence[Pack], seconds: float) -> Line:
    """Return the share of the GPU's peak, empty on a CPU.

    Two FLOPs a weight and token forward, two for the gradient of activations. The weights are frozen, and
    attention does not count.
    """
    peak = next(
        (flops for part, flops in PEAK_FLOPS.items() if GPU and part in torch.cuda.get_device_name()), None
    )
    weights = sum(parameter.numel() for parameter in policy.text.layers.parameters())
    work = weights * sum(pack.layout.num_tokens for pack in packs)
    return {} if peak is None else {"mfu": round(4 * work / seconds / peak, 3)}


def gradients(parameters: Sequence[torch.nn.Parameter], logprobs: Tensor) -> list[Tensor]:
    """Return the gradients of a weighted mean; the weights play the part of advantages."""
    return list(
        torch.autograd.grad(
            (logprobs * torch.linspace(-1, 1, len(logprobs), device=DEVICE)).mean(), parameters
        )
    )


def check_equal(name: str, ours: Sequence[Tensor], baseline: Sequence[Tensor], limit: float) -> float:
    """Return the largest relative difference of corresponding tensors; ValueError above the limit."""
    worst = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(ours, baseline, strict=True))
    if not worst <= limit:
        raise ValueError(f"{name}: the two sides differ by {worst:.1e}, expected at most {limit:.0e}")
    return worst


# ------------------------------------------------------------------------------------------------- benchmarks


def sampler(
    sizes: Sequence[int] = (400, 1500), response: int = 64, num_prompts: int = 4, n: int = 8, *, repeats: int
) -> Iterator[Line]:
    """Compare sampling over one stored prompt with `generate(num_return_sequences=n)`.

    Greedy answers must be equal.
    """
    policy, _ = build("attn")
    for size in sizes:
        prompts = [random_bundle(size, ()).prompt for _ in range(num_prompts)]
        greedy = Decoding(temperature=0.0)
        ours = sample(policy, prompts, n=1, max_new_tokens=response, seeds=[0] * num_prompts, decoding=greedy)
        equal = [
            torch.equal(a[0].ids, b[0].ids)
            for a, b in zip(
                ours, generate(policy, prompts, n=1, max_new_tokens=response, decoding=greedy), strict=True
            )
        ]
        if not GPU and not all(equal):
            raise ValueError(
                f"sampler: {equal.count(False)} of {num_prompts} greedy answers differ from generate's"
            )
        measured = compare(
            lambda prompts=prompts: sample(
                policy, prompts, n=n, max_new_tokens=response, seeds=range(num_prompts * n)
            ),
            lambda prompts=prompts: generate(policy, prompts, n=n, max_new_tokens=response),
            repeats,
        )
        yield line(
            "sampler",
            size,
            response,
            n,
            n * (size + response) / (size + n * response),
            {**measured, "num_prompts": num_prompts, "greedy_equal": sum(equal) / num_prompts},
        )


def update(
    sizes: Sequence[int] = (1000, 2000), response: int = 32, n: int = 8, *, repeats: int
) -> Iterator[Line]:
    """Compare forward and backward of one pack with those of n sequences; gradients must agree to 1e-5."""
    policy, parameters = build("attn")
    for size in sizes:
        pack = make_pack([random_bundle(size, [response] * n)], DEVICE)
        sides = [
            lambda pack=pack, f=f: gradients(parameters, f(pack))
            for f in (policy.response_logprobs, lambda pack: separate(policy, pack))
        ]
        worst = check_equal("update", *(side() for side in sides), 0.1 if GPU else 1e-5)
        measured = compare(*sides, repeats)
        measured |= mfu(policy, [pack], measured["ours_s"])
        yield line(
            "update",
            size,
            response,
            n,
            n * (size + response) / pack.layout.num_tokens,
            {**measured, "gradient_difference": float(f"{worst:.1e}")},
        )


def peak_rise(side: str, size: int, response: int, n: int) -> float:
    """Return by how many MiB the peak of one update lies above the idle model; run it in a fresh process.

    Resident memory, or the GPU's.
    """
    policy, parameters = build("attn")
    pack = make_pack([random_bundle(size, [response] * n)], DEVICE)

    def used(name: str) -> int:
        return (
            int(
                next(
                    row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name)
                ).split()[1]
            )
            * 1024
        )

    idle = torch.cuda.memory_allocated() if GPU else used("VmRSS")
    gradients(parameters, policy.response_logprobs(pack) if side == "ours" else separate(policy, pack))
    return ((torch.cuda.max_memory_allocated() if GPU else used("VmHWM")) - idle) / 2**20


def memory(
    sizes: Sequence[int] = (1000, 2000), response: int = 32, n: int = 8, *, repeats: int
) -> Iterator[Line]:
    """Compare the peak memory of one update as a pack with that of one batch of n sequences."""

    def measure(side: str, size: int) -> float:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(peak_rise, side, size, response, n).result()

    for size in sizes:
        pairs = [(measure("ours", size), measure("baseline", size)) for _ in range(repeats)]
        ratios = sorted(b / a for a, b in pairs)
        a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
        measured = {
            "ratio": round(b / a, 2),
            "ours_mib": round(a),
            "baseline_mib": round(b),
            "spread": [round(ratios[0], 2), round(ratios[-1], 2)],
        }
        measured["repeats"] = repeats
        yield line("memory", size, response, n, n * (size + response) / (size + n * response), measured)


def sft(
    shortest: int = 200,
    longest: int = 1500,
    num_samples: int = 16,
    response: int = 64,
    token_budget: int = rl.StepConfig().token_budget,
    *,
    repeats: int,
) -> Iterator[Line]:
    """Compare forward and backward of ragged samples in packs with padded batches.

    One padded batch, and micro-batches of 4 sorted by length.
    """
    policy, parameters = build("language")
    lengths = torch.linspace(shortest, longest, num_samples).long()[torch.randperm(num_samples)].tolist()
    bundles = [random_bundle(length - response, [response]) for length in lengths]
    items = [Packable(bundle.lengths, lambda bundle=bundle: bundle) for bundle in bundles]
    bins = plan_packs([item.lengths for item in items], token_budget)
    ordered = sorted(bundles, key=lambda bundle: len(bundle.prompt))  # all answers are equally long
    plans = {
        "packed": [bundles_in(content, items) for content in bins],
        "batch": [bundles],
        "sorted": [ordered[i : i + 4] for i in range(0, num_samples, 4)],
    }
    packs = {name: [make_pack(part, DEVICE) for part in plan] for name, plan in plans.items()}

    def run(name: str) -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        for pack in packs[name]:
            logprobs = policy.response_logprobs(pack) if name == "packed" else separate(policy, pack)
            (-logprobs.sum() / (num_samples * response)).backward()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    for name, padded in (
        ("batch", num_samples * max(lengths)),
        ("sorted", sum(len(part) * (len(part[-1].prompt) + response) for part in plans["sorted"])),
    ):
        worst = check_equal("sft", run("packed"), run(name), 0.1 if GPU else 1e-5)
        measured = compare(lambda: run("packed"), lambda name=name: run(name), repeats)
        measured |= {
            "baseline": {"batch": f"one batch of {num_samples}", "sorted": "sorted batches of 4"}[name],
            "gradient_difference": float(f"{worst:.1e}"),
        }
        measured |= mfu(policy, packs["packed"], measured["ours_s"])
        yield line(
            "sft", round(statistics.mean(lengths)) - response, response, 1, padded / sum(lengths), measured
        )


def step_state(policy: PolicyModel, number: int, size: int) -> State:
    """Return an RL state whose prompt has `size` tokens."""
    target = '{"action":[{"go_back":{}}]}'

    def record(text: str) -> StepSample:
        message = Message(role="user", parts=(Text(tag="state", text=text),))
        names = {
            "sample_id": f"s{number}",
            "task_id": f"t{number}",
            "trajectory_id": f"r{number}",
            "host": "localhost",
            "prompt_config": "",
        }
        return StepSample(
            **names,
            kind="action",
            step=1,
            split="train",
            messages=(message,),
            target_text=target,
            action_span=(10, len(target) - 1),
            prompt_indices=(),
        )

    letters = "".join(
        chr(97 + int(code))
        for code in torch.randint(0, 26, (size - policy.prompt_length(record("").messages),))
    )
    state = make_state(record(letters), Path(), policy, prompt_budget=size, response_budget=len(target) + 1)
    if isinstance(state, str):
        raise ValueError(f"step: the state cannot be trained on: {state}")
    return state


def step(
    size: int = 1500, responses: Sequence[int] = (32, 64), num_groups: int = 4, n: int = 8, *, repeats: int
) -> Iterator[Line]:
    """Compare a whole RL step with the same step by `generate` and a sequence an answer.

    Random rollouts never parse, so all groups are rejected and retained: n rollouts and the target are
    scored, the reference scores the rollouts, and all of them are in the update.
    """
    policy, parameters = build("attn")
    states = [step_state(policy, number, size) for number in range(num_groups)]
    ranks = Ranks(0, 1, DEVICE)
    tokens: list[float] = []

    def ours(config: rl.StepConfig) -> None:
        values, _ = rl.rl_step(
            policy, ranks, states, Optimizer(parameters, ranks, lambda step: 0.0), config, step=0, position=0
        )
        if values["updates"] != 1 or values["retained"] != num_groups:
            raise ValueError(f"step: expected one update on {num_groups} rejected groups, found {values}")
        tokens.append(values["response_tokens"])

    def plain(config: rl.StepConfig) -> None:
        group = size + (n + 1) * max(
            config.response_budget, len(states[0].target_ids)
        )  # a group a batch: larger ones are slower
        scores = patch.object(policy, "response_logprobs", lambda pack: separate(policy, pack))
        with patch.object(rl, "sample", generate), scores:
            ours(replace(config, token_budget=group))

    for response in responses:
        config = rl.StepConfig(
            train_batch=num_groups,
            mini_batch=num_groups,
            num_rollouts=n,
            max_generation_batches=1,
            response_budget=response,
        )
        tokens.clear()
        ours(config)
        measured = compare(lambda config=config: ours(config), lambda config=config: plain(config), repeats)
        sampled = {"num_groups": num_groups, "mean_sampled_tokens": round(statistics.mean(tokens), 1)}
        yield line(
            "step", size, response, n, n * (size + response) / (size + n * response), {**measured, **sampled}
        )


BENCHMARKS: dict[str, Callable[..., Iterator[Line]]] = {
    "sampler": sampler,
    "update": update,
    "memory": memory,
    "sft": sft,
    "step": step,
}


def run(name: str, pairs: int) -> None:
    """Print one JSON line a measurement.

    `wall_s` is the time since the line before it, checks and both sides included.
    """
    start = time.perf_counter()
    for result in BENCHMARKS[name](repeats=pairs):
        print(json.dumps({**result, "wall_s": round(time.perf_counter() - start, 1)}), flush=True)
        start = time.perf_counter()
