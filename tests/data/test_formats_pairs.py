"""Published preference formats that compare two answers, or rank several: who is better, and what is left out."""

import math
from typing import Any

import pytest
from formats_world import assistant, dropped, read, user

from rlhf.data.rows import Ranking, prompt_text

# -- ShareGPT rankings ------------------------------------------------------------------------------------------

TALK = [
    {"from": "human", "value": "Name a fruit"},
    {"from": "gpt", "value": "Fig"},
    {"from": "human", "value": "Another"},
]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("Pear", "Brick"),
        ({"from": "gpt", "value": "Pear"}, {"from": "gpt", "value": "Brick"}),
        ({"role": "assistant", "content": "Pear"}, {"role": "assistant", "content": "Brick"}),
        ([{"from": "gpt", "value": "Pear"}], [*TALK, {"from": "gpt", "value": "Brick"}]),
    ],
)
def test_a_sharegpt_conversation_is_the_prompt_of_both_answers(chosen: Any, rejected: Any) -> None:
    loaded = read({"conversations": TALK, "chosen": chosen, "rejected": rejected})
    assert loaded.report.format == "sharegpt_rankings"
    prompt = [user("Name a fruit"), assistant("Fig"), user("Another")]
    assert loaded.rows == [Ranking(prompt, ["Pear", "Brick"], [1, 2])]


def test_a_system_column_stands_first_unless_the_conversation_has_its_own_system_turn() -> None:
    row = {"conversations": TALK[:1], "chosen": "Pear", "rejected": "Brick", "source": "garden"}
    own = [{"from": "system", "value": "Be brief."}, *TALK[:1]]
    loaded = read(
        row | {"system": "Be kind."},
        row | {"system": "Be kind.", "conversations": own},
        row | {"system": ""},
        row | {"system": None},
    )
    assert [ranking.prompt[0]["content"] for ranking in loaded.rows] == [
        "Be kind.",
        "Be brief.",
        "Name a fruit",
        "Name a fruit",
    ]
    assert {ranking.source for ranking in loaded.rows} == {"garden"}


def test_tool_turns_of_sharegpt_keep_their_sides_and_the_prompt_tells_the_tools() -> None:
    talk = [
        *TALK[:1],
        {"from": "function_call", "value": '{"name": "pick"}'},
        {"from": "observation", "value": "plum"},
    ]
    row = {"conversations": talk, "chosen": "A plum", "rejected": "A brick", "tools": '[{"name": "pick"}]'}
    [ranking] = read(row).rows
    assert [turn["role"] for turn in ranking.prompt] == ["system", "user", "assistant", "tool"]
    assert '{"name": "pick"}' in ranking.prompt[0]["content"]


def test_sharegpt_rows_that_rank_nothing_are_named() -> None:
    row = {"conversations": TALK, "chosen": "Pear", "rejected": "Brick"}
    loaded = read(
        row | {"conversations": TALK[:2]},
        row | {"conversations": None},
        row | {"rejected": {"from": "gpt", "value": ""}},
        row | {"rejected": {"from": "human", "value": "Brick"}},
        row | {"chosen": None},
        row | {"conversations": [{"from": "narrator", "value": "Once"}]},
        row | {"conversations": ["Hi"]},
        row | {"conversations": TALK[:1], "system": 7},
    )
    assert dropped(loaded) == {
        "the last turn of the prompt is not the user's": [1],
        "conversations is missing, not a list of messages": [2],
        "empty response": [3, 5],
        "the last turn of rejected is not the assistant's": [4],
        "unknown role": [6],
        "conversations holds something that is not a message with role and content": [7],
        "system is a number, not text": [8],
    }


# -- Nectar -----------------------------------------------------------------------------------------------------


def test_nectar_goes_by_the_ranks_and_not_by_the_order_of_the_list() -> None:
    answers = [{"answer": "Rain", "rank": 3.0}, {"answer": "Sun", "rank": 1.0}, {"answer": "Wind", "rank": 1.0}]
    prompt = "\n\nHuman: Weather?\n\nAssistant: "
    loaded = read({"prompt": prompt, "answers": answers, "turns": 1, "num_responses": 3})
    assert loaded.report.format == "nectar"
    assert loaded.rows == [Ranking([user(prompt)], ["Rain", "Sun", "Wind"], [3, 1, 1])]


def test_nectar_rows_without_ranks_are_not_ranked() -> None:
    loaded = read(
        {"prompt": "Q", "answers": ["one", "two"]},
        {"prompt": "Q", "answers": [{"answer": "one", "rank": 1}, {"answer": "two", "rank": None}]},
        {"prompt": "Q", "answers": [{"answer": "one", "rank": 1}]},
        {"prompt": "Q", "answers": None},
    )
    assert dropped(loaded) == {
        "answers is not a list of answers with their ranks": [1, 4],
        "a rank is not a finite number": [2],
        "fewer than two answers": [3],
    }


# -- SHP --------------------------------------------------------------------------------------------------------

POST = {"history": "Soup too salty?", "domain": "cooking", "human_ref_A": "Add potato.", "human_ref_B": "Shrug."}


