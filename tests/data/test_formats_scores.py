"""Published preference formats that rate answers: rankings out of scores, and what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from formats_world import assistant, dropped, read, user

from rlhf.data.errors import DataError
from rlhf.data.rows import Ranking, read_rankings
from rlhf.data.sources import Source

# -- UltraFeedback ----------------------------------------------------------------------------------------------


def completion(response: str | None, overall: Any = None, ratings: tuple[Any, ...] = (3, 3, 3, 3)) -> dict[str, Any]:
    aspects = ("instruction_following", "honesty", "truthfulness", "helpfulness")
    notes = {aspect: {"Rating": rating, "Rationale": "…"} for aspect, rating in zip(aspects, ratings, strict=True)}
    answer = {"response": response, "annotations": notes, "model": "m", "custom_system_prompt": "Be good."}
    return answer if overall is None else answer | {"overall_score": overall}


def feedback(*completions: Any) -> dict[str, Any]:
    return {"source": "made_up", "instruction": "Why tides?", "models": [], "completions": list(completions)}


def test_ultrafeedback_ranks_by_the_overall_score_though_it_is_text() -> None:
    loaded = read(feedback(completion("Wind", "4"), completion("Moon", "9.5"), completion("Sun", 9.5)))
    assert loaded.report.format == "ultrafeedback_raw"
    assert loaded.rows == [Ranking([user("Why tides?")], ["Wind", "Moon", "Sun"], [3, 1, 1], [4, 9.5, 9.5], "made_up")]


def test_ultrafeedback_without_overall_scores_ranks_by_the_mean_of_the_ratings() -> None:
    [ranking] = read(
        feedback(completion("Wind", ratings=("1", "2", "4", "4")), completion("Moon", ratings=("5", "5", "4", "4")))
    ).rows
    assert (ranking.ranks, ranking.strengths) == ([2, 1], [2.75, 4.5])


def test_ultrafeedback_leaves_out_an_answer_that_cannot_be_ranked_and_keeps_the_others() -> None:
    loaded = read(
        feedback(completion("Wind", 4), completion(" ", 2), completion("Moon", 9), completion("Sun", "N/A")),
        feedback(completion("Wind"), completion("Sun", ratings=("5", "N/A", "5", "5")), completion("Moon")),
    )
    assert loaded.rows[0].responses == ["Wind", "Moon"]
    parts = {reason: (part.count, part.rows) for reason, part in loaded.report.parts.items()}
    assert parts == {"empty response": (1, [1]), "a score is not a finite number": (1, [1])}
    # The second row has only equal means left.
    assert dropped(loaded) == {"all answers tied": [2]}


def test_ultrafeedback_never_compares_an_overall_score_with_a_mean_of_ratings() -> None:
    [ranking] = read(feedback(completion("Wind", 2), completion("Moon", 3), completion("Sun", ratings=(5,) * 4))).rows
    assert (ranking.responses, ranking.ranks) == (["Wind", "Moon"], [2, 1])


def test_ultrafeedback_rows_without_two_scored_answers_are_named() -> None:
    loaded = read(
        feedback(),
        feedback(completion("Wind", 4), completion(None, 5)),
        feedback("Wind", "Moon"),
        feedback() | {"completions": None},
        feedback(completion("Wind", 4), completion("Moon", 5)) | {"instruction": ""},
        feedback({"response": "Wind"}, {"response": "Moon", "annotations": {}}),
    )
    assert dropped(loaded) == {
        "fewer than two answers": [1, 2, 6],
        "completions is not a list of answers with their scores": [3, 4],
        "empty prompt": [5],
    }


def binarized(chosen: str, rejected: str, scores: tuple[Any, Any]) -> dict[str, Any]:
    question = user("Why tides?")
    return {
        "prompt": "Why tides?",
        "prompt_id": "0a",
        "chosen": [question, assistant(chosen)],
        "rejected": [question, assistant(rejected)],
        "messages": [question, assistant(chosen)],
        "score_chosen": scores[0],
        "score_rejected": scores[1],
    }


def test_binarized_ultrafeedback_keeps_scores_and_takes_equal_ones_for_a_tie() -> None:
    rows = binarized("Moon", "Wind", (9.0, 6.5)), binarized("Moon", "Sun", (8.0, 8.0))
    loaded = read(*rows)
    assert loaded.report.format == "ultrafeedback_binarized"
    assert loaded.rows == [Ranking([user("Why tides?")], ["Moon", "Wind"], [1, 2], [9.0, 6.5])]
    assert (dropped(loaded), loaded.report.dropped_ties) == ({"all answers tied": [2]}, 1)
    assert read(*rows, keep_ties=True).rows[1].ranks == [1, 1]


def test_binarized_ultrafeedback_that_contradicts_itself_is_named() -> None:
    other = binarized("Moon", "Wind", (2, 1))
    other["rejected"] = [user("Why waves?"), assistant("Wind")]
    loaded = read(binarized("Moon", "Wind", (1, 2)), binarized("Moon", "", (2, 1)), other)
    assert dropped(loaded) == {
        "rejected has a higher score than chosen": [1],
        "empty response": [2],
        "rejected has turns that are not in the prompt": [3],
    }


# -- Summaries rated --------------------------------------------------------------------------------------------

REDDIT = {
    "id": "t1",
    "post": "My cat hides.",
    "title": "Shy cat",
    "subreddit": "pets",
    "site": None,
    "article": None,
}
NEWS = {"id": "n1", "post": None, "title": "Snow", "subreddit": None, "site": "gazette", "article": "It snowed."}
REDDIT_PROMPT = "SUBREDDIT: r/pets\n\nTITLE: Shy cat\n\nPOST: My cat hides.\n\nTL;DR:"
NEWS_PROMPT = "TITLE: Snow\n\nIt snowed.\n\nTL;DR:"


def summary(text: str, overall: Any, info: Any = REDDIT) -> dict[str, Any]:
    axes = {"overall": overall, "accuracy": 7, "coverage": 1, "coherence": 7}
    return {"info": info, "split": "test", "summary": {"text": text, "policy": "p", "axes": axes}, "worker": "w"}


def test_rated_summaries_of_one_post_become_one_ranking() -> None:
    loaded = read(
        summary(" Cat.", 3), summary(" Snow.", 6, NEWS), summary(" Cat hides.", 7), summary(" White.", 6, NEWS),
        summary(" A shy cat.", 3), summary(" It snowed.", 7, NEWS),
    )  # fmt: skip
    assert loaded.report.format == "summarize_from_feedback_ratings"
    assert loaded.rows == [
        Ranking([user(REDDIT_PROMPT)], [" Cat.", " Cat hides.", " A shy cat."], [2, 1, 2], [3, 7, 3], "pets"),
        Ranking([user(NEWS_PROMPT)], [" Snow.", " White.", " It snowed."], [2, 2, 1], [6, 6, 7], "gazette"),
    ]
    assert (loaded.report.rows, loaded.report.kept) == (6, 6)


def test_a_summary_that_several_people_rated_has_the_mean_of_their_ratings() -> None:
    [ranking] = read(summary(" Cat.", 2), summary(" Cat hides.", 4), summary("Cat.", 7)).rows
    assert (ranking.responses, ranking.ranks) == ([" Cat.", " Cat hides."], [1, 2])
    assert ranking.strengths == [4.5, 4]


def test_ratings_whose_mean_is_no_number_cost_their_prompt() -> None:
    loaded = read(summary(" Cat.", 1e308), summary(" Cat hides.", 4), summary("Cat.", 1e308))
    assert dropped(loaded) == {"a score is not a finite number": [1, 2, 3]}
    ratings = ("1e308",) * 4
    loaded = read(
        feedback(completion("Wind", ratings=ratings), completion("Sun"), completion("Moon", ratings=(4,) * 4))
    )
    assert loaded.rows[0].responses == ["Sun", "Moon"]


def test_rated_summaries_that_rank_nothing_are_each_counted() -> None:
    loaded = read(
        summary(" Snow.", 3, NEWS), summary(" Cat.", 2), summary(" Cat hides.", None), summary(" A shy cat.", 5),
        summary("", 5),
    )  # fmt: skip
    assert loaded.rows[0].responses == [" Cat.", " A shy cat."]
    assert dropped(loaded) == {
        "a rating is not a finite number": [3],
        "empty response": [5],
        "fewer than two answers": [1],
    }


def test_prompts_of_rated_summaries_are_prompts_however_they_were_rated() -> None:
    rows = summary(" Snow.", None, NEWS), summary(" Cat.", 2), summary(" Cat hides.", 3)
    loaded = read(*rows, kind="prompts")
    assert [prompt.messages for prompt in loaded.rows] == [[user(NEWS_PROMPT)], [user(REDDIT_PROMPT)]]
    assert dropped(loaded) == {"duplicate prompt": [3]}


# -- HelpSteer --------------------------------------------------------------------------------------------------


def rating(prompt: str, response: str, helpfulness: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "response": response,
        "helpfulness": helpfulness,
        "correctness": 4,
        "coherence": 4,
        "complexity": 1,
        "verbosity": 0,
    }


def test_helpsteer_answers_to_one_prompt_are_ranked_by_helpfulness() -> None:
    loaded = read(rating("Tea?", "Steep it.", 1), rating("Tea?", "Steep it for four minutes.", 4))
    assert loaded.report.format == "helpsteer_ratings"
    assert loaded.rows == [Ranking([user("Tea?")], ["Steep it.", "Steep it for four minutes."], [2, 1], [1, 4])]


def test_helpsteer_rows_of_a_tie_all_count_as_tied() -> None:
    rows = [
        rating("Tea?", "Steep it.", 3), rating("Tea?", "Brew it.", 3),
        rating("Jam?", "Cook fruit.", 4), rating("Jam?", "No.", 0),
    ]  # fmt: skip
    loaded = read(*rows)
    assert dropped(loaded) == {"all answers tied": [1, 2]}
    assert (loaded.report.kept, loaded.report.dropped_ties, loaded.report.bad) == (2, 1, 0)
    assert read(*rows, keep_ties=True).report.kept == 4
    assert (read(*rows[:2]).report.kept, read(*rows[:2]).rows) == (0, [])


def test_a_source_of_nothing_but_ties_is_refused_by_the_first_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(rating("Tea?", text, 3)) + "\n" for text in ("Steep it.", "Brew it.")))
    with pytest.raises(DataError, match=r"rows\.jsonl row 1: all answers tied.* Nothing usable is left"):
        read_rankings(Source(path=str(file)))


def test_helpsteer_rows_that_rank_nothing_are_each_counted() -> None:
    loaded = read(
        rating("Tea?", "Steep it.", 3), rating("Tea?", "", 1),
        rating("Jam?", "Cook fruit.", 4), rating("Jam?", "No.", "many"),
        rating("", "Yes.", 1), rating("Ice?", "Cold.", 4), rating("Ice?", "Hot.", 0),
    )  # fmt: skip
    assert [ranking.responses for ranking in loaded.rows] == [["Cold.", "Hot."]]
    assert dropped(loaded) == {
        "empty response": [2],
        "a rating is not a finite number": [4],
        "empty prompt": [5],
        "fewer than two answers": [1, 3],
    }


TURNS = "Tea?\n<extra_id_1>Assistant\nSteep it.\n\nGently.\n<extra_id_1>User\nHow long?"


def test_turn_marks_of_helpsteer2_become_messages_in_whatever_the_rows_are_read_as() -> None:
    prompt = [user("Tea?"), assistant("Steep it.\n\nGently."), user("How long?")]
    compared = {"prompt": TURNS, "response_1": "Four minutes.", "response_2": "No.", "preference_strength": -1}
    rated = [rating(TURNS, "Four minutes.", 4), rating(TURNS, "No.", 0)]
    assert [row.prompt for row in read(compared).rows] == [prompt]
    assert [row.messages for row in read(compared, kind="prompts").rows] == [prompt]
    assert [row.prompt for row in read(*rated).rows] == [prompt]
    assert [row.messages for row in read(*rated, kind="prompts").rows] == [prompt]
    demonstrations = read(*rated, kind="demonstrations").rows
    assert [(row.prompt, row.response) for row in demonstrations] == [(prompt, "Four minutes."), (prompt, "No.")]


def test_turn_marks_within_a_line_are_text_and_an_open_answer_is_no_prompt() -> None:
    compared = {"response_1": "A", "response_2": "B", "preference_strength": 1}
    spoken = "What is <extra_id_1>Assistant\nfor?"
    loaded = read(compared | {"prompt": spoken}, compared | {"prompt": TURNS.rpartition("\n<extra_id_1>")[0]})
    assert [row.prompt for row in loaded.rows] == [[user(spoken)]]
    assert dropped(loaded) == {"the last turn of the prompt is not the user's": [2]}


@pytest.mark.parametrize(
    ("row", "name", "source"),
    [
        (
            {"prompt": "Tea?", "response_1": "Steep.", "response_2": "No.", "split": "train"},
            "helpsteer2_preference",
            "",
        ),
        (
            {
                "domain": "food",
                "language": "english",
                "context": [user("Tea?")],
                "response1": "Steep.",
                "response2": "No.",
            },
            "helpsteer3_preference",
            "food",
        ),
    ],
)
def test_a_negative_helpsteer_preference_is_for_the_first_answer(row: dict[str, Any], name: str, source: str) -> None:
    column = "preference_strength" if name == "helpsteer2_preference" else "overall_preference"
    loaded = read(*(row | {column: strength} for strength in (-3, 1, 0, -100, None)))
    assert loaded.report.format == name
    assert loaded.rows == [
        Ranking([user("Tea?")], ["Steep.", "No."], [1, 2], [0, -3], source),
        Ranking([user("Tea?")], ["Steep.", "No."], [2, 1], [0, 1], source),
    ]
    assert dropped(loaded) == {
        "all answers tied": [3],
        f"{column} is not between -3 and 3": [4],
        "a preference is not a finite number": [5],
    }
