"""The pages and what they send, as a Starlette application."""

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from importlib.resources import files
from pathlib import Path
from sqlite3 import Error as SQLiteError
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from rlhf.data.errors import DataError
from rlhf.data.feedback.checks import MAX_NAME, MAX_NOTE
from rlhf.data.feedback.records import Rater
from rlhf.data.feedback.store import Store
from rlhf.pipeline.rank.forms import Form, ranking
from rlhf.pipeline.rank.security import SECONDS_OF_SESSION, Guard, Hosts, Sessions, check_origin, log, read_body
from rlhf.pipeline.rank.texts import blocks

TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = files("rlhf.pipeline.rank") / "page"


@dataclass(frozen=True)
class Options:
    """How the page is to be."""

    target: int = 1
    """Ratings that each prompt shall have."""
    instructions: Markup | None = None
    rater: str | None = None
    """Who everybody is that opens the page."""
    tokens: bool = False
    """Raters come in by their token and not by their name."""
    secure: bool = False
    """Raters call the page by https."""


class Page:
    """What is done for each request."""

    def __init__(self, store: Store, sessions: Sessions, options: Options) -> None:
        self._store = store
        self._sessions = sessions
        self._options = options
        self._static = {file.name: file.read_bytes() for file in _FILES.iterdir() if Path(file.name).suffix in TYPES}
        self._version = hashlib.sha256(b"".join(self._static.values())).hexdigest()[:12]
        self._templates = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
            loader=FunctionLoader(lambda name: (_FILES / name).read_text(encoding="utf-8")),
        )  # fmt: skip
        self._templates.globals.update(
            version=self._version,
            store_key=sessions.cookie,
            options=options,
            blocks=blocks,
            max_note=MAX_NOTE,
            max_name=MAX_NAME,
        )

    def routes(self) -> list[Route]:
        acts: dict[str, Callable[[Rater, Form], int | None]] = {
            "/rank": self._rank,
            "/skip": self._skip,
            "/flag": self._flag,
            "/undo": self._undo,
        }
        return [
            Route("/", self.home),
            Route("/enter", self.enter_by_token if self._options.tokens else self.to_home),
            Route("/enter", self.enter_by_name, methods=["POST"]),
            Route("/leave", self.leave, methods=["POST"]),
            Route("/instructions", self.instructions),
            *(Route(path, self._acting(act), methods=["POST"]) for path, act in acts.items()),
            *(Route(f"/{self._version}/{name}", self._file(name)) for name in self._static),
        ]

    # -- pages -------------------------------------------------------------------------------------------------

    def home(self, request: Request) -> Response:
        """The prompt that this rater has in hand, or the end of the list; without a session, who they are."""
        cookie = request.cookies.get(self._sessions.cookie, "")
        rater = self._sessions.rater(cookie)
        if rater is None:
            if self._options.rater is not None:
                return self._begin(self._named(self._options.rater), None)
            if self._options.tokens:
                raise HTTPException(403, "Please open the link that you were given.")
            return self._page("enter.jinja", error="")
        task = self._store.next_prompt(rater.id, target=self._options.target)
        round_ = None if task is None else task.round  # each is counted by itself
        [own] = self._store.progress(rater.id, target=self._options.target, round=round_).raters
        return self._page(
            "done.jinja" if task is None else "task.jinja",
            rater=rater,
            csrf=self._sessions.csrf(cookie),
            own=own,
            last=self._store.last_act(rater.id),
            task=task,
            new_id=lambda: str(uuid.uuid4()),
        )

    def instructions(self, request: Request) -> Response:
        """What the owner of the project has to say; for those only who may rank."""
        rater = self._sessions.rater(request.cookies.get(self._sessions.cookie, ""))
        if self._options.instructions is None:
            raise HTTPException(404, "There are no instructions.")
        if rater is None:
            raise HTTPException(403, "Please come in first.")
        return self._page("instructions.jinja", rater=rater)

    def to_home(self, _: Request) -> Response:
        return RedirectResponse("/", 303)

    def _page(self, template: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(values), status)

    def _file(self, name: str) -> Callable[[Request], Response]:
        headers = {"Cache-Control": "max-age=31536000, immutable"}  # its address changes with it
        return lambda _: Response(self._static[name], headers=headers, media_type=TYPES[Path(name).suffix])

    # -- coming and going --------------------------------------------------------------------------------------

    def enter_by_token(self, request: Request) -> Response:
        """Where a rater's link leads. No redirect: after a click elsewhere that would go without the new cookie."""
        token = request.query_params.get("token", "")
        rater = self._store.rater_of_token(token)
        if rater is None or rater.kind != "person":
            raise HTTPException(403, "No rater has this token. Ask for a new link.")
        return self._begin(rater, self._page("instructions.jinja", rater=rater), token)

    async def enter_by_name(self, request: Request) -> Response:
        """Somebody says who they are."""
        check_origin(request)
        if self._options.tokens or self._options.rater is not None:
            raise HTTPException(403, "Nobody comes in by name here.")
        name = Form(await read_body(request)).text("name")
        try:
            rater = await run_in_threadpool(self._named, name)
        except DataError as error:
            if _is_of_disk(error):
                raise
            log(request, 400, "a name that is none")
            told = str(error)
            return self._page("enter.jinja", 400, error=f"{told[0].upper()}{told[1:]}.")
        return self._begin(rater, None)

    def leave(self, request: Request) -> Response:
        """Forget who this browser's rater is."""
        check_origin(request)
        response = RedirectResponse("/", 303)
        response.delete_cookie(self._sessions.cookie)
        return response

    def _named(self, name: str) -> Rater:
        id_ = self._store.add_rater(name)
        return Rater(id_, name.strip(), "person")

    def _begin(self, rater: Rater, response: Response | None, token: str = "") -> Response:
        if response is None:
            response = RedirectResponse("/" if self._options.instructions is None else "/instructions", 303)
        response.set_cookie(
            self._sessions.cookie, self._sessions.begin(rater, token), SECONDS_OF_SESSION,
            httponly=True, samesite="strict", secure=self._options.secure,
        )  # fmt: skip
        return response

    # -- what raters do ----------------------------------------------------------------------------------------

    def _acting(self, act: Callable[[Rater, Form], int | None]) -> Callable[[Request], Any]:
        """A request that changes the store, answered when the change is on disk: with the act's id for scripts, with
        the next page for browsers without."""

        async def answer(request: Request) -> Response:
            check_origin(request)
            form = Form(await read_body(request))
            done = await run_in_threadpool(self._checked, request, form, act)
            if "text/html" in request.headers.get("accept", ""):
                return RedirectResponse("/", 303)
            return PlainTextResponse("" if done is None else str(done))

        return answer

    def _checked(self, request: Request, form: Form, act: Callable[[Rater, Form], int | None]) -> int | None:
        cookie = request.cookies.get(self._sessions.cookie, "")
        rater = self._sessions.rater(cookie)
        if rater is None:
            raise HTTPException(403, "Your session is over. Load the page again.")
        if not compare_digest(form.text("csrf").encode(), self._sessions.csrf(cookie).encode()):
            raise HTTPException(403, "This form is not of your session. Load the page again.")
        return act(rater, form)

    def _rank(self, rater: Rater, form: Form) -> int:
        said = ranking(form)
        prompt = self._prompt(form, set(said.ranks))
        return self._store.rank(form.text("request"), prompt, rater.id, said.ranks, **said.more)

    def _skip(self, rater: Rater, form: Form) -> int:
        prompt, round_ = self._prompt(form), form.wanted("round")
        return self._store.skip(form.text("request"), prompt, rater.id, form.seconds(), round=round_)

    def _flag(self, rater: Rater, form: Form) -> int:
        prompt, round_, reason = self._prompt(form), form.wanted("round"), form.text("reason")
        return self._store.flag(form.text("request"), prompt, rater.id, reason, form.seconds(), round=round_)

    def _undo(self, rater: Rater, form: Form) -> None:
        self._store.undo(rater.id, form.wanted("act"))

    def _prompt(self, form: Form, answers: set[int] | None = None) -> int:
        """The id of a prompt that is there and has exactly these answers in a round."""
        prompt = form.wanted("prompt")
        try:
            known = self._store.answers(prompt)
        except DataError as error:
            if _is_of_disk(error):
                raise
            raise HTTPException(404, "There is no such prompt.") from None
        if answers is not None and answers not in ({a.id for a in known if a.round == r.round} for r in known):
            raise HTTPException(409, "The answers to this prompt are others by now. Load the page again.")
        return prompt


def make_app(store: Store, secret: bytes, hosts: Hosts, options: Options) -> Guard:
    """The whole page, guarded."""
    page = Page(store, Sessions(store, secret, options.tokens, options.rater), options)
    handlers = {HTTPException: _refuse, DataError: _refuse_data, Exception: _fail}
    return Guard(Starlette(routes=page.routes(), exception_handlers=handlers), hosts)


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    log(request, error.status_code, error.detail)
    return PlainTextResponse(error.detail, error.status_code, error.headers)


def _refuse_data(request: Request, error: Exception) -> Response:
    """What the store does not take; or it takes nothing at the moment, which its owner is told more of."""
    status, told = (503, "The store cannot be written at the moment.") if _is_of_disk(error) else (400, str(error))
    log(request, status, str(error))
    return PlainTextResponse(told, status)


def _is_of_disk(error: Exception) -> bool:
    """Whether the same may go well later: the store is locked, away, or its disk full."""
    return isinstance(error.__cause__, SQLiteError)


def _fail(request: Request, error: Exception) -> Response:
    log(request, 500, f"{type(error).__name__}: {error}")
    return PlainTextResponse("Something broke here.", 500)
