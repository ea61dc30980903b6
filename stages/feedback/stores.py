"""Which store a feedback step begins with, and which rankings of people it does not take over. No torch."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rlhf.data.errors import DataError, RefusedError
from rlhf.data.feedback.schema import remove
from rlhf.data.feedback.store import Store
from rlhf.data.feedback.target import goes_beyond
from rlhf.stages.artifact import STORE, identify
from rlhf.stages.disk import sync
from rlhf.stages.feedback.config import OF_RATING, FeedbackSettings
from rlhf.stages.settings_file import read_settings


def make_store(settings: FeedbackSettings, path: Path) -> Path | None:
    """The store to begin with: that of the round before, or of a sibling with the same answers, or an empty one.

    A sibling's people have rated what this step would sample, for another target or rule. Where they went on there with
    what is here, theirs takes the place of this one. Returns the store that was copied, if one was.
    """
    found = gone_on(settings, path)
    if found is None and path.exists():
        return None
    if found is None and settings.earlier is not None:
        found = Path(settings.earlier.path).with_name(STORE)
    writing = path.with_name(f".{path.name}.writing")
    remove(writing)
    if found is None:
        Store.create(writing).close()
    elif not found.exists():
        raise DataError(
            f"{found}: no such file; the store of the round before is wanted, with the answers of its rankings"
        )
    else:
        Store.open(found).close()  # refuses what is none
        with closing(sqlite3.connect(found)) as source, closing(sqlite3.connect(writing)) as copy:
            source.backup(copy)
    sync([writing])
    remove(path)  # SQLite would play what a kill has left of a store that is gone into this one
    os.replace(writing, path)
    sync([path.parent])
    return found


def gone_on(settings: FeedbackSettings, path: Path) -> Path | None:
    """The store of a step that differs from this one in OF_RATING alone in which raters did more than in this one's,
    with all that is in this one's; of several that in which they did most."""
    found = {}
    for store, theirs in _others(path):
        if _has_the_same_answers(theirs, store, settings):
            try:
                with Store.open(store) as opened:
                    found[store] = len(opened.request_ids())
            except DataError:
                continue
    most = max(found, key=lambda store: (found[store], store.stat().st_mtime_ns), default=None)
    return None if most is None or (path.exists() and not goes_beyond(most, path)) else most


def left_behind(settings: FeedbackSettings, run_dir: Path, folder: Path | None) -> Iterator[tuple[Path, int, bool]]:
    """Stores of other steps in which people ranked answers of the same round, how many of their rankings this step will
    not have, and whether they are of the same answers.

    `folder` is the step's, or None where it is not known yet.
    """
    path = (folder or run_dir / "none") / STORE
    begins_with = None if folder is None else gone_on(settings, path) or path
    ours = _rankings(begins_with, settings.round) if begins_with else set()
    for store, theirs in _others(path):
        if theirs.round == settings.round and (lost := len(_rankings(store, settings.round) - ours)):
            yield store, lost, folder is not None and _has_the_same_answers(theirs, store, settings)


def _others(path: Path) -> Iterator[tuple[Path, FeedbackSettings]]:
    """The stores of the run's other feedback steps, and their settings."""
    for store in sorted(path.parent.parent.glob(f"feedback-*/{STORE}")):
        if store != path:
            try:
                yield store, read_settings(store.parent, FeedbackSettings)
            except RefusedError:
                continue


def _has_the_same_answers(theirs: FeedbackSettings, store: Path, settings: FeedbackSettings) -> bool:
    """Whether a step differs from this one in OF_RATING alone, and is what its folder says."""
    try:
        same = theirs.model_copy(update={name: getattr(settings, name) for name in OF_RATING})
        return identify(same) == identify(settings) and identify(theirs).folder_name == store.parent.name
    except RefusedError:  # its model or its data is gone
        return False


def _rankings(store: Path, round_: int) -> set[str]:
    """The rankings of a round by people, by their request ids; none of a store that cannot be read."""
    try:
        with Store.open(store) as opened:
            return opened.rankings_of_people(round_)
    except DataError:
        return set()
