"""Check that the tests of the algorithm's core notice mistakes.

A fixed list holds wrong constants, comparisons, masks, clips and denominators; each must fail a test.

`python scripts/mutants.py [--jobs 2] [--only TEXT]` copies the package and the tests to temporary folders,
applies one mutant at a time, and runs the test file of its module with the `quick` hypothesis profile. Exit
code 0: all killed; 1: a mutant survived; 2: a mutant no longer applies (mend the list).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place; `old` occurs exactly once in the file of rmsweb.<module>."""

    module: str  # dotted: its tests are tests/test_<module with underscores>.py
    old: str
    new: str

    @property
    def file(self) -> Path:
        return Path("rmsweb", *self.module.split(".")).with_suffix(".py")

    @property
    def tests(self) -> str:
        return f"test_{self.module.replace('.', '_')}.py"


LIST = {
    "salvage.reward": [
        # levels and rounding
        ("EXACT, CORE, TYPE, WRONG = 1.0, 0.7, 0.3, 0.0", "EXACT, CORE, TYPE, WRONG = 1.0, 0.75, 0.3, 0.0"),
        ("EXACT, CORE, TYPE, WRONG = 1.0, 0.7, 0.3, 0.0", "EXACT, CORE, TYPE, WRONG = 1.0, 0.7, 0.25, 0.0"),
        ("EXACT, CORE, TYPE, WRONG = 1.0, 0.7, 0.3, 0.0", "EXACT, CORE, TYPE, WRONG = 0.9, 0.7, 0.3, 0.0"),
        ("EXACT, CORE, TYPE, WRONG = 1.0, 0.7, 0.3, 0.0", "EXACT, CORE, TYPE, WRONG = 1.0, 0.7, 0.3, 0.1"),
        ("round(2 * earned / total, DIGITS)", "2 * earned / total"),
        ("DIGITS = 9", "DIGITS = 3"),
        # rules
        ('Rule(keys={"index": "equal"}, secondary=("while_holding_ctrl",))', 'Rule(keys={"index": "equal"}, ignored=("while_holding_ctrl",))'),
        ('keys={"down": "equal", "frame_element_index": "equal"}', 'keys={"frame_element_index": "equal"}'),
        ('keys={"down": "equal", "frame_element_index": "equal"}', 'keys={"down": "equal"}'),
        ('secondary=("num_pages",), weight=0.5', 'secondary=("num_pages",)'),
        ('"input_text": Rule(keys={"index": "equal", "text": "text"}', '"input_text": Rule(keys={"index": "equal", "text": "equal"}'),
        ('"input_text": Rule(keys={"index": "equal", "text": "text"}', '"input_text": Rule(keys={"text": "text"}'),
        ('"search_engine": Rule(keys={"query": "text"}, ignored=("engine",))', '"search_engine": Rule(keys={"query": "text"}, secondary=("engine",))'),
        ('"done": Rule(secondary=("text", "files_to_display"))', '"done": Rule(keys={"text": "text"}, secondary=("files_to_display",))'),
        ('"select_dropdown_option": Rule(keys={"index": "equal", "text": "text"})', '"select_dropdown_option": Rule(keys={"text": "text"})'),
        ('"execute_js": Rule(keys={"code": "equal"})', '"execute_js": Rule(keys={"code": "text"})'),
        ('"send_keys": Rule(keys={"keys": "equal"})', '"send_keys": Rule(keys={"keys": "text"})'),
        ('"go_back": Rule(weight=0.5)', '"go_back": Rule(weight=1.0)'),
        ('"read_file": Rule(keys={"file_name": "equal"}, weight=0.5)', '"read_file": Rule(keys={"file_name": "equal"})'),
        ("weight: float = 1.0", "weight: float = 0.75"),
        # comparisons
        ("return False if value is None or value in ([], ()) else value", "return value"),
        ("if index is not None and index not in prompt_indices and not is_page:", "if index is not None and index in prompt_indices and not is_page:"),
        ('return WRONG, f"index {invalid} is not in the prompt"', 'return TYPE, f"index {invalid} is not in the prompt"'),
        (" and not is_page:", ":"),
        ('return (TYPE, "success flag missing") if None in flags', 'return (WRONG, "success flag missing") if None in flags'),
        ('else (WRONG, "success flag mismatches")', 'else (TYPE, "success flag mismatches")'),
        ('"query differs": (CORE,', '"query differs": (EXACT,'),
        ('"date differs": (TYPE,', '"date differs": (CORE,'),
        ('"other": (TYPE,', '"other": (WRONG,'),
        ('if comparison == "text" and texts_similar(predicted, target):', 'if comparison == "text":'),
        ("if predicted.name != target.name:", "if False:"),
        ("if found < level:", "if found > level:"),
        ("if level == EXACT and other:", "if other:"),
        # soft-F1
        ("best[t - 1][p - 1] + weights[t - 1] * level", "best[t - 1][p - 1] + level"),
        ("best[t - 1][p - 1] + weights[t - 1] * level", "best[t - 1][p] + weights[t - 1] * level"),
        ("best[t][p] = max(best[t - 1][p], best[t][p - 1],", "best[t][p] = max(best[t - 1][p],"),
        ("return pairs[::-1]", "return pairs"),
        ("round(2 * earned / total, DIGITS)", "round(earned / sum(weights), DIGITS)"),
        ("earned = sum(part.weight * part.level for part in components)", "earned = sum(part.level for part in components)"),
        ('return Reward(WRONG, failure=f"no valid answer: {found.reason}")', 'return Reward(TYPE, failure=f"no valid answer: {found.reason}")'),
    ],
    "salvage.gating": [
        ("MIN_STD = 0.10", "MIN_STD = 0.12"),
        ("MIN_STD = 0.10", "MIN_STD = 0.099"),
        ("MIN_COMPETENT = 0.55", "MIN_COMPETENT = 0.5"),
        ("MIN_COMPETENT = 0.55", "MIN_COMPETENT = 0.6"),
        ("ADVANTAGE_EPS = 1e-6", "ADVANTAGE_EPS = 1e-4"),
        ("/ (len(values) - 1))", "/ len(values))"),
        ("if len(values) < 2 or max(values) == min(values):", "if len(values) < 2:"),
        ("if len(values) < 2 or max(values) == min(values):", "if max(values) == min(values) and len(values) > 1:"),
        ("has_contrast = std >= min_std and std > 0", "has_contrast = std > min_std"),
        ("has_contrast = std >= min_std and std > 0", "has_contrast = std >= min_std"),
        ("is_competent = best >= ", "is_competent = best > "),
        ("sample_std(values), max(values)", "sample_std(values), min(values)"),
        ("accepted = has_contrast and (is_competent or min_competent is None)", "accepted = has_contrast or is_competent"),
        ("accepted = has_contrast and (is_competent or min_competent is None)", "accepted = has_contrast"),
        ("(value - mean) / (std + ADVANTAGE_EPS) if accepted else 0.0", "(value - mean) / (std + ADVANTAGE_EPS)"),
        ("(value - mean) / (std + ADVANTAGE_EPS) if accepted else 0.0", "value / (std + ADVANTAGE_EPS) if accepted else 0.0"),
        ("(value - mean) / (std + ADVANTAGE_EPS) if accepted else 0.0", "(value - mean) if accepted else 0.0"),
        ("num_accepted < train_batch and", "num_accepted <= train_batch and"),
        ("and num_batches < max_batches", "and num_batches <= max_batches"),
        ("mini_batch * (min(num_rejected, train_batch) // mini_batch)", "min(num_rejected, train_batch)"),
        ("mini_batch * (min(num_rejected, train_batch) // mini_batch)", "mini_batch * (num_rejected // mini_batch)"),
        ("tuple(passed[:train_batch])", "tuple(passed)"),
        ("tuple(rejected[:kept])", "tuple(rejected[len(rejected) - kept :])"),
        ("mini_batch=mini_batch) if salvage else 0", "mini_batch=mini_batch)"),
        ("order = selection.accepted + selection.retained", "order = selection.accepted"),
        ("count = math.ceil(len(order) / mini_batch)", "count = max(1, len(order) // mini_batch)"),
        ("[order[first::count] for first in range(count)]", "[order[first * mini_batch : (first + 1) * mini_batch] for first in range(count)]"),
        ('return "accepted" if self.has_contrast else "no contrast"', 'return "accepted"'),
    ],
    "salvage.objective": [
        ("CLIP_LOW, CLIP_HIGH = 0.2, 0.32", "CLIP_LOW, CLIP_HIGH = 0.2, 0.2"),
        ("CLIP_LOW, CLIP_HIGH = 0.2, 0.32", "CLIP_LOW, CLIP_HIGH = 0.32, 0.32"),
        ("SALVAGE_WEIGHT = 0.10", "SALVAGE_WEIGHT = 0.1001"),
        ("KL_WEIGHT = 1e-3", "KL_WEIGHT = 1e-2"),
        ("LOG_RATIO_CLAMP = 20.0", "LOG_RATIO_CLAMP = 10.0"),
        ("KL_CLAMP = 10.0", "KL_CLAMP = 20.0"),
        ("DUAL_CLIP = 3.0", "DUAL_CLIP = 2.0"),
        # weights, masks, denominators
        ("mask = answer.mask.bool()", "mask = torch.ones_like(answer.mask.bool())"),
        # end-of-turn left out
        ("mask = answer.mask.bool()", "mask = answer.mask.bool() & (torch.arange(len(answer.mask)) < len(answer.mask) - 1)"),
        ("length = max(int(answer.mask.sum()), 1)", "length = len(answer.mask)"),
        ("share = 1 / (num_groups * length)", "share = 1 / length"),
        ("share = 1 / (num_groups * length)", "share = 1 / (num_groups * num_rollouts * length)"),
        ("share = 1 / (num_groups * num_rollouts * length)", "share = 1 / (num_groups * length)"),
        ("share = 1 / (num_groups * num_rollouts * length)", "share = 1 / (num_rollouts * length)"),
        ("share = 1 / num_tokens", "share = 1 / (num_tokens + 1)"),
        ("torch.where(mask, answer.old.detach().to(dtype), zero)", "answer.old.detach().to(dtype)"),
        ("torch.where(mask, answer.ref.detach().to(dtype), zero)", "answer.ref.detach().to(dtype)"),
        ("pg_weight=weight if answer.accepted else zero", "pg_weight=weight"),
        ("kl_weight=weight,", "kl_weight=weight if answer.accepted else zero,"),
        ("nll_weight = zero if answer.accepted else weight", "nll_weight = weight"),
        ("new = torch.where(used, new, torch.zeros_like(new))", "new = new * used"),
        ("new = torch.where(used, new, torch.zeros_like(new))", "new = new + 0"),
        # surrogate and KL
        ("torch.exp(torch.clamp(new - old, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))", "torch.exp(new - old)"),
        ("torch.exp(torch.clamp(new - old,", "torch.exp(torch.clamp(old - new,"),
        ("torch.clamp(ratio, 1 - config.clip_low, 1 + config.upper_clip)", "torch.clamp(ratio, min=1 - config.clip_low)"),
        ("torch.clamp(ratio, 1 - config.clip_low, 1 + config.upper_clip)", "torch.clamp(ratio, max=1 + config.upper_clip)"),
        ("torch.clamp(ratio, 1 - config.clip_low, 1 + config.upper_clip)", "torch.clamp(ratio, 1 - config.upper_clip, 1 + config.clip_low)"),
        ("torch.maximum(free, bounded), bounded > free", "torch.minimum(free, bounded), bounded > free"),
        ("torch.maximum(free, bounded), bounded > free", "bounded, bounded > free"),
        ("torch.maximum(free, bounded), bounded > free", "torch.maximum(free, bounded), bounded >= free"),
        ("limit = config.dual_clip * advantage.abs()", "limit = config.dual_clip * advantage"),
        ("return torch.minimum(terms, limit), clipped", "return terms, clipped"),
        ("difference = ref - new", "difference = new - ref"),
        ("d = torch.clamp(difference, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)", "d = difference"),
        ("k3 = torch.expm1(d) - d", "k3 = torch.expm1(d)"),
        ("k3 = torch.expm1(d) - d", "k3 = 0.5 * d * d"),
        ("k3 = torch.expm1(d) - d", "k3 = torch.exp(d) - d - 1"),
        ("return torch.clamp(k3, max=KL_CLAMP),", "return k3,"),
        ("| (k3 > KL_CLAMP)", "& (k3 > KL_CLAMP)"),
        # the sum and the statistics
        ("config.salvage_weight * sums", "sums"),
        ("config.kl_weight * sums", "sums"),
        ('"nll": (tokens.nll_weight * -new)', '"nll": (tokens.nll_weight * new)'),
        ("(clipped & in_pg).sum()", "clipped.sum()"),
        ("(muted & in_kl).sum()", "muted.sum()"),
        ("torch.where(in_kl, tokens.old - new, 0.0).sum()", "(tokens.old - new).sum()"),
    ],
    "salvage.dynamics": [
        ('"competence_rejected_after_std_frac": total["not competent"]', '"competence_rejected_after_std_frac": total["neither"]'),
        ('"std_rejected_frac": (total["no contrast"] + total["neither"])', '"std_rejected_frac": total["no contrast"]'),
        ('ratio("clipped", "pg_tokens")', 'ratio("clipped", "kl_tokens")'),
        ("for correct, wrong in groups if wrong]", "for correct, wrong in groups if len(wrong) > 1]"),
        ('"gap": correct - wrong', '"gap": wrong - correct'),
        ("means = [-float(values.mean())", "means = [-float(values.sum())"),
    ],
    "similarity": [
        ("SIMILAR_TEXT = 0.8", "SIMILAR_TEXT = 0.81"),
        ("SIMILAR_TEXT = 0.8", "SIMILAR_TEXT = 0.75"),
        ("return x.guarded == y.guarded and", "return"),
        (">= SIMILAR_TEXT", "> SIMILAR_TEXT"),
        ('content=tuple(word for word in words if word not in _STOP_WORDS)', 'content=tuple(words)'),
        ("if _date_contradicted(a, b):", "if False:"),
        ("if not _TRACKING.fullmatch(key)", "if True"),
    ],
}  # fmt: skip


