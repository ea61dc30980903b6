"""Answers are sampled into a feedback store and ranked: by a judge at once, by people while the run waits.

Run by hand: `accelerate launch -m rlhf.stages.feedback FOLDER`, where FOLDER holds a settings.yaml.
"""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlhf.data.errors import DataError, RefusedError
from rlhf.data.feedback.export import export
from rlhf.data.feedback.store import Store
from rlhf.data.feedback.target import dealt_with, missing
from rlhf.data.rows import Prompt, read_prompts
from rlhf.stages.artifact import CANDIDATES, STORE, identify, read_settings
from rlhf.stages.disk import sync
from rlhf.stages.feedback.choose import by_chance, most_disputed
from rlhf.stages.feedback.config import OF_RATING, RANKINGS, FeedbackSettings
from rlhf.stages.judging import FunctionJudge, ModelJudge, cost, judge_store, model_judge
from rlhf.stages.runtime import Runtime
from rlhf.stages.sample import Law, Writer, fill


def train(folder: str | Path) -> dict[str, Any]:
    """Run the step in `folder` and seal it; returns the final metrics.

    While people have not rated enough, it ends unsealed with the state `waiting`; run again it looks anew.
    """
    folder = Path(folder)
    settings = read_settings(folder, FeedbackSettings)
    run = Runtime(settings, folder)
    prompts = read_prompts(settings.prompts, settings.max_dropped).rows
    run.on_main(lambda: make_store(run, folder / STORE), STORE)
    with Store.open(folder / STORE) as store:
        if settings.choose_by:
            put_up_disputed(run, store, prompts)
        else:
            number = settings.num_prompts or len(prompts)
            sample(run, store, [prompts[i] for i in by_chance(number, len(prompts), settings.seed, settings.round)])
        rated, num_prompts = run.from_main(lambda: ratings(run, store))
        if num_prompts == 0:
            raise DataError(
                "feedback: no prompt has two different answers, so there is nothing to rank; raise the temperatures"
            )
        if rated < num_prompts:
            run.num_steps = num_prompts
            run.write_status("waiting", rated, missing(rated, num_prompts, settings.target, store.path))
            run.close()
            return {}
        told = run.from_main(lambda: export(store, folder / RANKINGS, "rankings", settings.rule, settings.raters, True))
    metrics = {
        "num_prompts": num_prompts, "num_rankings": told.rows, "num_votes": told.num_rankings,
        "num_disagreed": told.num_disagreed, "num_tied": told.num_tied, "num_all_bad": told.num_all_bad,
        "num_prompts_flagged": told.num_flagged, "num_prompts_skipped": told.num_skipped, "round": settings.round,
    }  # fmt: skip
    return run.finish(metrics, {})


def make_store(run: Runtime[FeedbackSettings], path: Path) -> None:
    """The store to begin with: that of the round before, or of a sibling with the same answers, or an empty one.

    A sibling's people have rated what this step would sample, for another target or rule.
    """
    if path.exists():
        return
    earlier = run.settings.earlier
    found = sibling(run, path) or (Path(earlier.path).with_name(STORE) if earlier else None)
    writing = path.with_name(f".{path.name}.writing")
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{writing}{suffix}").unlink(missing_ok=True)
    if found is None:
        Store.create(writing).close()
    else:
        run.say(f"begins with the answers and rankings of {found}")
        Store.open(found).close()  # refuses what is none
        with closing(sqlite3.connect(found)) as source, closing(sqlite3.connect(writing)) as copy:
            source.backup(copy)
    sync([writing])
    os.replace(writing, path)
    sync([path.parent])


def sibling(run: Runtime[FeedbackSettings], path: Path) -> Path | None:
    """The newest store of a step that differs from this one in OF_RATING alone."""
    found = []
    for store in path.parent.parent.glob(f"feedback-*/{STORE}"):
        try:
            theirs = read_settings(store.parent, FeedbackSettings)
            same = theirs.model_copy(update={name: getattr(run.settings, name) for name in OF_RATING})
            if identify(same) == run.identity and identify(theirs).folder_name == store.parent.name:
                found.append(store)
        except RefusedError:  # its model or its data is gone
            continue
    return max(found, key=lambda store: store.stat().st_mtime_ns, default=None)


