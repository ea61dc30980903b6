import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.errors import RefusedError
from rlhf.pipeline.charts import MAX_POINTS, draw_charts
from rlhf.pipeline.report import render

METRICS = {
    "pretrain": {"val_loss": 2.164, "vocab_size": 1024},
    "sft": {"eval_loss": 1.17, "base_eval_loss": 3.42},
    "reward": {"accuracy": 0.868, "longer_wins_accuracy": 0.571},
    "ppo": {"true_quality": 0.83, "sft_true_quality": 0.386, "win_rate": 0.82, "kl": 8.7},
}
ROWS = {
    "pretrain": [{"step": step, "loss": 7 - step / 10, "val_loss": 7 - step / 9} for step in range(30)],
    "sft": [{"step": step, "loss": 3 - step / 10, "eval_loss": 3 - step / 9} for step in range(10)],
    "reward": [{"step": step, "loss": 0.7, "accuracy": 0.5 + step / 100} for step in range(10)],
    "ppo": [{"step": step, "score": step / 10, "kl": step / 5, "entropy": 9 - step / 5} for step in range(10)],
}
SAMPLE = {
    "prompt": "What does a fox eat?",
    "sft": "the the the",
    "ppo": "A fox eats mice.",
    "sft_score": -0.5,
    "ppo_score": 2.25,
}


def make_run(folder: Path, stages: list[str], samples: list[dict[str, Any]] | None = None) -> Path:
    entries = {}
    for stage in stages:
        artifact = folder / f"{stage}-0123abcd"
        artifact.mkdir(parents=True)
        write_lines(artifact / "metrics.jsonl", ROWS[stage])
        made_with = {"versions": {"torch": "2.13.0"}, "commit": "c0ffee", "processes": 1}
        manifest = {"settings": {"learning_rate": 0.003}, "made_with": made_with, "files": {}}
        (artifact / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        entries[stage] = {
            "status": "done",
            "folder": artifact.name,
            "model": f"{artifact.name}/model",
            "seconds": 12.5,
            "metrics": METRICS[stage],
        }
        if stage == "ppo":
            write_lines(artifact / "samples.jsonl", samples or [])
    (folder / "summary.json").write_text(json.dumps({"stages": entries}), encoding="utf-8")
    (folder / "recipe.yaml").write_text("seed: 7\n", encoding="utf-8")
    return folder


CARD: dict[str, Any] = {
    "num_pairs": 1234,
    "num_prompts": 250,
    "by_length": [
        {"name": "better answer longer", "pairs": 800, "accuracy": 0.9},
        {"name": "better answer shorter", "pairs": 434, "accuracy": 0.55},
    ],
    "by_margin": [],
    "by_source": [{"name": "<forum>", "pairs": 1000, "accuracy": 0.7}, {"name": "web", "pairs": 234, "accuracy": 1.0}],
    "reliability": [
        {"confidence": 0.6, "accuracy": 0.55, "pairs": 400},
        {"confidence": 0.9, "accuracy": 0.8, "pairs": 834},
    ],
    "reliability_after_temperature": [{"confidence": 0.72, "accuracy": 0.719, "pairs": 1234}],
    "histogram": {"edges": [-2.0, 0.0, 2.0], "chosen": [50, 200], "rejected": [180, 70]},
}
FIGURES = {
    "accuracy": 0.7189, "prompt_accuracy": 0.7, "longer_wins_accuracy": 0.571, "ece": 0.0812, "temperature": 1.62,
    "ece_after_temperature": 0.0123, "chosen_mean": 0.41, "rejected_mean": -0.52,
}  # fmt: skip
WORST = {
    "prompt": "What does a fox eat?",
    "better": "Mice <b>and</b> berries.",
    "better_score": -1.5,
    "better_rank": 1.0,
    "worse": "No idea.",
    "worse_score": 2.25,
    "worse_rank": 2.5,
}


def make_graded(folder: Path, worst: list[dict[str, Any]], **more: Any) -> Path:
    """A run of the reward model alone with a report card."""
    run_dir = make_run(folder, ["reward"])
    artifact = run_dir / "reward-0123abcd"
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    (artifact / "manifest.json").write_text(json.dumps(manifest | {"metrics": FIGURES}), encoding="utf-8")
    (artifact / "card.json").write_text(json.dumps(CARD | more), encoding="utf-8")
    write_lines(artifact / "worst_pairs.jsonl", worst)
    return run_dir


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def page(run_dir: Path) -> str:
    """The report with runs of white space made one space."""
    return " ".join(render(run_dir).read_text(encoding="utf-8").split())


def words(html: str) -> str:
    """What a reader sees of it."""
    return " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", html).split())


