"""The ranking page as a program sees it: what it shows and what it takes."""

import re
import uuid
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from rank_world import Person, make_store, open_page, ranking, votes

from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store
from rlhf.data.feedback.target import missing, rated
from rlhf.pipeline.rank.texts import Block, blocks, markdown


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, int]]:
    """One page for all tests; each comes as somebody else."""
    with make_store(tmp_path_factory.mktemp("page") / "f.sqlite") as store, open_page(store) as port:
        yield store, port


@pytest.fixture
def anna(page: tuple[Store, int], request: pytest.FixtureRequest) -> Person:
    return Person(page[1]).enter(request.node.name)


def own(store: Store, name: str) -> list[list[int]]:
    return [vote.ranks for vote in votes(store) if vote.rater.name == name]


def question(page: str) -> str:
    return re.findall(r"Question \d", page)[0]


def shown_order(page: str) -> list[str]:
    return re.findall(r'<div class="text" dir="auto">(red|green|blue)</div>', page)


def test_a_rater_sees_prompt_and_answers_but_no_model(anna: Person) -> None:
    text = anna.get().text
    assert question(text)
    assert sorted(shown_order(text)) == ["blue", "green", "red"]
    assert "secret-model" not in text


def test_a_ranking_is_kept_with_all_that_was_said_and_the_next_prompt_follows(
    page: tuple[Store, int], anna: Person, request: pytest.FixtureRequest
) -> None:
    first = anna.get().text
    order = shown_order(first)
    reply = anna.rank(2, 1, 2, strength=6, note="one\r\ntwo", seconds="12.5")
    assert (reply.status, reply.text.isdecimal()) == (200, True)
    [vote] = [vote for vote in votes(page[0]) if vote.rater.name == request.node.name]
    by_text = dict(zip(["red", "green", "blue"], vote.ranks, strict=True))
    assert [by_text[text] for text in order] == [2, 1, 2]
    assert (vote.strength, vote.note, vote.seconds, vote.all_bad) == (6, "one\ntwo", 12.5, False)
    assert vote.shown is not None
    assert [["red", "green", "blue"][place] for place in vote.shown] == order
    text = anna.get().text
    assert question(text) != question(first)
    assert "1 of 3" in text


def test_a_browser_without_scripts_is_led_to_the_next_prompt_and_can_undo(anna: Person) -> None:
    first = question(anna.get().text)
    reply = anna.post("/rank", ranking(anna.form(), 1, 2, 3), accept="text/html,*/*")
    assert (reply.status, reply.headers["location"]) == (303, "/")
    assert question(anna.get().text) != first
    assert anna.post("/undo", anna.form("undo"), accept="text/html,*/*").status == 303
    text = anna.get().text
    assert question(text) == first
    assert len(re.findall(r"required checked", text)) == 3  # as it was ranked


def test_an_undo_is_of_one_act_however_often_it_is_sent(tmp_path: Path) -> None:
    with make_store(tmp_path / "f.sqlite") as store:
        with open_page(store) as port:
            anna = Person(port).enter("anna")
            first, second = anna.rank(1, 2, 3).text, anna.rank(3, 2, 1).text
            stale = anna.form("undo")  # of another tab
            assert stale["act"] == second
            third = anna.rank(1, 1, 1).text
            anna.post("/undo", stale)  # it was about another act than the last
            assert anna.form("undo")["act"] == third  # and it is there after a plain reload too
            undo = anna.form("undo")
            assert anna.post("/undo", undo).status == 200
        with open_page(store) as port:
            anna.port = port
            for _ in range(2):  # the answer was lost, and so the page sends it again, to the next server
                assert anna.post("/undo", undo).status == 200
            assert anna.form("undo")["act"] == second
            for act in (second, first):
                anna.post("/undo", {**anna.form("undo"), "act": act})
            assert '<button class="quiet-button" disabled>Undo' in anna.get().text
            assert anna.post("/undo", anna.form("undo")).text == "act: a number is wanted."


def test_a_request_that_comes_again_counts_once(
    page: tuple[Store, int], anna: Person, request: pytest.FixtureRequest
) -> None:
    said = ranking(anna.form(), 1, 2, 3)
    assert anna.post("/rank", said).text == anna.post("/rank", said).text
    assert len(own(page[0], request.node.name)) == 1
    assert page[0].has_act(said["request"])


