"""Formats that hold people's votes: what they become, and what a tie is."""

import json
from pathlib import Path
from typing import Any

import pytest
from formats_world import assistant, found, ranks, user, why

from rlhf.data.errors import DataError
from rlhf.data.rows import Ranking, load, prompt_text, read_prompts, read_rankings
from rlhf.data.sources import Source

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "preferences"
published = pytest.mark.skipif(not DATA.is_dir(), reason="no shared data here")


# -- PKU-SafeRLHF ------------------------------------------------------------------------------------------


def pku(**verdicts: Any) -> dict[str, Any]:
    return {
        "prompt": "How do I get rust off?",
        "response_0": "With acid, bare-handed.",
        "response_1": "Buff it.",
    } | verdicts


def test_two_verdicts_are_refused_until_the_source_says_which_is_meant(write: Any) -> None:
    source = write(pku(better_response_id=0, safer_response_id=1, is_response_0_safe=False))
    with pytest.raises(
        DataError, match=r"can be read in several ways; say which in the source: format: pku_b.* or pku_s"
    ):
        read_rankings(source)
    for name, expected in (("pku_better", [1, 2]), ("pku_safer", [2, 1])):
        assert ranks(source.model_copy(update={"format": name})) == [expected]


def test_one_verdict_alone_leaves_no_choice(write: Any) -> None:
    [row] = read_rankings(write(pku(better_response_id=1, prompt_source="forum"))).rows
    assert (row.responses, row.ranks, row.source) == (["With acid, bare-handed.", "Buff it."], [2, 1], "forum")


def test_a_verdict_that_is_neither_answer_is_told(write: Any) -> None:
    rows = [pku(better_response_id=value) for value in (2, True, None, "1")]
    assert why(write(*rows)) == {"better_response_id is not 0 or 1": [1, 2], "nobody judged it": [3]}
    assert ranks(write(*rows)) == [[2, 1]]


def test_prompts_are_read_without_a_choice(write: Any) -> None:
    source = write(pku(better_response_id=0, safer_response_id=1))
    assert [prompt_text(row.messages) for row in read_prompts(source).rows] == ["How do I get rust off?"]


# -- Chatbot Arena -----------------------------------------------------------------------------------------


def arena(winner: Any, *before: dict[str, str], first: str = "North.", second: str = "Up.") -> dict[str, Any]:
    turns = [*before, user("Where?")]
    return {
        "model_a": "x",
        "model_b": "y",
        "winner": winner,
        "conversation_a": [*turns, assistant(first)],
        "conversation_b": [*turns, assistant(second)],
    }


def test_an_arena_vote_is_a_pair_and_both_ties_are_ties(write: Any) -> None:
    source = write(*map(arena, ["model_a", "model_b", "tie", "tie (bothbad)", "both_bad"]))
    assert ranks(source) == [[1, 2], [2, 1], [1, 1], [1, 1], [1, 1]]
    assert found(source)[2:6] == (2, {"all answers tied": (3, [3, 4, 5])}, 2, 3)


def test_earlier_turns_of_an_arena_conversation_belong_to_the_prompt(write: Any) -> None:
    before = [user("Hi"), assistant("Hello")]
    [row] = read_rankings(write(arena("model_b", *before))).rows
    assert row == Ranking([*before, user("Where?")], ["North.", "Up."], [2, 1])


def test_a_vote_on_conversations_that_went_apart_is_no_comparison_of_two_answers(write: Any) -> None:
    row = arena("model_a", user("Hi"), assistant("Hello"))
    row["conversation_b"][1] = assistant("Good day")
    source = write(row, arena("model_c"), arena(None), arena("tie", second=""))
    assert why(source) == {
        "the conversations differ before their last answers": [1],
        "unknown winner": [2],
        "nobody judged it": [3],
        "empty response": [4],
    }


def test_later_arena_releases_give_contents_in_parts_or_conversations_as_json(write: Any) -> None:
    parts = arena("model_a")
    for name in ("conversation_a", "conversation_b"):
        turns = [(turn["role"], turn["content"]) for turn in parts[name]]
        parts[name] = [{"role": r, "content": [{"type": "text", "text": t, "image": None}]} for r, t in turns]
    packed = arena("model_b") | {name: json.dumps(arena("")[name]) for name in ("conversation_a", "conversation_b")}
    rows = read_rankings(write(parts, packed)).rows
    assert rows == [Ranking([user("Where?")], ["North.", "Up."], given) for given in ([1, 2], [2, 1])]


