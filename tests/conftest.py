"""What all tests share: the longest files come first, and garbage is looked for among what is new alone."""

import gc

import pytest

LONGEST = (
    "test_end_to_end", "test_strangers_path", "test_ranks", "test_docs_commands", "test_signals", "test_sharding",
    "test_odd_homes", "test_ppo_distributed", "test_resume_processes", "test_resume", "test_kills", "test_cases",
    "test_train",
)  # fmt: skip
"""Files, so that of several workers, each with whole files (see the Makefile), none has a long one left at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_no_garbage() -> None:
    """A stage ends with a collection of garbage, which would look through all that was imported each time."""
    gc.collect()
    gc.freeze()
