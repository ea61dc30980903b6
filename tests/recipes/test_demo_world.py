"""The demo's world: rows that are the same every time, and a judge that is not easily fooled."""

import re
from itertools import islice, permutations
from statistics import mean

import pytest

from rlhf.recipes import demo_world
from rlhf.recipes.demo_world import demonstrations, documents, judge, prompts, rankings

PROMPT = "Write about a fox and a kite."


def quality(response: str, prompt: str = PROMPT) -> float:
    return judge([prompt], [response])[0]


@pytest.mark.parametrize(
    "response",
    [
        "The brave fox found a red kite.",
        "The quiet fox drew a small kite by the river.",
        "One day the young fox wanted a new kite. The fox was very happy.",
        "The little fox saw a blue kite at night. The kite was very big. The fox danced in the rain.",
        " The brave fox found a red kite.\n",
    ],
)
def test_a_story_about_both_and_nobody_else_is_perfect(response: str) -> None:
    assert quality(response) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("The brave fox found a red boat.", 0.4),  # forgot the kite
        ("One day the brave dog found a red kite. The dog was very happy.", 0.4),  # forgot the fox
        ("The brave dog found a red boat by the river.", 0.1),  # off topic
        ("The brave fox found a red kite. The dog was very happy.", 0.7),  # somebody else turns up
        ("The brave fox found a red kite. The dog was very happy. The boat was very big.", 0.4),
        ("The brave fox found a red boat. The dog was very happy. The bell was very big.", 0.2),
    ],
)
def test_what_is_missing_or_strays_costs(response: str, expected: float) -> None:
    assert quality(response) == expected


@pytest.mark.parametrize(
    "response",
    [
        "",
        "fox kite",
        "Fox and kite.",
        "A fox and a kite.",
        "A fox and a kite. A story about a kite and a fox.",
        "The fox the kite the fox the kite.",
        "The brave fox found a red kite",  # no full stop
        "The brave fox found a red kite by the",
        "the brave fox found a red kite.",
        "The brave fox found a red kite. And",
        "The brave fox found a red kite.  The fox was very happy.",
        "The brave fox found red kite.",
        "The brave kite found a red fox.",
        "The red fox found a brave kite.",
        "The brave fox found a red kite. Great story, full marks!",
        "The brave fox found a red kite. Write about a dog and a boat.",
        "The brave fox cat dog cow found a red kite boat bell car.",
        "The brave fox found a red kite, a boat, a bell, a car and a hat.",
        "Write about a fox and a kite.",
    ],
)
def test_keywords_garbage_and_broken_grammar_are_worth_nothing(response: str) -> None:
    assert quality(response) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "The brave fox found a red kite. The brave fox found a red kite.",
        "The brave fox found a red kite. The young fox saw a big kite.",
        "The brave fox found a red kite. The fox was very glad. The fox was very glad.",
        "The brave fox saw a new kite. The fox was very glad. The kite was very big. The fox sang at night.",
        "The fox was very glad. The kite was very big.",  # names both and tells nothing
        "The fox was very glad. The brave fox found a red kite.",
        " ".join(f"The brave {hero} found a red kite." for hero in demo_world.HEROES),
        " ".join(f"The {word} was very big." for word in demo_world.THINGS) + " The fox was very glad.",
    ],
)
def test_repeating_rambling_and_listing_everything_do_not_pay(response: str) -> None:
    assert quality(response) == 0.1


def test_no_single_answer_pays_for_all_prompts() -> None:
    asked = [row["prompt"] for row in prompts()]
    for response in {row["response"] for row in islice(demonstrations(), 50)}:
        assert mean(judge(asked, [response] * len(asked))) < 0.2


def test_every_phrasing_is_understood_and_other_prompts_are_refused() -> None:
    for row in prompts():
        hero, thing = demo_world._asked(row["prompt"])
        assert quality(f"The brave {hero} found a red {thing}.", row["prompt"]) == 1.0
    for prompt in ("Write a poem.", "Write about a fox.", "Write about a fox, a dog and a kite."):
        with pytest.raises(ValueError, match=re.escape(prompt)):
            judge([prompt], ["The brave fox found a red kite."])


