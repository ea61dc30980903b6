"""What is refused before anything runs or is written."""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_world import FakeStages, contents, write_rows

from rlhf.data.documents import Documents
from rlhf.data.errors import ConnectionLost, DataError, Diverged, RefusedError, SettingsError
from rlhf.pipeline import lock, runner
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.lock import held
from rlhf.pipeline.plan import make_plan
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.sweep import load_sweep, run_sweep
from rlhf.stages.checkpoints import CannotWrite, clear, swap_in
from rlhf.stages.disk import file_digest

RUN = Path("run")


def run(*overrides: str) -> list[str]:
    said: list[str] = []
    runner.run(load_recipe("recipe.yaml", overrides), RUN, None, said.append)
    return said


@pytest.mark.parametrize("name", ["recipe.yaml", "report.html"])
def test_files_that_no_run_left_are_never_touched(world: Path, stages: FakeStages, name: str) -> None:
    RUN.mkdir()
    (RUN / name).write_text("mine")
    with pytest.raises(SettingsError, match=rf"run/{name}: is not of a run of ours.*another --run-dir"):
        run()
    assert {path: text for path, (text, _) in contents(RUN).items()} == {f"run/{name}": b"mine"}
    assert stages.trained == []


def test_names_that_are_not_utf_8_are_refused_with_their_setting(world: Path, stages: FakeStages) -> None:
    bad = Path("bad\udcff")  # the byte 0xff
    with pytest.raises(
        SettingsError, match=r"^--run-dir '.*/bad\\udcff': the name is not UTF-8, .*; choose one that is$"
    ):
        runner.run(load_recipe("recipe.yaml"), bad)
    with pytest.raises(SettingsError, match=r"^--run-dir '.*/bad\\udcff': the name is not UTF-8"):
        run_sweep(load_sweep("parts", "recipe.yaml"), bad)
    with pytest.raises(SettingsError, match=r"^override reward\.data\.path='d\\udcff': not UTF-8, .*; rename the file"):
        run("reward.data.path=d\udcff")
    (rows := Path("rows")).mkdir()
    os.replace("rankings.jsonl", rows / "r\udcff.jsonl")
    with pytest.raises(
        DataError, match=r"^reward\.data: 'rows/r\\udcff\.jsonl': the name is not UTF-8, .*; rename the f"
    ):
        run("reward.data=rows")
    assert stages.trained == []
    assert not bad.exists()
    assert not RUN.exists()


def test_each_source_is_read_as_the_stage_reads_it(world: Path, stages: FakeStages) -> None:
    tied = [{"prompt": p, "responses": ["x", "y"], "ranks": [1, 1]} for p in "ab"]
    write_rows(Path("tied.jsonl"), tied)
    with pytest.raises(DataError, match="all answers tied"):
        run("reward.data=tied.jsonl")
    assert stages.trained == []
    ptx = ("ppo.ptx_coef=1", "ppo.ptx_data=text.jsonl", "ppo.ptx_block_size=8")
    run("reward.data=tied.jsonl", "reward.ties=soft", *ptx)
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]


@pytest.mark.parametrize(("stage", "source"), [
    ("pretrain", "text"), ("sft", "demonstrations"), ("reward", "rankings"), ("ppo", "prompts"),
])  # fmt: skip
def test_the_setting_that_an_error_about_bad_rows_names_lets_the_run_go_on_without_them(
    world: Path, stages: FakeStages, stage: str, source: str
) -> None:
    with Path(f"{source}.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match=rf" or set {stage}\.max_dropped=0\.34 to go on without them$") as refused:
        run()
    run(str(refused.value).partition(" or set ")[2].split()[0])
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]


def odd_rows() -> Iterator[dict[str, Any]]:
    yield from ({"prompt": f"question {number}", "picture": b"..."} for number in range(4))


