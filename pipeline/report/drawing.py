"""Drawings as SVG inside a page, by matplotlib: lines over steps, dots on log axes, histograms, the frontier.

Each takes a label, which says in words what is drawn, for those who do not see it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from rlhf.pipeline.report.curves import Line, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = ("one", "two", "three", "four", "five")
"""CSS variables of the colours of lines."""
DASHES = ("", "7 2.5", "2 2", "8 2 2 2", "4 4")
"""Of the same lines in a legend: they are told apart without colours too."""
# matplotlib takes no CSS variables: charts are drawn in stand-ins, and the variables put in their place.
VARIABLES = {f"#00000{digit}": name for digit, name in enumerate(("muted", "grid", *SERIES), start=1)}
_MUTED, _GRID, *_SERIES = VARIABLES
_STYLES: list[Any] = ["-", (0, (5, 1.5)), ":", (0, (6, 1.5, 1.5, 1.5)), (0, (3, 3))]  # as DASHES


def _tick(value: float) -> str:
    """A number short enough for the margin of a chart: 0.75, 30k, 5e-4."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.4g}k"
    if 0 < abs(value) < 0.01:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.4g}"


def draw_reliability(card: dict[str, Any]) -> Markup:
    """How often the reward model orders a pair rightly, over how sure it is, before and after its temperature.

    On the dotted line it is as often right as it believes; a dot is the larger the more pairs it stands for.
    """

    def plot(axes: "Axes") -> None:
        axes.plot([0.5, 1], [0.5, 1], color=_MUTED, linewidth=1.3, linestyle=(0, (1.5, 2)))
        names = ("reliability", "reliability_after_temperature")
        for name, color, style in zip(names, _SERIES, _STYLES, strict=False):
            sure, right = ([found[key] for found in card[name]] for key in ("confidence", "accuracy"))
            total = sum(found["pairs"] for found in card[name])
            axes.plot(sure, right, color=color, linestyle=style, linewidth=1.5)
            axes.scatter(sure, right, [10 + 90 * found["pairs"] / total for found in card[name]], color=color)
        axes.margins(y=0.08)
        axes.set_xlim(0.48, 1.02)
        axes.set_ylim(top=1.06)  # room for a dot

    return _draw(plot, "Share of pairs ordered rightly over the confidence; the figures are in the legend")


def draw_histogram(card: dict[str, Any]) -> Markup:
    """How many of the best and of the worst answers have which score."""

    def plot(axes: "Axes") -> None:
        found = card["histogram"]
        for name, color, style in zip(("chosen", "rejected"), _SERIES, _STYLES, strict=False):
            axes.stairs(found[name], found["edges"], fill=True, color=color, alpha=0.18)
            axes.stairs(found[name], found["edges"], color=color, linestyle=style, linewidth=1.5)
        axes.margins(x=0.02)
        axes.set_ylim(bottom=0)

    return _draw(plot, "Histogram of the scores of best and worst answers; their means are in the legend")


def draw_variants(curves: list[Line], best: int, worst: int) -> Markup:
    """The held-out losses of a sweep over steps: three are told apart, of more than three the best and the worst."""

    def plot(axes: "Axes") -> None:
        for place, line in enumerate(curves):
            color, style, width = _MUTED, "-", 0.8
            if len(curves) <= len(_SERIES):
                color, style, width = _SERIES[place], _STYLES[place], 1.8
            elif place in (best, worst):
                color, style, width = _SERIES[place == worst], _STYLES[place == worst], 2.0
            axes.plot(*zip(*line, strict=True), color=color, linestyle=style, linewidth=width, zorder=1 + width)
        axes.margins(x=0.02, y=0.08)

    return _draw(plot, f"Held-out losses of {len(curves)} variants over steps; the table has their ends")


