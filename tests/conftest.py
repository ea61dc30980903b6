"""What all tests share: the longest files come first, and garbage is looked for among what is new alone."""

import gc
import os
import sys

import pytest

LONGEST = (
    "test_end_to_end", "test_strangers_path", "test_docs_commands", "test_odd_homes", "test_train", "test_sharding",
    "test_ranks", "test_ppo_oracle", "test_resume_processes", "test_kills", "test_static", "test_signals",
    "test_resume", "test_out_of_memory", "test_cases", "test_ppo_distributed",
)  # fmt: skip
"""Files, so that of several workers, each with whole files (see the Makefile), none has a long one left at the end."""

gc.disable()  # until all is imported, in which there is no garbage to be found
os.fsync = lambda _: None  # no test cuts the power; what is on the disk for one that looks, is in its cache


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """What tests fork from is forked itself while nothing but imports has happened in this process."""
    if "forking" in sys.modules and session.items and not session.config.option.collectonly:
        sys.modules["forking"].context()


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_no_garbage() -> None:
    """A stage ends with a collection of garbage, which would look through all that was imported each time."""
    gc.collect()
    gc.freeze()