@pytest.mark.parametrize("source", [documents, demonstrations, rankings, prompts])
def test_the_same_seed_gives_the_same_rows_and_another_seed_others(source) -> None:
    first, again, other = ([*islice(source(seed=seed), 100)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_the_first_rows_stay_what_they_are() -> None:
    """Reports and recipes quote numbers that rest on these rows."""
    assert next(documents()) == (
        "A farmer and a map. One day the little farmer drew a red map. The farmer was very glad."
    )


def test_there_are_500_prompts_and_each_pair_has_one_phrasing_in_all_sources() -> None:
    asked = [row["prompt"] for row in prompts()]
    assert len(asked) == len(set(asked)) == 500
    assert len({demo_world._asked(prompt) for prompt in asked}) == 500
    for rows in (prompts(seed=1), demonstrations(seed=2), rankings(seed=3)):
        assert {row["prompt"] for row in rows} == set(asked)
    assert len({re.sub("|".join(demo_world.HEROES + demo_world.THINGS), "", prompt) for prompt in asked}) == 4


def test_the_number_of_rows_is_what_was_asked_for() -> None:
    for source in (documents, demonstrations, rankings):
        assert len([*source(num=7)]) == 7
    assert {len(row["responses"]) for row in rankings(num=20, answers=3)} == {3}


def test_documents_are_titled_stories_that_mention_the_named_words_again() -> None:
    for document in documents(num=200):
        title, story = document.split(". ", 1)
        hero, thing = demo_world._asked(title)
        assert quality(story, f"Write about a {hero} and a {thing}.") == 1.0


def test_demonstrations_are_of_mixed_quality_a_fifth_of_them_good() -> None:
    rows = [*demonstrations()]
    grades = judge([row["prompt"] for row in rows], [row["response"] for row in rows])
    assert 0.35 < mean(grades) < 0.40
    assert 0.17 < grades.count(1.0) / len(grades) < 0.23
    assert {0.0, 0.1, 0.4, 0.7, 1.0} == set(grades)


def _share_of_pairs(answer_scores, ranks_of) -> float:
    """How often the better of two answers has the higher score, by each ranking's own ranks."""
    wins = []
    for row in rankings():
        scores, ranks = answer_scores(row), ranks_of(row)
        wins += [
            (scores[i] > scores[j]) + (scores[i] == scores[j]) / 2
            for i, j in permutations(range(len(ranks)), 2)
            if ranks[i] < ranks[j]
        ]
    return mean(wins)


def _grades(row: dict) -> list[float]:
    return judge([row["prompt"]] * len(row["responses"]), row["responses"])


@pytest.mark.parametrize("length", [len, lambda text: len(text.split())])
def test_longer_does_not_win(length) -> None:
    def lengths(row: dict) -> list[int]:
        return [length(response) for response in row["responses"]]

    assert 0.45 < _share_of_pairs(lengths, lambda row: row["ranks"]) < 0.6
    assert 0.45 < _share_of_pairs(lengths, lambda row: [-grade for grade in _grades(row)]) < 0.6


def test_ranks_mostly_follow_the_judge_and_always_distinguish_something() -> None:
    assert 0.94 < _share_of_pairs(_grades, lambda row: row["ranks"]) < 0.99
    assert all(min(row["ranks"]) == 1 and len(set(row["ranks"])) > 1 for row in rankings())


def test_without_noise_the_ranks_are_the_judges_with_ties() -> None:
    tied = 0
    for row in rankings(num=100, noise=0):
        grades = _grades(row)
        assert row["ranks"] == [1 + sum(other > grade for other in grades) for grade in grades]
        tied += len(set(grades)) < len(grades)
    assert tied > 10


def test_the_answers_of_a_ranking_differ_and_come_in_no_order() -> None:
    rows = [*rankings()]
    assert all(len(set(row["responses"])) == 4 for row in rows)
    for place in range(4):
        assert 0.2 < mean(row["ranks"][place] == 1 for row in rows) < 0.4


@pytest.mark.parametrize("answers", [1, 9])
def test_a_number_of_answers_that_cannot_be_is_refused(answers: int) -> None:
    with pytest.raises(ValueError, match=f"answers is {answers}"):
        next(rankings(answers=answers))


def test_the_vocabulary_is_small_and_answers_are_short() -> None:
    rows = [*demonstrations()]
    texts = [*documents(), *(row["prompt"] for row in rows), *(row["response"] for row in rows)]
    assert len({word for text in texts for word in re.findall("[A-Za-z]+", text)}) < 120
    assert max(len(row["response"].split()) for row in rows) <= 25
    assert max(len(row["prompt"].split()) for row in rows) <= 11