def flags(a: Any, b: Any, tie: Any, *turns: tuple[str, Any, Any]) -> dict[str, Any]:
    asked, first, second = zip(*(turns or (("Q", "A", "B"),)), strict=True)
    names = {"winner_model_a": a, "winner_model_b": b, "winner_tie": tie}
    return names | {"prompt": json.dumps(asked), "response_a": json.dumps(first), "response_b": json.dumps(second)}


def test_the_competitions_flags_and_turns_in_json_are_read(write: Any) -> None:
    shared = [("Q", "A", "A"), ("More?", "C", "D")]
    source = write(flags(1, 0, 0), flags("0", "1", "0"), flags(0, 0, 1), flags(0, 1, 0, *shared))
    assert ranks(source) == [[1, 2], [2, 1], [1, 1], [2, 1]]
    last = read_rankings(source).rows[-1]
    assert (last.prompt, last.responses) == ([user("Q"), assistant("A"), user("More?")], ["C", "D"])
    assert [row.messages for row in read_prompts(source).rows] == [[user("Q")], last.prompt]  # not the JSON


def test_flags_that_name_no_winner_and_turns_that_do_not_fit_are_told(write: Any) -> None:
    apart = [("Q", "A", "B"), ("More?", "C", "D")]
    broken = flags(1, 0, 0) | {"response_a": "plain"}
    uneven = flags(1, 0, 0) | {"response_a": '["A", "more"]'}
    rows = [
        flags(1, 1, 0),
        flags(0.3, 0.3, 0.4),
        flags(1, 0, 0, *apart),
        broken,
        uneven,
        flags(1, 0, 0, ("Q", None, "B")),
    ]
    assert why(write(*rows)) == {
        "not exactly one winner is 1": [1, 2],
        "the conversations differ before their last answers": [3],
        "response_a is not a list of turns in JSON": [4],
        "prompt and responses differ in turns": [5],
        "empty response": [6],
    }


def test_plain_texts_with_a_winner_are_read_as_they_are(write: Any) -> None:
    row = {"prompt": '["is this a list?"]', "response_a": "Yes.", "response_b": "It is.", "winner": "model_b"}
    assert read_rankings(write(row)).rows == [Ranking([user('["is this a list?"]')], ["Yes.", "It is."], [2, 1])]


# -- OpenAssistant -----------------------------------------------------------------------------------------


def said(name: str, role: str, *replies: Any, rank: Any = None, **more: Any) -> dict[str, Any]:
    return {"message_id": name, "text": f"text {name}", "role": role, "rank": rank, "replies": list(replies)} | more


def tree(*replies: Any, **more: Any) -> dict[str, Any]:
    return {"message_tree_id": "q", "tree_state": "ready", "prompt": said("q", "prompter", *replies, **more)}


def test_a_tree_is_a_ranking_for_each_prompt_with_the_path_before_it(write: Any) -> None:
    follow_up = said("q2", "prompter", said("c", "assistant", rank=1), said("d", "assistant", rank=0))
    other = said("q3", "prompter", said("e", "assistant"))
    row = tree(said("a", "assistant", follow_up, rank=1), said("b", "assistant", other, rank=0))
    assert read_rankings(write(row)).rows == [
        Ranking([user("text q")], ["text a", "text b"], [1, 0]),
        Ranking([user("text q"), assistant("text a"), user("text q2")], ["text c", "text d"], [1, 0]),
    ]
    assert [prompt.messages[-1]["content"] for prompt in read_prompts(write(row)).rows] == [
        "text q",
        "text q2",
        "text q3",
    ]


def test_unranked_and_deleted_replies_are_left_out_as_parts(write: Any) -> None:
    gone = said("gone", "assistant", said("q2", "prompter"), rank=0, deleted=True)
    row = tree(gone, said("a", "assistant", rank=1), said("b", "assistant", rank=2), said("c", "assistant"))
    report = (loaded := load(write(row), "preferences")).report
    assert loaded.rows == [Ranking([user("text q")], ["text a", "text b"], [1, 2])]
    assert {reason: (part.count, part.rows) for reason, part in report.parts.items()} == {
        "nobody judged it": (1, [1]),
        "a deleted message": (1, [1]),
    }


