"""The study: its stages fit the scripts, run once, go on where they stopped, and read no held-out task before the evaluations."""

import json
import sys
from pathlib import Path

import pytest

import collect
import evaluate
import mine
import train_rl
import train_sft
from rmsweb.runlog import parse_config

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


@pytest.mark.parametrize("stage", [stage for stage in study.stages(0, OUT) if stage.command[0] in CONFIGS], ids=lambda stage: stage.name)
def test_commands_fit_their_scripts(stage: study.Stage) -> None:
    """Every flag exists and every value is allowed."""
    parse_config(CONFIGS[stage.command[0]], [part.replace("URL", "http://127.0.0.1:1") for part in stage.command[1:]], prog=stage.name, description="")


def test_stages_read_only_what_they_need_and_no_held_out_task() -> None:
    """A stage needs earlier stages, every folder in its command is its own or needed, and only the evaluations name the held-out split."""
    earlier: set[str] = set()
    for stage in study.stages(3, OUT):
        assert set(stage.needs) <= earlier
        read = {part.removeprefix(f"{OUT}/").split("/")[0] for part in stage.command if part.startswith(f"{OUT}/")}
        assert read - {stage.name} == set(stage.needs)
        assert ("held-out" in " ".join(stage.command)) == (stage.name in study.POLICIES or stage.name == "tasks")
        earlier.add(stage.name)
    assert set(study.POLICIES) <= earlier


def stage(name: str, out: Path, code: str, *needs: str) -> study.Stage:
    return study.Stage(name, ("-c", f"import pathlib, sys; p = pathlib.Path({str(out / name)!r}); p.mkdir(exist_ok=True); {code}"), needs)


def test_a_stage_runs_once_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A finished stage is not run again, a failed one gets --resume, and a changed one takes those that need it along."""
    count = "f = p / 'count'; f.write_text(str(int(f.read_text()) + 1) if f.exists() else '1')"
    first, second = stage("a", tmp_path, count), stage("b", tmp_path, f"{count}; (p / 'config.json').touch(); sys.exit('--resume' not in sys.argv)", "a")
    with pytest.raises(SystemExit):
        study.run_stages([first, second], tmp_path, "")
    seconds = study.run_stages([first, second], tmp_path, "")
    assert set(seconds) == {"a", "b"}
    assert ((tmp_path / "a/count").read_text(), (tmp_path / "b/count").read_text()) == ("1", "2")
    changed = stage("a", tmp_path, f"{count}; 0")
    with pytest.raises(SystemExit):  # starts afresh, without --resume
        study.run_stages([changed, second], tmp_path, "")
    assert ((tmp_path / "a/count").read_text(), (tmp_path / "b/count").read_text()) == ("1", "1")


def test_the_table_pools_the_seeds() -> None:
    """Columns are the seeds and all of them together; a difference is paired by task over the runs of all seeds."""
    runs = {"base": [0, 0], "sft": [1, 0], "rl": [1, 1], "sft-mined": [1, 0], "rl-no-anchor": [1, 1]}
    results = [{"seed": seed, "outcomes": {name: {"t0": outcome, "t1": outcome} for name, outcome in runs.items()}} for seed in (0, 1)]
    text = "\n".join(study.markdown(results))
    assert "| SFT | 50.0 | 50.0 | 50.0 |" in text
    assert "| SFT + RL − SFT | +50.0 (+50.0 to +50.0) | +50.0 (+50.0 to +50.0) | +50.0 (+50.0 to +50.0) | shows |" in text
    assert study.pooled(results, "sft") == {"t0": [True, False, True, False], "t1": [True, False, True, False]}


def test_readme_shows_the_committed_results() -> None:
    """Where results are committed, their table stands in README.md as --table prints it."""
    results = study.load_results()
    assert not results or "\n".join(study.markdown(results)) in (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert all({"commit", "date", "seconds", "policies"} <= json.loads(json.dumps(item)).keys() for item in results)
