"""Other people's texts as HTML: nothing in them is taken for markup but what is made here."""

import re
from dataclasses import dataclass

from markupsafe import Markup, escape

_FENCE = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)([^`\n]*+)$")  # never tried twice: texts are long
_HEADING = re.compile(r"^(#{1,4})\s+(.+?)\s*#*$")
_ITEM = re.compile(r"^\s{0,3}(?:([-*+])|\d{1,9}[.)])\s+(.*)$")
_RULE = re.compile(r"^\s{0,3}([-*_])(\s*\1){2,}\s*$")
_CODE = re.compile(r"(`[^`\n]+`)")
# On text that is escaped already; an address has no quotes left that could end an attribute.
_LINK = re.compile(r"\[([^\[\]]+)\]\(((?:https?://|mailto:)[^\s()<>\"']+)\)")
_STRONG = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")
_EMPHASIS = re.compile(r"\*(?=\S)(.+?)(?<=\S)\*")


@dataclass(frozen=True)
class Block:
    """A stretch of an answer: text, or what stands between fences."""

    text: str
    is_code: bool = False
    language: str = ""
    """All that stands beside the opening fence; it may be more than a word."""


def blocks(text: str) -> list[Block]:
    """Text and fenced code, in order. All stays but the fences and empty lines beside them.

    A fence that is never closed reaches to the end: the answer may have been cut off.
    """
    found: list[Block] = []
    lines: list[str] = []
    fence, language = "", ""

    def end(is_code: bool) -> None:
        if is_code or "".join(lines).strip():
            text = "\n".join(lines)
            found.append(Block(text, True, language) if is_code else Block(text.strip("\n")))
        lines.clear()

    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.match(line)
        if fence and match and match[1].startswith(fence) and line.strip() == match[1]:
            end(is_code=True)
            fence = ""
        elif not fence and match:
            end(is_code=False)
            fence, language = match[1], match[2].strip()
        else:
            lines.append(line)
    end(is_code=bool(fence))
    return found


def markdown(source: str) -> Markup:
    """Instructions as HTML: headings, paragraphs, lists, quotes, rules, fenced code, and within lines code, bold,
    emphasis and links to http, https and mailto. HTML in it stays text."""
    out: list[str] = []
    for block in blocks(source):
        if block.is_code:
            out.append(f"<pre><code>{escape(block.text)}</code></pre>")
        else:
            out += _paragraphs(block.text.split("\n"))
    return Markup("\n".join(out))


def _paragraphs(lines: list[str]) -> list[str]:
    out: list[str] = []
    held: list[str] = []  # lines of one paragraph, quote or item
    tag = "p"
    items: list[str] = []
    list_tag = ""

    def end() -> None:
        if held:
            text = _inline("\n".join(held))
            if tag == "li":
                items.append(f"<li>{text}</li>")
            else:
                out.append(f"<{tag}>{text}</{tag}>")
        held.clear()

    def end_list() -> None:
        end()
        if items:
            out.append(f"<{list_tag}>{''.join(items)}</{list_tag}>")
        items.clear()

    for line in lines:
        item = _ITEM.match(line)
        if not line.strip():
            end()
            tag = "p"
        elif _RULE.match(line):
            end_list()
            out.append("<hr>")
        elif heading := _HEADING.match(line):
            end_list()
            # The page has a first-order heading of its own.
            level = len(heading[1]) + 1
            out.append(f"<h{level}>{_inline(heading[2])}</h{level}>")
        elif item:
            wanted = "ul" if item[1] else "ol"
            end()
            if wanted != list_tag:
                end_list()
            tag, list_tag = "li", wanted
            held.append(item[2])
        elif line.startswith(">"):
            if tag != "blockquote" or not held:
                end_list()
            tag = "blockquote"
            held.append(line[1:].strip())
        else:
            if not held:
                end_list()
                tag = "p"
            held.append(line.strip())
    end_list()
    return out


def _inline(text: str) -> str:
    parts = []
    for part in _CODE.split(text):
        if _CODE.fullmatch(part):
            parts.append(f"<code>{escape(part[1:-1])}</code>")
        else:
            safe = _LINK.sub(r'<a href="\2" target="_blank" rel="noopener noreferrer">\1</a>', str(escape(part)))
            # Stars within an address are part of it.
            pieces = re.split(r"(<a [^>]*>)", safe)
            parts += [
                piece if number % 2 else _EMPHASIS.sub(r"<em>\1</em>", _STRONG.sub(r"<strong>\1</strong>", piece))
                for number, piece in enumerate(pieces)
            ]
    return "".join(parts)