def draw_power_law(points: Line, law: Callable[[float], float] | None, label: str) -> Markup:
    """Losses on log axes as dots, with the line that was fitted."""
    from matplotlib import ticker

    def plot(axes: "Axes") -> None:
        xs, losses = zip(*points, strict=True)
        axes.scatter(xs, losses, 16, color=_SERIES[0], zorder=3)
        if law is not None:
            ends = [min(xs), max(xs)]
            axes.plot(ends, [law(x) for x in ends], color=_SERIES[1], linestyle=_STYLES[1], linewidth=1.5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(x=0.06, y=0.12)
        few_decades = max(xs) < 100 * min(xs)
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few_decades else (1,), numticks=7))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _power_of_ten(value)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(ticker.NullLocator())

    return _draw(plot, label)


def _power_of_ten(value: float) -> str:
    """A number on a log axis: 2·10⁵."""
    digits, exponent = f"{value:.0e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if digits == "1" else f"{digits}·{power}"


def draw_lines(lines: Sequence[Line], level: float | None, label: str) -> Markup:
    """Up to five lines of values over steps, thinned, and a level to compare them with; an empty one is left out."""
    from matplotlib import ticker  # 0.6 s, which `rlhf --help` should not pay

    def plot(axes: "Axes") -> None:
        for line, color, style in zip(lines, _SERIES, _STYLES, strict=False):
            if not line:
                continue
            steps, values = zip(*thin(line), strict=True)
            marker = "o" if len(line) <= 12 else ""
            width = 1.8 if len(line) <= 200 else 1.2
            axes.plot(steps, values, color=color, linestyle=style, linewidth=width, marker=marker, markersize=3.5)
        if level is not None:
            axes.axhline(level, color=_MUTED, linewidth=1.3, linestyle=(0, (1.5, 2)))
        axes.margins(x=0.02, y=0.08)
        if all(0 <= y <= 1 for line in lines for _, y in line):  # a share: nothing lies above 1
            bottom, top = axes.get_ylim()
            axes.set_ylim(top=min(top, 1 + 0.04 * (1 - bottom)))  # room for a dot
        right = axes.get_xlim()[1]
        axes.set_xlim(-0.02 * right, right)  # all charts of a stage begin at step 0
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))

    return _draw(plot, label)


def draw_frontier(lines: Mapping[str, Line], label: str) -> Markup:
    """Score or quality over √KL: points in the order in which training, or n, went through them."""

    def plot(axes: "Axes") -> None:
        for line, color, style in zip(lines.values(), _SERIES, _STYLES, strict=False):
            xs, ys = zip(*line, strict=True)
            marker = "o" if len(line) <= 30 else ""
            axes.plot(xs, ys, color=color, linestyle=style, linewidth=1.5, marker=marker, markersize=3.5)
        axes.margins(x=0.04, y=0.1)
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))

    return _draw(plot, label)


def _draw(plot: Callable[["Axes"], None], label: str) -> Markup:
    """An SVG of what `plot` draws, with `label` for those who do not see it.

    Colours are the page's own CSS variables, so that a chart follows its dark mode.
    """
    from matplotlib import rc_context, ticker
    from matplotlib.figure import Figure

    with rc_context(
        {
            "svg.fonttype": "none",  # text stays text: small, and in the page's font
            "svg.hashsalt": label,  # ids differ between charts and not between runs
            "text.parse_math": False,
            "font.size": 9,
            "axes.edgecolor": _GRID,
            "xtick.color": _MUTED,
            "ytick.color": _MUTED,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
        }
    ):
        figure = Figure(figsize=(4.4, 2.3))
        axes = figure.add_axes((0.115, 0.125, 0.865, 0.835))
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        plot(axes)
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))  # a share's axis has a 1
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _tick(value)))
        buffer = StringIO()
        nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return Markup(_for_the_page(buffer.getvalue(), label))


def _for_the_page(svg: str, label: str) -> str:
    """Take out what only a file of its own needs, and what would reach beyond the chart."""
    svg = svg[svg.index("<svg") :]
    head, body = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # the page sets the size; viewBox keeps the shape
    head += f' role="img" aria-label="{escape(label)}"'
    body = re.sub(r"<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # the same in every chart, and no one refers to them
    body = re.sub(r' d="[^"]*"', lambda found: re.sub(r"(\d\.\d)\d+", r"\1", found[0]), body)  # a tenth of a pixel
    for color, variable in VARIABLES.items():
        body = body.replace(color, f"var(--{variable})")
    return f"{head}>{body}"
