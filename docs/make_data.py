"""Write the table of docs/data.md from the formats themselves: `python docs/make_data.py`. A test compares."""

import importlib
import pkgutil
from pathlib import Path

from rlhf.data import formats

PAGE = Path(__file__).parent / "data.md"
START, END = "<!-- written by docs/make_data.py -->\n", "<!-- end of what it writes -->\n"


def page() -> str:
    """The page as it is, with the table of formats as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


def table() -> str:
    """One line for each format, in the order of their modules; the first also has what its module says at its head."""
    lines = ["| format | as | columns | |", "|---|---|---|---|"]
    for found in pkgutil.iter_modules(formats.__path__):
        module = importlib.import_module(f"{formats.__name__}.{found.name}")
        text = " ".join((module.__doc__ or "").partition("\n\n")[0].split()).replace("|", "\\|")
        kinds: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for known in module.FORMATS:
            kinds.setdefault((known.name, known.columns), []).append(known.kind)
        for (name, columns), kind in kinds.items():
            shown = ", ".join(f"`{column}`" for column in columns) or "by what they hold"
            lines.append(f"| `{name}` | {', '.join(kind)} | {shown} | {text} |")
            text = ""
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
