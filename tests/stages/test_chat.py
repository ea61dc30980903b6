"""`rlhf chat`: what is said while an answer is made, what a model sees of a conversation, and the commands."""

import io
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from stages_world import byte_tokenizer, tiny_policy

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.rows import read_demonstrations
from rlhf.data.sources import Source
from rlhf.data.tokens import encode_example
from rlhf.stages import chat
from rlhf.stages.chat import Answer, Conversation, Judge, Speaker, Streamed, converse
from rlhf.stages.models import load_scalar, save_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies, first/model and second/model, and a reward model, reward/model."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    for name, seed in (("first", 0), ("second", 1)):
        save_folder(root / name / "model", tiny_policy(seed=seed), tokenizer)
    save_folder(root / "reward" / "model", load_scalar(str(root / "first" / "model"), tokenizer, True), tokenizer)
    return root


def speaker(folder: Path, name: str = "first", length: int = 12) -> Speaker:
    torch.manual_seed(0)
    return Speaker(name, str(folder / name / "model"), 1.0, length, CPU)


class Talk:
    """A conversation whose speakers answer with what they were asked, and what it says."""

    def __init__(self, *names: str, typed: bool = True, judge: Any = None) -> None:
        self.said: list[str] = []
        self.asked: list[Any] = []
        self.typed = typed
        self.of = Conversation([self._echo(name) for name in names or ("echo",)], judge, self.said.append)

    def _echo(self, name: str) -> Any:
        talk = self

        class Echo:
            def __init__(self) -> None:
                self.name = name

            def answer(self, prompt: Any, say: Any) -> Answer:
                talk.asked.append(prompt)
                text = f"{name} {prompt[-1]['content']}"
                say(text)
                return Answer(text, True)

        return Echo()

    def __call__(self, *lines: str, multi_turn: bool = True) -> str:
        del self.said[:]
        converse(self.of, iter(lines), self.typed, multi_turn)
        return "".join(self.said)


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_an_answer_comes_piece_by_piece_and_is_what_was_sampled(folder: Path) -> None:
    pieces: list[str] = []
    answer = speaker(folder).answer([{"role": "user", "content": "Who?"}], pieces.append)
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == answer.text == answer.text.strip()
    assert "Who?" not in answer.text
    assert not answer.ended  # twelve tokens were not enough for it


def test_at_temperature_0_an_answer_is_the_same_whatever_the_seed(folder: Path) -> None:
    texts = set()
    for seed in range(3):
        greedy = Speaker("first", str(folder / "first" / "model"), 0.0, 12, CPU)
        torch.manual_seed(seed)
        texts.add(greedy.answer([{"role": "user", "content": "Who?"}], lambda text: None).text)
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", ["-0.1", "nan", "inf"])
def test_what_is_no_temperature_is_refused_before_a_model_is_loaded(temperature: str) -> None:
    with pytest.raises(SettingsError, match="--temperature must be a number from 0 on"):
        chat.main(["nowhere", "--temperature", temperature])


def test_half_a_letter_waits_for_its_rest() -> None:
    tokenizer, pieces = byte_tokenizer(), []
    streamed = Streamed(lambda ids: tokenizer.decode(ids, skip_special_tokens=True), pieces.append)
    ids = tokenizer(" é b ", add_special_tokens=False)["input_ids"]
    streamed.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for number in ids:
        streamed.put(torch.tensor([number]))
    streamed.end()
    assert [piece for piece in pieces if piece] == ["é", " b"]
    assert streamed.text == "é b"


def test_an_answer_ends_at_any_of_the_models_stop_tokens(folder: Path, tmp_path: Path) -> None:
    save_folder(tmp_path / "model", tiny_policy(), byte_tokenizer())
    path = tmp_path / "model" / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"eos_token_id": list(range(4, 260)), "top_k": 1}))
    every = Speaker("every", str(tmp_path / "model"), 1.0, 12, CPU)
    assert every.stops == [0, *range(4, 260)]
    streamed = every.answer([{"role": "user", "content": "Who?"}], lambda text: None)
    assert streamed.ended
    assert len(streamed.text) <= 1
    assert speaker(folder).stops == [0]