@pytest.mark.parametrize(
    ("label", "ranks", "strengths"),
    [(1, [1, 2], [math.log(4), 0]), (0, [2, 1], [0, math.log(4)]), ("1", [1, 2], [math.log(4), 0])],
)
def test_shp_label_one_means_that_a_is_better(label: Any, ranks: list[float], strengths: list[float]) -> None:
    loaded = read(POST | {"labels": label, "score_ratio": 4.0})
    assert loaded.report.format == "shp"
    assert loaded.rows == [Ranking([user("Soup too salty?")], ["Add potato.", "Shrug."], ranks, strengths, "cooking")]


def test_shp_without_a_ratio_has_no_strength_and_other_labels_are_refused() -> None:
    loaded = read(
        POST | {"labels": 1},
        POST | {"labels": 2},
        POST | {"labels": None},
        POST | {"labels": 1, "score_ratio": 0.5},
        POST | {"labels": 1, "human_ref_B": ""},
    )
    assert [ranking.strengths for ranking in loaded.rows] == [None]
    assert dropped(loaded) == {
        "labels is neither 1 (A is better) nor 0 (B is better)": [2],
        "a label is not a finite number": [3],
        "score_ratio is below 1, so labels and votes disagree": [4],
        "empty response": [5],
    }


# -- WebGPT -----------------------------------------------------------------------------------------------------


def webgpt(score: Any, question: Any = None) -> dict[str, Any]:
    return {
        "question": question or {"dataset": "quiz", "id": "q", "full_text": "Why is grass green?"},
        "quotes_0": {"title": ["A page"], "extract": ["An extract"]},
        "answer_0": "Chlorophyll [1].",
        "score_0": score,
        "quotes_1": {"title": [], "extract": []},
        "answer_1": "Paint.",
        "score_1": -score,
    }


def test_webgpt_prefers_the_answer_with_the_higher_score_and_zero_is_a_tie() -> None:
    loaded = read(webgpt(0.5), webgpt(-0.25), webgpt(0.0))
    assert loaded.report.format == "webgpt_comparisons"
    prompt, answers = [user("Why is grass green?")], ["Chlorophyll [1].", "Paint."]
    assert loaded.rows == [
        Ranking(prompt, answers, [1, 2], [0.5, -0.5], "quiz"),
        Ranking(prompt, answers, [2, 1], [-0.25, 0.25], "quiz"),
    ]
    assert (dropped(loaded), loaded.report.dropped_ties) == ({"all answers tied": [3]}, 1)


def test_webgpt_questions_without_text_are_named() -> None:
    loaded = read(webgpt(1, ["Why?"]), webgpt(1, {"dataset": "quiz"}), webgpt(1) | {"score_1": None})
    assert dropped(loaded) == {
        "question is not an object with full_text": [1],
        "empty prompt": [2],
        "a score is not a finite number": [3],
    }


# -- Summaries compared -----------------------------------------------------------------------------------------

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


def comparison(choice: Any, info: Any = REDDIT, texts: tuple[Any, ...] = (" Cat hides.", " Cat.")) -> dict[str, Any]:
    summaries = [{"text": text, "policy": "p", "note": None} for text in texts]
    return {"info": info, "split": "train", "summaries": summaries, "choice": choice, "worker": "w"}


def test_of_two_summaries_the_chosen_one_is_better_and_keeps_its_space() -> None:
    loaded = read(comparison(0), comparison(1, NEWS))
    assert loaded.report.format == "summarize_from_feedback_comparisons"
    assert loaded.rows == [
        Ranking([user(REDDIT_PROMPT)], [" Cat hides.", " Cat."], [1, 2], None, "pets"),
        Ranking([user(NEWS_PROMPT)], [" Cat hides.", " Cat."], [2, 1], None, "gazette"),
    ]


def test_posts_are_asked_about_with_what_the_row_has() -> None:
    bare = {"id": "t2", "post": "My dog digs."}
    rows = comparison(0, bare), comparison(0, bare | {"title": "Digging", "subreddit": None})
    assert [prompt_text(ranking.prompt) for ranking in read(*rows).rows] == [
        "POST: My dog digs.\n\nTL;DR:",
        "TITLE: Digging\n\nPOST: My dog digs.\n\nTL;DR:",
    ]
    assert len(read(*rows, kind="prompts").rows) == 2


def test_comparisons_without_two_summaries_or_a_choice_are_named() -> None:
    loaded = read(
        comparison(2),
        comparison(None),
        comparison(0, texts=(" Cat.",)),
        comparison(0, {"post": None, "article": None}),
        comparison(0, None),
        comparison(1, texts=(" Cat.", " ")),
        comparison(1, texts=(" Cat.", "Cat.")),
    )
    assert dropped(loaded) == {
        "choice is neither 0 nor 1": [1],
        "a choice is not a finite number": [2],
        "summaries is not a list of two": [3],
        "empty prompt": [4],
        "info is not an object with post or article": [5],
        "empty response": [6],
        "identical answers": [7],
    }


# -- Stack Exchange ---------------------------------------------------------------------------------------------


def test_of_two_stack_exchange_answers_j_is_better() -> None:
    row = {"qid": 1, "question": "Loop?", "response_k": "goto", "response_j": "for", "metadata": []}
    loaded = read(row, row | {"response_k": None})
    assert loaded.report.format == "stack_exchange_pairs"
    assert loaded.rows == [Ranking([user("Loop?")], ["for", "goto"], [1, 2])]
    assert dropped(loaded) == {"empty response": [2]}
