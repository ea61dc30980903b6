"""Exports of annotation tools: whose vote counts, and what they become."""

from typing import Any

import pytest
from formats_world import ranks, user, why

from rlhf.data.errors import DataError
from rlhf.data.rows import Ranking, read_rankings

# -- Argilla -----------------------------------------------------------------------------------------------

FIELDS = {"instruction": "Name a bird.", "response-1": "Wren", "response-2": "Bat", "response-3": "Owl"}


def record(fields: dict[str, Any] | None = None, /, **responses: Any) -> dict[str, Any]:
    return {"id": "1", "fields": fields or FIELDS, "metadata": {}, "suggestions": {}, "responses": responses}


def answered(value: Any, status: str | None = "submitted") -> dict[str, Any]:
    return {"value": value, "status": status, "user_id": "u"}


def order(*places: int) -> list[dict[str, Any]]:
    return [{"value": f"response-{i}", "rank": place} for i, place in enumerate(places, 1)]


def test_argillas_rankings_count_by_their_mean_ranks(write: Any) -> None:
    source = write(record(best=[answered(order(1, 3, 2)), answered(order(1, 2, 2)), answered(order(3, 1, 2), "draft")]))
    assert read_rankings(source).rows == [Ranking([user("Name a bird.")], ["Wren", "Bat", "Owl"], [1, 2.5, 2])]


def test_drafts_and_discarded_answers_do_not_vote(write: Any) -> None:
    bad, draft = answered(order(2, 1, 3), "discarded"), answered(order(2, 1, 3), "draft")
    assert why(write(record(best=[bad, draft]), record(), record(best=[answered(order(1, 2, 3)), bad]))) == {
        "nobody judged it": [1, 2]
    }


def test_argillas_ratings_are_scores(write: Any) -> None:
    given = {"rating-1": [answered(4), answered(5)], "rating-2": [answered(1)], "response-3-quality": [answered(4.5)]}
    [row] = read_rankings(write(record(**given, comment=[answered("fine")]))).rows
    assert (row.ranks, row.strengths) == ([1, 3, 1], [4.5, 1, 4.5])


def test_argillas_labels_are_votes_between_two_answers(write: Any) -> None:
    two = {name: text for name, text in FIELDS.items() if name != "response-3"}
    source = write(
        record(two, better=[answered("response-2"), answered("2"), answered("Response 1")]),
        record(two, better=[answered("tie")], topic=[answered("animals")]),
        record(better=[answered("response-2")]),
        record(two, topic=[answered("animals")]),
    )
    assert ranks(source) == [[2, 1], [1, 1]]
    assert why(source) == {
        "all answers tied": [2],
        "a label for more than two answers": [3],
        "no question that compares the answers": [4],
    }


def test_a_list_of_options_without_ranks_is_not_taken_for_their_order(write: Any) -> None:
    source = write(record(best=[answered(["response-2", "response-1", "response-3"])]))
    with pytest.raises(DataError, match=r"a ranking without ranks: best; Argilla's SDK leaves the ranks out: export"):
        read_rankings(source)
    unranked = [{"value": name} for name in ("response-1", "response-2", "response-3")]
    assert why(write(record(best=[answered(unranked)]))) == {"a ranking without ranks": [1]}


def test_the_flat_export_and_the_servers_own_say_the_same(write: Any) -> None:
    flat = FIELDS | {
        "id": "1",
        "status": "completed",
        "_server_id": None,
        "best.responses": [order(1, 2, 3), order(3, 2, 1)],
        "best.responses.status": ["submitted", "discarded"],
        "best.suggestion": order(3, 2, 1),
        "other.responses": None,
    }
    users = [
        {"values": {"best": {"value": order(1, 2, 3)}}, "status": "submitted"},
        {"values": {"best": {"value": order(3, 2, 1)}}, "status": "draft"},
        {"values": None, "status": "discarded"},
    ]
    server = {"id": "1", "fields": FIELDS, "responses": users}
    columns = {name: [value, value] for name, value in flat.items()}
    for row, num in ((flat, 1), (server, 1), (columns, 2)):
        assert ranks(write(row)) == [[1, 2, 3]] * num