def with_rows(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    raise AssertionError("it is not called here")


def test_rows_that_a_reward_function_cannot_be_given_are_refused_before_anything_trains(
    world: Path, stages: FakeStages
) -> None:
    data = f"ppo.data={__name__}:odd_rows"
    with pytest.raises(
        DataError, match=r"odd_rows row 1: column 'picture': a value of type bytes; reward functions are"
    ):
        run(data, f"ppo.rewards=[{{function: {__name__}:with_rows}}]")
    assert stages.trained == []
    run(data)  # nobody is given them
    assert stages.trained[-1] == "ppo"


def test_a_quantised_base_without_bitsandbytes_is_refused_before_anything_trains(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.stages.ppo.config.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"ppo\.quantization: 8bit needs .*install rlhf-toolkit\[quantization\]`"):
        run("ppo.layout=adapters", "ppo.quantization=8bit")
    assert stages.trained == []


def test_a_sealed_folder_that_lost_a_file_is_refused(world: Path, stages: FakeStages) -> None:
    run()
    folder = next(RUN.glob("sft-*"))
    (folder / "model" / "config.json").unlink()
    message = rf"{folder.name}: model/config\.json is missing since it was sealed; restore it, or delete"
    with pytest.raises(SettingsError, match=message):
        make_plan(load_recipe("recipe.yaml"), RUN)


def test_a_changed_model_is_refused_where_a_stage_would_start_from_it(world: Path, stages: FakeStages) -> None:
    run()
    folder = next(RUN.glob("sft-*"))
    (folder / "model" / "config.json").write_text("{}")
    run()  # reads nothing of it
    before = contents(RUN)
    with pytest.raises(SettingsError, match=rf"{folder.name}: model/config\.json was changed since it was sealed"):
        run("reward.learning_rate=0.002")
    assert contents(RUN) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sft.model=./base", "sft.max_length=65"], r"sft\.max_length is 65, but the model has 64 positions"),
        (["reward.model=./base", "reward.max_length=65"], r"reward\.max_length is 65"),
        (["ppo.model=./base", "ppo.max_new_tokens=60"], r"ppo\.max_prompt_length \+ ppo\.max_new_tokens is 65"),
        (["num_processes=3"], r"reward\.global_batch_size: 64 cannot be shared evenly by 3 processes"),
        (["num_processes=3"], r"ppo\.rollout_batch_size / num_minibatches: 128 cannot be shared evenly"),
        (["ppo.data=one.jsonl"], r"ppo\.data: 1 rows to train on and 0 to evaluate on"),
        (["sft.data=one.jsonl"], r"sft\.data: 2 rows to train on and 0 to evaluate on"),
        (["sft.data=one.jsonl", "sft.eval_data=one.jsonl"], r"sft\.data: 0 rows to train on and 2 to evaluate on"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_stage(
    world: Path, stages: FakeStages, overrides: list[str], message: str
) -> None:
    Path("base").mkdir()
    Path("base/config.json").write_text('{"max_position_embeddings": 64}')
    write_rows(Path("one.jsonl"), [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "c"}])
    fits = ["sft.max_length=64", "reward.max_length=64", "ppo.max_prompt_length=5", "ppo.max_new_tokens=59"]
    with pytest.raises(RefusedError, match=message):
        run(*fits, *overrides)
    assert stages.trained == []
    assert not RUN.exists()


def test_positions_of_gpt2_are_read_too(world: Path, stages: FakeStages) -> None:
    Path("base").mkdir()
    Path("base/config.json").write_text('{"n_positions": 64}')
    with pytest.raises(SettingsError, match=r"sft\.max_length is 65, but the model has 64 positions"):
        run("sft.model=./base", "sft.max_length=65")


def test_a_model_of_an_earlier_run_must_have_the_positions_too(world: Path, stages: FakeStages) -> None:
    run()
    folder = next(RUN.glob("pretrain-*"))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "model" / "config.json").write_text('{"text_config": {"max_position_embeddings": 64}}')
    manifest["files"]["model/config.json"] = file_digest(folder / "model" / "config.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SettingsError, match=r"sft\.max_length is 1024, but the model has 64 positions"):
        run()


def test_a_single_document_is_enough_for_pretraining(world: Path, stages: FakeStages) -> None:
    write_rows(Path("text.jsonl"), [{"text": "one long document"}])
    run()
    assert stages.trained[0] == "pretrain"


def test_text_is_counted_out_source_by_source_before_anything_trains(world: Path, stages: FakeStages) -> None:
    write_rows(Path("more.jsonl"), [{"text": "seven"}, {"text": 8}, {"text": " "}])
    with pytest.raises(DataError, match=r"more\.jsonl row 2: .*kept 1 of 3 rows"):
        run("pretrain.data=[text.jsonl,more.jsonl]")
    said = run("pretrain.data=[text.jsonl,more.jsonl]", "pretrain.max_dropped=0.5")
    assert any(line.startswith("pretrain.data[1]: kept 1 of 3 rows; 1 ×") for line in said)
    with pytest.raises(DataError, match=r"more\.jsonl row 2: .*kept 1 of 3 rows"):
        run("ppo.ptx_coef=1", "ppo.ptx_data=more.jsonl")
    said = run("ppo.ptx_coef=1", "ppo.ptx_data=more.jsonl", "ppo.ptx_block_size=4", "ppo.max_dropped=0.5")
    assert any(line.startswith("ppo.ptx_data: kept 1 of 3 rows; 1 ×") for line in said)


def test_text_that_streams_is_left_to_the_stage_which_downloads_it_once(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Documents, "survey", None)  # is not called
    streamed = "{path: owner/name, streaming: true}"
    run(f"pretrain.data={streamed}", "ppo.ptx_coef=1", f"ppo.ptx_data={streamed}")
    assert stages.trained[0] == "pretrain"


def test_text_of_which_nothing_is_left_is_refused(world: Path, stages: FakeStages) -> None:
    write_rows(Path("text.jsonl"), [{"text": "same"}, {"text": "same"}])
    write_rows(Path("eval.jsonl"), [{"text": "same"}])
    with pytest.raises(DataError, match=r"pretrain\.data: no document is left to train on.*2 × in eval_data"):
        run("pretrain.eval_data=eval.jsonl")
    with pytest.raises(DataError, match=r"no document is left to train on.*2 × shorter than 9 characters"):
        run("pretrain.min_document_length=9")
    assert stages.trained == []


def test_equal_documents_alone_are_enough_for_pretraining_and_its_gradients_in_ppo(
    world: Path, stages: FakeStages
) -> None:
    write_rows(Path("text.jsonl"), [{"text": "same words"}, {"text": "same words"}])
    run("ppo.ptx_coef=1", "ppo.ptx_data=${pretrain.data}", "ppo.ptx_block_size=8")
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]


