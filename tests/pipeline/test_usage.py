"""Words of the command line that cannot be read: one line in our form, the nearest word, exit code 2."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.data.errors import of_file

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("estimate", "demo", "--run-dir", "x"), "rlhf estimate: no option --run-dir; there are --device, --devices"),
        (("estimate", "demo", "--devise", "x"), "rlhf estimate: no option --devise; did you mean '--device'? `rlhf"),
        (("init",), "rlhf init: NAME is missing: What to call the recipe"),
        (("data", "check", "x"), "rlhf data check: --as is missing: text, demonstrations"),
        (("rnu",), "rlhf: no such command 'rnu'. Did you mean 'run'"),
        (
            ("data", "chek", "x"),
            "rlhf data: no such command 'chek'. Did you mean 'check'? `rlhf data --help` tells more",
        ),
        (("chat", "m", "--max-new-tokens", "0"), "rlhf chat: invalid value for '--max-new-tokens': "),
        (("status", "a", "b"), "rlhf status: got unexpected extra argument(s) (b); `rlhf status --help` tells more"),
        (("status", "a", "--json=1"), "option '--json' does not take a value"),
    ],
)
def test_what_cannot_be_read_is_one_line(rlhf: Call, words: tuple[str, ...], message: str) -> None:
    code, out, err = rlhf(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"error: {message}")


def test_a_group_without_words_shows_its_commands(rlhf: Call) -> None:
    code, out, err = rlhf("data")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: rlhf data")
    assert "error" not in err


@pytest.mark.parametrize("words", [(), ("data",)])
def test_no_command_is_listed_with_half_a_sentence(
    rlhf: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = rlhf(*words, "--help")
    assert code == 0
    assert "Commands:" in out
    assert "..." not in out[out.index("Commands:") :]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "a/b"), "a/b: No space left on device; make room there"),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded", "a/b"),
            "a/b: Disk quota exceeded; free some of the quota there, or have it raised",
        ),
        (
            OSError(errno.EFBIG, "File too large"),
            "standard output, or a file: File too large; raise the limit on the size of a file (`ulimit -f`; some "
            "file systems have one of their own)",
        ),
        (
            OSError(28, "No space left on device"),
            "standard output, or a file: No space left on device; make room there",
        ),
        (
            PermissionError(13, "Permission denied", "a/b"),
            "a/b: Permission denied; change its mode, or that of its folder, or name another place",
        ),
        (
            FileNotFoundError(2, "No such file or directory"),
            "FileNotFoundError: [Errno 2] No such file or directory",
        ),
        (OSError("the hub could not be reached"), "OSError: the hub could not be reached"),
        (ConnectionResetError(104, "reset by peer"), "ConnectionResetError: [Errno 104] reset by peer"),
    ],
)
def test_what_the_system_says_is_told_with_the_file_if_it_is_of_one(error: OSError, said: str) -> None:
    assert of_file(error) == said


def test_a_working_folder_that_was_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = of_file(FileNotFoundError(2, "No such file or directory"))
    assert said == "the folder that you are in: No such file or directory; look whether its folder is there"
