"""Nothing that a model, a data folder or a recipe brings is run unasked, and no secret is written down."""

import ast
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from pipeline_world import FakeStages, write_rows
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf.data import rows
from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.sources import Source
from rlhf.pipeline import cli, runner
from rlhf.pipeline.recipe import load_recipe
from rlhf.stages import entry, logs
from rlhf.stages.models import load_policy, load_scalar, load_tokenizer
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.tokenizer import train_tokenizer
from rlhf.stages.secrets import mask

ROOT = Path(__file__).parents[2]
CODE = [path for part in ("data", "stages", "pipeline", "recipes") for path in (ROOT / part).rglob("*.py")]
SECRET = "hf_AbCdEfGhIjKlMnOp"
MARK = "import pathlib; pathlib.Path('it_was_run').touch()\n"
"""Code that tells when it was run."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return SECRET


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["abc"], PretrainSettings.load({"data": "x", "vocab_size": 270}, "pretrain"))


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> Path:
    """A saved tiny model."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("model")
    tokenizer.save_pretrained("model")
    return Path("model")


# -- code --------------------------------------------------------------------------------------------------


def calls() -> dict[str, set[str]]:
    """Every call in our code, as it is written, with the files that it stands in."""
    found: dict[str, set[str]] = {}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.setdefault(ast.unparse(node.func), set()).add(path.relative_to(ROOT).as_posix())
                for keyword in node.keywords:
                    if keyword.arg in ("shell", "weights_only", "trust_remote_code"):
                        name = f"{keyword.arg}={ast.unparse(keyword.value)}"
                        found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_no_line_of_ours_opens_a_pickle_runs_a_shell_or_loads_yaml_unsafely() -> None:
    found = calls()
    forbidden = {
        "eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load",
        "torch.load", "torch.save", "joblib.load", "shell=True", "weights_only=False", "trust_remote_code=True",
        "register_for_checkpointing", "run.accelerator.register_for_checkpointing",
    }  # fmt: skip
    assert not forbidden & found.keys(), {name: found[name] for name in forbidden & found.keys()}
    assert found["importlib.import_module"] <= {
        "data/sources.py",  # load_function: what the recipe names
        "data/formats/__init__.py", "pipeline/launch.py", "pipeline/evaluation.py",  # our own modules
        "stages/entry.py",
        "stages/artifact.py",  # load_function's
    }  # fmt: skip


def test_every_model_is_loaded_without_code_of_its_own() -> None:
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("from_pretrained"):
                continue
            if ast.unparse(node.func) in ("LoraConfig.from_pretrained", "PeftModel.from_pretrained"):
                continue  # adapters that we wrote ourselves, as safetensors
            assert "**SAFELY" in ast.unparse(node) or "trust_remote_code=False" in ast.unparse(node), ast.unparse(node)


# -- models ------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (MARK,)


def test_weights_in_a_pickle_are_refused_with_the_cure(model: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(), protocol=2))
    for load in (load_policy, load_scalar):
        with pytest.raises(RefusedError, match=r"'model': its weights are a pickle .*save_pretrained, as safetensors"):
            load("model", tokenizer)
    assert not Path("it_was_run").exists()


def test_a_model_that_needs_code_of_its_own_is_refused(model: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (model / "evil.py").write_text(MARK)
    config = json.loads((model / "config.json").read_text())
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    config |= {"model_type": "evil", "auto_map": {name: f"evil.{name}" for name in names}}
    (model / "config.json").write_text(json.dumps(config))
    for load in (load_policy, load_scalar):
        with pytest.raises(RefusedError, match="'model': it needs code of its own, which is never run here"):
            load("model", tokenizer)
    tokens = json.loads((model / "tokenizer_config.json").read_text())
    tokens |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.raises(RefusedError, match="no tokenizer in 'model'"):
        load_tokenizer("model")
    assert not Path("it_was_run").exists()


def test_the_code_that_lies_beside_a_decoder_of_ours_is_not_what_is_run(tokenizer: PreTrainedTokenizerFast) -> None:
    from rlhf.stages.decoder import DecoderConfig, DecoderForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    DecoderForCausalLM(DecoderConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("model")
    assert Path("model/decoder.py").is_file()
    Path("model/decoder.py").write_text(MARK)
    assert isinstance(load_policy("model", tokenizer), DecoderForCausalLM)
    assert not Path("it_was_run").exists()


def test_a_chat_template_cannot_reach_out_of_its_sandbox(model: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(model)
    loaded.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Exception, match="unsafe"):
        loaded.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)


def test_an_optimizers_state_that_is_a_trap_is_not_opened() -> None:
    from accelerate.utils import load

    Path("optimizer.bin").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="eights"):  # weights_only
        load("optimizer.bin")
    assert not Path("it_was_run").exists()
    torch.save({"step": 1}, "optimizer.bin")
    assert load("optimizer.bin") == {"step": 1}


