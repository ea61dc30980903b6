"""A run where little is as it is at home: no network, no home, no terminal, another locale, another file system."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_world import write_recipe, write_rows

from rlhf.stages.artifact import BESIDE, Artifact

RLHF = str(Path(sys.executable).parent / "rlhf")
WORDS = ("Füchse", "狐狸", "crows", "bears", "owls", "ducks", "goats", "hens")
ODD: dict[str, Any] = {
    "HF_HUB_OFFLINE": "1",
    "HOME": "/dev/null/home",  # nothing can be made below a file, by root neither
    "TERM": "dumb",
    "LC_ALL": "C",
    "LANG": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder on another file system where there is one, with blanks and other signs in its name."""
    memory = Path("/dev/shm")
    there = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="a läuft 跑 '$HOME' ", dir=there))
    yield folder
    shutil.rmtree(folder)


def rlhf(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command in an odd home: no terminal, and nothing that could be read from stdin."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.run(
        [RLHF, *words], cwd=cwd, env=kept | ODD | more, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
        errors="replace", timeout=300, check=False, start_new_session=True,
    )  # fmt: skip


def tiny(folder: Path, **more: Any) -> None:
    """A recipe of all four stages that takes seconds, and its rows."""
    write_rows(folder / "text ä.jsonl", [{"text": f"All about {word}: {word} are {word}. " * 8} for word in WORDS])
    write_rows(folder / "demonstrations.jsonl", [{"prompt": f"Who? {w}", "response": f"{w} it is."} for w in WORDS])
    write_rows(
        folder / "rankings.jsonl", [{"prompt": f"Who? {w}", "chosen": f"{w}.", "rejected": "No."} for w in WORDS]
    )
    write_rows(folder / "prompts.jsonl", [{"prompt": f"Who? {word}"} for word in WORDS])
    write_recipe(
        folder,
        eval_share=0.3,
        pretrain={
            "data": "text ä.jsonl", "vocab_size": 300, "hidden_size": 16, "num_layers": 1, "num_heads": 2,
            "context_length": 64, "num_steps": 2, "global_batch_size": 2,
        },
        sft={"data": "demonstrations.jsonl", "global_batch_size": 4, "max_length": 64},
        reward={"data": "rankings.jsonl", "global_batch_size": 4, "max_length": 64},
        ppo={
            "data": "prompts.jsonl", "num_iterations": 1, "rollout_batch_size": 4, "max_prompt_length": 40,
            "max_new_tokens": 8, "num_minibatches": 1,
        },
        **more,
    )  # fmt: skip


def test_a_whole_run_without_network_home_terminal_or_locale(place: Path) -> None:
    tiny(place)
    done = rlhf("run", "recipe.yaml", "--run-dir", "run é", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    run = place / "run é"
    stages = json.loads((run / "summary.json").read_text(encoding="utf-8"))["stages"]
    assert [entry["status"] for entry in stages.values()] == ["done"] * 4
    for entry in stages.values():
        folder = run / entry["folder"]
        sealed = {Path(name).parts[0] for name in Artifact(folder).manifest["files"]}
        assert set(os.listdir(folder)) <= sealed | set(BESIDE)  # a stage writes nothing that is not known
        assert not list(folder.rglob("*.bin")) + list(folder.rglob("*.pt")) + list(folder.rglob("*.pkl"))
    assert {path.name for path in place.iterdir()} == {
        "recipe.yaml", "text ä.jsonl", "demonstrations.jsonl", "rankings.jsonl", "prompts.jsonl", "run é",
    }  # fmt: skip

    assert (run / "report.html").is_file()
    for words in (["verify"], ["status"], ["clean"]):
        done = rlhf(*words, "run é", cwd=place)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    done = rlhf("run", "recipe.yaml", "--run-dir", "run é", "--verify", cwd=place)
    assert done.stdout.count(": reuse ") == 4, done.stdout + done.stderr


def test_a_stage_in_two_processes_of_its_own_finds_its_way_too(place: Path) -> None:
    config = {"distributed_type": "MULTI_GPU", "num_processes": 2, "num_machines": 1, "mixed_precision": "no"}
    (place / "accelerate ä.yaml").write_text(json.dumps(config | {"use_cpu": True}))
    tiny(place, accelerate_config="accelerate ä.yaml")
    done = rlhf("run", "recipe.yaml", "--run-dir", "run é", "--to", "pretrain", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    [sealed] = (place / "run é").glob("pretrain-*")
    assert Artifact(sealed).manifest["made_with"]["processes"] == 2


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_a_closed_stream_ends_no_command(place: Path, closed: str) -> None:
    tiny(place)
    command = f'exec "$0" plan recipe.yaml {closed}<&-' if closed == "0" else f'exec "$0" plan recipe.yaml {closed}>&-'
    done = subprocess.run(
        ["sh", "-c", command, RLHF], cwd=place, env=os.environ | ODD, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_done_ends_well_though_nobody_reads_on(tmp_path: Path, stream: int, unbuffered: str) -> None:
    """As in `rlhf run RECIPE | head -1`: whatever is printed after that goes nowhere."""
    program = """
import os, sys
from rlhf.pipeline import streams

streams.prepare()
for number in range(100):
    print(number, file=sys.stdout if sys.argv[1] == "1" else sys.stderr, flush=True)
os.system(f"echo said by another >&{sys.argv[1]} || echo failed > failed")
print("x" * 100_000, file=sys.stdout if sys.argv[1] == "1" else sys.stderr)
print("done", file=open("done", "w"))
"""
    reads, writes = os.pipe()
    os.close(reads)
    given = {"stdout": writes} if stream == 1 else {"stderr": writes}
    done = subprocess.run(
        [sys.executable, "-c", program, str(stream)], cwd=tmp_path, check=False, timeout=100,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, **given,
    )  # fmt: skip
    os.close(writes)
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_a_name_that_no_file_can_have_is_refused(place: Path) -> None:
    done = rlhf("status", "a" * 300, cwd=place)
    assert done.returncode == 2
    assert done.stderr.endswith("a: File name too long; name something shorter (--debug shows where)\n"), done.stderr
    assert len(done.stderr) < 300


def test_an_id_of_the_hub_is_refused_without_a_network_and_without_waiting(place: Path) -> None:
    tiny(place)
    done = rlhf("run", "recipe.yaml", "pretrain.data=owner/name", "--run-dir", "run é", cwd=place)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: owner/name: neither a local file or folder nor loadable from the hub" in done.stderr
    assert not (place / "run é").exists()
