"""The gallery of answers: what comes first, what is marked, what is cut off."""

from typing import Any

from markupsafe import escape

from rlhf.pipeline.report import gallery as gallery_module
from rlhf.pipeline.report.gallery import AT_EACH_END, MAX_BYTES, MAX_CHARACTERS, clip, gallery, mark

TITLES = {"base": "base", "sft": "SFT", "ppo": "PPO"}


def row(number: int, before: float, after: float, kind: str = "scores", **answers: str) -> dict[str, Any]:
    given = {"sft": "one two", "ppo": "one three", **answers}
    return {"prompt": f"prompt {number}", "answers": given, kind: {"sft": before, "ppo": after}}


def test_the_largest_gains_and_losses_come_first_and_the_others_in_their_order() -> None:
    gains = [0.5, -3.0, 2.0, 0.0, *[0.1 * n for n in range(1, 20)], -0.5]
    found = gallery([row(n, 1.0, 1.0 + gain) for n, gain in enumerate(gains)], TITLES)
    assert found is not None
    assert [entry.prompt for entry in found.gains][:2] == ["prompt 2", "prompt 22"]  # 2.0 and 1.9
    assert len(found.gains) == AT_EACH_END
    assert [entry.prompt for entry in found.losses] == ["prompt 1", "prompt 23"]
    rest = [entry.prompt for entry in found.others]
    assert rest == sorted(rest, key=lambda prompt: int(prompt.split()[1]))
    assert (found.count, found.better, found.worse, found.dropped) == (24, 21, 2, 0)


def test_the_judges_quality_decides_where_all_answers_have_it() -> None:
    judged = [row(0, 0.9, 0.2, "qualities") | {"scores": {"sft": 0.0, "ppo": 5.0}}]
    found = gallery(judged, TITLES)
    assert found is not None
    assert (found.judged, found.worse, found.better) == (True, 1, 0)
    half = gallery([*judged, row(1, 0.0, 1.0)], TITLES)
    assert half is not None
    assert (half.judged, half.better) == (False, 2)


def test_answers_without_figures_are_shown_as_they_come() -> None:
    found = gallery([{"prompt": str(n), "answers": {"base": "a"}} for n in range(3)], TITLES)
    assert found is not None
    assert [entry.prompt for entry in found.others] == ["0", "1", "2"]
    assert found.others[0].gain is None
    assert gallery([], TITLES) is None
    assert gallery([{"prompt": "x", "answers": {}}], TITLES) is None


def test_beyond_a_thousand_prompts_the_smallest_changes_are_dropped_and_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(gallery_module, "MAX_PROMPTS", 25)
    found = gallery([row(n, 0.0, n - 20.0) for n in range(41)], TITLES)  # gains from -20 to 20
    assert found is not None
    assert (len(found.gains), len(found.losses), len(found.others), found.dropped) == (10, 10, 5, 16)
    assert [entry.gain for entry in found.others] == [-10, -9, 8, 9, 10] or [e.gain for e in found.others] == [
        -10, -9, -8, 9, 10,
    ]  # fmt: skip


def test_words_that_the_other_answer_lacks_are_marked_in_both() -> None:
    marked = mark("The fox ate a red apple.", "The fox saw a red <b> apple.")
    assert marked == (
        "The fox <del>ate</del> a red apple.",
        "The fox <ins>saw</ins> a red <ins>&lt;b&gt; </ins>apple.",
    )


def test_answers_with_little_in_common_are_not_marked() -> None:
    assert mark("one two three four", "five six seven eight") is None
    assert mark("one two three four five", "one six seven eight nine") is None  # a fifth in common
    assert mark("the same", "the same") == ("the same", "the same")


def test_a_text_is_cut_off_by_the_bytes_that_it_takes_in_the_page() -> None:
    assert clip("short", 100) == ("short", 0)
    assert clip("x" * 30, 10) == ("x" * 10, 20)
    assert clip("<" * 30, 10) == ("<<", 28)  # each takes four, as &lt;
    assert clip("é" * 30, 11) == ("é" * 5, 25)


def test_a_thousand_long_answers_share_the_pages_budget() -> None:
    texts = [f"{n} " + "word & <tag> é " * 400 for n in range(1000)]
    rows = [row(n, 0.0, 1.0, base=text, sft=text, ppo=f"{text[:50]} other") for n, text in enumerate(texts)]
    found = gallery(rows, TITLES)
    assert found is not None
    entries = [*found.gains, *found.losses, *found.others]
    assert len(entries) == 1000
    size = sum(len(str(escape(a.html)).encode()) for entry in entries for a in entry.answers)
    assert MAX_BYTES / 3 < size < MAX_BYTES
    assert all(answer.left_out > 4000 for entry in entries for answer in entry.answers[:2])
    few = gallery(rows[:1], TITLES)
    assert few is not None
    assert len(str(few.gains[0].answers[0].html)) > MAX_CHARACTERS * 0.9