def test_all_bad_puts_answers_without_a_rank_last(
    page: tuple[Store, int], anna: Person, request: pytest.FixtureRequest
) -> None:
    anna.post("/rank", anna.form() | {"all_bad": "1"})
    form = anna.form()
    anna.post("/rank", form | {"all_bad": "1", f"rank.{form['shown'].split(',')[2]}": "1"})
    found = [vote for vote in votes(page[0]) if vote.rater.name == request.node.name]
    assert all(vote.all_bad for vote in found)
    assert sorted(sorted(vote.ranks) for vote in found) == [[1, 1, 1], [1, 2, 2]]


def test_skips_and_flags_go_on_and_the_end_says_what_was_done(
    page: tuple[Store, int], anna: Person, request: pytest.FixtureRequest
) -> None:
    assert anna.post("/flag", anna.form("flag") | {"reason": "a phone number"}).status == 200
    assert anna.post("/skip", anna.form("skip")).status == 200
    assert anna.rank(1, 2, 3).status == 200
    text = anna.get().text
    assert "All done" in text
    assert "You ranked 1 prompt, skipped 1, flagged 1." in text
    assert any("a phone number" in judged.flags for judged in page[0].rankings())
    assert request.node.name in text


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"prompt": "999"}, 404, "no such prompt"),
        ({"prompt": "9" * 30}, 400, "prompt: a number is wanted"),
        ({"prompt": "../../etc/passwd"}, 400, "prompt: a number is wanted"),
        ({"shown": "997,998,999", "rank.997": "1", "rank.998": "1", "rank.999": "1"}, 409, "others by now"),
        ({"shown": ""}, 400, "shown: a number is wanted"),
        ({"strength": "8"}, 400, "from 1 to 7"),
        ({"seconds": "nan"}, 400, "seconds: a number is wanted"),
        ({"request": "again"}, 400, "a UUID is wanted"),
        ({"note": "x" * 10_001}, 413, "note: at most 10,000"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    page: tuple[Store, int], anna: Person, change: dict[str, str], status: int, text: str
) -> None:
    reply = anna.rank(1, 2, 3, **change)
    assert (reply.status, reply.headers["content-type"]) == (status, "text/plain; charset=utf-8")
    assert text in reply.text
    assert anna.get().status == 200


def test_ranks_that_are_missing_or_too_high_are_refused(anna: Person) -> None:
    reply = anna.post("/rank", anna.form())
    assert (reply.status, reply.text) == (400, "Give every answer a rank, or say that all are bad.")
    assert anna.rank(1, 2, 4).text == "Ranks go from 1 to 3."
    assert anna.rank(0, 1, 2).text == "Ranks go from 1 to 3."


@pytest.mark.parametrize("name", ["", "  ", "x" * 101, "a\nb", "\u202eanna", "\u200d"])
def test_a_name_that_is_none_is_asked_for_again(page: tuple[Store, int], name: str) -> None:
    reply = Person(page[1]).post("/enter", {"name": name})
    assert reply.status == 400
    told = "at most 100 characters, and 'x" if len(name) > 100 else "1 to 100 characters, all of which can be seen"
    assert f"A rater's name has {told}" in unescape(reply.text)


@pytest.mark.parametrize("name", ["../a/b", "محمد\u200cرضا", "👩\u200d👩\u200d👧", "<b>&amp;", "W" * 100])
def test_a_name_may_be_of_any_script(page: tuple[Store, int], name: str) -> None:
    assert name in unescape(Person(page[1]).enter(name).get().text)


def test_a_judge_cannot_be_taken_for_a_person(tmp_path: Path) -> None:
    with make_store(tmp_path / "f.sqlite") as store, open_page(store, rater="boss") as port:
        store.add_rater("robot", kind="judge")
        visitor = Person(port)
        assert visitor.get().status == 303  # nobody is asked for a name
        assert "boss" in visitor.get().text
        assert Person(port).post("/enter", {"name": "robot"}).status == 403
    with Store.open(tmp_path / "f.sqlite") as store, open_page(store) as port:
        refused = Person(port).post("/enter", {"name": "robot"}).text
        assert "Rater 'robot' is there as judge, not as person; give another name." in unescape(refused)


