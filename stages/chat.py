"""Talk to one model of any stage or to several, line by line: `python -m rlhf.stages.chat MODEL …`."""

import contextlib
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from rlhf.data.collate import pad_examples
from rlhf.data.errors import DataError, RefusedError
from rlhf.data.messages import Messages
from rlhf.data.tokens import Encoded, answer_texts, encode_example, encode_prompt
from rlhf.stages.arguments import Arguments
from rlhf.stages.engines.stock import TransformersEngine
from rlhf.stages.logs import be_quiet
from rlhf.stages.metric_names import number
from rlhf.stages.models import load_policy, load_scalar, load_tokenizer
from rlhf.stages.precision import half
from rlhf.stages.text_limits import num_positions, stops_of

Say = Callable[[str], None]
"""Takes a piece of an answer, or a line with its end."""

HELP = """/system TEXT   a system message for the conversation, which begins anew; without TEXT none
/undo          take the last question and its answers back
/new           begin anew, with the same system message
/save FILE     write the conversation as a row of messages (JSON Lines), for each model one
/quit          leave; ctrl-d does too. ctrl-c ends an answer"""


class Streamed(BaseStreamer):
    """Hands on what `generate` writes as text, piece by piece, without whitespace at either end."""

    def __init__(self, decode: Callable[[list[int]], str], say: Say) -> None:
        self.ids: list[int] = []
        self._decode, self._say = decode, say
        self._said = ""
        self._begun = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return self._decode(self.ids).strip()

    def put(self, value: Tensor) -> None:
        """Take the next tokens; those that come first are the prompt."""
        if not self._begun:
            self._begun = True
            return
        self.ids += value.flatten().tolist()
        text = self.text
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of a letter is still to come
            self._hand_on(text)

    def end(self) -> None:
        self._hand_on(self.text)

    def _hand_on(self, text: str) -> None:
        if text.startswith(self._said):
            self._say(text[len(self._said) :])
            self._said = text


class Speaker:
    """A model that answers, under a name."""

    def __init__(
        self, name: str, reference: str, temperature: float, max_new_tokens: int, device: torch.device
    ) -> None:
        self.name = name
        self.tokenizer = load_tokenizer(reference)
        model = load_policy(reference, self.tokenizer, half(device))
        self.model = model.eval().to(device)
        self.temperature = temperature
        context = num_positions(model)
        self.length = min(max_new_tokens, context // 2)
        self.room = context - self.length
        self.stops = stops_of(model, self.tokenizer)

    def answer(self, prompt: Messages, say: Say) -> "Answer":
        """Answer the prompt, while `say` gets the text as it is made. Ctrl-C ends the answer where it is."""
        ids = encode_prompt(self.tokenizer, prompt, max_length=self.room)
        streamed = Streamed(lambda found: answer_texts(self.tokenizer, [found], self.stops)[0], say)
        engine = TransformersEngine(self.model, streamer=streamed)
        with contextlib.suppress(KeyboardInterrupt):
            engine.generate([ids], self.length, self.temperature, self.stops, self.tokenizer.pad_token_id)
        return Answer(streamed.text, bool(streamed.ids) and streamed.ids[-1] in self.stops)


def short_names(references: Sequence[str]) -> list[str]:
    """What models are called: by the folder of the stage that made them, with where it lies if another has its name."""
    folders = [path.parent if path.is_dir() and path.name == "model" else None for path in map(Path, references)]
    names = [folder.absolute().name if folder else given for folder, given in zip(folders, references, strict=True)]
    return [
        str(folder) if folder and names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)
    ]


class Judge:
    """A reward model that scores answers."""

    def __init__(self, reference: str, device: torch.device) -> None:
        self.tokenizer = load_tokenizer(reference)
        self.scalar = load_scalar(reference, self.tokenizer).eval().to(device)
        self.max_length = num_positions(self.scalar.classifier)
        self.device = device

    @torch.no_grad()
    def score(self, prompt: Messages, answer: "Answer") -> float | None:
        """Its score; None where the answer does not fit. One that was cut off is read without an end, as in PPO."""
        example = encode_example(self.tokenizer, prompt, answer.text, self.max_length)
        if example is None:
            return None
        if not answer.ended and len(example.input_ids) - example.prompt_length > 1:
            example = Encoded(example.input_ids[:-1], example.prompt_length)
        ids, mask, in_response = (x.to(self.device) for x in pad_examples([example], self.tokenizer.pad_token_id))
        return self.scalar.pool(self.scalar(ids, mask), in_response).item()


@dataclass
class Answer:
    """What a model said."""

    text: str
    ended: bool
    """Whether the model itself ended it."""