# -- data --------------------------------------------------------------------------------------------------


def test_nothing_in_a_data_folder_is_run() -> None:
    folder = Path("rows")
    folder.mkdir()
    write_rows(folder / "a.jsonl", [{"prompt": "evil:boom", "response": "{{ 7 * 7 }} ${oc.env:HOME}"}])
    (folder / "rows.py").write_text(MARK)  # as dataset scripts were called
    (folder / "evil.py").write_text(MARK)
    (folder / "__init__.py").write_text(MARK)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('it was run') }}")
    (folder / "data.pkl").write_bytes(pickle.dumps(Evil(), protocol=2))
    found = rows.read_demonstrations(Source(path="rows"), max_dropped=0.0).rows
    assert [row.response for row in found] == ["{{ 7 * 7 }} ${oc.env:HOME}"]
    assert not Path("it_was_run").exists()


# -- secrets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "sft.args.run_name=${oc.env:HF_TOKEN}",
        f"sft.args.run_name=run of {SECRET}",
        "ppo.model=https://me:${oc.env:HF_TOKEN}@hub/model",
        "pretrain.special_tokens=[a,'${oc.env:HF_TOKEN}']",
        "reward.data={path: 'rankings:rows', options: {token: '${oc.env:HF_TOKEN}'}}",
    ],
)
def test_a_recipe_that_would_write_a_secret_down_is_refused(
    world: Path, secret: str, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "recipe.yaml", override, "--run-dir", "run"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "holds the secret of the environment variable HF_TOKEN" in err
    assert err.startswith(f"error: {override.partition('=')[0]}")
    assert secret not in err
    assert not Path("run").exists()


def test_a_token_of_the_hub_has_no_place_in_a_recipe(world: Path) -> None:
    with pytest.raises(SettingsError, match=r"sft\.args: 'hub_token' would be written .*set HF_TOKEN"):
        load_recipe("recipe.yaml", ["sft.args.hub_token=abc"])


def test_an_error_that_holds_a_secret_is_shown_and_kept_without_it(
    world: Path, stages: FakeStages, secret: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(f"401 for https://hub/?token={secret}")

    stages.in_stage["sft"] = fail
    monkeypatch.setenv("RLHF_DEBUG", "")  # given back after the test
    for debug in ([], ["--debug"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["run", "recipe.yaml", "--run-dir", "run", *debug])
        assert stop.value.code == 1
        out, err = capsys.readouterr()
        assert "401 for https://hub/?token=***" in err
        assert secret not in out + err
    kept = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert any(path.name == "error.log" and b"token=***" in content for path, content in kept.items())
    assert not [path for path, content in kept.items() if secret.encode() in content]


def test_a_stage_in_a_process_of_its_own_keeps_secrets_too(secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("stage")
    folder.mkdir()
    try:
        raise ValueError(f"token {secret}")
    except ValueError as error:
        logs.tell_failure(folder, "failed", str(error))
    logs.Terminal("sft", quiet=False).say(f"wandb failed: {secret}")
    assert secret not in capsys.readouterr().err
    assert not [path for path in folder.iterdir() if secret in path.read_text()]
    assert json.loads((folder / "status.json").read_text())["message"] == "token ***"


def test_the_traceback_of_a_stage_in_a_process_of_its_own_is_shown_without_secrets(
    secret: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: str) -> None:
        raise OSError(f"401 for https://hub/?token={secret}")

    monkeypatch.setenv("RLHF_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["stage", "nowhere"])
    monkeypatch.setattr("rlhf.stages.sft.train.train", fail)
    with pytest.raises(SystemExit) as stop:
        entry.run_stage("sft")
    assert stop.value.code == 1
    err = capsys.readouterr().err
    assert "in fail" in err
    assert "token=***" in err
    assert secret not in err


def test_only_what_is_a_secret_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("db_password", 'a"b\\c d e\n')
    monkeypatch.setenv("SORT_KEY", "a")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-false")
    text = "key 0123456789, a, false-false, " + json.dumps('a"b\\c d e')
    assert mask(text) == 'key ***, a, false-false, "***"'
    assert mask("nothing") == "nothing"


def test_a_run_of_a_recipe_with_no_secret_is_not_hindered(world: Path, stages: FakeStages, secret: str) -> None:
    runner.run(load_recipe("recipe.yaml"), Path("run"), say=lambda _: None)
    assert len(stages.trained) == 4
