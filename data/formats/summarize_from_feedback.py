"""Summaries of Reddit posts and news (OpenAI, Stiennon et al. 2020): comparisons of two, and ratings of single ones.

The prompt is written as in the paper: SUBREDDIT, TITLE and POST (an article stands alone under its TITLE), each where
the row has it, then "TL;DR:". Rated summaries of one post are ranked by axes.overall (1 to 7); what several people
said of the same summary is averaged. The `confidence` of a comparison has no documented meaning and is left out.
"""

from collections.abc import Iterator
from typing import Any

from rlhf.data.examples import Prompt, Ranking, number, ranked
from rlhf.data.formats import Format, Numbered, Rating, by_mean, ranked_together
from rlhf.data.messages import Messages, Unusable, as_prompt, as_response, as_text


def _read_comparison(row: dict[str, Any]) -> Ranking:
    summaries, choice = row["summaries"], number(row["choice"], "choice")
    if not isinstance(summaries, list) or len(summaries) != 2 or not all(isinstance(one, dict) for one in summaries):
        raise Unusable("summaries is not a list of two")
    if choice not in (0, 1):
        raise Unusable("choice is neither 0 nor 1", f": {choice:g}")
    prompt, source = _prompt(row["info"])
    responses = [as_response(one.get("text"), "summary", prompt) for one in summaries]
    return ranked(prompt, responses, [1 + choice, 2 - choice], source=source)


def _read_ratings(rows: list[Numbered]) -> Iterator[tuple[tuple[int, ...], Ranking | Unusable]]:
    return ranked_together(rows, _rating, by_mean)


def _rating(row: dict[str, Any]) -> Rating:
    summary = row["summary"]
    axes = summary["axes"]
    prompt, source = _prompt(row["info"])
    overall = axes.get("overall") if isinstance(axes, dict) else None
    return Rating(prompt, as_response(summary.get("text"), "summary", prompt), number(overall, "rating"), source)


def _prompt(info: Any) -> tuple[Messages, Any]:
    """The prompt, and where it is from: a subreddit or a news site."""
    if not isinstance(info, dict):
        raise Unusable("info is not an object with post or article")
    post = info.get("post")
    text = as_text(post or info.get("article"), "the post", empty="empty prompt")
    subreddit, title = info.get("subreddit"), info.get("title")
    parts = [f"SUBREDDIT: r/{subreddit}"] if subreddit else []
    parts += [f"TITLE: {title}"] if title else []
    parts += [f"POST: {text}" if post else text, "TL;DR:"]
    return as_prompt("\n\n".join(parts)), subreddit or info.get("site")


def _read_prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(_prompt(row["info"])[0], row)


def _is_rating(row: dict[str, Any]) -> bool:
    return isinstance(row["summary"], dict) and "axes" in row["summary"]


_RATED = ("info", "summary")

FORMATS = (
    Format("summarize_from_feedback_comparisons", "preferences", ("info", "summaries", "choice"), _read_comparison),
    Format("summarize_from_feedback_ratings", "preferences", _RATED, read_all=_read_ratings, recognises=_is_rating),
    Format("summarize_from_feedback_ratings", "prompts", _RATED, _read_prompt, recognises=_is_rating),
)