def test_every_stage_shows_its_metric_before_and_after(tmp_path: Path) -> None:
    shown = words(page(make_run(tmp_path / "run", list(METRICS), [SAMPLE])))
    assert "held-out loss, nats per token 6.93 → 2.16 against guessing ✓ better" in shown  # ln 1024 = 6.93
    assert "3.42 → 1.17 against the base model ✓ better" in shown
    assert "0.571 → 0.868 against “longer wins” ✓ better" in shown
    assert "true quality 0.386 → 0.830 against SFT ✓ better" in shown
    assert "Together 50.0 s" in shown


def test_a_stage_that_made_it_worse_is_said_to_be_worse(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["sft"])
    summary = (run_dir / "summary.json").read_text(encoding="utf-8")
    (run_dir / "summary.json").write_text(summary.replace("3.42", "1.05"), encoding="utf-8")
    assert "1.05 → 1.17 against the base model ✗ worse" in words(page(run_dir))


REASON = "from iteration 60 to 100 the score rose from 2.10 to 3.40 while the true quality fell from 0.83 to 0.61"


def make_ppo(folder: Path, **metrics: Any) -> Path:
    """A run of ppo alone whose final metrics hold these too."""
    run_dir = make_run(folder, ["ppo"])
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    summary["stages"]["ppo"]["metrics"] |= metrics
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run_dir


def test_an_over_optimised_run_is_marked_at_the_top_and_at_its_stage(tmp_path: Path) -> None:
    run_dir = make_ppo(tmp_path / "run", over_optimised=True, over_optimised_because=REASON, best_step=60)
    shown = words(page(run_dir))
    sentence = f"Over-optimised: {REASON}. The policy of iteration 60 was kept."
    top, stages = shown.split(" Stages Stage Status ")
    assert f"⚠ PPO: {sentence} PPO ✓ better 0.386 → 0.830" in top
    assert f"PPO done, over-optimised 12.5 s ⚠ {sentence} true quality 0.386" in stages


def test_findings_of_the_health_monitor_are_told_in_words(tmp_path: Path) -> None:
    run_dir = make_ppo(tmp_path / "run", over_optimised=False, findings=["entropy_collapse", "kl_blow_up"])
    shown = words(page(run_dir))
    assert "⚠ PPO: Not healthy at the end: entropy collapse, kl blow up. PPO ✓ better" in shown
    assert "PPO done 12.5 s ⚠ Not healthy at the end: entropy collapse, kl blow up. true quality" in shown
    assert "over_optimised no findings entropy_collapse, kl_blow_up" in shown  # the table of all results


def test_a_healthy_run_shows_no_warning(tmp_path: Path) -> None:
    html = page(make_ppo(tmp_path / "run", over_optimised=False, findings=[]))
    assert "⚠" not in html
    assert "over_optimised no findings none" in words(html)