def test_ctrl_c_ends_an_answer_and_keeps_what_there_is(folder: Path) -> None:
    pieces: list[str] = []

    def interrupt(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    answer = speaker(folder).answer([{"role": "user", "content": "Who?"}], interrupt)
    assert len(pieces) == 4
    assert answer.text == "".join(pieces)
    assert not answer.ended


def test_typed_lines_are_one_conversation_and_piped_ones_each_their_own() -> None:
    talk = Talk()
    talk("a", "b")
    assert contents(talk.asked[-1]) == ["a", "echo a", "b"]
    piped = Talk(typed=False)
    piped("a", "b", multi_turn=False)
    assert contents(piped.asked[-1]) == ["b"]
    piped("a", "/undo", multi_turn=True)  # piped in, it is a question like any other
    assert contents(piped.asked[-1])[-3:] == ["a", "echo a", "/undo"]


def test_each_of_two_models_answers_by_its_name_and_sees_its_own_answers() -> None:
    talk = Talk("sft", "ppo")
    assert talk("a") == "[sft]\nsft a\n[ppo]\nppo a\n"
    talk("b")
    assert [contents(prompt) for prompt in talk.asked[2:]] == [["a", "sft a", "b"], ["a", "ppo a", "b"]]


def test_undo_takes_the_last_question_back_with_all_answers() -> None:
    talk = Talk()
    assert talk("a", "b", "/undo").endswith("taken back: b\n")
    talk("c")
    assert contents(talk.asked[-1]) == ["a", "echo a", "c"]
    assert talk("/undo", "/undo", "/undo").endswith("there is nothing to take back\n")


def test_a_system_message_opens_a_new_conversation_and_stays_until_taken_away() -> None:
    talk = Talk()
    talk("a", "/system Be brief.", "b", "/new", "c")
    assert [(m["role"], m["content"]) for m in talk.asked[-1]] == [("system", "Be brief."), ("user", "c")]
    talk("/system", "d")
    assert contents(talk.asked[-1]) == ["d"]


def test_a_saved_conversation_is_a_row_of_messages_for_each_model(tmp_path: Path) -> None:
    talk = Talk("sft", "ppo")
    path = tmp_path / "talk.jsonl"
    assert talk(f"/save {path}") == "there is nothing to save yet\n"
    talk("/system Be brief.", "a", "b")
    assert "2 questions" in talk(f"/save {path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["model"] for row in rows] == ["sft", "ppo"]
    assert contents(rows[1]["messages"]) == ["Be brief.", "a", "ppo a", "b", "ppo b"]
    read = read_demonstrations(Source(path=str(path))).rows
    assert [row.response for row in read] == ["sft b", "ppo b"]
    before = path.read_text()
    assert "choose another name" in talk(f"/save {path}")
    assert path.read_text() == before


def test_help_names_every_command_and_quit_ends_it() -> None:
    talk = Talk()
    said = talk("/help")
    assert all(f"/{name}" in said for name in ("system", "undo", "new", "save", "quit"))
    assert "no command /hepl; /help lists them" in talk("/hepl")
    talk("/quit", "a")
    assert talk.asked == []


def test_what_a_template_refuses_is_told_and_the_conversation_goes_on(folder: Path) -> None:
    refusing = speaker(folder)
    refusing.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    said: list[str] = []
    talk = Conversation([refusing], None, said.append)
    converse(talk, iter(["/system Be brief.", "a", "/system", "b"]), True, True)
    assert "leaves the system message out" in "".join(said)
    assert [question for question, _ in talk.turns] == ["b"]


def test_the_reward_models_score_stands_under_each_answer(folder: Path) -> None:
    class Fixed:
        def score(self, prompt: Any, answer: Answer) -> float | None:
            return None if answer.text == "ppo a" else 1.25

    talk = Talk("sft", "ppo", judge=Fixed())
    assert talk("a") == "[sft]\nsft a\n  score 1.25\n[ppo]\nppo a\n  score too long for the reward model\n"


def test_a_score_is_the_models_at_the_last_token_and_without_an_end_where_there_was_none(folder: Path) -> None:
    judge = Judge(str(folder / "reward" / "model"), CPU)
    prompt = [{"role": "user", "content": "Who?"}]
    example = encode_example(judge.tokenizer, prompt, "Me.", 64)
    assert example is not None
    for ended, ids in ((True, example.input_ids), (False, example.input_ids[:-1])):
        row = torch.tensor([ids])
        with torch.no_grad():
            expected = judge.scalar(row, torch.ones_like(row, dtype=torch.bool))[0, -1].item()
        assert judge.score(prompt, Answer("Me.", ended)) == pytest.approx(expected, abs=1e-5)
    assert judge.score(prompt, Answer("long " * 30, True)) is None


@pytest.mark.parametrize("piped", ["", "\n  \n"])
def test_no_question_is_said_before_a_model_is_loaded(piped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    with pytest.raises(DataError, match=r"^nothing was asked: .*; echo .* \| rlhf chat MODEL asks a question$"):
        chat.main(["nowhere"])


def test_the_same_seed_gives_the_same_answers_to_lines_that_are_piped_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for seed in (3, 3, 4):
        monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\nWhere?\n"))
        chat.main([str(folder / "first" / "model"), "--seed", str(seed), "--max-new-tokens", "6"])
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
    assert outputs[0].out != outputs[2].out
    assert outputs[0].err == "> Who?\n> Where?\n"  # answers alone are on stdout


def test_what_is_no_utf8_is_read_as_a_sign_of_its_own_and_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nWho?\n\0\rMe\nWithout an end \xc3"), encoding="utf-8", newline="\n")
    monkeypatch.setattr("sys.stdin", piped)
    chat.main([str(folder / "first" / "model"), "--max-new-tokens", "1"])
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4
    told = "warning: not all of this line is utf-8; � stands for what is not"
    assert err.split("\n") == ["> caf�", told, "> Who?", "> \0\rMe", "> Without an end �", told, ""]


def test_an_answer_has_escapes_where_the_terminal_has_no_letters_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n"))
    monkeypatch.setattr(Speaker, "answer", lambda self, prompt, say: say("café"))
    chat.main([str(folder / "first" / "model")])
    assert shown.buffer.getvalue() == b"caf\\xe9\n"  # type: ignore[attr-defined]


def test_after_ctrl_d_the_shell_begins_on_a_line_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = io.StringIO()
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", typed)
    chat.main([str(folder / "first" / "model")])
    assert capsys.readouterr().out == "> \n"


def test_it_ends_without_a_word_when_nobody_reads_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "w") as out, (tmp_path / "err").open("w") as err:
        monkeypatch.setattr("sys.stdin", io.StringIO("Who?\nWhere?\n"))
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        with pytest.raises(SystemExit) as end:
            chat.main([str(folder / "first" / "model")])
    assert end.value.code == 128 + signal.SIGPIPE
    assert (tmp_path / "err").read_text() == "> Who?\n"


def test_two_models_of_the_same_folder_name_are_told_apart_by_where_they_lie(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "first", tmp_path / "first")
    models = [str(path / "model") for path in (folder / "first", folder / "second", tmp_path / "first")]
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n"))
    chat.main([*models, "--max-new-tokens", "1"])
    labels = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert labels == [f"[{folder / 'first'}]", "[second]", f"[{tmp_path / 'first'}]"]
