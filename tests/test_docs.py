"""The documentation says what the program does: pages that the code writes, blocks, names of things, and the site.

Its commands are run in tests/test_docs_commands.py.
"""

import ast
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from docs_world import PAGES, ROOT, Block, blocks, commands, inline, options, parse
from pydantic import BaseModel
from torch.distributed.run import get_args_parser
from typer.main import get_command

from rlhf.pipeline.commands import app
from rlhf.pipeline.recipe import Recipe, load_recipe, section_class
from rlhf.stages.artifact import STEPS
from rlhf.stages.settings import meaning

NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def made_by(name: str) -> ModuleType:
    """The program that writes a page."""
    spec = importlib.util.spec_from_file_location(f"make_{name}", ROOT / "docs" / f"make_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["recipes", "data", "commands"])
def test_a_page_that_is_written_by_the_code_is_the_one_that_it_writes(name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == made_by(name).page(), (
        f"run docs/make_{name}.py"
    )


def test_every_setting_is_on_the_page_of_settings_with_what_it_means() -> None:
    shown = {cls for _, cls, _ in made_by("recipes").SECTIONS}
    for cls in set(sections(Recipe)):
        assert cls in shown or any(issubclass(other, cls) for other in shown), cls.__name__
        for name, field in cls.model_fields.items():
            assert len(meaning(field)) > 5, f"{cls.__name__}.{name} has no description"


def sections(kind: Any) -> Iterator[type[BaseModel]]:
    """The classes of settings in a type."""
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from sections(field.annotation)
    for part in typing.get_args(kind):
        yield from sections(part)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//", text), page.name


def test_the_top_pages_are_part_of_the_site_as_they_are(site: Path) -> None:
    assert "The four stages behind ChatGPT-like models" in (site / "index.html").read_text(encoding="utf-8")
    assert 'href="ppo.html#memory"' in (site / "index.html").read_text(encoding="utf-8")
    assert "Choices that differ from what one might expect" in (site / "architecture.html").read_text(encoding="utf-8")


def test_every_block_says_what_it_holds_and_no_output_hides_a_command() -> None:
    for block in blocks():
        assert block.language in {"bash", "yaml", "python", "json", "text", ""}, block
        if block.language in ("text", ""):
            hidden = r"^(?!.*(?:  |: \d))(\$ )?(rlhf|make|pip|accelerate|torchrun|python) "  # and no row of a table
            assert not re.search(hidden, block.text, re.MULTILINE), block


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_recipe_in_the_documentation_is_valid(block: Block, tmp_path: Path) -> None:
    """Laid over a recipe that has the rest, where it is a part of one."""
    content = yaml.safe_load(block.text)
    if "apiVersion" in content:
        for words in said_to_containers(content):
            parse(words[1:])
        return
    model, rows = {"model": "owner/name"}, {"data": "rows.jsonl"}
    rest = {"sft": model | rows, "reward": rows, "ppo": rows}
    if {"feedback", "rounds"} & set(content):
        rest |= {"feedback": {"prompts": "rows.jsonl"}, "reward": {}}
    if "pretrain" in content:
        rest = {"pretrain": {"data": "text/"}}
    whole = {**rest, **content} | {name: part | content.get(name, {}) for name, part in rest.items()}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    load_recipe(str(tmp_path / "recipe.yaml"))


def said_to_containers(content: Any) -> Iterator[list[str]]:
    """The commands of ours in a document, as lists of words."""
    if isinstance(content, list) and content[:1] == ["rlhf"]:
        yield content
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from said_to_containers(part)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_in_the_documentation_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__docs__"})


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_in_the_documentation_is_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)


OF_OTHERS = {
    "vllm": "a server in an environment of its own",
    "machine.sh": "tests/test_clusters.py runs it",
    "echo": "what it says is piped into a command of ours",
    "mkdir": "a folder for the settings of a stage",
    "cp": "puts them there",
}
"""First words of commands that are not ours, and why nothing is done with them here."""


def test_commands_of_others_name_what_is_there() -> None:
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    met = set()
    for block in blocks("bash"):
        for words in commands(block):
            first, *rest = [word for word in words if not re.match(r"[A-Z_]+=", word)]
            first = "vllm" if first.startswith("vllm-env/") else first
            if first == "make":
                assert rest[0] in targets, f"{block}: make {rest[0]}"
            elif first == "pip":
                for extra in re.findall(r"rlhf-toolkit\[(\w+)\]", " ".join(rest)):
                    assert f"\n{extra} = [" in extras, f"{block}: no extra {extra}"
            elif first == "python":
                names_a_program(rest, str(block))
            elif first in ("accelerate", "torchrun"):
                parser = launch_command_parser() if first == "accelerate" else get_args_parser()
                module = parser.parse_args(rest[first == "accelerate" :]).training_script
                names_a_program(["-m", module], str(block))
            elif first != "rlhf":
                met.add(first)
    assert met == set(OF_OTHERS)


def names_a_program(words: list[str], where: str) -> None:
    """A program of ours that `python` is given is there, and its options are in its source."""
    if words[:1] == ["-m"]:
        assert words[1] == "venv" or importlib.util.find_spec(f"{words[1]}.__main__"), f"{where}: {words[1]}"
    elif words[0].startswith(("benchmarks/", "docs/")):
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source, f"{where}: {words[0]} has no {option}"


def test_scripts_in_the_documentation_are_valid_and_their_commands_are_ours() -> None:
    scripts = [block for block in blocks("bash") if block.text.startswith("#!")]
    assert scripts
    for block in scripts:
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        for line in re.findall(r"^(?:exec )?rlhf ([^&\n]+)", block.text, re.MULTILINE):
            parse(shlex.split(line))


@pytest.mark.parametrize("name", NAMES)
def test_commands_settings_programs_and_tests_that_a_page_names_are_there(name: str) -> None:
    for code in inline(ROOT / name):
        words = code.split()
        if words[0] == "rlhf":
            names_a_command(words[1:], f"{name}: {code}")
        elif words[0] == "python" and len(words) > 1:
            names_a_program(words[1:], f"{name}: {code}")
        elif found := re.fullmatch(r"(tests/[\w/]+\.py)(?:::(\w+))?", code):
            assert (ROOT / found[1]).is_file(), f"{name}: {code}"
            assert f"def {found[2] or 'test_'}" in (ROOT / found[1]).read_text(encoding="utf-8"), f"{name}: {code}"
        elif found := re.match(rf"({'|'.join(STEPS)})\.(\w+)((?:\.\w+)*)(?:[=:]|$)", code):
            is_file = found[2] in ("sqlite", "jsonl", "py", "yaml")
            assert is_file or found[2] in section_class(found[1]).model_fields, f"{name}: {code}"


def names_a_command(words: list[str], where: str) -> None:
    """The command is one, and so are its options; what else stands there may be a placeholder."""
    command: Any = get_command(app)
    for word in words:
        if (
            hasattr(command, "get_command")
            and not word.startswith("-")
            and word not in ("alone", "COMMAND", "STAGE", "…")
        ):
            command = command.get_command(None, word)
            assert command is not None, where
    known = options(command) | {"--help", "-h", "--debug", "--install-completion"}
    for word in words:
        if word.startswith("-") and word != "--":
            assert word.strip("[]") in known or word in ("--profile", "--force"), where


TRL = {
    "learning_rate", "dataset_num_proc", "num_mini_batches", "total_episodes", "local_rollout_forward_batch_size",
    "num_sample_generations", "response_length", "stop_token", "stop_token_id", "temperature", "missing_eos_penalty",
    "sft_model_path", "world_size", "num_total_batches", "micro_batch_size", "local_batch_size", "batch_size",
    "local_mini_batch_size", "mini_batch_size", "push_to_hub", "reward_model_path", "model_adapter_name",
    "ref_adapter_name", "num_ppo_epochs", "whiten_rewards", "kl_coef", "kl_estimator", "cliprange", "vf_coef",
    "cliprange_value", "gamma", "lam", "ds3_gather_for_generation",
}  # fmt: skip
"""The fields of PPOConfig in TRL 1.12.0, its last release with PPO."""


def test_every_field_of_trls_configs_has_a_line() -> None:
    page = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
    ppo, reward = (part.split("\n## ")[0] for part in re.split(r"\n## PPOConfig|\n## RewardTrainer", page)[1:])
    assert first_column(ppo) >= TRL
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "trainer" / "reward_config.py").read_text(encoding="utf-8")
    [config] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    fields = {part.target.id for part in config.body if isinstance(part, ast.AnnAssign)}  # type: ignore[union-attr]
    assert len(fields) > 8
    assert fields <= first_column(reward)


def first_column(text: str) -> set[str]:
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