def run(mutant: Mutant) -> tuple[str, str]:
    """Apply a mutant in a copy of the project and run its tests.

    Returns: "killed", "survived" or "does not apply"; and the last lines of the test run.
    """
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    if (count := source.count(mutant.old)) != 1:
        return "does not apply", f"{mutant.old!r} occurs {count} times in {mutant.file}, expected once"
    with tempfile.TemporaryDirectory(prefix="rmsweb-mutant-") as name:
        copy = Path(name)
        ignore = shutil.ignore_patterns("__pycache__", "base", "static", "sites", "pages")
        shutil.copytree(ROOT / "rmsweb", copy / "rmsweb", ignore=ignore)
        (copy / "tests").mkdir()
        for file in ("conftest.py", "strategies.py", mutant.tests):
            shutil.copy(ROOT / "tests" / file, copy / "tests" / file)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / mutant.file).write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        pytest = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
        environment = os.environ | {
            "HYPOTHESIS_PROFILE": "quick",
            "PYTHONPATH": name,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [*pytest, f"tests/{mutant.tests}"]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a test failed; anything else is no verdict on the mutant
        return "does not apply", "\n".join((done.stdout + done.stderr).splitlines()[-5:])
    return ("survived" if done.returncode == 0 else "killed"), "\n".join(done.stdout.splitlines()[-3:])


def main() -> int:
    """Run the list in parallel and print one line a mutant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="test runs at a time (default 2)")
    parser.add_argument("--only", default="", help="only mutants whose module or text contains this")
    options = parser.parse_args()
    mutants = [Mutant(module, old, new) for module, pairs in LIST.items() for old, new in pairs]
    mutants = [mutant for mutant in mutants if options.only in f"{mutant.module} {mutant.old} {mutant.new}"]
    start, verdicts = time.monotonic(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, (mutant, (verdict, detail)) in enumerate(
            zip(mutants, pool.map(run, mutants), strict=True), 1
        ):
            verdicts.append(verdict)
            print(
                f"[{number}/{len(mutants)}] {verdict}: {mutant.module}: {mutant.old!r} -> {mutant.new!r}",
                flush=True,
            )
            if verdict != "killed":
                print(detail, flush=True)
    print(f"{verdicts.count('killed')} of {len(mutants)} mutants killed in {time.monotonic() - start:.0f} s")
    return 2 if "does not apply" in verdicts else int("survived" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
