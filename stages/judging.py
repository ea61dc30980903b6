"""Judges rank what lies in a feedback store: functions, and models behind a server. No torch.

A function gives each answer a quality, and the ranks follow. A model is shown two answers at a time, every pair in both
orders: the better one is that which it names both times, and else the two are tied. An answer's points are its wins,
ties counting half, and the ranks follow from those.
"""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.feedback.records import Task
from rlhf.data.feedback.store import Store
from rlhf.data.messages import prompt_text
from rlhf.data.sources import load_function
from rlhf.stages.disk import replace_text
from rlhf.stages.endpoint import ChatModel, EndpointError, each
from rlhf.stages.judge import judge_answers

MAX_FAILURES = 5  # prompts in a row that could not be judged, after which the server is taken to be gone
QUESTION = (
    "Which of two responses answers the prompt better? Say A or B, or TIE if neither is better, and nothing else.\n\n"
    "<prompt>\n{prompt}\n</prompt>\n\n<response A>\n{a}\n</response A>\n\n<response B>\n{b}\n</response B>\n\nBetter:"
)
_ANSWER = re.compile(r"\W*(?:(?:better|answer|response)\W*)?(A|B|TIE)\W*", re.IGNORECASE)
MAX_NEW_TOKENS = 16  # of a reply
REPLIES = ".replies.jsonl"
"""How the file of questions and replies is called: as the store, with this behind it."""
_REQUESTS = uuid.UUID("8f8c6a3e-3d0c-4a57-9d5a-6c1f5b1f7a02")  # names the ids of judges' rankings


class Judge(Protocol):
    """Who ranks."""

    name: str
    kind: str
    at_once: int
    """Prompts that it is given together."""

    def points(self, tasks: Sequence[Task]) -> Sequence[Sequence[float] | Exception]:
        """How good each answer of each prompt is, higher is better; or why that is not known."""
        ...


@dataclass
class Told:
    """What judging came to."""

    num_judged: int = 0
    num_failed: int = 0
    first_failure: str = ""
    num_left: int = 0
    """Prompts that were not come to."""


def judge_store(store: Store, judge: Judge, say: Callable[[str], None]) -> Told:
    """Have a judge rank all prompts that it has not ranked yet; what it has ranked stays, whatever happens.

    Ended early after MAX_FAILURES prompts in a row that could not be judged.
    """
    rater = store.add_rater(judge.name, judge.kind)
    told, in_a_row = Told(), 0
    tasks = store.tasks(rater)
    for batch in _batches(tasks, judge.at_once):
        if in_a_row >= MAX_FAILURES:
            told.num_left += len(batch)
            continue
        if told.num_judged:  # between batches; what it came to in all is told by who asked
            say(f"{told.num_judged} prompts judged by {judge.name}")
        for task, points in zip(batch, judge.points(batch), strict=True):
            if isinstance(points, Exception):
                in_a_row += 1
                told.num_failed += 1
                told.first_failure = told.first_failure or str(points)
                continue
            in_a_row = 0
            told.num_judged += 1
            request = str(uuid.uuid5(_REQUESTS, f"{judge.kind} {judge.name} {task.prompt_id} {task.round}"))
            by_id = dict(zip([answer.id for answer in task.answers], points, strict=True))
            ranks = {answer: 1 + sum(other > value for other in by_id.values()) for answer, value in by_id.items()}
            store.rank(request, task.prompt_id, rater, ranks, scores=by_id)
    return told


def _batches(tasks: Iterator[Task], size: int) -> Iterator[list[Task]]:
    while batch := list(islice(tasks, size)):
        yield batch


class FunctionJudge:
    """A `module:function` (prompts, responses) -> qualities."""

    kind, at_once = "judge", 64

    def __init__(self, reference: str) -> None:
        load_function(reference)  # refuses what is none
        self.name = reference

    def points(self, tasks: Sequence[Task]) -> Sequence[Sequence[float] | Exception]:
        """Its qualities. Raises ValueError where it fails: that is the function's fault, and no prompt's."""
        prompts = [prompt_text(task.messages) for task in tasks for _ in task.answers]
        qualities = iter(judge_answers(self.name, prompts, [answer.text for task in tasks for answer in task.answers]))
        return [[next(qualities) for _ in task.answers] for task in tasks]