@pytest.mark.parametrize("text", ["short.jsonl", "${pretrain.data}"])
def test_text_that_fills_no_block_of_ppo_is_refused_before_anything_trains(
    world: Path, stages: FakeStages, text: str
) -> None:
    for name in ("short.jsonl", "text.jsonl"):  # of nine characters the last is held out, the others are nine bytes
        write_rows(Path(name), [{"text": "naïve one"}])
    fields = ("ppo.ptx_coef=1", f"ppo.ptx_data={text}")
    message = (
        r"^ppo\.ptx_data: (short|text)\.jsonl: without what is held out it gives 11 tokens at most, one a byte, but a "
        r"block needs 12; use more text, or a smaller ppo\.ptx_block_size$"
    )
    with pytest.raises(DataError, match=message):
        run(*fields, "ppo.ptx_block_size=11")
    assert stages.trained == []
    run(*fields, "ppo.ptx_block_size=10")
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]


def test_minhash_without_rensa_is_refused_before_anything_trains(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(SettingsError, match=r"pip install 'rlhf-toolkit\[dedup\]'"):
        run("pretrain.deduplicate=minhash")
    assert stages.trained == []


def test_a_tokenizer_that_is_not_there_is_refused_before_anything_is_written(world: Path, stages: FakeStages) -> None:
    Path("empty").mkdir()
    with pytest.raises(SettingsError, match=r"pretrain\.tokenizer: 'empty' holds no tokenizer\.json"):
        run("pretrain.tokenizer=empty")
    assert not RUN.exists()


def test_a_batch_in_tokens_is_what_processes_must_share(world: Path, stages: FakeStages) -> None:
    shape = ("num_processes=3", "sft.global_batch_size=3", "reward.global_batch_size=3", "ppo.rollout_batch_size=12")
    fits = (*shape, "pretrain.context_length=32", "sft.max_length=32", "reward.max_length=32", "ppo.num_minibatches=1")
    lengths = (*fits, "ppo.max_prompt_length=8", "ppo.max_new_tokens=8")
    with pytest.raises(
        SettingsError, match=r"pretrain\.global_batch_tokens / block_size: 4 cannot be shared evenly by 3"
    ):
        run(*lengths, "pretrain.global_batch_tokens=128")
    run(*lengths, "pretrain.global_batch_tokens=96")


def test_blocks_must_fit_into_a_model_that_is_trained_further(world: Path, stages: FakeStages) -> None:
    Path("base").mkdir()
    Path("base/config.json").write_text('{"max_position_embeddings": 16}')
    with pytest.raises(SettingsError, match=r"block_size is 32, .* has 16 positions; set pretrain\.block_size=16"):
        run("pretrain.model=base", "pretrain.block_size=32")


def test_lengths_that_fit_are_told_of_all_stages_at_once_and_work(world: Path, stages: FakeStages) -> None:
    """The recipe of the README, say, on a model of 256 positions."""
    Path("base").mkdir()
    Path("base/config.json").write_text('{"max_position_embeddings": 256}')
    base = ("pretrain=null", "sft.model=./base")
    with pytest.raises(SettingsError, match="positions") as refused:
        run(*base)
    sets = [line.partition("; set ")[2] for line in str(refused.value).splitlines()]
    assert sets == ["sft.max_length=256", "reward.max_length=256", "ppo.max_prompt_length=128"]  # beside 128 new ones
    run(*base, *" ".join(sets).split())
    assert stages.trained == ["sft", "reward", "ppo"]


@pytest.mark.parametrize(("prompt", "new", "told"), [
    (200, 100, "ppo.max_prompt_length=156"), (100, 200, "ppo.max_new_tokens=156"),
    (250, 250, "ppo.max_prompt_length=128 ppo.max_new_tokens=128"),
])  # fmt: skip
def test_of_ppos_lengths_the_one_is_told_that_takes_more_than_half(
    world: Path, stages: FakeStages, prompt: int, new: int, told: str
) -> None:
    Path("base").mkdir()
    Path("base/config.json").write_text('{"max_position_embeddings": 256}')
    with pytest.raises(SettingsError, match=rf"has 256 positions; set {told}$"):
        run("ppo.model=./base", f"ppo.max_prompt_length={prompt}", f"ppo.max_new_tokens={new}")


def test_a_reward_model_is_no_start_of_a_policy_and_is_refused_before_anything_is_written(
    world: Path, stages: FakeStages, rlhf: Callable[..., tuple[int, str, str]]
) -> None:
    Path("rm").mkdir()
    Path("rm/config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    for command in ("run", "plan"):
        code, _, err = rlhf(command, "recipe.yaml", "sft.model=./rm", "ppo.model=./rm", "--run-dir", "run")
        assert (code, err.splitlines()) == (2, [
            "error: sft.model: './rm' is a reward model, not a language model; name the sft or ppo stage's model",
            "ppo.model: './rm' is a reward model, not a language model; name the sft or ppo stage's model",
        ])  # fmt: skip
    assert (stages.trained, RUN.exists()) == ([], False)
    run("reward.model=./rm", "ppo.reward_model=./rm")
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]


def test_only_a_complete_checkpoint_is_gone_on_from(world: Path, stages: FakeStages) -> None:
    def break_after_step_7(folder: Path) -> None:
        for step in (7, 9):
            (clear(folder) / "weights").write_text("abc")
            swap_in(folder, step, processes=1, device="cpu", state={})
        (folder / "checkpoints" / "step-00000009" / "weights").write_text("a")  # it was cut short
        raise ZeroDivisionError("oops")

    stages.in_stage["sft"] = break_after_step_7
    with pytest.raises(RunFailed, match=r"state is kept in run/sft-.* it goes on from step 7, or starts over in a"):
        run()


@pytest.mark.parametrize("kind", [CannotWrite, ConnectionLost, Diverged])
@pytest.mark.parametrize("processes", [1, 2])
def test_what_says_itself_how_to_go_on_is_not_told_it_twice(
    world: Path, stages: FakeStages, kind: type[Exception], processes: int
) -> None:
    said = "the model could not be written: File too large; raise the limit and run again: it goes on from step 7"

    def break_after_step_7(folder: Path) -> None:
        (clear(folder) / "weights").write_text("abc")
        swap_in(folder, 7, processes=1, device="cpu", state={})
        raise kind(said) if processes == 1 else RunFailed(f"{kind.__name__}: {said}")  # as `launch` tells it

    stages.in_stage["sft"] = break_after_step_7
    with pytest.raises(RunFailed) as failed:
        run()
    assert str(failed.value).startswith(f"sft: {said} (traceback in run/sft-")
    assert str(failed.value).count("run again") == 1
    assert str(failed.value).count("step 7") == 1


def test_a_function_that_says_run_again_is_told_how_to_go_on_all_the_same(world: Path, stages: FakeStages) -> None:
    def breaks(folder: Path) -> None:
        raise ValueError("reward mine: it raised TimeoutError: the server is busy, run again later")

    stages.in_stage["sft"] = breaks
    with pytest.raises(RunFailed, match=r"sft: ValueError: reward mine: .*later; no checkpoint yet .*; correct it and"):
        run()


def test_a_run_that_waits_for_another_says_so_at_once(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    RUN.mkdir()
    monkeypatch.setattr(lock, "sleep", lambda seconds: None)
    said: list[str] = []
    with held(RUN, 0), pytest.raises(SettingsError, match="another rlhf run"), held(RUN, 0.01, said.append):
        pass
    holder = f"pid {os.getpid()} on {socket.gethostname()}, for 0 min"
    assert said == [f"another run is working here (run): {holder}; waiting up to 0.01 s"]


def test_rows_or_a_judge_that_cannot_be_found_are_told_with_their_key(world: Path, stages: FakeStages) -> None:
    with pytest.raises(DataError, match=r"^reward\.data: nowhere\.jsonl: no such file"):
        run("reward.data=nowhere.jsonl")
    with pytest.raises(DataError, match=r"^ppo\.judge: nowhere:judge: No module named"):
        run("ppo.judge=nowhere:judge")