def test_the_report_card_shows_accuracies_calibration_and_the_worst_pairs(tmp_path: Path) -> None:
    html = page(make_graded(tmp_path / "run", [WORST]))
    shown = words(html)
    assert (
        "Of 1,234 pairs of held-out answers to 250 prompts, the model gives the higher score to the better answer in "
        "71.9% ; averaged prompt by prompt, in 70.0% . Always preferring the longer answer would reach 57.1%."
    ) in shown
    assert "as trained, calibration error 0.0812 at temperature 1.62 0.0123 as right as it is sure" in shown
    assert "best of a prompt, mean 0.410 worst, mean -0.520" in shown
    assert "by length pairs accuracy better answer longer 800 90.0% better answer shorter 434 55.0%" in shown
    assert "by source pairs accuracy &lt;forum&gt; 1,000 70.0% web 234 100.0%" in shown
    assert "by how much better" not in shown  # no strengths are known
    assert "several reward models" not in shown
    assert "The 1 pair it is most wrong about" in shown
    assert (
        "What does a fox eat? Better, rank 1 score -1.50 Mice &lt;b&gt;and&lt;/b&gt; berries. "
        "Worse, rank 2.5 score 2.25 No idea."
    ) in shown
    assert html.count("<figure") == 4  # loss, accuracy, reliability, scores


def test_other_reward_models_stand_beside_with_how_far_they_agree(tmp_path: Path) -> None:
    compared = [{"model": "other/model", "accuracy": 0.65}]
    agreement = {"all_agree": 0.8, "mean_pairwise": 0.85, "score_std": 0.25}
    shown = words(page(make_graded(tmp_path / "run", [], compared=compared, agreement=agreement)))
    assert (
        "several reward models on the same pairs accuracy other/model 65.0% pairs that all models order alike 80.0%"
        in shown
    )
    assert "most wrong about" not in shown


def test_a_card_of_a_stage_that_is_not_sealed_is_not_shown(tmp_path: Path) -> None:
    run_dir = make_graded(tmp_path / "run", [WORST])
    (run_dir / "reward-0123abcd" / "manifest.json").unlink()
    assert "report card" not in page(run_dir)


def test_a_failed_gate_is_told_at_the_top_and_at_its_stage(tmp_path: Path) -> None:
    run_dir = make_graded(tmp_path / "run", [])
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    failed = "held-out accuracy 0.72 is below reward.min_accuracy 0.8"
    summary["stages"]["reward"]["metrics"]["gates_failed"] = [failed]
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    top, stages = words(page(run_dir)).split(" Stages Stage Status ")
    assert f"⚠ Reward model: PPO does not start from it: {failed}." in top
    assert f"Reward model done, gate failed 12.5 s ⚠ PPO does not start from it: {failed}." in stages


def test_true_quality_is_drawn_from_where_sft_stood(tmp_path: Path) -> None:
    """With the names that the ppo stage writes, finished or not."""
    evaluations = [
        {"step": 5, "score": 0.2, "kl": 1.0},
        {"step": 5, "eval_score": 0.1, "eval_sft_score": -0.1, "eval_true_quality": 0.5, "eval_sft_true_quality": 0.4,
         "eval_win_rate": 0.6, "eval_kl": 1.5, "eval_eos_share": 1.0, "eval_sft_eos_share": 0.9},
        {"step": 10, "score": 0.4, "kl": 2.0},
        {"step": 10, "eval_score": 0.5, "eval_sft_score": -0.1, "eval_true_quality": 0.9, "eval_sft_true_quality": 0.4,
         "eval_win_rate": 0.8, "eval_kl": 2.5, "eval_eos_share": 1.0, "eval_sft_eos_share": 0.9},
    ]  # fmt: skip
    for final in ({}, {"sft_true_quality": 0.4, "sft_score": -0.1, "sft_eos_share": 0.9}):
        drawn = draw_charts("ppo", evaluations, final)
        quality, score, kl, eos = drawn["charts"]
        assert (quality["spec"].title, quality["last"], quality["level"]) == (
            "True quality", {"eval_true_quality": 0.9}, 0.4,
        )  # fmt: skip
        assert (score["last"], score["level"]) == ({"score": 0.4, "eval_score": 0.5}, -0.1)
        assert kl["last"] == {"kl": 2.0, "eval_kl": 2.5}
        assert (eos["last"], eos["level"]) == ({"eval_eos_share": 1.0}, 0.9)
        assert [chart["spec"].title for chart in drawn["more_charts"]] == ["eval win rate"]
    run_dir = make_run(tmp_path / "run", ["ppo"], [SAMPLE | {"sft_quality": 0.4, "ppo_quality": 0.9}])
    write_lines(run_dir / "ppo-0123abcd" / "metrics.jsonl", evaluations)
    html = page(run_dir)
    assert "True quality eval_true_quality 0.900 SFT 0.386" in words(html)
    assert "for PPO iterations: new answers" in html
    assert "the judge, which PPO never optimises directly, only through the reward model" in html