def test_records_whose_fields_hold_no_two_answers_or_no_prompt_are_told(write: Any) -> None:
    rows = [record({"prompt": "Q", "response": "A"}, best=[]), record({"title": "Q", "answer a": "A", "answer b": "B"})]
    assert why(write(*rows)) == {"no two answers among the fields": [1], "no prompt among the fields": [2]}
    with pytest.raises(
        DataError, match=r"\(fields found: prompt, response\); name them response_1, response_2 and so on"
    ):
        read_rankings(write(rows[0]))


def test_two_questions_that_could_decide_are_refused(write: Any) -> None:
    source = write(record(best=[answered(order(1, 2, 3))], kindest=[answered(order(3, 2, 1))]))
    with pytest.raises(DataError, match="several ranking questions: best, kindest; keep the one to learn from"):
        read_rankings(source)


# -- Label Studio ------------------------------------------------------------------------------------------


def task(*values: Any, cancelled: Any = (), data: Any = None, to: str = "answer1,answer2") -> dict[str, Any]:
    annotations = [
        {"was_cancelled": i in cancelled, "result": [{"value": value, "to_name": to, "type": "pairwise"}]}
        for i, value in enumerate(values)
    ]
    return {
        "id": 1,
        "data": data or {"prompt": "Name a fish.", "answer1": "Pike", "answer2": "Whale"},
        "annotations": annotations,
        "predictions": [{"result": [{"value": {"selected": "right"}}]}],
    }


LEFT, RIGHT = {"selected": "left"}, {"selected": "right"}


def test_a_pairwise_choice_is_the_left_or_the_right_field(write: Any) -> None:
    source = write(
        task(LEFT), task(RIGHT), task(LEFT, to="answer2,answer1"), task(RIGHT, RIGHT, LEFT), task(LEFT, RIGHT)
    )
    assert ranks(source) == [[1, 2], [2, 1], [1, 2], [2, 1], [1, 1]]
    assert [row.responses[0] for row in read_rankings(source).rows] == ["Pike", "Pike", "Whale", "Pike"]


def test_cancelled_annotations_do_not_vote_and_predictions_never_do(write: Any) -> None:
    source = write(task(RIGHT, LEFT, RIGHT, cancelled=(0, 2)), task(LEFT, cancelled=(0,)), task())
    assert ranks(source) == [[1, 2]]
    assert why(source) == {"nobody judged it": [2, 3]}


ITEMS = [{"id": name, "title": f"model {name}", "body": f"text {name}"} for name in "xyz"]


def test_a_ranker_orders_the_items_of_the_task_best_first(write: Any) -> None:
    data = {"prompt": "Name a fish.", "items": ITEMS}
    once, again = ({"ranker": {"rank": list(ids)}} for ids in ("yzx", "zyx"))
    [row] = read_rankings(write(task(once, data=data))).rows
    assert row == Ranking([user("Name a fish.")], ["text y", "text z", "text x"], [1, 2, 3])
    assert ranks(write(task(once, again, data=data))) == [[1.5, 1.5, 3]]
    assert ranks(write(task({"ranker": list("yzx")}, data=data))) == [[1, 2, 3]]


def test_tasks_that_do_not_say_which_is_better_are_told(write: Any) -> None:
    data = {"prompt": "Name a fish.", "items": ITEMS}
    source = write(
        task({"ranker": {"good": ["x"], "bad": ["y"]}}, data=data),
        task({"ranker": {"rank": ["x", "other"]}}, data=data),
        task({"ranker": {"rank": ["x", "y"]}}, {"ranker": {"rank": ["x", "z"]}}, data=data),
        task({"choices": ["fine"]}),
        task({"selected": "none"}),
    )
    assert why(source) == {
        "items sorted into several buckets": [1],
        "ranked ids that are in no list of the task": [2],
        "not every item was ranked once by all": [3],
        "no Pairwise and no Ranker among the results": [4],
        "a choice is neither left nor right": [5],
    }
