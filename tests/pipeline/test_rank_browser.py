"""The ranking page in a browser, by mouse and by keys. Skipped where there is no Chromium."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser_world import CHROMIUM, Browser, Tab
from rank_world import Person, make_store, open_page, votes

from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store
from rlhf.pipeline.rank.texts import markdown

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

SHELVES = (
    "[...document.querySelectorAll('.shelf')]"
    ".map(shelf => [...shelf.querySelectorAll('.letter')].map(letter => letter.innerText).join(''))"
)


@dataclass
class World:
    store: Store
    port: int
    browser: Browser

    def tab(self, name: str) -> Tab:
        """The page in front of somebody who has come in."""
        tab = self.browser.tab(self.browser.person())
        for cookie, value in Person(self.port).enter(name).cookies.items():
            tab.tell("Network.setCookie", name=cookie, value=value, url=self.url)
        tab.go(self.url)
        return tab

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self, name: str) -> list[dict[str, object]]:
        """This rater's rankings: ranks in the order in which the answers were shown, and the rest."""
        found = []
        for vote in (vote for vote in votes(self.store) if vote.rater.name == name):
            assert vote.shown is not None
            ranks = [vote.ranks[place] for place in vote.shown]
            found.append({"ranks": ranks, "note": vote.note, "strength": vote.strength, "bad": vote.all_bad})
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One browser and one page for all tests; each comes as somebody else."""
    folder = tmp_path_factory.mktemp("browser")
    with make_store(folder / "f.sqlite", answers=("one", "two", "three", "four")) as store, open_page(store) as port:
        browser = Browser(folder / "profile")
        try:
            yield World(store, port, browser)
        finally:
            browser.close()


def test_answers_are_dragged_onto_ranks_and_between_them(world: World) -> None:
    tab = world.tab("mouse")
    tab.drag(".answer:nth-child(1) .letter", ".shelf[data-rank='1']")  # A from its card
    tab.drag(".tray .chip:nth-child(1)", ".shelf[data-rank='3']")  # B from the tray
    tab.drag(".tray .chip:nth-child(1)", ".shelf[data-rank='3']")  # C ties with it
    assert tab.run(SHELVES) == ["A", "", "BC", ""]
    tab.drag(".tray .chip:nth-child(1)", ".shelf[data-rank='1']", share=0.05)  # D goes above A, which makes room
    assert tab.run(SHELVES) == ["D", "A", "BC", ""]
    tab.drag(".shelf[data-rank='3'] .chip:nth-child(2)", ".shelf[data-rank='3']", share=0.95)  # C below B
    assert tab.run(SHELVES) == ["D", "A", "B", "C"]
    tab.drag(".shelf[data-rank='4'] .chip", ".shelf[data-rank='2']", share=0.95)  # and up again, between A and B
    assert tab.run(SHELVES) == ["D", "A", "C", "B"]
    tab.act(lambda: tab.click("#submit"))
    assert world.said("mouse") == [{"ranks": [2, 4, 3, 1], "note": "", "strength": None, "bad": False}]


def test_a_prompt_is_ranked_by_keys_alone(world: World) -> None:
    tab = world.tab("keys")
    for key in "2141":  # each rank marks the next answer
        tab.key(key)
    assert tab.run(SHELVES) == ["BD", "A", "", "C"]
    assert "Answer D: rank 1 of 4, tied with B. B and D, then A, then C." in tab.text("#said")
    tab.key("ArrowUp")  # to C
    tab.key("ArrowLeft")  # which gets better
    tab.key("n")
    tab.type("a note")
    tab.key("Escape")
    tab.act(lambda: tab.key("Enter"))
    assert world.said("keys") == [{"ranks": [2, 1, 3, 1], "note": "a note", "strength": None, "bad": False}]


def test_keyboards_that_write_other_letters_or_digits_do_as_well(world: World) -> None:
    tab = world.tab("layouts")
    prompt = tab.text(".prompt")
    tab.key("۲", "Digit2")  # Persian
    tab.key("&", "Digit1")  # French
    assert tab.run(SHELVES) == ["B", "A", "", ""]
    tab.act(lambda: tab.key("ы", "KeyS"))  # Russian
    assert tab.text(".prompt") != prompt
    tab.act(lambda: tab.key("u", "KeyF"))  # what a key writes goes before where it is
    assert tab.text(".prompt") == prompt


def test_what_is_missing_is_said_and_all_bad_needs_no_ranks(world: World) -> None:
    tab = world.tab("bad")
    tab.key("3")
    tab.key("Enter")
    assert tab.text("#problem") == "B, C, D have no rank yet: give them one, or say “All bad”."
    assert tab.run("document.activeElement.dataset.letter") == "B"
    tab.key("9")  # there are four
    tab.key("0")
    assert tab.run(SHELVES) == ["", "", "A", ""]
    tab.act(lambda: tab.key("b"))
    assert world.said("bad") == [{"ranks": [1, 2, 2, 2], "note": "", "strength": None, "bad": True}]


def test_skip_flag_and_undo_by_keys(world: World) -> None:
    tab = world.tab("undo")
    first = tab.text(".prompt")
    tab.act(lambda: tab.key("s"))
    second = tab.text(".prompt")
    assert second != first
    tab.key("f")
    tab.type("no question")
    tab.act(lambda: tab.key("Enter"))
    third = tab.text(".prompt")
    assert "no question" in [flag for judged in world.store.rankings() for flag in judged.flags]
    for key in "1234":
        tab.key(key)
    tab.act(lambda: tab.click("#submit"))
    assert "You ranked 1 prompt, skipped 1, flagged 1." in tab.text()
    for expected in (third, second, first):  # from the page that says that all is done
        tab.act(lambda: tab.key("u"))
        assert tab.text(".prompt") == expected
    assert world.said("undo") == []
    tab.key("u")  # nothing is left to take back
    tab.act(lambda: tab.key("s"))
    tab.act(lambda: tab.key("s"))
    assert tab.run(SHELVES) == ["A", "B", "C", "D"]  # what was taken back is not forgotten
    tab.act(lambda: tab.tell("Page.reload"))
    tab.act(lambda: tab.key("u"))  # after a reload too it is one that is taken back
    assert tab.text(".prompt") == second


def test_a_reload_keeps_prompt_ranks_note_pause_and_time(world: World) -> None:
    tab = world.tab("reload")
    prompt = tab.text(".prompt")
    tab.key("2")
    tab.key("1")
    tab.key("n")
    tab.type("half")
    tab.click(".strength label:nth-child(5)")
    tab.run("document.activeElement.blur()")
    tab.key("p")
    tab.act(lambda: tab.tell("Page.reload"))
    assert tab.run("document.querySelector('#paused').open")
    tab.key("s")  # not while it is paused
    tab.key("Enter")
    assert tab.text(".prompt") == prompt
    assert tab.run(SHELVES) == ["B", "A", "", ""]
    tab.key("3")
    tab.key("4")
    tab.act(lambda: tab.key("Enter"))
    assert world.said("reload") == [{"ranks": [2, 1, 3, 4], "note": "half", "strength": 5, "bad": False}]


def test_time_stands_still_while_the_page_is_paused(world: World) -> None:
    tab = world.tab("time")
    module = "import(document.querySelector('script').src.replace('page.js', 'clock.js'))"
    clock = f"{module}.then(m => m.clock.spent())"
    tab.wait(f"{clock}.then(t => t > 50)")
    tab.key("p")
    stopped = tab.run(clock)
    tab.run("new Promise(done => setTimeout(done, 60))")
    assert tab.run(clock) == stopped
    tab.key("Escape")
    tab.wait(f"{clock}.then(t => t > {stopped})")
    # Four minutes pass, and nobody is there: the page pauses by itself, and does not count them; nor does it where the
    # machine slept, and the first that happens is a key.
    for sign in ("m.clock.tick()", "document.dispatchEvent(new KeyboardEvent('keydown', { key: '1' }))"):
        tab.run("document.querySelector('#paused').close()")
        tab.wait(f"{module}.then(m => m.clock.since !== null)")
        tab.run(f"{module}.then(m => {{ m.clock.before += 240000; m.clock.seen -= 240000; {sign}; }})")
        assert tab.run("document.querySelector('#paused').open")
    assert tab.run(SHELVES) == ["", "", "", ""]
    assert tab.run(clock) < 60_000
    tab.key("Enter")
    for key in "1111":
        tab.key(key)
    tab.act(lambda: tab.key("Enter"))
    [vote] = [vote for vote in votes(world.store) if vote.rater.name == "time"]
    assert vote.seconds is not None
    assert 0 < vote.seconds < 60


def test_two_raters_work_at_once(world: World) -> None:
    anna, bob = world.tab("first"), world.browser.tab(world.browser.person())
    bob.go(world.url)
    bob.click("#name")
    bob.type("second")
    bob.act(lambda: bob.key("Enter"))
    for anna_key, bob_key in zip("1234", "4321", strict=True):
        anna.key(anna_key)
        bob.key(bob_key)
    for tab in (anna, bob):
        tab.act(lambda tab=tab: tab.key("Enter"))  # type: ignore[misc]
    assert [said["ranks"] for said in world.said("first")] == [[1, 2, 3, 4]]
    assert [said["ranks"] for said in world.said("second")] == [[4, 3, 2, 1]]


def test_it_fits_a_phone_and_buttons_do_what_dragging_does(world: World) -> None:
    tab = world.tab("phone")
    tab.resize(360, 740, touch=True)
    assert tab.run("document.documentElement.scrollWidth") == 360
    tab.resize(320, 256, touch=True)  # a desktop at 400 %: bars that stay in sight would cover the text
    assert tab.run("document.documentElement.scrollWidth") == 320
    assert tab.run("document.querySelector('.send').getBoundingClientRect().top > innerHeight")
    tab.resize(360, 740, touch=True)
    bar = tab.run("document.querySelector('.send').getBoundingClientRect().bottom")
    assert bar == 740  # always at hand
    for letter, rank in (("1", 4), ("2", 3), ("3", 2)):
        tab.click(f".answer:nth-child({letter}) .ranks label:nth-of-type({rank})")
    assert tab.text("#summary") == "C › B › A"
    tab.click(".tray [data-step=worse]")  # D has no rank: the best that is free
    tab.click(".shelf[data-rank='4'] [data-step=better]")  # A up to B: a tie
    assert tab.text("#summary") == "D › C › A = B"
    assert tab.run("[...document.querySelectorAll('.ranks label')].every(l => l.getBoundingClientRect().height >= 36)")
    tab.act(lambda: tab.click("#submit"))
    assert world.said("phone")[0]["ranks"] == [3, 3, 2, 1]


def test_a_lost_answer_is_asked_for_again_and_counts_once(world: World) -> None:
    tab = world.tab("lost")
    for key in "1234":
        tab.key(key)
    # The first request arrives, but what the server says is lost on the way.
    tab.run(
        "void (window.real = fetch, window.fetch = async (...all) => {"
        " const answer = await real(...all);"
        " if (!window.lost) { window.lost = true; throw new TypeError('lost'); }"
        " return answer; })"
    )
    tab.act(lambda: tab.key("Enter"))
    with sqlite3.connect(world.store.path) as db:  # not even one that was replaced
        acts = "SELECT count(*) FROM acts JOIN raters ON raters.id = rater_id WHERE name = 'lost'"
        assert db.execute(acts).fetchone() == (1,)
    db.close()
    assert "1 of 3" in tab.text(".top")


def test_a_connection_that_says_nothing_is_given_up_and_another_one_taken(world: World) -> None:
    tab = world.tab("silent")
    tab.run(
        "void (window.real = fetch, AbortSignal.timeout = () => { const one = new AbortController();"
        " setTimeout(() => one.abort(), 50); return one.signal; }, window.fetch = (where, how) =>"
        " window.silent ? real(where, how) : new Promise((_, reject) => { window.silent = true;"
        " how.signal?.addEventListener('abort', () => reject(new TypeError('gone'))); }))"
    )
    tab.act(lambda: tab.key("s"))
    assert "0 of 3, 1 skipped" in tab.text(".top")


def test_what_is_opened_beside_the_answers_is_seen_whole_and_closes_what_was_open(world: World) -> None:
    tab = world.tab("opener")
    seen = (
        "(() => { const of = (q) => document.querySelector(q).getBoundingClientRect();"
        " const [inner, outer] = [of('details[open]'), of('.panel')];"
        " return inner.top >= outer.top && inner.bottom < outer.bottom + 1; })()"
    )
    for opened in ("more", "flagging", "keys"):
        tab.click(f"#{opened} > summary")
        tab.wait(seen)
        assert tab.run("[...document.querySelectorAll('details[open]')].map(one => one.id)") == [opened]


def test_keys_can_be_turned_off_but_in_the_answer_that_is_chosen(world: World) -> None:
    tab = world.tab("speech")
    tab.run("document.querySelector('#keys').open = true")
    tab.click("#letters")
    tab.run("document.activeElement.blur()")
    prompt = tab.text(".prompt")
    for key in "1s":
        tab.key(key)
    assert (tab.text(".prompt"), tab.run(SHELVES)) == (prompt, ["", "", "", ""])
    tab.run("document.querySelector('.answer:nth-child(2)').focus()")
    tab.key("3")
    assert tab.run(SHELVES) == ["", "", "B", ""]


def test_colours_of_the_readers_own_show_what_is_chosen(world: World) -> None:
    tab = world.tab("forced")
    tab.media(forced_colors="active")
    tab.key("1")
    back = "getComputedStyle(document.querySelector('.answer:nth-child(1) label:nth-of-type({}) span')).backgroundColor"
    assert tab.run(back.format(1)) != tab.run(back.format(2))
    edge = "getComputedStyle(document.querySelector('.answer:nth-child({})')).borderTopWidth"
    assert (tab.run(edge.format(2)), tab.run(edge.format(3))) == ("3px", "1px")  # the second one is marked


def test_names_code_and_words_that_are_long_fit_a_phone(tmp_path: Path, world: World) -> None:
    wide = "W" * 100
    instructions = markdown(f"# {wide}\n\n```\n{wide}{wide}\n```")
    with make_store(tmp_path / "f.sqlite", num=0) as store, open_page(store, instructions=instructions) as port:
        prompt = store.add_prompt(wide)
        store.add_answers(prompt, [Answer(f"```{wide}\n{wide}", "m"), *(Answer(f"{wide}{n}", "m") for n in range(11))])
        tab = world.browser.tab(world.browser.person())
        tab.resize(320, 568, touch=True)
        tab.go(f"http://127.0.0.1:{port}")
        tab.click("#name")
        tab.type(wide)
        tab.act(lambda: tab.key("Enter"))
        assert "Instructions" in tab.text()
        assert tab.run("document.documentElement.scrollWidth") == 320
        tab.act(lambda: tab.click(".primary"))
        assert tab.run("document.documentElement.scrollWidth") == 320
        assert tab.run("document.querySelectorAll('.answer').length") == 12
        for key in "123456789":
            tab.key(key)
        for _ in range(3):  # beyond the keys: the best place that is free
            tab.run("document.querySelector('.answer:not(.ranked)').focus()")
            tab.key("ArrowRight")
        tab.act(lambda: tab.key("Enter"))
        [vote] = votes(store)
        assert sorted(vote.ranks) == list(range(1, 13))


def test_long_answers_are_folded_and_scripts_in_them_are_text(tmp_path: Path, world: World) -> None:
    with make_store(tmp_path / "f.sqlite", num=0) as store, open_page(store, rater="anna") as port:
        prompt = store.add_prompt("<img src=x onerror='window.hacked = 1'>")
        texts = ("<script>window.hacked = 1</script>", "</div></section><svg onload='hacked=1'>", "word\n" * 500)
        store.add_answers(prompt, [Answer(text, "m") for text in texts])
        tab = world.browser.tab(world.browser.person())
        tab.go(f"http://127.0.0.1:{port}")
        assert tab.run("window.hacked === undefined")
        assert tab.run("document.querySelectorAll('.answer').length") == 3
        assert tab.run("document.querySelectorAll('.folded').length") == 1
        height = tab.run("document.querySelector('.folded').offsetHeight")
        assert height < 500
        tab.click(".unfold")
        assert tab.run("document.querySelectorAll('.folded').length") == 0


def test_without_scripts_the_page_still_ranks(world: World) -> None:
    tab = world.tab("plain")
    tab.scripts(allowed=False)
    tab.tell("Page.reload")
    tab.wait("document.readyState === 'complete' && !document.documentElement.matches('.scripted')")
    before = tab.text(".prompt")
    tab.click("#submit")  # the browser itself asks for what is missing
    for number in range(1, 5):
        tab.click(f".answer:nth-child({number}) .ranks label:nth-of-type({number})")
    tab.click("#submit")
    tab.wait(f"document.querySelector('.prompt').innerText !== {before!r}")
    assert world.said("plain")[0]["ranks"] == [1, 2, 3, 4]
    tab.click("#undo button")
    tab.wait("document.querySelectorAll('.ranks input:checked').length === 4")


# The lowest contrast of all texts that can be seen: colours, and opacity, as they come out.
CONTRAST = """(() => {
  const numbers = (color) => { const all = color.match(/[\\d.]+/g).map(Number); return [...all, 1].slice(0, 4); };
  const over = (top, ground) => [0, 1, 2].map((i) => top[i] * top[3] + ground[i] * (1 - top[3]));
  const opacity = (one) => (one ? Number(getComputedStyle(one).opacity) * opacity(one.parentElement) : 1);
  function ground(one) {
    if (!one) return [255, 255, 255];
    const own = numbers(getComputedStyle(one).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, ground(one.parentElement));
  }
  const light = (color) => {
    const [r, g, b] = color.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const one = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !one.checkVisibility() || one.closest(".hidden, :disabled")) continue;
    const ink = numbers(getComputedStyle(one).color);
    ink[3] *= opacity(one);
    const [low, high] = [light(over(ink, ground(one))), light(ground(one))].sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), one.outerHTML]);
  }
  return [found.length, ...found.sort((a, b) => a[0] - b[0])[0]];
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(tmp_path: Path, world: World, scheme: str) -> None:
    """WCAG 2.2 AA: 4.5 to 1."""
    with make_store(tmp_path / "f.sqlite", num=0) as store, open_page(store, rater="anna") as port:
        messages = [{"role": role, "content": f"{role}?"} for role in ("system", "user", "assistant", "user")]
        store.add_answers(store.add_prompt(messages), [Answer("```python\n1\n```", "m"), Answer("No", "m")])
        tab = world.browser.tab(world.browser.person())
        tab.media(prefers_color_scheme=scheme)
        tab.go(f"http://127.0.0.1:{port}")
        tab.run("for (const details of document.querySelectorAll('details')) details.open = true")
        tab.key("1")
        tab.run("document.querySelector('#problem').textContent = 'no'")
        num, contrast, where = tab.run(CONTRAST)
        assert num > 60
        assert contrast >= 4.5, where
        tab.key("p")
        assert tab.run(CONTRAST)[1] >= 4.5
        tab.key("Escape")
        tab.act(lambda: tab.key("s"))
        assert "All done" in tab.text()
        assert tab.run(CONTRAST)[1] >= 4.5


def test_everything_that_can_be_used_has_a_name(world: World) -> None:
    tab = world.tab("names")
    tab.run("for (const d of document.querySelectorAll('details')) d.open = true")
    nodes = tab.tell("Accessibility.getFullAXTree")["nodes"]
    usable = {"button", "link", "radio", "checkbox", "textbox", "progressbar", "dialog"}
    found = [node for node in nodes if node.get("role", {}).get("value") in usable]
    assert len(found) > 30
    assert [node for node in found if not node.get("name", {}).get("value")] == []
    ranks = [
        node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == "group" and node.get("name")
    ]
    assert "Rank of answer A, 1 is best" in ranks