def test_an_evaluation_curve_begins_at_the_sft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("rlhf.pipeline.charts._svg", lambda lines, level, salt: drawn.append(lines))
    draw_charts("ppo", [{"step": 5, "eval_true_quality": 0.5, "eval_sft_true_quality": 0.4}], {})
    assert drawn == [[[(0, 0.4), (5, 0.5)]]]


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    html = page(make_run(tmp_path / "run", list(METRICS), [SAMPLE]))
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)|src=|href=\"(?!#)", html)


def test_text_of_models_and_people_cannot_become_markup(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    run_dir = make_run(tmp_path / "run", ["ppo"], [SAMPLE | {"prompt": attack, "sft": attack, "ppo": attack}])
    (run_dir / "recipe.yaml").write_text(f"name: '{attack}'\n", encoding="utf-8")
    write_lines(run_dir / "ppo-0123abcd" / "metrics.jsonl", [{"step": 1, attack: 1.0, "$x_": 2.0}])
    html = page(run_dir)
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4


def test_answers_stand_side_by_side_with_their_scores(tmp_path: Path) -> None:
    worse = SAMPLE | {"ppo_score": -1.0}
    shown = words(page(make_run(tmp_path / "run", ["ppo"], [SAMPLE, SAMPLE, worse])))
    assert "What does a fox eat? SFT score -0.50 the the the PPO score 2.25 A fox eats mice." in shown
    assert "By score, PPO's answer is better for 2 of 3 prompts and worse for 1 ." in shown


def test_true_quality_decides_where_a_judge_gave_it(tmp_path: Path) -> None:
    judged = SAMPLE | {"sft_quality": 0.9, "ppo_quality": 0.25}  # the score says better, the judge worse
    shown = words(page(make_run(tmp_path / "run", ["ppo"], [judged])))
    assert "By true quality, PPO's answer is better for 0 of 1 prompts and worse for 1 ." in shown
    assert "PPO true quality 0.25 score 2.25" in shown


def test_an_unfinished_run_shows_what_there_is(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain", "sft"])
    (run_dir / "sft-0123abcd" / "manifest.json").unlink()
    with (run_dir / "sft-0123abcd" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 99, "lo')  # killed while writing
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    summary["stages"]["sft"] |= {"status": "failed", "seconds": None, "metrics": {}}
    summary["stages"]["reward"] = {
        "status": "planned",
        "folder": None,
        "model": None,
        "seconds": None,
        "metrics": {},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    html = page(run_dir)
    assert "SFT failed no result yet" in words(html)
    assert "Reward model planned no result yet" in words(html)
    assert html.count("<figure") == 2  # the losses of pretrain and of sft as far as it came
    assert "Answers before and after" not in html


def test_settings_and_versions_can_be_looked_up(tmp_path: Path) -> None:
    shown = words(page(make_run(tmp_path / "run", ["sft"])))
    assert "seed: 7" in shown
    assert "sft.learning_rate 0.003 versions torch 2.13.0 commit c0ffee processes 1" in shown


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain", "reward"])
    assert page(run_dir) == page(run_dir)


def test_a_long_run_stays_under_half_a_megabyte(tmp_path: Path) -> None:
    samples = [SAMPLE | {"sft": "word " * 5000, "ppo": "word " * 5000}] * 200
    run_dir = make_run(tmp_path / "run", ["ppo"], samples)
    rows = [{"step": step, **{f"metric_{i}": (step * i) % 7.3 for i in range(20)}} for step in range(5000)]
    write_lines(run_dir / "ppo-0123abcd" / "metrics.jsonl", rows)
    assert render(run_dir).stat().st_size < 500_000


def test_steps_logged_again_after_a_resume_count_once() -> None:
    rows = [{"step": 1, "kl": 5.0}, {"step": 2, "kl": 6.0}, {"step": 2, "kl": 7.0}]
    charts = draw_charts("ppo", rows, {})["charts"]
    assert [chart["last"] for chart in charts] == [{"kl": 7.0}]


def test_long_curves_show_the_mean_of_neighbours() -> None:
    rows = [{"step": step, "kl": float(step % 2)} for step in range(2 * MAX_POINTS)]  # 0 1 0 1 …
    charts = draw_charts("ppo", rows, {})["charts"]
    assert charts[0]["last"] == {"kl": 0.5}


def test_values_that_are_no_numbers_are_left_out_of_curves() -> None:
    rows = [{"step": 1, "kl": float("nan"), "note": "warm-up"}, {"step": 2, "kl": None}]
    assert draw_charts("ppo", rows, {}) == {"charts": [], "more_charts": []}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"no summary\.json"):
        render(tmp_path)


def test_a_damaged_manifest_is_refused_with_its_path(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain", "sft"])
    manifest = run_dir / "sft-0123abcd" / "manifest.json"
    manifest.write_text("[]", encoding="utf-8")
    with pytest.raises(RefusedError, match=re.escape(f"{manifest}: is damaged; move its folder away")):
        render(run_dir)


def make_sweep(folder: Path, losses: list[float], scaling: bool = False) -> Path:
    """A run whose pretraining was swept; a variant without a loss failed. Each has a curve of three evaluations."""
    run_dir = make_run(folder, ["pretrain"])
    rows: list[dict[str, Any]] = []
    for number, loss in enumerate(losses):
        artifact = run_dir / f"pretrain-{number}"
        artifact.mkdir()
        evaluations = [{"step": 10 * n, "num_tokens": 100 * n, "val_loss": loss + 3 - n} for n in (1, 2, 3)]
        write_lines(artifact / "metrics.jsonl", evaluations if loss else [])
        rows.append({
            "name": f"<v{number}>", "settings": {"num_layers": number}, "folder": artifact.name, "num_tokens": 300,
            "num_parameters": 2000 + number, "num_non_embedding_parameters": 1000 + number, "vocab_size": 512,
            "val_loss": loss or None, "best_step": 30, "seconds": 61.0, "error": None if loss else "it diverged",
        })  # fmt: skip
    part = {"points": [[1e3, 4.0], [1e4, 2.0], [1e5, 1.0]], "fit": None}
    fit = {"exponent": 0.30103, "log10_constant": 5.0, "r_squared": 0.98765}
    study = {"parameters": part | {"fit": fit}, "tokens": part, "compute": {"points": [], "fit": None}}
    content = {"rows": rows, "scaling": study if scaling else None}
    (run_dir / "sweep.json").write_text(json.dumps(content), encoding="utf-8")
    return run_dir


def test_a_sweep_is_a_table_of_its_variants_and_their_curves(tmp_path: Path) -> None:
    html = page(make_sweep(tmp_path / "run", [2.5, 2.25, 2.75, 3.0, 0]))
    shown = words(html)
    assert "5 variants of pretraining, the best first" in shown
    assert "variant num layers parameters not embeddings tokens val loss behind best best step time folder" in shown
    assert "&lt;v1&gt; 1 2,001 1,001 300 2.2500 30 1:01 min pretrain-1 &lt;v0&gt;" in shown
    assert "2.5000 +0.2500" in shown
    assert "⚠ &lt;v4&gt;: it diverged" in shown
    assert "&lt;v1&gt; 2.25 &lt;v3&gt; 3.00 the 2 between" in shown  # the best and the worst are told apart
    assert "log axes" not in shown


def test_up_to_three_variants_have_a_line_of_their_own(tmp_path: Path) -> None:
    shown = words(page(make_sweep(tmp_path / "run", [2.5, 2.25, 2.75])))
    assert "&lt;v1&gt; 2.25 &lt;v0&gt; 2.50 &lt;v2&gt; 2.75" in shown
    assert "between" not in shown.partition("Sweep")[2].partition("How it was made")[0]


def test_a_scaling_study_shows_each_law_with_its_points(tmp_path: Path) -> None:
    html = page(make_sweep(tmp_path / "run", [2.5, 2.25, 2.75], scaling=True))
    assert "L(N) = (1.00·10<sup>5</sup> / N)<sup>0.301</sup>" in html
    assert "R² 0.988, 3 points" in html
    assert html.count("no line: it takes three points, and a loss that falls") == 2
    assert "form of Kaplan et al. (2020)" in html
    drawn = html.partition("over parameters N")[2].partition("</figure>")[0]
    assert all(power in drawn for power in ("10³", "10⁴", "10⁵"))


def test_a_run_without_a_sweep_says_nothing_of_one(tmp_path: Path) -> None:
    assert "Sweep" not in page(make_run(tmp_path / "run", ["pretrain"]))


def test_a_sweep_file_that_is_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    run_dir = make_sweep(tmp_path / "run", [2.5])
    (run_dir / "sweep.json").write_text('{"rows": [', encoding="utf-8")
    with pytest.raises(RefusedError, match=r"sweep.json: not the result of a sweep"):
        render(run_dir)


def test_what_the_base_model_writes_is_shown_newest_first(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain"])
    samples = [{"step": step, "prompt": "Once", "text": f" at {step} <i>"} for step in (100, 200)]
    write_lines(run_dir / "pretrain-0123abcd" / "samples.jsonl", samples)
    shown = words(page(run_dir))
    assert "What it writes, from step 100 to step 200 step 200 Once at 200 &lt;i&gt; step 100 Once at 100" in shown
    assert "Answers before and after PPO" not in shown


def timed(step: int, **seconds: float) -> dict[str, Any]:
    return {"step": step, "score": 0.5, **{f"seconds_{name}": value for name, value in seconds.items()}}


def test_phases_are_means_over_steps_without_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        timed(1, rollout=90, update=90),  # compiles
        timed(2, rollout=1, update=2) | {"tokens_per_second_rollout": 1000.0, "bandwidth_share_rollout": 0.1},
        timed(5, rollout=3, update=2, evaluation=4) | {"tokens_per_second_rollout": 2000.0},  # three steps at once
    ]
    monkeypatch.setitem(ROWS, "ppo", rows)
    shown = words(page(make_run(tmp_path, ["ppo"])))
    # rollout (1 + 3 · 3) / 4, update 2, evaluation 3 · 4 / 4; rates weigh by time: (1 · 1000 + 9 · 2000) / 10
    assert "PPO seconds share tokens/s of the bound" in shown
    assert "rollout sampling answers 2.50 33.3% 1,900 10.0% bandwidth" in shown
    assert "update forward and backward passes, optimiser 2.00 26.7% – –" in shown
    assert "evaluation on held-out data 3.00 40.0% – –" in shown


def test_one_row_is_all_there_is_of_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "ppo", [timed(1, update=0.5) | {"flops_share_update": 0.375}])
    shown = words(page(make_run(tmp_path, ["ppo"])))
    assert "update forward and backward passes, optimiser 0.500 100.0% – 37.5% FLOP/s" in shown


def test_phases_are_in_their_table_and_not_among_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [timed(step, rollout=1) | {"tokens_per_second_rollout": 7.0, "peak_gib": 1.0} for step in (1, 2)]
    monkeypatch.setitem(ROWS, "ppo", rows)
    shown = words(page(make_run(tmp_path, ["ppo"])))
    assert "1 more curve" in shown
    assert "seconds rollout" not in shown


def test_a_run_without_phases_has_no_table_of_them(tmp_path: Path) -> None:
    assert "Where the time went" not in page(make_run(tmp_path, ["sft", "ppo"]))
