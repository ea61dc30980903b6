"""A hook of mkdocs.yml: README.md, ARCHITECTURE.md and CHANGELOG.md become pages of the site as they are.

Links lead on from where a page stands there; those out of the documentation (a benchmark, a module) become plain text.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "docs/index.md", "ARCHITECTURE.md": "docs/architecture.md", "CHANGELOG.md": "docs/changelog.md"}
"""Files at the top, and as which page they appear."""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page.removeprefix("docs/"), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page."""
    place = f"docs/{page.file.src_uri}"
    source = next((name for name, as_page in PAGES.items() if as_page == place), place)
    return _LINK.sub(lambda link: _rewritten(link, source, place), markdown)


def _rewritten(link: re.Match[str], source: str, place: str) -> str:
    label, target, anchor = link.groups()
    if "://" in target:
        return link[0]
    found = os.path.normpath(PurePosixPath(source).parent / target)
    if not (ROOT / found).exists():
        raise PluginError(f"{source}: links to {target}, which is not there")
    found = PAGES.get(found, found)
    if not found.startswith("docs/"):
        return str(label)
    return f"[{label}]({os.path.relpath(found, PurePosixPath(place).parent)}{anchor or ''})"
