"""What a run says while people have not rated enough."""

import shlex
from pathlib import Path

from rlhf.data.feedback.target import Rated, missing


def test_the_command_to_copy_names_the_store_whatever_its_path() -> None:
    for path in ("runs/a/feedback.sqlite", "my runs/it's $HOME/feedback.sqlite"):
        told = missing(Rated(1, 2, 5), 2, Path(path))
        assert told.startswith("2 of 5 prompts are rated by 2 people: `rlhf rank ")
        assert shlex.split(told.split("`")[1]) == ["rlhf", "rank", path, "--target", "2"]