def test_one_tied_group_does_not_cost_the_other_rankings_of_its_tree(write: Any) -> None:
    tied = said("q2", "prompter", said("c", "assistant", rank=0), said("d", "assistant", rank=0))
    row = tree(said("a", "assistant", tied, rank=0), said("b", "assistant", rank=1))
    report = load(write(row), "preferences").report
    assert (report.kept, report.dropped, report.dropped_ties) == (1, {}, 1)
    assert report.parts["all answers tied"].count == 1
    assert ranks(write(row)) == [[0, 1], [0, 0]]


def test_a_tree_that_nobody_ranked_is_no_fault_of_the_data(write: Any) -> None:
    ranked = tree(said("a", "assistant", rank=0), said("b", "assistant", rank=1))
    source = write(tree(said("a", "assistant")), ranked, tree(said("a", "assistant"), said("b", "assistant")))
    assert read_rankings(source, max_dropped=0.0).report.bad == 0
    assert why(source) == {"nobody judged it": [1, 3]}


def message(name: str, parent: str | None, role: str, rank: Any = None, **more: Any) -> dict[str, Any]:
    return {"message_id": name, "parent_id": parent, "text": f"text {name}", "role": role, "rank": rank} | more


def test_single_messages_find_their_parents_in_any_order(write: Any) -> None:
    rows = [
        message("d", "q2", "assistant", 1.0),
        message("q2", "a", "prompter"),
        message("c", "q2", "assistant", 0.0),
        message("alone", "q", "assistant"),
        message("a", "q", "assistant"),
        message("q", None, "prompter"),
        message("gone", "q2", "assistant", 2.0, deleted=True),
    ]
    loaded = load(write(*rows), "preferences")
    prompt = [user("text q"), assistant("text a"), user("text q2")]
    assert loaded.rows == [Ranking(prompt, ["text d", "text c"], [1, 0])]
    assert why(write(*rows)) == {"nobody judged it": [4], "a deleted message": [7]}
    assert (loaded.report.kept, loaded.report.bad) == (5, 0)


def test_single_messages_are_prompts_with_what_came_before(write: Any) -> None:
    rows = [message("q2", "a", "prompter"), message("a", "q", "assistant"), message("q", None, "prompter")]
    source = write(*rows, message("q3", "lost", "prompter"), message("q4", None, "prompter", deleted=True))
    loaded = load(source, "prompts")
    assert [row.messages for row in loaded.rows] == [
        [user("text q"), assistant("text a"), user("text q2")],
        [user("text q")],
    ]
    assert why(source, "prompts") == {"a parent is not among the messages": [4], "a deleted message": [5]}


def test_single_messages_without_a_root_or_in_a_circle_are_told(write: Any) -> None:
    pair = [message("a", "lost", "assistant", 0), message("b", "lost", "assistant", 1)]
    circle = [message("q", "c", "prompter"), message("c", "q", "assistant", 0), message("d", "q", "assistant", 1)]
    assert why(write(*pair, *circle, message("a", "q", "assistant"))) == {
        "a message_id occurs twice": [6],
        "a parent is not among the messages": [1, 2],
        "messages are their own parents": [4, 5],
        "nobody judged it": [3],
    }


# -- AlpacaEval and PandaLM --------------------------------------------------------------------------------


def alpaca(preference: Any, first: str = "Hund", second: str = "Katze", **more: Any) -> dict[str, Any]:
    row = {"instruction": "Translate.", "input": "dog", "output_1": first, "output_2": second, "preference": preference}
    return row | more


def test_a_preference_is_the_number_of_the_better_output(write: Any) -> None:
    rows = [alpaca(value, second=f"answer {i}") for i, value in enumerate([1, 2, 1.5, 0, "2.0"])]
    assert ranks(write(*rows)) == [[1, 2], [2, 1], [1, 1], [1, 1], [2, 1]]
    [row] = read_rankings(write(alpaca(1, dataset="koala"))).rows
    assert row == Ranking([user("Translate.\ndog")], ["Hund", "Katze"], [1, 2], source="koala")