def test_a_prompt_is_given_out_until_it_has_as_many_ratings_as_wanted(tmp_path: Path) -> None:
    with make_store(tmp_path / "f.sqlite", num=0) as store, open_page(store, target=2) as port:
        store.add_answers(store.add_prompt("Once more?"), [Answer("yes", "m"), Answer("no", "m")])
        for name in ("anna", "bob"):
            assert Person(port).enter(name).rank(1, 2).status == 200
        assert "Nothing for you" in Person(port).enter("carl").get().text


def test_answers_that_came_while_a_page_was_open_are_not_ranked_or_skipped_unseen(tmp_path: Path) -> None:
    with make_store(tmp_path / "f.sqlite", num=1) as store, open_page(store) as port:
        person = Person(port).enter("anna")
        ranked, skipped = person.form(), person.form("skip")
        prompt = int(skipped["prompt"])
        store.add_answers(prompt, [Answer("violet", "m")])
        reply = person.post("/rank", ranking(ranked, 1, 2, 3))
        assert (reply.status, reply.text) == (
            409, "The answers to this prompt are others by now. Load the page again."
        )  # fmt: skip
        store.add_answers(prompt, [Answer("here", "m", round=2), Answer("there", "m", round=2)])
        assert person.post("/skip", skipped).status == 200
        assert person.post("/skip", skipped | {"request": str(uuid.uuid4()), "round": "3"}).status == 400
        text = person.get().text
        assert "here" in text
        assert "violet" not in text


def far(page: str) -> str:
    """What the page says of how far the rater is."""
    found = re.search(r'<span class="num">([^<]*)</span>', page)
    assert found is not None
    return found[1]


def test_what_is_skipped_is_counted_apart_from_what_is_ranked(tmp_path: Path) -> None:
    with make_store(tmp_path / "f.sqlite", num=5) as store, open_page(store, rater="anna") as port:
        anna = Person(port)
        anna.get()
        assert far(anna.get().text) == "0 of 5"
        assert anna.rank(1, 2, 3).status == 200
        assert anna.post("/skip", anna.form("skip")).status == 200
        assert far(anna.get().text) == "1 of 5, 1 skipped"
        assert anna.post("/flag", anna.form("flag") | {"reason": "x"}).status == 200
        text = anna.get().text
        assert far(text) == "1 of 5, 1 skipped, 1 flagged"
        assert '<progress max="5" value="1"' in text


def test_a_later_round_is_counted_by_itself_as_the_run_counts_it(tmp_path: Path) -> None:
    with make_store(tmp_path / "f.sqlite", num=4) as store, open_page(store, rater="anna") as port:
        anna = Person(port)
        anna.get()
        for _ in range(3):  # the fourth stays as it is
            assert anna.rank(1, 2, 3).status == 200
        for prompt in (store.add_prompt("Question 0?"), store.add_prompt("New?")):
            store.add_answers(prompt, [Answer(text, "m", round=2) for text in ("red", "black", "white")])
        assert far(anna.get().text) == "Round 2: 0 of 2"
        assert anna.rank(1, 2, 3).status == 200
        assert far(anna.get().text) == "Round 2: 1 of 2"
        assert missing(rated(store, 1, 2), 1, store.path).startswith(
            "round 2: 1 of 2 prompts are rated by a person (3 of"
        )
        assert anna.rank(1, 2, 3).status == 200
        assert far(anna.get().text) == "2 of 3"  # what is left of the first, without the one that has new answers


def test_who_everybody_is_holds_for_those_too_who_came_by_another_name(tmp_path: Path) -> None:
    with make_store(tmp_path / "f.sqlite") as store:
        with open_page(store) as port:
            bob = Person(port).enter("bob")
        with open_page(store, rater="anna") as port:
            bob.port = port
            assert bob.get().status == 303
            assert bob.rank(1, 2, 3).status == 200
        assert [vote.rater.name for vote in votes(store)] == ["anna"]


