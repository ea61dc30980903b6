"""report.html: what it shows of a run, finished or not, healthy or not."""

import json
import re
from pathlib import Path

import pytest
from report_world import (
    METRICS,
    SAMPLE,
    WORST,
    make_graded,
    make_run,
    page,
    set_metrics,
    together,
    words,
    write_lines,
)

from rlhf.data.errors import RefusedError
from rlhf.pipeline.report import render
from rlhf.pipeline.report.judgement import judge_run
from rlhf.pipeline.report.run import read_run
from rlhf.stages.artifact import Artifact


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are drawn for the tests that want `drawings`; each takes a twentieth of a second."""
    if "drawings" not in request.fixturenames:
        monkeypatch.setattr("rlhf.pipeline.report.charts.draw_lines", lambda *_: "")


@pytest.fixture
def drawings() -> None:
    """What a test asks for that looks at curves."""


def test_every_stage_shows_its_metric_before_and_after(tmp_path: Path) -> None:
    shown = words(page(make_run(tmp_path / "run", list(METRICS), [SAMPLE])))
    assert (
        "Pretraining ✓ learned 6.93 → 2.16 held-out loss, nats per token, against guessing" in shown
    )  # ln 1024 = 6.93
    assert "SFT ✓ learned 3.42 → 1.17 held-out loss, nats per token, against the base model" in shown
    assert "Reward model ✓ learned 0.57 → 0.87 held-out ranking accuracy, against “longer wins” (in tokens)" in shown
    assert "PPO ? too few to tell 0.386 → 0.830 quality by the judge, against SFT; at the end of the ppo stage" in shown
    assert "Together 50.0 s" in shown


def test_every_stage_has_a_verdict_and_the_run_an_outcome_at_the_top(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", list(METRICS), [SAMPLE | {"prompt": str(n)} for n in range(40)])
    set_metrics(run_dir, "reward", num_eval_prompts=300)
    shown = words(page(run_dir))
    assert "SFT ✓ learned SFT learned: held-out loss 3.42 → 1.17. done 12.5 s" in shown
    top = shown[: shown.index("From raw text")]
    assert (
        "PPO improved: quality by the judge 0.386 → 0.830, win rate over SFT by the judge 0.82 (at least 40 prompts; "
        "of so many the 95 % interval 0.67 to 0.91), KL 8.70 nats per response; at the end of the ppo stage."
    ) in " ".join(top.split())
    assert top.endswith("No stage before it gives cause for doubt. The last finished model is run/ppo-0123abcd/model. ")
    assert "What it means, and what to change" not in shown


def test_a_verdict_that_asks_for_it_says_what_to_change(tmp_path: Path) -> None:
    run_dir = set_metrics(make_run(tmp_path / "run", ["sft", "ppo"]), "sft", eval_loss=3.415)
    set_metrics(run_dir, "ppo", findings=["kl_blow_up"])
    shown = words(page(run_dir))
    assert "SFT ✗ moved nothing SFT moved nothing: held-out loss 3.42 → 3.42." in shown
    diagnoses = shown.partition("What it means, and what to change")[2]
    assert diagnoses.index("SFT: moved nothing what it means") < diagnoses.index("PPO: kl blow up what it means")
    assert "Raise sft.learning_rate or sft.num_epochs" in diagnoses


def test_a_stage_that_made_it_worse_is_said_to_be_worse(tmp_path: Path) -> None:
    shown = words(page(set_metrics(make_run(tmp_path / "run", ["sft"]), "sft", base_eval_loss=1.05)))
    assert "SFT ✗ made it worse 1.05 → 1.17 held-out loss" in shown
    assert "✗ made it worse SFT made it worse: held-out loss 1.05 → 1.17 nats per token." in shown


def test_what_so_few_prompts_do_not_show_is_said_alike_in_card_verdict_and_terminal(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["reward", "ppo"])
    set_metrics(run_dir, "reward", accuracy=0.0, longer_wins_accuracy=1.0, num_eval_prompts=1)
    set_metrics(run_dir, "ppo", true_quality=0.3, win_rate=0.4, num_eval_prompts=20)
    shown = words(page(run_dir))
    assert "Reward model ? too few to tell 1.00 → 0.00 held-out ranking accuracy" in shown
    assert "? too few to tell Too few to tell whether the reward model is better than guessing" in shown
    assert (
        "PPO ? too few to tell 0.386 → 0.300 quality by the judge, against SFT; 20 prompts, at the end of the ppo stage"
    ) in shown
    assert "? too few to tell Too few to tell whether PPO&#39;s answers are better than SFT&#39;s" in shown
    assert "✗" not in shown
    verdicts = judge_run(read_run(run_dir)).values()  # of which `rlhf run` prints the sentences
    assert [verdict.sentence[:15] for verdict in verdicts] == ["Too few to tell"] * 2
    set_metrics(run_dir, "reward", num_eval_prompts=8)  # 0 to 0.37
    set_metrics(run_dir, "ppo", win_rate=0.1)  # 0.03 to 0.30
    shown = words(page(run_dir))
    assert "Reward model ✗ inverted 1.00 → 0.00" in shown
    assert "PPO ✗ broken reward 0.386 → 0.300" in shown


def test_the_card_of_a_stage_has_the_sign_of_its_verdict(tmp_path: Path) -> None:
    """Also where its figure rose: a rise of the score alone is no proof."""
    run_dir = set_metrics(
        make_run(tmp_path / "run", ["ppo"]), "ppo", true_quality=None, sft_true_quality=None, win_rate=None,
        score=1.5, sft_score=0.1, score_win_rate=0.9, num_eval_prompts=100,
    )  # fmt: skip
    shown = words(page(run_dir))
    assert "PPO ! raised the score 0.100 → 1.50 score, against SFT; 100 prompts, at the end of the ppo stage" in shown
    assert "✓" not in shown.partition("Status")[0]
    assert "win rate over SFT by the score 0.90 ties count half" in shown


def test_functions_that_give_the_score_are_named_in_the_verdict(tmp_path: Path) -> None:
    run_dir = set_metrics(
        make_run(tmp_path / "run", ["ppo"]), "ppo", true_quality=None, sft_true_quality=None, win_rate=None,
        score=1.5, sft_score=0.1, score_win_rate=0.9, num_eval_prompts=100,
    )  # fmt: skip
    (run_dir / "recipe.yaml").write_text("ppo: {rewards: [{function: 'mine:correct'}]}\n", encoding="utf-8")
    assert "win rate over SFT by the rewards themselves, ppo.rewards (mine:correct), 0.90" in words(page(run_dir))


def test_commands_in_a_sentence_are_marked_as_such(tmp_path: Path) -> None:
    run_dir = set_metrics(make_run(tmp_path / "run", ["ppo"]), "ppo", win_rate=None)
    html = page(run_dir)
    assert "<dd>Run <code>rlhf eval</code>.</dd>" in html
    assert "`" not in words(html)


def test_more_prompts_are_asked_for_by_the_settings_that_hold_them_out(tmp_path: Path) -> None:
    """`rlhf eval` asks all of them already."""
    run_dir = set_metrics(make_run(tmp_path / "run", ["ppo"]), "ppo", win_rate=0.5, num_eval_prompts=4)
    change = words(page(run_dir)).rpartition("what to change")[2].partition("Curves")[0]
    assert change.startswith(" Hold out more prompts: a larger ppo.eval_share, or a ppo.eval_data")
    assert "rlhf eval" not in change


def test_figures_that_are_no_numbers_are_taken_as_not_told(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain", "sft", "reward", "ppo"])
    nan, inf = float("nan"), float("inf")
    set_metrics(run_dir, "pretrain", val_loss=nan)
    set_metrics(run_dir, "sft", eval_loss=inf)
    set_metrics(run_dir, "reward", accuracy=nan)
    set_metrics(run_dir, "ppo", kl=nan)
    assert [verdict.name for verdict in judge_run(read_run(run_dir)).values()] == ["unknown"] * 4
    shown = words(page(run_dir))
    assert " nan " not in shown


def test_a_run_without_any_log_has_a_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", list(METRICS))
    for path in run_dir.glob("*/metrics.jsonl"):
        path.write_text("")
    assert "Nothing was logged yet." in words(page(run_dir))


def test_an_over_optimised_run_is_marked_at_the_top_and_at_its_stage(tmp_path: Path) -> None:
    reason = "the KL ended at 61.0 nats per response, over kl_budget 50"
    run_dir = make_run(tmp_path / "run", ["ppo"], [SAMPLE])
    set_metrics(run_dir, "ppo", over_optimised=True, over_optimised_because=reason, best_step=60)
    top, stages = words(page(run_dir)).split(" Verdicts Stage ")
    sentence = (
        f"PPO over-optimised: {reason}. The policy of iteration 60 was kept, with a win rate over SFT by the judge"
    )
    assert sentence in top
    assert "PPO ✗ over optimised" in stages
    assert sentence in stages
    assert "done, over-optimised 12.5 s" in stages


def test_findings_of_the_health_monitor_are_told_in_words(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["ppo"], [SAMPLE])
    set_metrics(run_dir, "ppo", over_optimised=False, findings=["entropy_collapse", "kl_blow_up"])
    shown = words(page(run_dir))
    assert "⚠ Not healthy at the end: entropy collapse, kl blow up." in shown
    assert "PPO: entropy collapse what it means The policy says almost the same thing each time." in shown
    assert "over_optimised no findings entropy_collapse, kl_blow_up" in shown  # the table of all results


def test_a_healthy_run_shows_no_warning(tmp_path: Path) -> None:
    run_dir = set_metrics(make_run(tmp_path / "run", ["ppo"]), "ppo", over_optimised=False, findings=[])
    html = page(run_dir)
    assert "⚠" not in html
    assert "over_optimised no findings none" in words(html)


def test_the_report_card_shows_accuracies_calibration_and_the_worst_pairs(tmp_path: Path) -> None:
    html = page(make_graded(tmp_path / "run", [WORST]))
    shown = words(html)
    assert (
        "Accuracy is the share of pairs in which the better answer has the higher score: 0.72 of 1,234 pairs of "
        "held-out answers to 250 prompts; averaged prompt by prompt, 0.70 . Always preferring the longer answer (in "
        "tokens) would reach 0.57."
    ) in shown
    assert "as trained, calibration error 0.0812 at temperature 1.62 0.0123 as right as it is sure" in shown
    assert "best of a prompt, mean 0.410 worst, mean -0.520" in shown
    assert "No temperature can be told" not in shown
    assert (
        "by length in tokens pairs accuracy better answer longer 800 0.90 about equal 0 – better answer shorter 434 "
        "0.55" in shown
    )
    assert "by source pairs accuracy &lt;forum&gt; 1,000 0.70 web 234 1.00" in shown
    assert "by how much better" not in shown  # no strengths are known
    assert "several reward models" not in shown
    assert "The 1 pair it is most wrong about" in shown
    assert (
        "What does a fox eat? Better, rank 1 score -1.50 Mice &lt;b&gt;and&lt;/b&gt; berries. "
        "Worse, rank 2.5 score 2.25 No idea."
    ) in shown
    assert html.count("<figure") == 4  # loss, accuracy, reliability, scores


def test_a_temperature_that_cannot_be_told_is_not_shown(tmp_path: Path) -> None:
    run_dir = make_graded(tmp_path, [], reliability_after_temperature=[])
    path = run_dir / "reward-0123abcd" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for name in ("temperature", "ece_after_temperature"):
        del manifest["metrics"][name]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    shown = words(page(run_dir))
    assert "as trained, calibration error 0.0812 as right as it is sure" in shown
    assert "No temperature can be told from these pairs: the scores are no better than chance." in shown


def test_other_reward_models_stand_beside_with_how_far_they_agree(tmp_path: Path) -> None:
    compared = [{"model": "other/model", "accuracy": 0.65}]
    agreement = {"all_agree": 0.8, "mean_pairwise": 0.85, "score_std": 0.25}
    shown = words(page(make_graded(tmp_path / "run", [], compared=compared, agreement=agreement)))
    assert (
        "several reward models on the same pairs accuracy other/model 0.65 pairs that all models order alike 0.80"
        in shown
    )
    assert "most wrong about" not in shown


def test_a_card_of_a_stage_that_is_not_sealed_is_not_shown(tmp_path: Path) -> None:
    run_dir = make_graded(tmp_path / "run", [WORST])
    (run_dir / "reward-0123abcd" / "manifest.json").unlink()
    assert "report card" not in page(run_dir)


def test_a_failed_gate_is_told_at_the_top_and_at_its_stage(tmp_path: Path) -> None:
    failed = "held-out accuracy 0.72 is below reward.min_accuracy 0.8"
    run_dir = set_metrics(make_graded(tmp_path / "run", []), "reward", gates_failed=[failed])
    top, stages = words(page(run_dir)).split(" Verdicts Stage ")
    assert f"The reward model is below its bar: {failed}." in top
    assert f"⚠ PPO does not start from it: {failed}." in stages
    assert "done, gate failed 12.5 s" in stages


def test_the_page_needs_nothing_from_outside(tmp_path: Path, drawings: None) -> None:
    html = page(make_run(tmp_path / "run", list(METRICS), [SAMPLE]))
    assert not re.search(
        r"<(link|img|iframe|object|embed)\b|@import|url\((?!#)|src=|href=\"(?!#)|fetch\(|import\(", html
    )
    assert html.count("<script>") == 1  # our own, of the filter


def test_text_of_models_and_people_cannot_become_markup(tmp_path: Path, drawings: None) -> None:
    attack = "</script><script>alert(1)</script>"
    answers = {"prompt": attack, "sft": f"{attack} <b>one", "ppo": f"{attack} <b>two"}
    run_dir = make_run(tmp_path / "run", ["ppo"], [SAMPLE | answers])
    (run_dir / "recipe.yaml").write_text(f"name: '{attack}'\n", encoding="utf-8")
    write_lines(run_dir / "ppo-0123abcd" / "metrics.jsonl", [{"step": 1, attack: 1.0, "$x_": 2.0, '"onload="': 3.0}])
    html = page(run_dir)
    assert html.count("<script") == 1
    assert "<b>one" not in html
    assert 'onload="' not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4


def test_any_text_makes_a_page_that_is_one(tmp_path: Path) -> None:
    """Signs that HTML has no place for, an answer as long as a book, and one that is read from right to left."""
    odd = SAMPLE | {"sft": "nul \0, escape \x1b[31m", "ppo": "x" * 200_000, "prompt": "\u202e\u05e9\u05dc\u05d5\u05dd"}
    html = page(make_run(tmp_path, ["ppo"], [odd]))
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", html)
    assert "nul \ufffd, escape \ufffd[31m" in html
    assert "199,000 characters more" in html
    assert 'class="prompt text" dir="auto"' in html
    assert 'class="text" dir="auto"' in html


def test_a_page_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, ["sft"])
    (run_dir / "report.html").mkdir()
    with pytest.raises(RefusedError, match=r"report\.html: cannot be written: Is a directory"):
        render(run_dir)


def test_answers_stand_side_by_side_with_their_scores(tmp_path: Path) -> None:
    worse = SAMPLE | {"ppo_score": -1.0}
    shown = words(page(make_run(tmp_path / "run", ["ppo"], [SAMPLE, SAMPLE, worse])))
    assert "+2.75 What does a fox eat? SFT score -0.50 the the the PPO score 2.25 A fox eats mice." in shown
    assert "By score, PPO's answer is better for 2 of 3 prompts and worse for 1 ." in shown
    assert shown.index("Largest gains") < shown.index("Largest losses -0.50 What")


def test_the_judges_quality_decides_where_a_judge_gave_it(tmp_path: Path) -> None:
    judged = SAMPLE | {"sft_quality": 0.9, "ppo_quality": 0.25}  # the score says better, the judge worse
    shown = words(page(make_run(tmp_path / "run", ["ppo"], [judged])))
    assert "By quality, PPO's answer is better for 0 of 1 prompt and worse for 1 ." in shown
    assert "PPO quality by the judge 0.25 score 2.25" in shown


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
    assert "SFT ✗ failed SFT is failed, so there is no result yet. failed" in words(html)
    assert "Reward model ? planned Reward model is planned, so there is no result yet. planned" in words(html)
    assert html.count("<figure") == 2  # the losses of pretrain and of sft as far as it came
    assert "Answers before and after" not in html


def test_settings_versions_and_lineage_can_be_looked_up(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain", "sft"])
    manifests = [run_dir / f"{stage}-0123abcd" / "manifest.json" for stage in ("pretrain", "sft")]
    made = json.loads(manifests[1].read_text(encoding="utf-8"))
    digest = "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"  # of no files at all: sha256 of []
    more = {"key": "c0de", "inputs": {"model": digest, "other": "dead"}, "data": {"data": "beef"}}
    manifests[1].write_text(json.dumps(made | more), encoding="utf-8")
    (run_dir / "sft-0123abcd" / "settings.yaml").write_text("stage: sft\n", encoding="utf-8")
    shown = words(page(run_dir))
    assert "seed: 7" in shown
    assert "sft.learning_rate 0.003" in shown
    assert "key c0de" in shown
    assert "from other dead" in shown
    assert "data beef" in shown
    assert "versions torch 2.13.0 commit c0ffee processes 1" in shown
    assert f"anew, beside this result rlhf sft {run_dir}/recipe.yaml --run-dir {run_dir} --force" in shown
    assert "python -m rlhf.stages.sft again/sft" in shown


def test_a_model_that_another_stage_of_the_run_made_is_named(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain", "sft"])
    for stage, files in (("pretrain", {"model/config.json": "12"}), ("sft", {})):
        path = run_dir / f"{stage}-0123abcd" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}), encoding="utf-8")
    digest = Artifact(run_dir / "pretrain-0123abcd").digest
    path = run_dir / "sft-0123abcd" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"inputs": {"model": digest}}), encoding="utf-8")
    assert f"from model {digest} (pretrain-0123abcd)" in words(page(run_dir))


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain", "reward"])
    assert page(run_dir) == page(run_dir)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"no summary\.json"):
        render(tmp_path)


def test_what_the_base_model_writes_is_shown_newest_first(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", ["pretrain"])
    samples = [{"step": step, "prompt": "Once", "text": f" at {step} <i>"} for step in (100, 200)]
    write_lines(run_dir / "pretrain-0123abcd" / "samples.jsonl", samples)
    shown = words(page(run_dir))
    assert "What it writes, from step 100 to step 200 step 200 Once at 200 &lt;i&gt; step 100 Once at 100" in shown
    assert "Answers before and after PPO" not in shown


def test_what_ranked_is_not_said_to_be_people(tmp_path: Path) -> None:
    """Answers may have been ranked by a function or by a model."""
    shown = words(page(make_run(tmp_path, list(METRICS), [SAMPLE])))
    assert "From raw text to a model whose answers are preferred" in shown
    assert not re.search("human|people", shown)


def test_sentences_stand_apart(tmp_path: Path) -> None:
    """A tag of a template at the end of a line takes the line's end away."""
    for run_dir in (make_graded(tmp_path / "card", [WORST]), make_run(tmp_path / "run", list(METRICS), [SAMPLE])):
        assert together(page(run_dir)) == []