@dataclass
class Conversation:
    """Questions, and the answers of all speakers to each, who do not see each other's."""

    speakers: Sequence[Speaker]
    judge: Judge | None
    say: Say
    system: str | None = None
    turns: list[tuple[str, list[Answer]]] = field(default_factory=list)

    def messages(self, speaker: int) -> Messages:
        """The conversation as that speaker, counted from 0, sees it."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answers in self.turns:
            found.append({"role": "user", "content": question})
            found.append({"role": "assistant", "content": answers[speaker].text})
        return found

    def ask(self, question: str) -> None:
        """Have everybody answer. Raises DataError where a chat template refuses the conversation."""
        answers = []
        for place, speaker in enumerate(self.speakers):
            prompt = [*self.messages(place), {"role": "user", "content": question}]
            if len(self.speakers) > 1:
                self.say(f"[{speaker.name}]\n")
            answers.append(answer := speaker.answer(prompt, self.say))
            self.say("\n")
            if self.judge is not None:
                score = self.judge.score(prompt, answer)
                told = "too long for the reward model" if score is None else number(score)
                self.say(f"  score {told}\n")
        self.turns.append((question, answers))

    def obey(self, line: str) -> bool:
        """Carry out a line that begins with a slash; False if it was the last one."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if command == "/quit":
            return False
        if command == "/system":
            self.system, self.turns = rest or None, []
            self.say("a new conversation\n")
        elif command == "/new":
            self.turns = []
            self.say("a new conversation\n")
        elif command == "/undo":
            self.say(f"taken back: {self.turns.pop()[0]}\n" if self.turns else "there is nothing to take back\n")
        elif command == "/save":
            self.say(f"{self._save(rest)}\n")
        else:
            self.say(f"{HELP}\n" if command == "/help" else f"no command {command}; /help lists them\n")
        return True

    def _save(self, name: str) -> str:
        if not name:
            return "say where to: /save FILE"
        if not self.turns:
            return "there is nothing to save yet"
        rows = [{"model": speaker.name, "messages": self.messages(n)} for n, speaker in enumerate(self.speakers)]
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:
            return f"{name}: {error.strerror}; choose another name"
        return f"{name}: {len(self.turns)} question{'s' * (len(self.turns) > 1)} with answers"


def converse(conversation: Conversation, lines: Iterator[str], typed: bool, multi_turn: bool) -> None:
    """Answer line by line. Lines that are typed are one conversation, and those that begin with a slash commands."""
    for line in lines:
        if typed and line.startswith("/"):
            if not conversation.obey(line):
                return
            continue
        if not multi_turn:
            conversation.turns = []
        try:
            conversation.ask(line)
        except DataError as error:
            if not typed:
                raise
            conversation.say(f"{error}\n")


def main(arguments: list[str]) -> None:
    """Read a line, print an answer, until the input ends.

    Lines typed at a terminal are one conversation; each that is piped in opens a new one, unless --multi-turn. Raises
    DataError where none is, and ends with the code of SIGPIPE where nobody reads the answers any more.
    """
    parser = Arguments(prog="rlhf chat", description="Talk to models, line by line.")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder or hub id of a causal language model")
    parser.add_argument("--reward", help="folder or hub id of a reward model that scores the answers")
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling; 0 takes the likeliest token")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer in tokens")
    parser.add_argument("--multi-turn", action="store_true", help="let the model see the earlier turns")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--seed", type=int, default=None, help="for the same answers again")
    options = parser.parse_args(arguments)
    if not 0 <= options.temperature < math.inf or options.max_new_tokens < 1:
        parser.error("--temperature must be a number from 0 on and --max-new-tokens at least 1")
    _take_all_signs()
    typed = sys.stdin.isatty()
    lines = _lines(typed)
    if not typed:
        lines = _piped(lines)
    be_quiet()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if typed:
        print(f"loading {', '.join(options.models)} … (/help tells the commands)", file=sys.stderr)
    named = zip(short_names(options.models), options.models, strict=True)
    speakers = [Speaker(*model, options.temperature, options.max_new_tokens, device) for model in named]
    judge = None if options.reward is None else Judge(options.reward, device)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    conversation = Conversation(speakers, judge, lambda text: print(text, end="", flush=True), options.system)
    try:
        converse(conversation, lines, typed, typed or options.multi_turn)
    except BrokenPipeError:  # as after `| head`: whoever read has enough
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # what they still hold goes nowhere
            os.dup2(nowhere, stream.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def _take_all_signs() -> None:
    """Read � for bytes that are no letters, and write an escape where there is no place for a letter."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _lines(typed: bool) -> Iterator[str]:
    """Lines typed at a terminal until ctrl-d, or piped in."""
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lines can be edited, and called up again
    while True:
        try:
            line = input("> " if typed else "").strip()
        except (EOFError, KeyboardInterrupt):
            if typed:
                print()  # the shell's own line begins below
            return
        if line:
            yield line


def _piped(lines: Iterator[str]) -> Iterator[str]:
    """The same lines, each shown on stderr when it is asked, as a terminal shows what is typed.

    Raises DataError, before a model is loaded, where there is none.
    """
    first = next(lines, None)
    if first is None:
        raise DataError(
            'nothing was asked: the input is no terminal, and has no line with text; echo "Who are you?" | '
            "rlhf chat MODEL asks a question"
        )
    return map(_shown, chain([first], lines))


def _shown(line: str) -> str:
    print(f"> {line}", file=sys.stderr, flush=True)
    if "\N{REPLACEMENT CHARACTER}" in line:
        print(f"warning: not all of this line is {sys.stdin.encoding}; � stands for what is not", file=sys.stderr)
    return line


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
