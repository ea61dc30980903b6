"""Every `rlhf` command in the blocks of the README and of docs/ runs, on tiny models and files that stand in for those
that it names."""

import csv
import glob
import json
import re
import shutil
from pathlib import Path
from typing import Any

import forking
import pyarrow
import pyarrow.parquet
import pytest
from docs_world import PAGES, ROOT, blocks, commands, parse, read

from rlhf.pipeline.recipe import load_recipe

SMALL = {
    "demo": (
        *("pretrain.hidden_size=16", "pretrain.num_layers=1", "pretrain.num_heads=2", "pretrain.num_steps=2"),
        *("pretrain.eval_every=2", "pretrain.data.options.num=100", "sft.data.options.num=40", "sft.num_epochs=1"),
        *("reward.data.options.num=20", "reward.num_epochs=1", "reward.max_new_tokens=8", "ppo.max_new_tokens=8"),
        *("ppo.num_iterations=1", "ppo.rollout_batch_size=4", "ppo.num_eval_samples=1", "ppo.eval_data=asked.jsonl"),
    ),
    "shakespeare": (
        *("pretrain.hidden_size=16", "pretrain.num_heads=2", "pretrain.num_layers=1", "pretrain.block_size=16"),
        *("pretrain.num_steps=2", "pretrain.global_batch_size=2", "pretrain.sample_length=4"),
    ),
}
"""What makes minutes a second, by the recipe that a name begins with."""
STAND_INS = {
    "Qwen/Qwen3-0.6B": "base", "path/to/sft": "base", "path/to/reward": "models/helpful",
    "trl-lib/tldr": "prompts.jsonl", "num_iterations: 1953": "num_iterations: 1",
    "rollout_batch_size: 512": "rollout_batch_size: 4",
    "max_new_tokens: 53": "max_new_tokens: 8\n  max_prompt_length: 64", "num_processes=4": "num_processes=2",
}  # fmt: skip
"""What stands in for models, data and sizes that a page names."""
LAUNCHED = {"num_processes=2": 2, "accelerate_config=accelerate_config.yaml": 1}
"""Settings with which stages are launched, in so many processes."""
PARSED_ALONE = {
    r"run demo_rounds": "tests/test_rounds_end_to_end.py runs it",
    r"run (hh|tldr)": "data and models are on the hub; tests/recipes/test_hub_recipes.py has stand-ins",
    r"estimate": "it takes long; tests/pipeline/test_pipeline_estimate.py runs it",
    r"run my-run.yaml": "tests/test_strangers_path.py runs what init wrote",
    r"run mine.yaml accelerate_config=fsdp2": "a CPU has no use for it; tests/stages/test_sharding.py shards",
    r"rank \S+( --target 2)?( --tokens --url \S+)?$": "it serves a page; tests/pipeline/test_rank_cli.py does that",
    r"judge .* --endpoint": "it asks a server; tests/pipeline/test_sample_cli.py has one",
    r"export .* --push-to-hub": "it asks the hub; tests/stages/test_export.py has a stand-in",
}
"""Commands whose words are parsed, and whose recipe is read, but which are not run: why."""


