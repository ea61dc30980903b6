"""`rlhf rank`: a page on which people rank the answers in a feedback store."""

import re
import secrets
import shlex
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from rlhf.data.errors import SettingsError
from rlhf.pipeline.feedback_cli import StoreArgument

rank_app = typer.Typer()


@rank_app.command()
def rank(
    store: StoreArgument,
    target: Annotated[
        int, typer.Option(min=1, help="Ratings for each prompt. `rlhf sample --overlap N` puts up some for all raters.")
    ] = 1,
    instructions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What raters are told: Markdown, without HTML.")
    ] = None,
    rater: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who ranks; by default the page asks for a name.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Raters come in by a link of their own alone.")] = False,
    add_rater: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print a new link for a rater, and end; an older one is void.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; others than this machine need --tokens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8700,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="What raters open, where a proxy with TLS leads to this page.")
    ] = None,
) -> None:
    """Open a page on which people rank answers.

    They rank what is in a feedback store, by drag and drop or by keys. The page is for this machine alone unless --host
    says otherwise. Ctrl-C ends it, and nothing is lost by that: a ranking is on disk before the page goes on to the
    next.
    """
    if url is not None and not _is_url(url):
        raise SettingsError(f"--url {url}: scheme and host are wanted, such as https://rank.example.org")
    try:
        from rlhf.pipeline.rank import server
        from rlhf.pipeline.rank.app import Options
        from rlhf.pipeline.rank.security import is_loopback
        from rlhf.pipeline.rank.texts import markdown
    except ImportError as error:
        cure = "pip install 'rlhf-toolkit[rank]'"
        raise SettingsError(f"rlhf rank needs {error.name}, which is not installed; {cure}") from None
    if add_rater is not None:
        _add_rater(store, add_rater, (url or server.address(host, port)).rstrip("/"))
        return
    others = [where for where in (host, url and urlsplit(url).hostname) if where and not is_loopback(where)]
    if others and not tokens:
        link = shlex.join(["rlhf", "rank", str(store), "--add-rater", "NAME"])
        cure = f"add --tokens, and make a link for each rater: {link}"
        raise SettingsError(f"{' and '.join(others)}: whoever can reach this machine could rank as anybody; {cure}")
    if tokens and rater is not None:
        raise SettingsError("--rater goes without --tokens: with these, a rater's link says who it is")
    text = None
    if instructions is not None:
        try:
            text = markdown(instructions.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--instructions {instructions}: cannot be read: {error}") from None
    options = Options(target, text, rater, tokens, secure=url is not None and url.startswith("https:"))
    server.serve(store, host, port, url, options, lambda where: _tell(where, tokens))


def _is_url(url: str) -> bool:
    """Whether this is http or https and a host as browsers send it (in letters of ASCII), perhaps with a port."""
    try:
        urlsplit(url).port  # noqa: B018  # raises for what is none
    except ValueError:
        return False
    return re.fullmatch(r"https?://[A-Za-z0-9._:\[\]-]+/?", url) is not None


def _tell(where: str, tokens: bool) -> None:
    by = ", for raters who have a link" if tokens else ""
    print(f"{where} is open{by}; ctrl-c ends it", flush=True)


def _add_rater(store: Path, name: str, where: str) -> None:
    from rlhf.data.feedback.store import Store

    token = secrets.token_urlsafe(24)
    with Store.open(store) as opened:
        opened.add_rater(name, token=token)
    print(f"{where}/enter?token={token}")