class ModelJudge:
    """A model behind an OpenAI-compatible server. What it said lies in the file `said`, and is not asked for again."""

    kind, at_once = "endpoint", 8

    def __init__(self, model: ChatModel, said: Path) -> None:
        self.name, self.model = model.model, model
        self.num_requests = 0
        self.num_known = 0
        """Questions that had been answered before."""
        self.num_tokens = {"prompt_tokens": 0, "completion_tokens": 0}
        """As the server tells."""
        self._path, self._lock = said, Lock()
        self._said = dict(_read(said))

    def probe(self) -> None:
        """Ask about two answers of our own, and keep nothing of it. Raises EndpointError as a question does."""
        question = [{"role": "user", "content": _question("What is one and one?", "Two.", "Blue.")}]
        self._wins(self.model.reply(question, MAX_NEW_TOKENS, temperature=0.0)[0])

    def points(self, tasks: Sequence[Task]) -> Sequence[Sequence[float] | Exception]:
        """Wins over the other answers, ties counting half; the first error where a question had no answer."""
        pairs = [(task, a, b) for task in tasks for a, b in combinations(range(len(task.answers)), 2)]
        pairs.sort(key=lambda pair: pair[1:])  # one of each prompt first, so that a server that is gone soon fails all
        failed: dict[int, EndpointError] = {}

        def first_wins(task: Task, a: int, b: int) -> float:
            """Half a win where another question about the prompt has failed: then no more are asked."""
            try:
                return 0.5 if task.prompt_id in failed else self._first_wins(task, a, b)
            except EndpointError as error:
                failed.setdefault(task.prompt_id, error)
                return 0.5

        questions = [question for task, a, b in pairs for question in ((task, a, b), (task, b, a))]
        won = each(lambda question: first_wins(*question), questions, self.model.at_once)
        found = {task.prompt_id: [0.0] * len(task.answers) for task in tasks}
        for (task, a, b), first, turned in zip(pairs, won[::2], won[1::2], strict=True):
            of_a = first if first == 1 - turned else 0.5
            found[task.prompt_id][a] += of_a
            found[task.prompt_id][b] += 1 - of_a
        return [failed.get(task.prompt_id, found[task.prompt_id]) for task in tasks]

    def _first_wins(self, task: Task, a: int, b: int) -> float:
        """1 where the answer that is shown first is said to be better, 0 where the other is, 0.5 for a tie."""
        return self._wins(self._ask(_question(prompt_text(task.messages), task.answers[a].text, task.answers[b].text)))

    def _wins(self, text: str) -> float:
        match = _ANSWER.fullmatch(text)
        if match is None:
            raise EndpointError(
                f"{self.model.endpoint.url}: {self.name} said neither A, B nor TIE but {text[:100]!r}; take another "
                "model where that happens again"
            )
        return {"A": 1.0, "B": 0.0, "TIE": 0.5}[match[1].upper()]

    def _ask(self, question: str) -> str:
        with self._lock:
            known = self._said.get((self.name, question))
            self.num_known += known is not None
        if known is not None:
            return known
        with self._lock:
            self.num_requests += 1
        text, usage = self.model.reply([{"role": "user", "content": question}], MAX_NEW_TOKENS, temperature=0.0)
        with self._lock:
            for name in self.num_tokens:
                count = usage.get(name)
                self.num_tokens[name] += count if isinstance(count, int) else 0
            self._said[self.name, question] = text
            row = {"model": self.name, "question": question, "reply": text, "usage": usage}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return text


def _question(prompt: str, a: str, b: str) -> str:
    filled = {"{prompt}": prompt, "{a}": a, "{b}": b}
    return "".join(filled.get(part, part) for part in re.split(r"(\{(?:prompt|a|b)\})", QUESTION))


def model_judge(store: Path, url: str, model: str, key_variable: str | None) -> ModelJudge:
    """A model as a judge; its replies lie beside the store. Raises SettingsError for what cannot be one."""
    if key_variable is not None and not os.environ.get(key_variable):
        raise SettingsError(f"the environment has no {key_variable}, which is to hold the server's API key")
    try:
        chat = ChatModel(url, model, key_variable)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return ModelJudge(chat, store.with_name(store.name + REPLIES))


def _read(path: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """What was said before; what a kill left of a line is removed."""
    if not path.exists():
        return
    whole, _, part = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            model, question, reply = row["model"], row["question"], row["reply"]
            known = _ANSWER.fullmatch(reply)
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path} line {number}: no reply of a model; delete the line, or the file") from None
        if known:  # else it is asked again
            yield (model, question), reply
    if part:
        replace_text(path, whole.decode() + "\n" * bool(whole))


def cost(judge: Any) -> str:
    """What a model's rankings took, in words; nothing for a function."""
    if not isinstance(judge, ModelJudge):
        return ""
    read, written = judge.num_tokens.values()
    return (
        f"{judge.num_requests} requests, {read} tokens read and {written} written as the server tells; "
        f"{judge.num_known} questions had been answered before"
    )
