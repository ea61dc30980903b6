"""The report in a browser: its filter, without scripts, on a phone, dark, on paper. Skipped without Chromium."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from browser_world import CHROMIUM, Browser, Tab
from report_world import METRICS, SAMPLE, make_run, set_metrics

from rlhf.pipeline.report import render
from rlhf.pipeline.report.compare import Comparison
from rlhf.pipeline.report.page import write

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
SHOWN = "[...document.querySelectorAll('.gallery .sample')].filter(e => e.checkVisibility()).length"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of forty prompts, and its comparison with another run, each with all their curves."""
    folder = tmp_path_factory.mktemp("home")
    samples = [SAMPLE | {"prompt": f"prompt {n}", "ppo_score": n - 20.0} for n in range(39)]
    samples.append(SAMPLE | {"prompt": "a word " + "without-a-space" * 40, "ppo": "needle", "ppo_score": -0.5})
    for name in ("one", "two"):
        run_dir = make_run(folder / name, list(METRICS), samples)
        set_metrics(run_dir, "ppo", findings=["kl_blow_up"])
        render(run_dir)
    write(folder / "comparison.html", Comparison([folder / "one", folder / "two"]).page())
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser"))
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def tab(browser: Browser, home: Path) -> Tab:
    found = browser.tab(browser.person())
    found.go((home / "one" / "report.html").as_uri())
    return found


def test_the_filter_shows_the_prompts_that_hold_all_its_words(tab: Tab) -> None:
    assert tab.run(SHOWN) == 20  # ten at each end, the others folded
    tab.run("document.querySelector('label[for=filter]').click()")
    assert tab.run("document.activeElement.id") == "filter"
    tab.type("NEEDLE word")
    assert tab.run(SHOWN) == 1
    assert tab.text("#found") == "1 of 40 prompts"
    tab.key("Escape")
    assert tab.run(SHOWN) == 20
    assert tab.text("#found") == ""


def test_without_scripts_the_answers_are_a_plain_list_without_a_filter(tab: Tab) -> None:
    tab.scripts(allowed=False)
    tab.tell("Page.reload")
    tab.wait("document.readyState === 'complete' && document.querySelector('.filter').hidden")
    assert tab.run(SHOWN) == 20
    tab.click(".gallery summary")
    tab.wait(f"{SHOWN} === 40")


@pytest.mark.parametrize("name", ["one/report.html", "comparison.html"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(tab: Tab, home: Path, name: str, width: int) -> None:
    tab.resize(width, 844, touch=width < 500)
    tab.go((home / name).as_uri())
    tab.run("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert tab.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_every_row_of_charts_is_full(tab: Tab, width: int) -> None:
    """However many there are: none stands alone beside an empty place, and an only one takes the whole row."""
    tab.resize(width, 844)
    for number in range(1, 12):
        assert tab.run(GAPS.replace("NUMBER", str(number))) == [], number


def test_dark_and_light_have_ink_that_can_be_read(tab: Tab) -> None:
    """By the contrast of WCAG 2: 4.5 to 1 at least, of every text that is in sight, on what is behind it."""
    for scheme in ("light", "dark"):
        tab.media(prefers_color_scheme=scheme)
        worst = tab.run(CONTRAST)
        assert worst[0] >= 4.5, (scheme, worst)


def test_on_paper_there_is_neither_a_filter_nor_a_folded_part(tab: Tab) -> None:
    tab.tell("Emulation.setEmulatedMedia", media="print")
    assert not tab.run("document.querySelector('.filter').checkVisibility()")
    assert not tab.run("document.querySelector('details').checkVisibility()")
    assert tab.run(SHOWN) == 20
    tab.tell("Emulation.setEmulatedMedia", media="")


def test_every_drawing_and_field_has_a_name_and_every_table_headers(tab: Tab) -> None:
    unnamed = (
        "[...document.querySelectorAll('figure > svg, .bar svg')].filter(e => !e.getAttribute('aria-label')).length"
    )
    assert tab.run(unnamed) == 0
    assert tab.run("[...document.querySelectorAll('table')].filter(e => !e.querySelector('th')).length") == 0
    assert tab.run("document.querySelector('#filter').labels.length") == 1
    levels = tab.run("[...document.querySelectorAll('h1,h2,h3,h4')].map(e => +e.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


GAPS = """(() => {
  const gaps = [];
  for (const box of document.querySelectorAll('.charts')) {
    const whole = box.innerHTML;
    if (!box.children.length || !box.checkVisibility()) continue;
    const card = box.children[0].outerHTML;
    box.innerHTML = card.repeat(NUMBER);
    const rows = {};
    for (const e of box.children) {
      const place = e.getBoundingClientRect();
      rows[place.top] = Math.max(rows[place.top] || 0, place.right);
    }
    for (const right of Object.values(rows)) {
      const gap = box.getBoundingClientRect().right - right;
      if (gap > 2) gaps.push(gap);
    }
    box.innerHTML = whole;
  }
  return gaps;
})()"""
CONTRAST = """(() => {
  const light = ([r, g, b]) => {
    const f = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    if (!e.checkVisibility() || ![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(numbers(e instanceof SVGElement ? style.fill : style.color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, `${e.className.baseVal ?? e.className} ${e.textContent.slice(0, 40)}`];
  }
  return worst;
})()"""
