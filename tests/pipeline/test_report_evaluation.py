"""What the report shows of evaluation.json, in its full and its cheap form, and of one that is old."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_world import SAMPLE, make_run, page, set_metrics, together, words, write_lines

from rlhf.pipeline.report.evaluation import frontier
from rlhf.pipeline.report.run import read_run
from rlhf.stages.evaluation.records import short_hash

Rlhf = Callable[..., tuple[int, str, str]]
SCORE = {"mean": 0.5, "std": 1.0, "quantiles": [-1.0, 0.0, 0.25, 1.0, 2.0]}
MODEL = {
    "model": "sft-0123abcd", "digest": "beef", "text_perplexity": 8.0, "num_text_tokens": 100,
    "response_perplexity": 3.0, "num_response_tokens": 50, "score": SCORE, "quality": None, "length": 20.0,
    "eos_share": 1.0, "distinct_1": 0.5, "distinct_2": 0.75, "repetition": 0.01, "refusal_share": 0.1234, "kl": None,
    "kl_interval": None,
}  # fmt: skip
PAIR = {"one": "ppo", "other": "sft", "by": "judge", "wins": 70, "ties": 10, "losses": 20, "win_rate": 0.75,
        "interval": [0.66, 0.83], "length_controlled": 0.7, "length_controlled_interval": [0.6, 0.8]}  # fmt: skip
FULL: dict[str, Any] = {
    "form": "full", "settings": {"seed": 0, "temperature": 1.0, "num_prompts": 100}, "reward_model": "reward-0123abcd",
    "judge": "world:judge", "pairs": [PAIR], "tasks": {"sft": {"arc": {"acc": 0.25}}},
    "models": {"sft": MODEL, "ppo": MODEL | {"model": "ppo-0123abcd", "text_perplexity": 10.0, "kl": 9.0}},
    "best_of_n": [{"n": 1, "score": 0.5, "score_interval": [0.4, 0.6], "quality": 0.4, "kl": 0.0},
                  {"n": 4, "score": 1.2, "score_interval": [1.1, 1.3], "quality": 0.6, "kl": 0.636}],
}  # fmt: skip


def evaluated(folder: Path, content: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> Path:
    run_dir = make_run(folder, ["sft", "ppo"], [SAMPLE])
    if rows is not None:
        write_lines(run_dir / "evaluation.jsonl", rows)
        content = content | {"answers_digest": short_hash(rows)}
    (run_dir / "evaluation.json").write_text(json.dumps(content), encoding="utf-8")
    return run_dir


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.pipeline.report.charts.draw_lines", lambda *_: "")


def test_the_full_form_shows_win_rates_with_intervals_and_the_alignment_tax(tmp_path: Path) -> None:
    rows = [{"prompt": "Why?", "answers": {"base": "b", "sft": "s", "ppo": "p"}, "lengths": {"ppo": 7}}]
    html = page(evaluated(tmp_path / "run", FULL, rows))
    shown = words(html)
    assert "losses win rate, 95 % interval 0 to 1, half dotted at equal length PPO over SFT the judge" in shown
    assert "PPO over SFT the judge 70 10 20 0.75 (0.66 to 0.83) 0.70 (0.60 to 0.80)" in shown
    assert 'aria-label="0.75, interval 0.66 to 0.83, on a scale from 0 to 1"' in html
    assert "of each model SFT PPO perplexity of held-out text, 100 tokens 8.00 10.0" in shown
    assert "perplexity of held-out responses, 50 tokens 3.00 3.00" in shown
    assert "share of answers that come to an end 1.00 1.00" in shown
    assert "share of refusals 0.12 0.12" in shown
    assert "KL from SFT, nats per response – 9.00 scores of nine in ten answers -1.00 to 2.00 -1.00 to 2.00" in shown
    assert "PPO raised the perplexity of held-out text from 8.00 to 10.0 (+25%)." in shown
    assert "best of n answers of SFT, n = 1, 4" in shown
    assert "Why? base b SFT s PPO 7 tokens p" in shown  # of evaluation.jsonl, and not of samples.jsonl
    assert "0.75 (100 prompts, 95 % interval 0.66 to 0.83), KL 9.00 nats per response; by rlhf eval." in shown
    assert "Measured by rlhf eval: the same held-out prompts" in shown
    assert "does not rest on these figures" not in shown
    assert together(html) == []


def test_a_win_rate_at_equal_length_that_is_not_known_is_a_dash(tmp_path: Path) -> None:
    unknown = PAIR | {"by": "score", "length_controlled": None, "length_controlled_interval": None}
    shown = words(page(evaluated(tmp_path / "one", FULL | {"pairs": [unknown, PAIR]})))
    assert "PPO over SFT the score 70 10 20 0.75 (0.66 to 0.83) – PPO over SFT the judge" in shown
    shown = words(page(evaluated(tmp_path / "none", FULL | {"pairs": [unknown]})))
    assert "half dotted PPO over SFT the score 70 10 20 0.75 (0.66 to 0.83) What the win rates" in shown


def test_an_evaluation_of_fewer_prompts_says_that_the_verdict_rests_on_others(tmp_path: Path) -> None:
    few = FULL | {"form": "cheap", "settings": {"num_prompts": 16}}
    run_dir = set_metrics(evaluated(tmp_path, few), "ppo", win_rate=0.8525, num_eval_prompts=119)
    shown = words(page(run_dir))
    assert "by the judge 0.85 (119 prompts, 95 % interval" in shown
    assert "Measured by rlhf eval --cheap: the same held-out prompts" in shown
    assert "; 16 prompts" in shown
    assert (
        "PPO's verdict does not rest on these figures, but on those at the end of the ppo stage, of 119 prompts."
        in (shown.replace("&#39;", "'"))
    )


def test_no_second_figures_stand_below_a_verdict_that_rests_on_the_evaluation(tmp_path: Path) -> None:
    """Those of the ppo stage are of other answers, and differ by chance."""
    sft, ppo = (MODEL | {"quality": SCORE | {"mean": mean}, "kl": kl} for mean, kl in ((0.2, None), (0.6, 9.0)))
    content = FULL | {"models": {"sft": sft, "ppo": ppo | {"eos_share": 0.87}}, "pairs": [PAIR]}
    own = {"win_rate": 0.8525, "num_eval_prompts": 19, "kl": 7.77, "sft_true_quality": 0.31, "true_quality": 0.71}
    shown = words(page(set_metrics(evaluated(tmp_path, content), "ppo", **own)))
    assert "0.200 → 0.600 quality by the judge, against SFT; 100 prompts, by rlhf eval" in shown
    listed = shown[shown.index("by rlhf eval. ") : shown.index("all figures of this list: 100 prompts, by rlhf eval")]
    assert "win rate over SFT by the judge 0.75 ties count half" in listed
    assert "1.00 → 0.87" in listed
    assert "KL from SFT, nats per response 9.00" in listed
    assert not re.search(r"0\.85|7\.77|0\.31|0\.71", listed)


def test_sft_whose_answers_never_end_is_doubted_by_the_figures_that_ppos_list_has(tmp_path: Path) -> None:
    run_dir = evaluated(tmp_path, FULL | {"models": FULL["models"] | {"sft": MODEL | {"eos_share": 0.0}}})
    set_metrics(run_dir, "ppo", num_eval_prompts=19, sft_eos_share=0.5)
    told = "and the share of answers that come to an end is 0.00 ({})"
    assert told.format("100 prompts, by rlhf eval") in words(page(run_dir))
    set_metrics(run_dir, "ppo", num_eval_prompts=119, sft_eos_share=0.02)  # the stage asked more
    assert told.format("119 prompts, at the end of the ppo stage").replace("0.00", "0.02") in words(page(run_dir))
    set_metrics(run_dir, "ppo", sft_eos_share=0.5)
    assert "SFT learned: " in words(page(run_dir))


def test_answers_to_four_prompts_do_not_tell_that_sfts_never_end(tmp_path: Path) -> None:
    run_dir = evaluated(tmp_path, FULL | {"pairs": []})
    set_metrics(run_dir, "ppo", num_eval_prompts=4, sft_eos_share=0.0)
    assert "SFT learned: " in words(page(run_dir))
    set_metrics(run_dir, "ppo", num_eval_prompts=19)
    assert "SFT learned, but not where an answer ends" in words(page(run_dir))


def test_what_was_not_measured_is_said_with_why(tmp_path: Path) -> None:
    why = "sft.data: demos.jsonl: no such file or folder (looked from /here); left out: the perplexity of responses"
    assert f"Not measured: {why}." in words(page(evaluated(tmp_path, FULL | {"left_out": [why]})))


def test_an_evaluation_of_a_model_that_was_finished_before_a_failed_attempt_is_shown_with_its_name(
    tmp_path: Path,
) -> None:
    run_dir = evaluated(tmp_path / "run", FULL)
    manifest = run_dir / "ppo-0123abcd" / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["made_with"]["finished"] = "2026-01-01T00:00:00+00:00"
    manifest.write_text(json.dumps(content), encoding="utf-8")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    summary["stages"]["ppo"] = {"status": "failed", "folder": "ppo-feedbeef"}
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert read_run(run_dir).warnings == []
    shown = words(page(run_dir))
    assert "The figures are of ppo-0123abcd, finished before the attempt that the verdicts are on." in shown
    assert "PPO over SFT the judge 70 10 20" in shown
    assert "ties count half 0.75" not in shown  # no list of figures beside "PPO is failed"
    assert "all figures of this list" not in shown


def test_an_interval_is_the_same_in_the_table_and_in_the_verdict(tmp_path: Path) -> None:
    pair = PAIR | {"win_rate": 0.75, "interval": (0.3, 0.95)}
    shown = words(page(evaluated(tmp_path, FULL | {"settings": {"num_prompts": 4}, "pairs": [pair]})))
    assert "PPO over SFT the judge 70 10 20 0.75 (0.30 to 0.95)" in shown
    assert "win rate over SFT by the judge 0.75 (4 prompts, 95 % interval 0.30 to 0.95)" in shown


def test_tasks_of_lm_eval_are_a_table_with_standard_errors(tmp_path: Path) -> None:
    sft = {
        "arc": {"acc,none": 0.25, "acc_stderr,none": 0.0125},
        "gsm": {"exact,strict": 0.5, "exact_stderr,strict": None},
    }
    tasks = {"sft": sft, "ppo": {"arc": {"acc,none": 0.5, "acc_stderr,none": 0.025}}}
    html = page(evaluated(tmp_path, FULL | {"tasks": tasks}))
    assert "task metric SFT PPO arc acc 0.250 ± 0.0125 0.500 ± 0.0250 gsm exact (strict) 0.500 –" in words(html)
    assert "stderr" not in html
    assert "Tasks of lm-eval" not in page(evaluated(tmp_path / "none", FULL | {"tasks": {}}))


def test_best_of_n_is_explained_only_where_it_is_drawn(tmp_path: Path) -> None:
    assert "The best of n answers of SFT" in words(page(evaluated(tmp_path / "with", FULL)))
    run_dir = evaluated(tmp_path / "without", FULL | {"best_of_n": None})
    rows = [{"step": 5, "eval_kl": 4.0, "eval_score": 2.0, "eval_sft_score": 0.0}]
    write_lines(run_dir / "ppo-0123abcd" / "metrics.jsonl", rows)
    shown = words(page(run_dir))
    assert "What a nat of KL buys The score over the root of the KL" in shown
    assert "best of n" not in shown.lower()


def test_the_command_warns_of_an_evaluation_that_it_leaves_out(tmp_path: Path, rlhf: Rlhf) -> None:
    """One line: the file, where in it, and the cure."""
    run_dir = evaluated(tmp_path / "run", FULL, [{"prompt": "Why?", "answers": {"sft": "s", "ppo": "p"}}])
    assert rlhf("report", str(run_dir))[2] == ""
    path, cure = run_dir / "evaluation.json", f", and is left out; `rlhf eval {run_dir}` makes it anew\n"
    whole = json.loads(path.read_text(encoding="utf-8"))
    for text, what in (
        (json.dumps(whole, indent=1)[:40], " line 4: is damaged ("),
        (json.dumps(whole | {"models": []}), ": models is damaged, or of another version ("),
        (
            json.dumps(whole | {"models": {"sft": 3}}),
            ": models.sft is damaged, or of another version (Input should be a valid dictionary)",
        ),
        (json.dumps(whole | {"pairs": [PAIR | {"wins": "x"}]}), ": pairs.0.wins is damaged"),
    ):
        path.write_text(text, encoding="utf-8")
        code, out, err = rlhf("report", str(run_dir))
        assert (code, out) == (0, f"{run_dir / 'report.html'}\n")
        assert err.startswith(f"warning: {path}{what}")
        assert err.endswith(cure)
        assert err.count("\n") == 1
    assert (
        rlhf("report", str(run_dir), str(make_run(tmp_path / "b", ["sft"])), "--out", str(tmp_path / "x.html"))[2]
        == err
    )
    path.write_text(json.dumps(whole), encoding="utf-8")
    row = {"prompt": "Why?", "answers": {"sft": "s", "ppo": "p"}}
    lines = [json.dumps(found).encode() for found in (row, row | {"prompt": "Who?"}, row | {"answers": ["s"]}, {})]
    for text, what in (
        (lines[0] + b"\n{", " line 2: is damaged ("),
        (lines[0] + b"\n\xff", " line 2: is damaged (not UTF-8)"),
        (b"\n".join(lines[:3]), " line 3: answers is damaged, or of another version ("),
        (lines[3], " line 1: prompt is damaged, or of another version ("),
        (lines[0] + b"\n3", " line 2: the whole line is damaged, or of another version ("),
        (lines[1], " is not of the same evaluation as evaluation.json"),
    ):
        (run_dir / "evaluation.jsonl").write_bytes(text)
        err = rlhf("report", str(run_dir))[2]
        assert err.startswith(f"warning: {run_dir / 'evaluation.jsonl'}{what}")
        assert err.endswith(cure)


def test_the_cheap_form_leaves_out_what_it_does_not_have(tmp_path: Path) -> None:
    cheap = {"form": "cheap", "settings": {}, "reward_model": None, "judge": None, "pairs": [], "best_of_n": None,
             "tasks": None, "models": {"sft": {"model": "sft-0123abcd"}}}  # fmt: skip
    shown = words(page(evaluated(tmp_path / "run", cheap)))
    assert "This is the cheap form" in shown
    assert "win rate, ties" not in shown
    assert "lm-eval" not in shown
    assert "What does a fox eat?" in shown  # of the ppo stage's samples


def test_an_evaluation_of_models_that_are_gone_is_left_out_and_said_to_be_old(tmp_path: Path) -> None:
    other = FULL | {"models": {"sft": MODEL, "ppo": MODEL | {"model": "ppo-feedbeef"}}}
    shown = words(page(evaluated(tmp_path / "run", other)))
    assert "evaluation.json is of other models than those that the run has now" in shown
    assert "PPO over SFT" not in shown


def test_a_base_model_that_was_trained_anew_makes_an_evaluation_old(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, ["pretrain"])
    base = FULL | {"pairs": [], "models": {"base": MODEL | {"model": "pretrain-feedbeef"}}}
    (run_dir / "evaluation.json").write_text(json.dumps(base), encoding="utf-8")
    (fault,) = read_run(run_dir).faults
    assert (fault.file, fault.what) == (
        "evaluation.json",
        " is of other models than those that the run has now, and is left out",
    )


WITHOUT = object()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), "{"), ((), []), ((), b"\xff"), ((), "9" * 5000), (("models",), []), (("models", "ppo"), 3),
        (("pairs",), "abc"), (("pairs", 0), {}), (("pairs", 0, "interval"), None), (("pairs", 0, "one"), "other"),
        (("settings",), 7),
        (("settings", "num_prompts"), "many"), (("models", "sft", "score"), 1.0), (("models",), WITHOUT),
        (("best_of_n", 0, "kl"), float("nan")),
    ],
)  # fmt: skip
def test_an_evaluation_that_is_not_whole_is_left_out_and_said_to_be_damaged(
    tmp_path: Path, place: tuple[Any, ...], value: Any
) -> None:
    """Cut short, edited by hand, or of another version: what the stages brought is shown all the same."""
    run_dir = evaluated(tmp_path, content := copy.deepcopy(FULL))
    part: Any = content
    for key in place[:-1]:
        part = part[key]
    if value is WITHOUT:
        del part[place[-1]]
    elif place:
        part[place[-1]] = value
    text = json.dumps(content).encode()
    if not place:
        text = value if isinstance(value, bytes) else (value if isinstance(value, str) else json.dumps(value)).encode()
    (run_dir / "evaluation.json").write_bytes(text)
    read = read_run(run_dir)
    assert (read.evaluation, read.answers) == (None, read.samples)
    shown = words(page(run_dir))
    assert re.search(r"⚠ evaluation\.json .{0,40}is damaged.{0,200}, and is left out", shown)
    assert "What does a fox eat?" in shown


def test_answers_of_another_evaluation_are_not_shown(tmp_path: Path) -> None:
    """As after a kill between the two files."""
    run_dir = evaluated(tmp_path, FULL, [{"prompt": "Why?", "answers": {"sft": "s", "ppo": "p"}}])
    for rows in ([{"prompt": "Who?", "answers": {"sft": "s"}}], [{"prompt": 3}], [{"prompt": "Why?", "answers": {}}]):
        write_lines(run_dir / "evaluation.jsonl", rows)
        assert "What does a fox eat?" in words(page(run_dir))
    (run_dir / "evaluation.jsonl").write_bytes(b"\xff{")
    assert read_run(run_dir).answers == read_run(run_dir).samples


def test_texts_may_hold_any_sign_that_ends_a_line(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b", "answers": {"sft": "c\x85d", "ppo": "e\x1cf"}}]
    run_dir = evaluated(tmp_path, FULL, rows)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (run_dir / "evaluation.jsonl").write_text(text, encoding="utf-8")
    assert [row["prompt"] for row in read_run(run_dir).answers] == ["a\u2028b"]


def test_the_frontier_lies_over_the_root_of_the_kl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = evaluated(tmp_path / "run", FULL)
    rows = [
        {"step": step, "eval_kl": kl, "eval_score": kl / 2, "eval_sft_score": 0.0} for step, kl in ((5, 4.0), (9, 16.0))
    ]
    write_lines(run_dir / "ppo-0123abcd" / "metrics.jsonl", rows)
    drawn: list[Any] = []
    monkeypatch.setattr("rlhf.pipeline.report.evaluation.draw_frontier", lambda lines, label: drawn.append(lines))
    frontier(read_run(run_dir))
    scores, qualities = drawn
    assert scores["PPO, evaluation by evaluation"] == [(0.0, 0.0), (2.0, 2.0), (4.0, 8.0)]
    assert scores["best of n answers of SFT, n = 1, 4"] == [(0.0, 0.5), (pytest.approx(0.7975, abs=1e-4), 1.2)]
    assert list(qualities) == ["best of n answers of SFT, n = 1, 4"]
