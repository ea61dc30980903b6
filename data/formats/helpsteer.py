"""NVIDIA's HelpSteer: rated answers (HelpSteer, HelpSteer2), and preferences with a strength (HelpSteer2, HelpSteer3).

Rated rows hold one answer each; those of one prompt are ranked by `helpfulness`. Preferences go from -3 (the first
answer is much better) to 3 (the second is), and 0 is a tie. Where a prompt of HelpSteer2 has several turns they are
told apart by lines such as "<extra_id_1>Assistant", which become messages in whatever the rows are read as.
"""

import re
from collections.abc import Iterator
from typing import Any

from rlhf.data.examples import Demonstration, Prompt, Ranking, by_score, number
from rlhf.data.formats import Format, Numbered, Rating, by_mean, ranked_together
from rlhf.data.messages import Messages, Unusable, as_prompt, as_response, as_text

TURN = re.compile(r"(?:^|\n)<extra_id_1>(User|Assistant)\n")


def _read_ratings(rows: list[Numbered]) -> Iterator[tuple[tuple[int, ...], Ranking | Unusable]]:
    return ranked_together(rows, _rating, by_mean)


def _rating(row: dict[str, Any]) -> Rating:
    answered = _read_demonstration(row)
    return Rating(answered.prompt, answered.response, number(row["helpfulness"], "rating"))


def _read_demonstration(row: dict[str, Any]) -> Demonstration:
    prompt = _turns(row["prompt"])
    return Demonstration(prompt, as_response(row["response"], "response", prompt))


def _read_prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(_turns(row["prompt"]), row)


def _read_helpsteer2(row: dict[str, Any]) -> Ranking:
    return _preference(_turns(row["prompt"]), row, ("response_1", "response_2"), "preference_strength")


def _read_helpsteer3(row: dict[str, Any]) -> Ranking:
    return _preference(as_prompt(row["context"]), row, ("response1", "response2"), "overall_preference")


def _preference(prompt: Messages, row: dict[str, Any], answers: tuple[str, str], column: str) -> Ranking:
    strength = number(row[column], "preference")
    if abs(strength) > 3:
        raise Unusable(f"{column} is not between -3 and 3", f": {strength:g}")
    responses = [as_response(row[name], name, prompt) for name in answers]
    return by_score(prompt, responses, [0.0, strength], row.get("domain"))


def _turns(value: Any) -> Messages:
    first, *others = TURN.split(as_text(value, "prompt", empty="empty prompt"))
    turns = [("User", first), *zip(others[::2], others[1::2], strict=True)]
    return as_prompt([{"role": role.lower(), "content": text} for role, text in turns])


RATED = ("prompt", "response", "helpfulness")
COMPARED = ("prompt", "response_1", "response_2", "preference_strength")
FORMATS = (
    Format("helpsteer_ratings", "preferences", RATED, read_all=_read_ratings),
    Format("helpsteer_ratings", "demonstrations", RATED, _read_demonstration),
    Format("helpsteer_ratings", "prompts", RATED, _read_prompt),
    Format("helpsteer2_preference", "preferences", COMPARED, _read_helpsteer2),
    Format("helpsteer2_preference", "prompts", COMPARED, _read_prompt),
    Format(
        "helpsteer3_preference",
        "preferences",
        ("context", "response1", "response2", "overall_preference"),
        _read_helpsteer3,
    ),
)
