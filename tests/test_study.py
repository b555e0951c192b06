"""Laws of the study: stages fit the scripts, run once, go on where they stopped, keep the splits apart."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import collect
import evaluate
import mine
import train_rl
import train_sft
from rmsweb.config import parse_config

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import study

OUT = Path("runs/study/seed0")
CONFIGS = {
    "collect.py": collect.Config,
    "mine.py": mine.Config,
    "evaluate.py": evaluate.Config,
    "train_sft.py": train_sft.Config,
    "train_rl.py": train_rl.Config,
}


@pytest.mark.parametrize(
    "stage",
    [stage for stage in study.Plan(0, OUT).stages() if stage.command[0] in CONFIGS],
    ids=lambda stage: stage.name,
)
def test_commands_fit_their_scripts(stage: study.Stage) -> None:
    """Every flag exists and every value is allowed."""
    parse_config(
        CONFIGS[stage.command[0]],
        [part.replace("URL", "http://127.0.0.1:1") for part in stage.command[1:]],
        prog=stage.name,
        description="",
    )


def test_stages_read_only_what_they_need_and_no_held_out_task() -> None:
    """A stage reads its own and needed folders alone, and only evaluations name the held-out split."""
    earlier: set[str] = set()
    for stage in study.Plan(3, OUT).stages():
        assert set(stage.needs) <= earlier
        read = {
            Path(part).relative_to(folder).parts[0]
            for part in stage.command
            for folder in (OUT, OUT.parent / "shared")
            if part.startswith(f"{folder}/")
        }
        assert read - {stage.name} == set(stage.needs)
        assert ("held-out" in " ".join(stage.command)) == (
            stage.name in study.POLICIES or stage.name == "tasks"
        )
        earlier.add(stage.name)
    assert set(study.POLICIES) <= earlier


def test_seeds_share_the_tasks_and_the_teachers_runs_alone() -> None:
    """The stages of SHARED are the same for two seeds, and no other stage is."""
    first, second = (study.Plan(seed, OUT.with_name(f"seed{seed}")).stages() for seed in (0, 1))
    assert {ours.name for ours, other in zip(first, second, strict=True) if ours == other} == set(
        study.SHARED
    )


def stage(name: str, out: Path, code: str, *needs: str) -> study.Stage:
    return study.Stage(
        out / name,
        ("-c", f"import pathlib, sys; p = pathlib.Path({str(out / name)!r}); p.mkdir(exist_ok=True); {code}"),
        needs,
    )


def test_a_stage_runs_once_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A finished stage is kept, a failed one resumes, a changed one runs again with those that need it."""
    count = "f = p / 'count'; f.write_text(str(int(f.read_text()) + 1) if f.exists() else '1')"
    first, second = (
        stage("a", tmp_path, count),
        stage(
            "b", tmp_path, f"{count}; (p / 'config.json').touch(); sys.exit('--resume' not in sys.argv)", "a"
        ),
    )
    with pytest.raises(SystemExit):
        study.run_stages([first, second], "")
    seconds = study.run_stages([first, second], "")
    assert set(seconds) == {"a", "b"}
    assert ((tmp_path / "a/count").read_text(), (tmp_path / "b/count").read_text()) == ("1", "2")
    changed = stage("a", tmp_path, f"{count}; 0")
    with pytest.raises(SystemExit):  # starts afresh, without --resume
        study.run_stages([changed, second], "")
    assert ((tmp_path / "a/count").read_text(), (tmp_path / "b/count").read_text()) == ("1", "1")


def test_the_table_pools_the_seeds() -> None:
    """Columns are the seeds and all together; a difference is paired by task over the runs of all seeds."""
    runs = {
        "base": [0, 0],
        "sft": [1, 0],
        "rl": [1, 1],
        "sft-mined": [1, 0],
        "rl-no-anchor": [1, 1],
        "rl-mined": [1, 1],
    }
    results = [
        {"seed": seed, "outcomes": {name: {"t0": outcome, "t1": outcome} for name, outcome in runs.items()}}
        for seed in (0, 1)
    ]
    text = "\n".join(study.markdown(results))
    assert "| SFT | 50.0 | 50.0 | 50.0 |" in text
    assert f"| SFT + RL against SFT | {' | '.join(['+50.0 (+50.0 to +50.0)'] * 3)} | shows |" in text
    assert study.pooled(results, "sft") == {
        "t0": [True, False, True, False],
        "t1": [True, False, True, False],
    }


def test_the_details_add_up_the_seeds_and_average_the_steps() -> None:
    """Failures are summed over seeds, other figures averaged; a missing figure leaves its cell empty."""
    figures = {"pass3": 0.5, "steps": None, "format_errors": 0.01, "failures": {"evidence": 2}}
    rl = [{"step": 0, "dev_reward": 0.25}, *({"step": step, "kl": step / 100} for step in (1, 20, 21))]
    item = {
        "policies": dict.fromkeys(study.POLICIES, figures),
        "rl": rl,
        "seconds": {"tasks": 1.4, "collect": 100.0},
    }
    text = "\n".join(study.details([item | {"seed": seed} for seed in (0, 1)]))
    assert "| failed runs: evidence | 4 | 4 | 4 | 4 | 4 | 4 |" in text
    assert "| turns of a successful run |  |  |  |  |  |  |" in text
    assert "| unusable answers, % of turns | 1.0 | 1.0 | 1.0 | 1.0 | 1.0 | 1.0 |" in text
    assert "| kl | 0.105 | 0.210 |  |  |  |" in text
    assert text.endswith("| total | 101 | 101 |")


@pytest.mark.parametrize("tables", [study.markdown, study.details])
def test_documents_show_the_committed_results(
    tables: Callable[[list[dict[str, Any]]], Iterator[str]],
) -> None:
    """Where results are committed, docs/study.md has their tables as --table and --details print them."""
    results = study.load_results()
    document = Path(__file__).parent.parent / "docs" / "study.md"
    assert not results or "\n".join(tables(results)) in document.read_text(encoding="utf-8")
    assert all({"commit", "date", "seconds", "policies"} <= item.keys() for item in results)