def put_up_disputed(run: Runtime[FeedbackSettings], store: Store, prompts: Sequence[Prompt]) -> None:
    """Sample answers to all prompts into a store aside, and put up those on which the reward models disagree most."""
    settings, aside = run.settings, run.folder / CANDIDATES

    def is_done() -> bool:
        with store.batch():
            ids = [store.add_prompt(prompt.messages) for prompt in prompts]
        return not aside.exists() and any(store.answers(prompt_id, settings.round) for prompt_id in ids)

    if run.from_main(is_done):
        return
    run.on_main(lambda: None if aside.exists() else Store.create(aside).close(), CANDIDATES)
    with Store.open(aside) as candidates:
        sample(run, candidates, prompts)

        def choose() -> None:
            ids = [candidates.add_prompt(prompt.messages) for prompt in prompts]
            answers = [candidates.answers(prompt_id) for prompt_id in ids]
            messages, texts = [prompt.messages for prompt in prompts], [[a.text for a in found] for found in answers]
            assert settings.num_prompts is not None
            run.say(f"{len(settings.choose_by)} reward models read the answers to {len(prompts)} prompts")
            chosen = most_disputed(settings.num_prompts, messages, texts, settings.choose_by, run.device)
            with store.batch():
                for place in chosen:
                    prompt_id = store.add_prompt(messages[place])
                    if not store.answers(prompt_id, settings.round):
                        store.add_answers(prompt_id, answers[place])

        run.on_main(choose, STORE)

    def tidy() -> None:
        for path in run.folder.glob(f"{CANDIDATES}*"):
            path.unlink()

    run.on_main(tidy, CANDIDATES)


def sample(run: Runtime[FeedbackSettings], store: Store, prompts: Sequence[Prompt]) -> None:
    """Answers to all prompts that have none of this round; the pieces are shared by the processes."""
    settings = run.settings
    model = settings.model
    assert model is not None
    law = Law(settings.num_answers, tuple(settings.temperatures), settings.seed, settings.round)

    @cache
    def writers() -> Sequence[Writer]:
        name = Path(model).parent.name if Path(model).name == "model" else model
        length = (settings.max_new_tokens, settings.max_length)
        return [Writer(model, name, run.device, *length, dtype=run.low_precision)]  # once there is something to write

    def in_order() -> None:
        """Rankings are written by the numbers that prompts got: these must not depend on who was quicker."""
        with store.batch():
            for prompt in prompts:
                store.add_prompt(prompt.messages)

    run.on_main(in_order, STORE)
    pieces = list(law.pieces(prompts))
    for start, piece in pieces[run.rank :: run.num_processes]:
        fill(store, writers, law, start, piece)
        run.say(f"prompt {start + len(piece)} of {len(prompts)} has its answers", now_and_then=True)
    run.wait_for_all()


def ratings(run: Runtime[FeedbackSettings], store: Store) -> tuple[int, int]:
    """How many prompts are rated, of how many; where there is a judge, it rates them now."""
    settings = run.settings
    if settings.by_people:
        return dealt_with(store, settings.target)
    judge: FunctionJudge | ModelJudge
    if settings.judge_from is not None:
        given = settings.judge_from
        judge = model_judge(store.path, given.url, given.model, given.key_variable)
    else:
        assert settings.judge is not None
        judge = FunctionJudge(settings.judge)
    told = judge_store(store, judge, partial(run.say, now_and_then=True))
    if spent := cost(judge):
        run.say(spent)
    if told.num_failed:
        raise RuntimeError(f"{told.num_failed + told.num_left} prompts are not judged: {told.first_failure}")
    num_prompts = store.progress().num_prompts
    return num_prompts, num_prompts
