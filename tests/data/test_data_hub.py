"""A model's name that is no folder here: a slip that is told at once, or an id that the hub is asked for once."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, RemoteEntryNotFoundError, RepositoryNotFoundError

from rlhf.data import hub
from rlhf.data.errors import SettingsError
from rlhf.data.lengths import tokens
from rlhf.stages.logs import be_quiet
from rlhf.stages.models import read_tokenizer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two runs, a folder of models and a file."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/demo/sft-1234abcd", "runs/other", "models/small"):
        Path(folder).mkdir(parents=True)
    Path("notes.txt").touch()
    return tmp_path


@pytest.fixture
def hub_says(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], list[str]]:
    """Have the hub, whose cache here is empty, answer so; the requests that it gets."""
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)

    def answering(error: Exception | None) -> list[str]:
        asked: list[str] = []

        def answer(url: str) -> None:
            asked.append(url)
            if error is not None:
                raise error

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
        return asked

    return answering


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("runs/zzz", "no folder 'runs/zzz'; runs has demo, other"),
        ("runs/demos", "did you mean runs/demo?"),
        ("runs/demo/sft-1234abce", "did you mean runs/demo/sft-1234abcd?"),
        ("models/smal", "did you mean models/small?"),  # its parent is a folder here
        ("a/b/c", "no folder 'a/b/c'; runs here: runs/demo, runs/other"),
        ("./x", "no folder './x'"),
        ("gpt2/", "no folder 'gpt2/'"),
        ("notes.txt", "notes.txt is a file"),
    ],
)
def test_what_can_only_be_a_path_is_refused_without_asking(here: Path, reference: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        hub.refuse_missing_folder(reference, "sft.model")
    assert str(refused.value).startswith("sft.model: ")
    assert message in str(refused.value)


def test_folders_and_what_may_be_ids_pass(here: Path) -> None:
    for reference in ("runs/demo", "models/small", "gpt2", "owner/name"):
        hub.refuse_missing_folder(reference)


def test_an_unreachable_hub_is_told_with_what_lies_here_after_one_request(
    hub_says: Callable[[Exception | None], list[str]],
) -> None:
    asked = hub_says(OSError("no route\nand more"))
    with pytest.raises(SettingsError) as refused:
        hub.refuse_unknown("demo", "sft.model")
    assert str(refused.value) == (
        "sft.model: no folder 'demo' here (did you mean runs/demo?), and the hub could not be reached (no route)"
    )
    assert len(asked) == 1


def test_what_the_hub_does_not_have_and_what_it_has(hub_says: Callable[[Exception | None], list[str]]) -> None:
    response: Any = SimpleNamespace(headers={}, request=None, status_code=404)
    hub_says(RepositoryNotFoundError("404", response=response))
    with pytest.raises(SettingsError, match=r"no folder 'owner/gone' here .*and the hub has no such model"):
        hub.refuse_unknown("owner/gone")
    hub_says(OfflineModeIsEnabled("offline"))
    with pytest.raises(SettingsError, match="HF_HUB_OFFLINE is set"):
        hub.refuse_unknown("owner/name")
    with pytest.raises(SettingsError, match="no name that the hub could have"):
        hub.refuse_unknown("no::pe")
    hub_says(RemoteEntryNotFoundError("404", response=response))  # a tokenizer alone has no config.json
    hub.refuse_unknown("owner/tokenizer")
    hub_says(None)
    hub.refuse_unknown("owner/name")


def test_what_is_in_the_cache_is_not_asked_for(
    hub_says: Callable[[Exception | None], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub_says(OSError("no route"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, name: f"cache/{name}")
    hub.refuse_unknown("owner/name")
    assert asked == []


def test_loading_asks_first_and_retries_are_not_told(
    hub_says: Callable[[Exception | None], list[str]],
) -> None:
    hub_says(OSError("no route"))
    for load in (read_tokenizer, tokens):
        with pytest.raises(SettingsError, match="the hub could not be reached"):
            load("owner/name")
    be_quiet()
    assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)