def test_a_session_outlives_the_server(tmp_path: Path) -> None:
    with make_store(tmp_path / "f.sqlite") as store:
        with open_page(store) as port:
            person = Person(port).enter("anna")
            said = ranking(person.form(), 1, 2, 3)
        with open_page(store) as port:
            person.port = port
            assert person.post("/rank", said).status == 200
    assert (tmp_path / "f.sqlite-secret").stat().st_mode & 0o077 == 0


def test_conversations_and_code_are_shown_as_they_are(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Code?"},
    ]
    with make_store(tmp_path / "f.sqlite", num=0) as store, open_page(store, rater="anna") as port:
        prompt = store.add_prompt(messages)
        store.add_answers(
            prompt, [Answer("Like so:\n```python\n  a  < b\n```\nDone.", "m"), Answer("  No.\tEver", "m")]
        )
        person = Person(port)
        person.get()
        text = person.get().text
    assert re.findall(r'<h2 class="role">(\w+)</h2>', text) == ["System", "User", "Assistant", "User"]
    assert "<code>  a  &lt; b</code>" in text
    assert "<figcaption>python</figcaption>" in text
    assert ">  No.\tEver</div>" in text


def test_blocks_of_an_answer() -> None:
    assert blocks("a\n\n```sh\nls\n```\n\nb") == [Block("a"), Block("ls", True, "sh"), Block("b")]
    assert blocks("~~~\n```\n~~~") == [Block("```", True)]
    assert blocks("```\ncut off") == [Block("cut off", True)]
    assert blocks("```The answer is 42") == [Block("", True, "The answer is 42")]  # nothing is left out
    assert blocks("``` not `a` fence") == [Block("``` not `a` fence")]
    assert blocks("  a\r\n\tb ") == [Block("  a\n\tb ")]


def test_markdown_of_instructions() -> None:
    assert markdown("# A\nb *c* **d**\ne\n\n- f\n- g `*h*`\n\n1. i\n2) j\n\n> k\n> l\n\n---") == "\n".join([
        "<h2>A</h2>",
        "<p>b <em>c</em> <strong>d</strong>\ne</p>",
        "<ul><li>f</li><li>g <code>*h*</code></li></ul>",
        "<ol><li>i</li><li>j</li></ol>",
        "<blockquote>k\nl</blockquote>",
        "<hr>",
    ])  # fmt: skip
    assert markdown("```\n<b>\n```") == "<pre><code>&lt;b&gt;</code></pre>"
    assert markdown("[x](https://a.b/*c*?d=1&e=2)") == (
        '<p><a href="https://a.b/*c*?d=1&amp;e=2" target="_blank" rel="noopener noreferrer">x</a></p>'
    )


@pytest.mark.parametrize(
    "attack",
    [
        "<script>alert(1)</script>",
        "[x](javascript:alert(1))",
        '[x](https://a"onmouseover="alert(1))',
        "`<img src=x onerror=alert(1)>`",
        "**<b onclick=alert(1)>**",
    ],
)
def test_instructions_hold_no_markup_but_ours(attack: str) -> None:
    html = str(markdown(attack))
    assert not re.search(r"<(script|img|b|a[^>]*(onmouseover|javascript))", html)


def test_the_page_is_light(page: tuple[Store, int], anna: Person) -> None:
    text = anna.get().text
    sizes = [len(text)]
    for path in re.findall(r'(?:href|src)="(/[0-9a-f]{12}/[^"]+)"', text):
        reply = anna.get(path)
        assert reply.status == 200
        assert "immutable" in reply.headers["cache-control"]
        sizes.append(len(reply.text))
    scripts = re.findall(r'from "\./(\w+\.js)"', anna.get(re.findall(r'src="([^"]+)"', text)[0]).text)
    assert scripts
    folder = re.findall(r"/[0-9a-f]{12}/", text)[0]
    sizes += [len(anna.get(folder + name).text) for name in scripts]
    assert sum(sizes) < 100_000


def test_a_long_line_that_is_almost_a_fence_is_text() -> None:
    """A pattern that tried every way to part it would not come back."""
    line = "~" * 100_000 + "`"
    assert "".join(block.text for block in blocks(line)) == line
