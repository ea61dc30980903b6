"""Variants of pretraining in one run folder: how a sweep is read, trained, reused and shown."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pipeline_world import FakeStages, contents, write_recipe, write_rows

from rlhf.data.documents import Documents
from rlhf.data.errors import SettingsError
from rlhf.pipeline import cli, launch
from rlhf.pipeline.errors import RunStopped
from rlhf.pipeline.plan import Scope
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.runner import run
from rlhf.pipeline.sweep import load_sweep, read_sweep, run_sweep, shipped_sweeps, table
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.settings_file import read_settings

RUN = Path("run")
SIZES = "- {name: small, hidden_size: 16}\n- {name: large, hidden_size: 64}\n- {name: medium, hidden_size: 32}\n"


@pytest.fixture
def learning(stages: FakeStages) -> FakeStages:
    """Pretraining whose loss is a power law of parameters and tokens, 1000 parameters per unit of width."""

    def train(folder: Path) -> None:
        settings = read_settings(folder, PretrainSettings)
        size = 1000 * settings.hidden_size
        losses = {tokens: 40 * size**-0.1 * tokens**-0.2 for tokens in (1000, 2000, 4000)}
        write_rows(folder / "metrics.jsonl", [
            {"step": tokens // 100, "num_tokens": tokens, "val_loss": loss} for tokens, loss in losses.items()
        ])  # fmt: skip
        stages.metrics["pretrain"] = {
            "val_loss": losses[4000], "best_step": 40, "num_tokens": 4000, "vocab_size": 512,
            "num_parameters": size + 512, "num_non_embedding_parameters": size,
        }  # fmt: skip

    stages.in_stage["pretrain"] = train
    return stages


def sweep(text: str = SIZES, *overrides: str, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a sweep file: its rows, and what it said."""
    Path("sweep.yaml").write_text(text)
    said: list[str] = []
    variants = load_sweep("sweep.yaml", "recipe.yaml", overrides)
    return run_sweep(variants, RUN, say=said.append, **options), said


def names(text: str) -> list[str]:
    Path("sweep.yaml").write_text(text)
    return [variant.name for variant in load_sweep("sweep.yaml", "recipe.yaml")]


def test_a_mapping_of_lists_is_a_grid_of_all_combinations(world: Path) -> None:
    assert names("architecture: decoder\nnorm: [rmsnorm, layernorm]\npositions: [rope, none]\n") == [
        "norm=rmsnorm, positions=rope",
        "norm=rmsnorm, positions=none",
        "norm=layernorm, positions=rope",
        "norm=layernorm, positions=none",
    ]


