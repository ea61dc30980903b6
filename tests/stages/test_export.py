"""`rlhf export`: what is written loads elsewhere, says what it was made from, and writes over nothing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_world import tiny_decoder
from peft import PeftModel
from ppo_world import lora_reward
from stages_world import byte_tokenizer, inputs, run_stage, tiny_policy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from yaml import safe_load

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages import adapters, export
from rlhf.stages.artifact import Artifact
from rlhf.stages.export import export_adapter, push
from rlhf.stages.models import load_policy, load_scalar, save_folder
from rlhf.stages.settings import LoraSettings

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = torch.tensor([[5, 6, 7, 8]])
LORA = {"r": 2, "alpha": 4}


@pytest.fixture(scope="module")
def made(chain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The chain's stages, and SFT with LoRA."""
    folder = tmp_path_factory.mktemp("lora") / "sft"
    run_stage("sft", folder, lora=LORA, learning_rate=0.1, **inputs("sft", chain))
    return chain | {"lora": folder}


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Metadata and text of a model card."""
    _, about, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return safe_load(about), text


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def test_a_policy_is_the_same_elsewhere_and_says_what_it_was_made_from(made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "mine"
    export.main([str(made["ppo"] / "model"), str(out)])
    ours = load_policy(str(made["ppo"] / "model"), byte_tokenizer())
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(theirs(IDS).logits, ours(IDS).logits)
    assert AutoTokenizer.from_pretrained(out).chat_template
    about, text = card_of(out)
    manifest = Artifact(made["ppo"]).manifest
    assert about["library_name"] == "transformers"
    assert about["pipeline_tag"] == "text-generation"
    assert about["rlhf_toolkit"]["key"] == manifest["key"]
    assert about["rlhf_toolkit"]["metrics"]["kl"] == manifest["metrics"]["kl"]
    assert "license" not in about
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ") and " | `" in line]
    keys = {stage: Artifact(made[stage]).manifest["key"][:8] for stage in ("pretrain", "sft", "reward", "ppo")}
    assert rows == [[f"| {stage}", f"`{key}`"] for stage, key in keys.items()]  # the reward model's, once each
    for data in ("documents", "demonstrations", "rankings"):
        assert f"rlhf.recipes.demo_world:{data}" in text
    assert "rlhf.recipes.demo_world:documents" in text
    assert str(tmp_path.parent) not in text + json.dumps(about)  # no path of this machine


@pytest.mark.parametrize("stage", ["ppo", "reward"])
def test_the_card_s_example_loads_the_model_and_runs(
    made: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    export.export(str(made[stage] / "model"), tmp_path / "mine")
    (example,) = re.findall(r"```python\n(.*?)```", card_of(tmp_path / "mine")[1], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, found := {})
    ours = (load_scalar if stage == "reward" else load_policy)(str(made[stage] / "model"), byte_tokenizer())
    weights = tensors(ours.classifier if stage == "reward" else ours)
    assert all(torch.equal(weight, weights[name]) for name, weight in tensors(found["model"]).items())
    assert (capsys.readouterr().out.strip() != "") == (stage == "ppo")  # which answers


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_weights_are_rounded_and_a_reward_models_head_is_not(made: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    reference = str(made["reward"] / "model")
    export.export(reference, tmp_path / "out", dtype)
    ours = load_scalar(reference, byte_tokenizer())
    again = load_scalar(str(tmp_path / "out"), byte_tokenizer())
    assert again.rule == ours.rule
    assert torch.equal(again.classifier.score.weight, ours.classifier.score.weight)
    for name, weight in tensors(ours.classifier).items():
        if not name.startswith("score."):
            assert torch.equal(tensors(again.classifier)[name], weight.to(export.DTYPES[dtype]).float())
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert theirs.dtype == export.DTYPES[dtype]
    about, text = card_of(tmp_path / "out")
    assert about["pipeline_tag"] == "text-classification"
    assert f" / {ours.std:.6g}, where x is " in text
    kept = {"bf16": "bfloat16, those of its head in float32", "fp16": "float16, those of its head in float32"}
    assert f"Its weights are in {kept.get(dtype, 'float32')}." in text


@pytest.mark.parametrize(("pooling", "mean", "x"), [
    ("last", 0.5, "(x - 0.5) / 2, where x is its head's number at the last of the answer's tokens"),
    ("mean", -0.5, "(x + 0.5) / 2, where x is the mean of its head's numbers over the answer's tokens"),
])  # fmt: skip
def test_how_a_score_is_made_of_the_heads_numbers_is_told(
    made: dict[str, Path], tmp_path: Path, pooling: str, mean: float, x: str
) -> None:
    model = load_scalar(str(made["reward"] / "model"), byte_tokenizer())
    model.pooling, model.mean, model.std = pooling, mean, 2.0
    save_folder(tmp_path / "model", model, byte_tokenizer())
    notes = export.export(str(tmp_path / "model"), tmp_path / "out")
    assert f"Its score is {x} (`rlhf_score` in config.json)" in notes[-1]
    assert notes[-1] in card_of(tmp_path / "out")[1]


def test_numbers_that_a_type_has_no_place_for_are_refused(tmp_path: Path) -> None:
    model = tiny_policy()
    model.model.norm.weight.data[0] = 1e6  # fp16 ends at 65504
    save_folder(tmp_path / "model", model, byte_tokenizer())
    with pytest.raises(RefusedError, match=r"model\.norm\.weight holds numbers that fp16 has no place for"):
        export.export(str(tmp_path / "model"), tmp_path / "out", "fp16")
    assert not (tmp_path / "out").exists()


def test_the_adapter_alone_makes_of_its_base_what_was_merged(made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    export.main([str(made["lora"] / "model"), str(out), "--adapter-only"])
    base = load_policy(str(made["pretrain"] / "model"), byte_tokenizer())
    before = base(IDS).logits
    merged = load_policy(str(made["lora"] / "model"), byte_tokenizer())(IDS).logits
    assert (merged - before).abs().max() > 0.01
    assert torch.allclose(PeftModel.from_pretrained(base, out)(IDS).logits, merged, atol=1e-4)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    about, text = card_of(out)
    assert about["library_name"] == "peft"
    assert "lora" in about["tags"]
    assert "It belongs to pretrain:" in text


@pytest.mark.parametrize(("model", "name"), [("base", "base"), ("./models/small", "small"), ("model", "model")])
def test_an_adapter_says_the_name_of_the_folder_that_it_belongs_to(
    made: dict[str, Path], tmp_path: Path, model: str, name: str
) -> None:
    stage = tmp_path / "sft"
    shutil.copytree(made["lora"], stage)
    settings = (stage / "settings.yaml").read_text().replace(str(made["pretrain"] / "model"), model)
    (stage / "settings.yaml").write_text(settings)
    (note,) = export_adapter(str(stage / "model"), tmp_path / "out")
    assert note.startswith(f"It belongs to {name}: ")
    text = card_of(tmp_path / "out")[1]
    assert note in text
    assert f"| {name} | rlhf.recipes.demo_world:demonstrations |" in text


def test_an_adapter_on_a_base_is_merged(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_policy(), byte_tokenizer())
    model = load_policy(str(tmp_path / "base"), byte_tokenizer())
    adapters.add_lora(model, LoraSettings(r=2))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    adapters.save_adapter(tmp_path / "adapter", model)
    export.export(str(tmp_path / "adapter"), tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(merged(IDS).logits, model(IDS).logits, atol=1e-4)
    assert not any("lora" in name for name in tensors(merged))


def test_a_reward_models_adapter_comes_with_its_head(made: dict[str, Path], tmp_path: Path) -> None:
    reward = Path(lora_reward(tmp_path / "reward", str(made["sft"] / "model")))
    export_adapter(str(reward), tmp_path / "out")
    assert (tmp_path / "out" / "value_head.safetensors").is_file()
    assert "value_head.safetensors" in card_of(tmp_path / "out")[1]


def test_a_model_without_adapter_has_none_to_write(made: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="has no adapter"):
        export_adapter(str(made["sft"] / "model"), tmp_path / "out")
    with pytest.raises(SettingsError, match="leave out --adapter-only or --dtype"):
        export.main([str(made["lora"] / "model"), str(tmp_path / "out"), "--adapter-only", "--dtype", "bf16"])
    assert not (tmp_path / "out").exists()


def test_our_own_decoder_brings_its_code_and_says_so(tmp_path: Path) -> None:
    save_folder(tmp_path / "model", tiny_decoder(vocab_size=260), byte_tokenizer())
    notes = export.export(str(tmp_path / "model"), tmp_path / "out")
    assert (tmp_path / "out" / "decoder.py").is_file()
    assert "auto_map" in json.loads((tmp_path / "out" / "config.json").read_text())
    assert any("trust_remote_code=True" in note for note in notes)
    assert 'AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)' in card_of(tmp_path / "out")[1]


def test_a_base_of_the_hub_is_named_and_data_sets_of_it_too(made: dict[str, Path], tmp_path: Path) -> None:
    stage = tmp_path / "sft"
    (stage / "model").mkdir(parents=True)
    for name in ("manifest.json", "settings.yaml"):
        text = (made["sft"] / name).read_text()
        text = text.replace(str(made["pretrain"] / "model"), "owner/base")
        (stage / name).write_text(text.replace("rlhf.recipes.demo_world:demonstrations", "owner/rows"))
    about = safe_load(export.card("mine", str(stage / "model"), False, False, []).split("---\n")[1])
    assert (about["base_model"], about["datasets"]) == ("owner/base", ["owner/rows"])


def test_a_base_is_that_of_the_policy_and_data_sets_are_the_reward_model_s_too(
    made: dict[str, Path], tmp_path: Path
) -> None:
    """Whatever the reward model started from."""
    for stage, changed in (("ppo", {}), ("sft", {"model": "owner/base"}), ("reward", {"model": "owner/other"})):
        (tmp_path / stage / "model").mkdir(parents=True)
        shutil.copy(made[stage] / "manifest.json", tmp_path / stage)
        settings = safe_load((made[stage] / "settings.yaml").read_text()) | changed
        text = json.dumps(settings).replace("rlhf.recipes.demo_world:rankings", "owner/rankings")
        (tmp_path / stage / "settings.yaml").write_text(text)
    about, text = export.card("mine", str(tmp_path / "ppo" / "model"), False, False, []).split("---\n")[1:]
    assert (safe_load(about)["base_model"], safe_load(about)["datasets"]) == ("owner/base", ["owner/rankings"])
    assert re.findall(r"\| (\w+) \| `", text) == ["sft", "reward", "ppo"]


def test_a_run_that_was_moved_still_knows_its_past(made: dict[str, Path], tmp_path: Path) -> None:
    for stage in ("pretrain", "sft"):
        (tmp_path / stage / "model").mkdir(parents=True)
        for name in ("manifest.json", "settings.yaml"):
            text = (made[stage] / name).read_text().replace(str(made["pretrain"].parent), "/gone")
            (tmp_path / stage / name).write_text(text)
    assert [made.stage for made in export.past(tmp_path / "sft" / "model")] == ["sft", "pretrain"]


def test_a_copy_of_a_run_is_read_for_its_own_past(made: dict[str, Path], tmp_path: Path) -> None:
    """Though the run that it is a copy of still lies at the place that its settings name."""
    for stage in ("pretrain", "sft"):
        (tmp_path / stage / "model").mkdir(parents=True)
        for name in ("manifest.json", "settings.yaml"):
            shutil.copy(made[stage] / name, tmp_path / stage)
    past = export.past(tmp_path / "sft" / "model")
    assert [stage.folder for stage in past] == [tmp_path / "sft", tmp_path / "pretrain"]


def test_a_card_names_figures_with_the_words_of_the_report(made: dict[str, Path], tmp_path: Path) -> None:
    for stage in ("pretrain", "sft", "reward", "ppo"):
        text = export.card("mine", str(made[stage] / "model"), False, False, []).split("## Figures")[1]
        assert "_" not in re.sub("`.*?`", "", text), stage
    (tmp_path / "model").mkdir()
    shutil.copy(made["pretrain"] / "settings.yaml", tmp_path)
    manifest = Artifact(made["pretrain"]).manifest | {
        "metrics": {
            "val_loss": 4.2,
            "num_parameters": 270816,
            "win_rate": 0.8309,
            "num_tokens": 12345.6,
            "num_skipped": 2,
        }
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    text = export.card("mine", str(tmp_path / "model"), False, False, [])
    assert "| held-out loss, nats per token | 4.20 |\n| parameters | 270,816 |" in text
    assert "| win rate over SFT by the judge | 0.83 |\n| tokens trained on | 12,346 |" in text
    assert "| steps not taken, as their loss or gradient was no finite number | 2 |" in text


def test_a_card_tells_who_found_ppo_s_answers_better_on_how_many_prompts_and_how_sure_that_is(
    made: dict[str, Path], tmp_path: Path
) -> None:
    metrics = {"win_rate": 0.75, "score_win_rate": 1.0, "kl": 2.5, "num_eval_prompts": 20}
    settings = safe_load((made["ppo"] / "settings.yaml").read_text()) | {"num_eval_samples": 4}
    (tmp_path / "model").mkdir()

    def figures() -> str:
        (tmp_path / "settings.yaml").write_text(json.dumps(settings))
        (tmp_path / "manifest.json").write_text(json.dumps(Artifact(made["ppo"]).manifest | {"metrics": metrics}))
        text = export.card("mine", str(tmp_path / "model"), False, False, [])
        return text.split("## Figures")[1].split("## License")[0].replace("\u00a0", " ")

    assert figures().strip().splitlines()[2:] == [
        "| win rate over SFT by the judge | 0.75 (20 prompts, 95 % interval 0.53 to 0.89) |",
        "| win rate over SFT by the score | 1.00 (20 prompts, 95 % interval 0.83 to 1.00) |",
        "| KL from SFT, nats per response | 2.50 |",
        "| prompts held out | 20 |",
        "",
        "PPO was compared with SFT at the end of the ppo stage, on 20 held-out prompts (answers to each: 4); in win "
        "rates ties count half. The judge is `rlhf.recipes.demo_world:judge`. The score is by `reward`.",
    ]
    del metrics["num_eval_prompts"]  # of an earlier release
    settings |= {"judge": None, "rewards": [{"model": "owner/rm"}, {"function": "mine:rule"}, {"model": "/my/rm"}]}
    assert "| win rate over SFT by the judge | 0.75 |" in figures()
    assert figures().strip().endswith("The score is by `reward`, `owner/rm`, `mine:rule`, `rm`.")
    assert "judge is" not in figures()


def test_a_card_tells_how_sure_an_accuracy_is_beside_its_mean_over_prompts(
    made: dict[str, Path], tmp_path: Path
) -> None:
    """Not beside that over pairs, many of which may be of one prompt."""
    metrics = {"accuracy": 10 / 12, "prompt_accuracy": 0.5, "num_eval_prompts": 3, "num_eval_pairs": 12}
    (tmp_path / "model").mkdir()
    shutil.copy(made["reward"] / "settings.yaml", tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(Artifact(made["reward"]).manifest | {"metrics": metrics}))
    text = export.card("mine", str(tmp_path / "model"), True, False, []).replace("\u00a0", " ")
    assert "| held-out ranking accuracy | 0.83 |\n" in text
    assert (
        "| held-out ranking accuracy, averaged prompt by prompt | 0.50 (3 prompts, 95 % interval 0.13 to 0.87) |\n"
        in text
    )


def test_nothing_is_written_over(made: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for write in (export.export, export_adapter):
        with pytest.raises(SettingsError, match="is there already"):
            write(str(made["lora"] / "model"), tmp_path / "out")
    with pytest.raises(SettingsError, match="there is no folder"):
        export.export(str(made["lora"] / "model"), tmp_path / "none" / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_a_place_that_may_not_be_written_to_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    for write in (export.export, export_adapter):
        with pytest.raises(SettingsError, match=f"out: {tmp_path} cannot be written to; change its mode, or name"):
            write(str(tmp_path / "no model"), tmp_path / "out")


def test_of_an_export_that_failed_nothing_stays(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "a file")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    for write in (export.export, export_adapter):
        with pytest.raises(OSError, match="No space left"):
            write(str(made["lora"] / "model"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Hub:
    """A hub that takes everything."""

    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def create_repo(self, name: str, **options: Any) -> str:
        self.calls.append((name, options))
        return f"https://hub/{name}"

    def upload_folder(self, repo_id: str, **options: Any) -> None:
        if repo_id == "owner/full":
            raise OSError("507 no space\nmore")
        self.calls.append((repo_id, options))


def test_it_is_uploaded_only_where_asked_and_to_a_private_place(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    model = str(made["sft"] / "model")
    export.main([model, str(tmp_path / "a")])
    assert Hub.calls == []
    export.main([model, str(tmp_path / "b"), "--push-to-hub", "owner/mine"])
    assert Hub.calls[0] == ("owner/mine", {"private": True, "exist_ok": True})
    assert (Hub.calls[1][0], Hub.calls[1][1]["folder_path"]) == ("owner/mine", str(tmp_path / "b"))
    assert "uploaded to https://hub/owner/mine" in capsys.readouterr().out
    assert "# mine\n" in card_of(tmp_path / "b")[1]
    with pytest.raises(SettingsError, match="--push-to-hub a//b"):
        export.main([model, str(tmp_path / "c"), "--push-to-hub", "a//b"])
    with pytest.raises(
        RuntimeError, match=r"b is written, but could not be uploaded to owner/full: 507 no space; HF_TOKEN"
    ):
        push(tmp_path / "b", "owner/full")


def test_trl_takes_what_is_written(made: dict[str, Path], tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    policy, reward = str(tmp_path / "policy"), str(tmp_path / "reward")
    export.export(str(made["sft"] / "model"), Path(policy))
    export.export(str(made["reward"] / "model"), Path(reward))
    common: dict[str, Any] = {
        "output_dir": str(tmp_path / "trl"), "max_steps": 1, "per_device_train_batch_size": 2, "bf16": False,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_length": 64,
        "gradient_checkpointing": None,
    }  # fmt: skip
    rows = [{"prompt": "Who?", "completion": " Me."}] * 2
    pairs = [{"prompt": "Who?", "chosen": " Me.", "rejected": " No."}] * 2
    of_sft = SFTTrainer(policy, args=SFTConfig(**common), train_dataset=Dataset.from_list(rows))
    of_reward = RewardTrainer(reward, args=RewardConfig(**common), train_dataset=Dataset.from_list(pairs))
    for trainer in (of_sft, of_reward):
        assert trainer.train().training_loss > 0