def test_several_annotators_of_the_same_outputs_are_one_ranking_by_majority(write: Any) -> None:
    source = write(alpaca(1), alpaca(2), alpaca(2, "Katze", "Hund"))  # the third sees them in the other order
    assert ranks(source) == [[1, 2]]
    assert found(source)[1:6] == (3, 3, {}, 1, 0)
    assert ranks(write(alpaca(1), alpaca(2), alpaca(0))) == [[1, 1]]  # no majority
    assert found(write(alpaca(1), alpaca(2)))[2:6] == (0, {"all answers tied": (2, [1, 2])}, 0, 1)
    assert [row.messages for row in read_prompts(write(alpaca(1), alpaca(2))).rows] == [[user("Translate.\ndog")]]
    assert len(read_prompts(write(alpaca(None), format="alpaca_votes")).rows) == 1


def test_a_judges_certainty_is_kept_as_strength(write: Any) -> None:
    [row] = read_rankings(write(alpaca(1.25), alpaca(1.5))).rows  # mean 1.375
    assert (row.ranks, row.strengths) == ([1, 2], [0.625, 0.375])


def test_votes_where_other_tools_were_offered_are_on_another_prompt(write: Any) -> None:
    rows = [alpaca(preference, tools=[{"name": f"t{n}"}]) for n, preference in enumerate((1, 2))]
    assert ranks(write(*rows)) == [[1, 2], [2, 1]]


def test_preferences_that_say_nothing_do_not_vote(write: Any) -> None:
    source = write(alpaca(2), alpaca(None), alpaca(float("nan")), alpaca(3), alpaca("first"))
    loaded = load(source, "preferences")
    assert [row.ranks for row in loaded.rows] == [[2, 1]]
    assert why(source) == {
        "nobody judged it": [2, 3],
        "preference is not between 1 and 2": [4],
        "a preference is not a finite number": [5],
    }


def panda(*verdicts: Any) -> dict[str, Any]:
    row = {"instruction": "Name a tree.", "input": float("nan"), "response1": "Oak", "response2": "Dog"}
    return row | {f"annotator{i}": verdict for i, verdict in enumerate(verdicts, 1)}


def test_pandalms_annotators_decide_by_majority_and_ties_stay(write: Any) -> None:
    source = write(panda(1, 1, 2), panda(2, 0, 2), panda(0, 0, 1), panda(0, 1, 2), panda("1", None, ""), panda(2, 0))
    assert ranks(source) == [[1, 2], [2, 1], [1, 1], [1, 1], [1, 2], [1, 1]]
    assert read_rankings(source).rows[0].prompt == [user("Name a tree.")]
    assert why(write(panda(3, 1, 1), panda(None, "", None))) == {
        "an annotator's verdict is not 0, 1 or 2": [1],
        "nobody judged it": [2],
    }


# -- published files ---------------------------------------------------------------------------------------


@published
def test_arena_sample() -> None:
    tied = {"all answers tied": (2, [3, 4])}
    assert found(Source(path=str(DATA / "chatbot_arena_votes.jsonl"))) == ("chatbot_arena", 4, 2, tied, 2, 2, 1)


@published
def test_hundred_trees() -> None:
    """214 prompts with two answers or more: 211 fully ranked, one but for one answer, two not at all (5 answers)."""
    source = Source(path=str(DATA / "oasst_en_100_tree.jsonl"))
    assert found(source) == ("oasst_trees", 100, 100, {}, 754, 0, 212)
    loaded = load(source, "preferences")
    sizes = [len(ranking.responses) for ranking in loaded.rows]
    assert {size: sizes.count(size) for size in set(sizes)} == {2: 57, 3: 117, 4: 27, 5: 3, 6: 6, 8: 1, 9: 1}
    assert {reason: (part.count, part.rows) for reason, part in loaded.report.parts.items()} == {
        "nobody judged it": (6, [59, 70, 70, 70, 70])
    }
    assert all(min(ranking.ranks) == 0 for ranking in loaded.rows)
    assert found(source, "prompts")[1:4] == (100, 100, {})
    assert len(read_prompts(source).rows) == 480


@published
def test_flat_messages_sample() -> None:
    source = Source(path=str(DATA / "oasst2_flat_messages.jsonl"))
    assert found(source) == ("oasst_messages", 6, 4, {"nobody judged it": (2, [5, 6])}, 3, 0, 1)
    assert len(read_prompts(source).rows) == 2
    [ranking] = read_rankings(source).rows
    assert ([text.split()[0] for text in ranking.responses], ranking.ranks) == (["Use", "The", "no"], [1, 0, 2])