def test_a_variant_is_laid_over_the_overridden_recipe(world: Path) -> None:
    Path("sweep.yaml").write_text("- {hidden_size: 64, learning_rate: 1e-3}\n- {}\n")
    first, second = load_sweep("sweep.yaml", "recipe.yaml", ["pretrain.hidden_size=32", "pretrain.num_layers=3"])
    assert first.recipe.pretrain is not None
    assert second.recipe.pretrain is not None
    assert (first.recipe.pretrain.hidden_size, first.recipe.pretrain.num_layers) == (64, 3)
    assert first.recipe.pretrain.learning_rate == 0.001  # a number, though PyYAML would read a text
    assert (second.name, second.recipe.pretrain.hidden_size) == ("as the recipe", 32)
    assert first.recipe.sft == second.recipe.sft


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "- {name: a}\n- {name: b, hiden_size: 64}\n",
            "sweep.yaml: entry 2 (b): pretrain: no setting 'hiden_size'; did you mean 'hidden_size'?",
        ),
        ("num_heads: [2, 3]", "sweep.yaml: entry 2 (num_heads=3): pretrain"),
        (
            "- {name: a, num_layers: 1}\n- {name: a, num_layers: 2}\n",
            "entry 2 (a): an entry before it has the same name",
        ),
        ("- {}\n- {log_every: 3}\n", "entry 2 (log_every=3): trains the same model as entry 'as the recipe'"),
        ("- 7\n", "sweep.yaml: entry 1 is 7; it must be a mapping of pretrain settings"),
        ("[]", "sweep.yaml: no variants"),
        ("num_layers: []", "sweep.yaml: no variants"),
        ("- {num_layers: ", "sweep.yaml: not valid YAML"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_by_file_and_entry(world: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        names(text)
    assert message in str(refusal.value)


def test_mistakes_of_the_recipe_are_not_blamed_on_the_sweep(world: Path) -> None:
    with pytest.raises(SettingsError, match=r"^pretrain: no setting 'hiden_size'"):
        load_sweep("sizes", "recipe.yaml", ["pretrain.hiden_size=3"])
    write_recipe(world, sft={"data": "demonstrations.jsonl"})
    with pytest.raises(SettingsError, match=r"recipe.yaml: no section 'pretrain'"):
        load_sweep("sizes", "recipe.yaml")
    with pytest.raises(SettingsError, match=r"sises: no such sweep; did you mean 'sizes'\?"):
        load_sweep("sises", "recipe.yaml", ["pretrain.data=text.jsonl"])


def test_the_shipped_sweeps_fit_any_recipe(world: Path) -> None:
    assert set(shipped_sweeps()) == {"parts", "sizes", "original_llama"}
    assert [variant.name for variant in load_sweep("original_llama", "demo")] == ["original", "LLaMA"]
    assert len(load_sweep("parts", "demo")) == 2**4
    widths = [variant.settings["hidden_size"] for variant in load_sweep("sizes", "demo")]
    assert widths == sorted(set(widths))
    assert len(widths) == 5


def test_all_variants_are_trained_side_by_side_and_the_best_sums_up_the_run(world: Path, learning: FakeStages) -> None:
    rows, said = sweep()
    assert learning.trained == ["pretrain"] * 3
    assert {row["folder"] for row in rows} == {path.name for path in RUN.glob("pretrain-*")}
    assert [(row["name"], row["num_non_embedding_parameters"], row["best_step"]) for row in rows] == [
        ("small", 16000, 40), ("large", 64000, 40), ("medium", 32000, 40),
    ]  # fmt: skip
    assert rows[0]["settings"] == {"hidden_size": 16}
    assert all(row["seconds"] >= 0 and row["num_tokens"] == 4000 for row in rows)
    assert read_sweep(RUN)["rows"] == rows
    summary = json.loads((RUN / "summary.json").read_text())["stages"]
    assert (summary["pretrain"]["folder"], summary["pretrain"]["seconds"]) == (rows[1]["folder"], rows[1]["seconds"])
    assert load_recipe(str(RUN / "recipe.yaml")).pretrain.hidden_size == 64
    assert learning.reports == 1
    assert [line.split(":")[0] for line in said] == [
        f"[{n}/3] {name}" for n, name in ((1, "small"), (2, "large"), (3, "medium")) for _ in range(2)
    ]
    assert said[1].startswith(f"[1/3] small: val_loss {rows[0]['val_loss']:.4f}  0.")


def test_three_sizes_make_a_scaling_study_that_finds_the_laws_again(world: Path, learning: FakeStages) -> None:
    sweep()
    found = read_sweep(RUN)["scaling"]
    assert found["parameters"]["fit"]["exponent"] == pytest.approx(0.1)
    assert found["tokens"]["fit"]["exponent"] == pytest.approx(0.2)
    assert [x for x, _ in found["tokens"]["points"]] == [1000, 2000, 4000]
    assert found["parameters"]["fit"]["r_squared"] == pytest.approx(1)
    sweep("num_layers: [1, 2, 3]")  # which leave the count as it is, here
    assert read_sweep(RUN)["scaling"] is None


def test_losses_of_different_vocabularies_are_not_put_on_one_line(world: Path, learning: FakeStages) -> None:
    train = learning.in_stage["pretrain"]

    def with_own_vocabulary(folder: Path) -> None:
        train(folder)
        learning.metrics["pretrain"]["vocab_size"] = read_settings(folder, PretrainSettings).hidden_size

    learning.in_stage["pretrain"] = with_own_vocabulary
    sweep()
    assert read_sweep(RUN)["scaling"] is None


def test_what_is_finished_is_reused_and_its_time_is_remembered(world: Path, learning: FakeStages) -> None:
    before, _ = sweep()
    run(load_recipe("recipe.yaml", ["pretrain.hidden_size=128"]), RUN, Scope("pretrain", "pretrain"), lambda _: None)
    rows, said = sweep(SIZES + "- {name: xl, hidden_size: 128}\n- {name: xxl, hidden_size: 256}\n")
    assert learning.trained == ["pretrain"] * 5
    assert rows[:3] == before
    assert [line.split()[2] for line in said[::2]] == ["reuse"] * 4 + ["run"]


def test_a_sweep_that_is_done_is_read_again_without_a_change(world: Path, learning: FakeStages) -> None:
    before, _ = sweep()
    files = {path: content for path, (content, _) in contents(RUN).items()}
    assert sweep()[0] == before
    assert {path: content for path, (content, _) in contents(RUN).items()} == files


def test_force_trains_all_variants_anew_beside_the_old(world: Path, learning: FakeStages) -> None:
    before, _ = sweep()
    after, _ = sweep(force=True)
    assert len(list(RUN.glob("pretrain-*"))) == 6
    assert not {row["folder"] for row in before} & {row["folder"] for row in after}


def test_nothing_is_trained_where_one_variant_cannot_be(world: Path, learning: FakeStages) -> None:
    with pytest.raises(SettingsError, match="cannot be shared evenly by 2 processes"):
        sweep("- {}\n- {global_batch_size: 7}\n", "num_processes=2")
    assert learning.trained == []
    assert not RUN.exists()


def test_a_variant_that_its_stage_refuses_lets_the_others_go_on(world: Path, learning: FakeStages) -> None:
    train = learning.in_stage["pretrain"]

    def picky(folder: Path) -> None:
        if read_settings(folder, PretrainSettings).hidden_size == 64:
            raise SettingsError("pretrain.block_size: the text is too short")
        train(folder)

    learning.in_stage["pretrain"] = picky
    rows, _ = sweep()
    assert [row["error"] for row in rows] == [None, "pretrain.block_size: the text is too short", None]


def test_a_variant_that_breaks_lets_the_others_go_on(world: Path, learning: FakeStages) -> None:
    train = learning.in_stage["pretrain"]

    def break_the_large(folder: Path) -> None:
        if read_settings(folder, PretrainSettings).hidden_size == 64:
            raise RuntimeError("training diverged")
        train(folder)

    learning.in_stage["pretrain"] = break_the_large
    rows, said = sweep()
    assert [row["val_loss"] is None for row in rows] == [False, True, False]
    assert "training diverged" in rows[1]["error"]
    assert any(line.startswith("[2/3] large: pretrain: RuntimeError: training diverged") for line in said)
    assert load_recipe(str(RUN / "recipe.yaml")).pretrain.hidden_size == 32
    columns, cells = table(rows)
    assert [line[0] for line in cells] == ["medium", "small", "large"]
    assert cells[2][columns.index("val_loss")] == "failed"
    learning.in_stage["pretrain"] = train
    assert sweep()[1][2] == f"[2/3] large: resume {rows[1]['folder']}"


def test_a_stopped_sweep_keeps_its_rows_and_goes_on(world: Path, learning: FakeStages) -> None:
    train = learning.in_stage["pretrain"]

    def stop_at_the_second(folder: Path) -> None:
        if len(learning.trained) == 2:
            raise SystemExit(143)
        train(folder)

    learning.in_stage["pretrain"] = stop_at_the_second
    with pytest.raises(RunStopped):
        sweep()
    assert [row["name"] for row in read_sweep(RUN)["rows"]] == ["small"]
    assert len(sweep()[0]) == 3
    assert learning.trained == ["pretrain"] * 4


def test_the_table_has_the_settings_that_differ_and_the_best_variant_first(world: Path, learning: FakeStages) -> None:
    rows, _ = sweep("num_layers: 3\nhidden_size: [16, 64]\n")
    columns, cells = table(rows)
    assert columns == [
        "hidden_size", "parameters", "not embeddings", "tokens", "val_loss", "behind best", "best step", "time",
        "folder",
    ]  # fmt: skip
    assert [line[0] for line in cells] == ["64", "16"]
    best, worst = (40 * size**-0.1 * 4000**-0.2 for size in (64000, 16000))
    assert cells[0][1:6] == ["64,512", "64,000", "4,000", f"{best:.4f}", ""]
    assert cells[1][5] == f"+{worst - best:.4f}"


def test_the_command_prints_the_table_and_fails_if_a_variant_did(
    world: Path, learning: FakeStages, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sweep.yaml").write_text(SIZES)
    words = ["pretrain", "recipe.yaml", "--sweep", "sweep.yaml", "--run-dir", "run"]
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[6].split()[:2] == ["variant", "hidden_size"]
    assert [line.split()[0] for line in lines[7:]] == ["large", "medium", "small", "report:"]

    def fail(folder: Path) -> None:
        raise RuntimeError("training diverged")

    learning.in_stage["pretrain"] = fail
    Path("sweep.yaml").write_text("seed: [0, 1]\nhidden_size: 16\n")
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 1
    assert "error: 1 of 2 variants failed; run again to go on. pretrain: RuntimeError" in capsys.readouterr().err


def test_real_sizes_are_trained_fitted_and_shown(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "stays_in_process", lambda *_: True)
    documents = {"path": "rlhf.recipes.demo_world:documents", "options": {"num": 120}}
    write_recipe(
        world,
        pretrain={
            "data": documents, "vocab_size": 300, "num_layers": 1, "num_heads": 2, "context_length": 32,
            "num_steps": 6, "global_batch_size": 4, "eval_every": 2, "learning_rate": 1e-2, "warmup_steps": 2,
            "report_to": [],
        },
    )  # fmt: skip
    rows, _ = sweep("hidden_size: [16, 32, 64]")
    assert all(row["val_loss"] < math.log(300) for row in rows)  # better than guessing
    sizes = [row["num_non_embedding_parameters"] for row in rows]
    assert sizes == sorted(set(sizes))
    found = read_sweep(RUN)["scaling"]
    assert [x for x, _ in found["parameters"]["points"]] == sizes
    assert [x for x, _ in found["tokens"]["points"]] == [2 * 4 * 32, 4 * 4 * 32, 6 * 4 * 32]
    assert "over parameters N, log axes" in (RUN / "report.html").read_text()


def test_a_text_is_read_once_before_all_variants_and_its_warnings_told_once(
    world: Path, learning: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    surveys = []
    survey = Documents.survey
    monkeypatch.setattr(Documents, "survey", lambda self: surveys.append(self) or survey(self))
    sweep()
    assert len(surveys) == 1