def rlhf(*words: str, cwd: Path, typed: str = "", charts: bool = False) -> forking.Command:
    done = forking.rlhf(*words, cwd=cwd, typed=typed, charts=charts)
    assert done.returncode == 0, f"rlhf {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with finished runs of the demo and of the README's recipe, and the files that pages name."""
    home = tmp_path_factory.mktemp("docs")
    heroes = ("fox", "cat", "dog", "bear", "duck", "goat", "king", "wolf")
    write(home / "demonstrations.jsonl", [{"prompt": f"Who is {h}?", "response": f"A {h}."} for h in heroes])
    write(home / "rankings.jsonl", [
        {"prompt": f"Who is {h}?", "responses": [f"A {h}.", "No.", "Who?"], "ranks": [1, 2, 2]} for h in heroes
    ])  # fmt: skip
    write(home / "prompts.jsonl", [{"prompt": f"Who is {h}?", "answer": h} for h in heroes])
    write(home / "test.jsonl", [{"prompt": "Who is fox?"}, {"prompt": "Who is owl?"}])
    votes = [{"question": f"Who is {h}?", "response_j": f"A {h}.", "response_k": "No."} for h in heroes]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(votes), home / "theirs.parquet")
    asked = ("Tell me about a kite and a fox.", "Write about a bear and a hat.")
    write(home / "asked.jsonl", [{"prompt": prompt} for prompt in asked])
    write(home / "grade_school.jsonl", [{"question": "2 + 3?", "answer": "5"}])
    (home / "input.txt").write_text("To be, or not to be: that is the question. " * 30)
    shutil.copy(ROOT / "accelerate_config.yaml", home)
    with (home / "posts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["title", "body", "votes"], ["Who?", "A fox.", "3"]])
    for block in blocks("python"):
        if found := re.match(r"# (\w+\.py)", block.text):
            (home / found[1]).write_text(block.text)
    (home / "my_judges.py").write_text("def helpfulness(prompts, responses):\n    return [len(r) for r in responses]\n")
    rlhf("run", "demo", *SMALL["demo"], cwd=home)
    (home / "base").symlink_to(next(home.glob("runs/demo/sft-*")) / "model")
    (home / "models").mkdir()
    (home / "models" / "helpful").symlink_to(next(home.glob("runs/demo/reward-*")) / "model")
    [mine] = [block.text for block in blocks("yaml") if block.page == "README.md"]
    lengths = "\n  max_length: 64\n  global_batch_size: 4"
    mine = mine.replace("sft:", f"sft:{lengths}").replace("reward:", f"reward:{lengths}\n  model: base")
    small = "num_iterations: 1", "rollout_batch_size: 4", "num_epochs: 1", "max_prompt_length: 64", "max_new_tokens: 8"
    mine = mine.replace("ppo:", "\n  ".join(["ppo:", *small]))
    (home / "mine.yaml").write_text(stood_in(mine))
    [ppo] = [block.text for block in blocks("yaml") if block.page == "docs/from_trl.md"]
    (home / "ppo.yaml").write_text(stood_in(ppo))
    rlhf("run", "mine.yaml", cwd=home)
    for name, run in (("first", "demo"), ("second", "mine")):
        (home / "runs" / name).symlink_to(run)
    return home


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def stood_in(text: str) -> str:
    return re.sub("|".join(map(re.escape, STAND_INS)), lambda found: STAND_INS[found[0]], text)


def commands_of(page: Path) -> list[tuple[list[str], str]]:
    """The words after `rlhf` of each command of ours on a page, and what is typed into it."""
    found = []
    for block in read(page)[0]:
        for words in commands(block) if block.language == "bash" else ():
            typed = "Who is the fox?"
            if "|" in words:  # echo TEXT | rlhf …
                typed, words = words[1], words[words.index("|") + 1 :]
            if words[0] == "rlhf":
                found.append((words[1:], typed))
    return found


def why_not(words: list[str]) -> str | None:
    """Which pattern of PARSED_ALONE the command has."""
    return next((pattern for pattern in PARSED_ALONE if re.match(pattern, " ".join(words))), None)


README, *OTHERS = (page for page in PAGES if commands_of(page))
HAVE_RUN: list[list[str]] = []
"""Commands that need not run once more: those of earlier pages."""


@pytest.mark.parametrize("page", [*OTHERS, README], ids=lambda page: page.stem)  # its last ones leave many results
def test_every_command_of_a_page_runs(home: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for words, typed in commands_of(page):
        if words in HAVE_RUN:
            continue
        HAVE_RUN.append(words)
        if why_not(words):
            _, parameters = parse(words)
            if words[0] == "rank":  # a judge in the place of people, so that what follows has rankings
                rlhf("judge", words[1], "--with", "my_judges:helpfulness", cwd=home)
            if "recipe" in parameters and not parameters["recipe"].startswith("my-run"):
                load_recipe(parameters["recipe"], parameters["overrides"])
            continue
        words = [word for part in map(stood_in, words) for word in (glob.glob(part, root_dir=home) or [part])]
        make_room(home, words)
        small = more(words)
        before = set(home.glob("runs/mine/ppo-*"))
        said = rlhf(*words, *small, cwd=home, typed=f"{typed}\n", charts=words[0] == "report").stderr
        if page is README:  # a question that is piped in is shown, and how far it is after two seconds
            assert re.sub(r".*, \d+\.\d s so far\n", "", said) in ("", f"> {typed}\n")
        for processes in (LAUNCHED[word] for word in words if word in LAUNCHED):  # and not reused
            (new,) = set(home.glob("runs/mine/ppo-*")) - before
            assert json.loads((new / "manifest.json").read_text())["made_with"]["processes"] == processes


def more(words: list[str]) -> tuple[str, ...]:
    """What is added to a command, so that it takes seconds and has something to do."""
    if words[0] == "sample":
        return ("--max-new-tokens", "8")
    if not LAUNCHED.keys().isdisjoint(words):
        return ("--force", "ppo")
    if words[0] in ("run", "plan", "pretrain"):
        return next((small for name, small in SMALL.items() if words[1].startswith(name)), ())
    return ()


def make_room(home: Path, words: list[str]) -> None:
    """Takes away what a command would not write over, which another page made."""
    out = words[2:3] if words[0] == "export" else words[3:4] if words[:2] == ["data", "export"] else []
    out = [f"{words[1]}.yaml"] if words[0] == "init" else out
    for path in (home / name for name in out):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def test_no_exception_is_left_over() -> None:
    met = {why_not(words) for page in PAGES for words, _ in commands_of(page)}
    assert set(PARSED_ALONE) <= met
    named = [path for reason in PARSED_ALONE.values() for path in re.findall(r"tests/[\w/]+\.py", reason)]
    assert [path for path in named if not (ROOT / path).is_file()] == []
