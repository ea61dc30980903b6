"""A key stands for all that decides a result and nothing else; the manifest seals it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages.artifact import Artifact, code_digest, identify, input_digest, model_digest, seal
from rlhf.stages.disk import file_digest
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.sft.config import SFTSettings


@pytest.fixture
def settings(tmp_path: Path) -> SFTSettings:
    model = tmp_path / "base"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Hi", "response": "Hello"}\n')
    return SFTSettings.load({"model": str(model), "data": str(rows)}, "sft")


def changed(settings: SFTSettings, **fields: Any) -> SFTSettings:
    return settings.model_copy(update=fields)


def test_a_setting_that_changes_the_result_changes_the_key(settings: SFTSettings) -> None:
    assert identify(changed(settings, learning_rate=1.0)).key != identify(settings).key
    assert identify(changed(settings, attempt=1)).key != identify(settings).key


def test_how_it_is_logged_saved_and_cut_into_microbatches_leaves_the_key(settings: SFTSettings) -> None:
    other = changed(settings, log_every=1, save_every=2, microbatch_size=3, max_dropped=0.5)
    assert identify(other).key == identify(settings).key


def test_one_changed_letter_in_the_rows_changes_the_key(settings: SFTSettings) -> None:
    before = identify(settings)
    rows = Path(settings.data.path)
    rows.write_text(rows.read_text().replace("Hello", "Hallo"))
    after = identify(settings)
    assert (after.key != before.key, after.data != before.data) == (True, True)


def test_the_same_rows_and_model_elsewhere_have_the_same_key(settings: SFTSettings, tmp_path: Path) -> None:
    before = identify(settings).key
    (tmp_path / "moved").mkdir()
    rows = Path(settings.data.path).rename(tmp_path / "moved" / "rows.jsonl")
    model = Path(str(settings.model)).rename(tmp_path / "moved" / "base")
    moved = SFTSettings.load({"model": str(model), "data": str(rows)}, "sft")
    assert identify(moved).key == before


def test_one_changed_byte_of_the_weights_changes_the_key(settings: SFTSettings) -> None:
    before = identify(settings).key
    (Path(str(settings.model)) / "model.safetensors").write_bytes(b"weighty")
    assert identify(settings).key != before


@pytest.mark.parametrize("missing", ["/no/such/model", "./model"])
def test_a_model_folder_that_is_not_there_is_refused_by_name(settings: SFTSettings, missing: str) -> None:
    with pytest.raises(SettingsError, match=rf"sft\.model: no folder '{missing}'"):
        identify(changed(settings, model=missing))


def test_a_folder_without_config_is_no_model(settings: SFTSettings, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"holds no config\.json"):
        identify(changed(settings, model=str(tmp_path / "empty")))


def test_the_manifest_names_every_file_with_its_hash_but_no_checkpoint(settings: SFTSettings, tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    for name in ("model/config.json", "checkpoints/step-1/state.json", "logs/x", "metrics.jsonl", "status.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"step": 1}\n')
    identity = identify(settings)
    assert not Artifact(folder).sealed
    seal(folder, identity, {"eval_loss": 1.5}, processes=2, hand_over={"vocab_size": 260})
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"] == {name: file_digest(folder / name) for name in ("metrics.jsonl", "model/config.json")}
    assert (manifest["stage"], manifest["key"], manifest["inputs"]) == ("sft", identity.key, identity.inputs)
    assert manifest["metrics"] == {"eval_loss": 1.5}
    assert manifest["made_with"]["processes"] == 2
    assert Artifact(folder).sealed


def test_an_artifact_is_known_by_its_model_and_not_by_its_logs_or_where_it_was_made(
    settings: SFTSettings, tmp_path: Path
) -> None:
    digests = []
    for number, log in enumerate(("a", "b")):
        folder = tmp_path / str(number)
        (folder / "model" / "adapter").mkdir(parents=True)
        (folder / "model" / "weights").write_text("same")
        (folder / "model" / "adapter" / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{folder}"}}')
        (folder / "metrics.jsonl").write_text(log)
        seal(folder, identify(settings), {}, 1, {})
        digests.append(Artifact(folder).digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("line", ['{"step": 2, "sc', '{"step": 2, sco}', '{"step": "\\udc"}', b'{"step": "\xff"}'])
def test_a_damaged_line_of_the_metrics_is_named_but_for_the_last_which_a_kill_may_have_cut(
    tmp_path: Path, line: str | bytes
) -> None:
    damaged = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\r\n' + damaged)
    assert Artifact(tmp_path).metrics == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    with pytest.raises(RefusedError, match=r"metrics\.jsonl line 2: cannot be read \(.*put it back"):
        _ = Artifact(tmp_path).metrics


def test_a_folder_or_manifest_that_may_not_be_read_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", forbidden)
    with pytest.raises(SettingsError, match=rf"^{tmp_path}: may not be looked into; change its mode$"):
        _ = Artifact(tmp_path).sealed
    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(SettingsError, match=r"manifest\.json: may not be read; change its mode$"):
        _ = Artifact(tmp_path).manifest


def test_another_function_of_the_same_file_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_two_rewards.py").write_text(
        "def one(p, r): return [0] * len(r)\ndef two(p, r): return [1] * len(r)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert code_digest("made_two_rewards:one") == code_digest("made_two_rewards:one")
    assert code_digest("made_two_rewards:one") != code_digest("made_two_rewards:two")


def test_an_adapter_beside_a_models_weights_is_part_of_its_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = model_digest(str(tmp_path), "here")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "value_head.safetensors").write_bytes(b"1")
    with_head = model_digest(str(tmp_path), "here")
    (tmp_path / "adapter" / "value_head.safetensors").write_bytes(b"2")
    assert len({before, with_head, model_digest(str(tmp_path), "here")}) == 3


def test_each_source_of_a_list_has_its_digest_and_each_weight_counts(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)

    def data(*weights: float) -> dict[str, str]:
        sources = [{"path": str(tmp_path / name), "weight": w} for name, w in zip("ab", weights, strict=True)]
        return identify(PretrainSettings.load({"data": sources, "eval_data": str(tmp_path / "a")}, "pretrain")).data

    assert list(data(1, 2)) == ["data[0]", "data[1]", "eval_data"]
    assert [name for name in data(1, 2) if data(1, 2)[name] != data(1, 3)[name]] == ["data[1]"]
    assert list(identify(PretrainSettings.load({"data": str(tmp_path / "a")}, "pretrain")).data) == ["data"]


def test_a_tokenizer_is_known_by_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    text = tmp_path / "text.txt"
    text.write_text("a")

    def key(where: Path = tmp_path) -> str:
        return identify(PretrainSettings.load({"data": str(text), "tokenizer": str(where)}, "pretrain")).key

    before = key()
    for name in ("model.safetensors", "config.json", "generation_config.json", "README.md"):
        (tmp_path / name).write_bytes(b"of the model beside it")
    assert key() == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert key() != before
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer.json").write_text("[]")
    assert key() != before
    (tmp_path / "tokenizer.json").write_text("{}")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "tokenizer.json").write_text("{}")
    assert key(moved) == before


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"pretrain\.tokenizer: no folder './none'"):
        input_digest("tokenizer", "./none", "pretrain")
    with pytest.raises(SettingsError, match=r"pretrain\.tokenizer: '.*' holds no tokenizer\.json; it must be a saved"):
        input_digest("tokenizer", str(tmp_path), "pretrain")
    assert input_digest("tokenizer", "owner/name", "pretrain") == "hub:owner/name"
