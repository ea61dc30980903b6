"""evaluation.json as tables for people."""

from typing import Any

import pytest

from rlhf.pipeline.evaluation_tables import show


def shown(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that are printed of it, without what aligns them."""
    show(found)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def figures(**others: Any) -> dict[str, Any]:
    """evaluation.json with one model, of which there is a text perplexity of 3.4567 over 1,984 tokens."""
    model = {"model": "sft-1", "text_perplexity": 3.4567, "num_text_tokens": 1984}
    return {"form": "cheap", "models": {"sft": model | others.pop("model", {})}, **others}


def test_the_table_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"mean": 1.0, "std": 0.25, "quantiles": [0.0] * 5}
    model = {"score": spread, "kl": 0.5, "kl_interval": [0.4, 0.6], "length": 12.0, "distinct_2": 0.9684}
    best = {"n": 2, "kl": 0.193147, "score": 0.5, "score_interval": [0.25, 0.75], "quality": None}
    lines = shown(figures(model=model, best_of_n=[best]), capsys)
    assert lines[0] == "model text ppl score KL from sft tokens distinct-2"
    assert lines[1] == "sft (sft-1) 3.46 1.00 ± 0.250 0.500 (0.400 to 0.600) 12.0 0.968"
    assert lines[-2:] == ["best of KL score", "2 0.193 0.500 (0.250 to 0.750)"]  # and no column that would be empty
    judged = shown(figures(model=model, best_of_n=[best | {"quality": 0.75}, best]), capsys)
    assert judged[-3:] == [
        "best of KL score quality", "2 0.193 0.500 (0.250 to 0.750) 0.750", "2 0.193 0.500 (0.250 to 0.750) –",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("best_of", "told"),
    [
        (16, "best of: 16 answers of sft to each prompt, the 4 above and 12 more; 1 is the mean of all 16"),
        (4, "best of: the first 4 of the 4 answers of sft above to each prompt"),
        (1, "best of: the first 1 of the 4 answers of sft above to each prompt"),
    ],
)
def test_below_the_best_of_n_stands_of_which_answers_they_are(
    capsys: pytest.CaptureFixture[str], best_of: int, told: str
) -> None:
    """They are others than those of the first table, so that the best of 1 is not its score."""
    best = {"n": 1, "kl": 0.0, "score": 0.5, "score_interval": [0.25, 0.75], "quality": None}
    settings = {"num_prompts": 9, "num_samples": 4, "best_of": best_of}
    assert shown(figures(best_of_n=[best], settings=settings), capsys)[-1] == told


def test_shares_have_the_digits_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(figures(model={"eos_share": 0.9684, "refusal_share": 0.0021}), capsys)
    assert lines[:2] == ["model text ppl ended refused", "sft (sft-1) 3.46 0.97 0.00"]


def test_below_the_figures_stands_on_how_much_they_rest(capsys: pytest.CaptureFixture[str]) -> None:
    """Of what there is none nothing is said."""
    assert shown(figures(), capsys)[2:] == ["held out: 1,984 tokens of text"]
    whole = figures(model={"num_response_tokens": 930}, settings={"num_prompts": 16, "num_samples": 1})
    assert shown(whole, capsys)[2:] == [
        "held out: 1,984 tokens of text, 930 tokens of responses, 16 prompts (answers to each: 1)"
    ]
    several = figures(model={"num_response_tokens": 930})
    several["models"] |= {"base": {"model": "hub/id"}, "ppo": several["models"]["sft"] | {"num_text_tokens": 2000}}
    told = "held out: 1,984 to 2,000 tokens of text, 930 tokens of responses"
    assert shown(several, capsys)[4:] == [told]  # base was not measured


def test_win_rates_have_two_decimals_as_in_the_report_and_a_dash_where_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = {
        "one": "ppo", "other": "sft", "by": "score", "wins": 7, "ties": 1, "losses": 2, "win_rate": 0.7549,
        "interval": [0.5, 0.9], "length_controlled": None, "length_controlled_interval": None,
    }  # fmt: skip
    controlled = pair | {"by": "judge", "length_controlled": 0.996, "length_controlled_interval": [0.061, 1.0]}
    lines = shown(figures(pairs=[pair, controlled]), capsys)
    assert "ppo than sft score 7 1 2 0.75 (0.50 to 0.90) –" in lines
    assert "ppo than sft judge 7 1 2 0.75 (0.50 to 0.90) 1.00 (0.06 to 1.00)" in lines


def test_results_of_lm_eval_are_a_row_per_metric_with_a_column_per_model(capsys: pytest.CaptureFixture[str]) -> None:
    """As lm-eval names them; a standard error stands by its value, and what a model has not is a dash."""
    tasks = {
        "base": {"fox": {"acc,none": 0.25, "acc_stderr,none": 0.0433}},
        "sft": {
            "fox": {"acc,none": 0.5, "acc_stderr,none": 0.05},
            "sums": {"exact_match,strict-match": 0.125, "exact_match_stderr,strict-match": None},
        },
    }
    assert shown(figures(tasks=tasks), capsys)[-3:] == [
        "task metric base sft",
        "fox acc 0.250 ± 0.0433 0.500 ± 0.0500",
        "sums exact_match (strict-match) – 0.125",
    ]
