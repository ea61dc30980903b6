"""Answers are sampled into a feedback store and ranked: by a judge at once, by people while the run waits.

Run by hand: `accelerate launch -m rlhf.stages.feedback FOLDER`, where FOLDER holds a settings.yaml.
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.feedback.export import export
from rlhf.data.feedback.store import Store
from rlhf.data.feedback.target import Rated, missing, rated
from rlhf.data.rows import Prompt, read_prompts
from rlhf.stages.artifact import CANDIDATES, STORE
from rlhf.stages.feedback.choose import by_chance, most_disputed
from rlhf.stages.feedback.config import RANKINGS, FeedbackSettings
from rlhf.stages.feedback.stores import make_store
from rlhf.stages.judging import FunctionJudge, ModelJudge, cost, judge_store, model_judge
from rlhf.stages.runtime import Runtime
from rlhf.stages.sample import Filled, Law, Writer, add_prompts, fill, lines
from rlhf.stages.settings_file import read_settings


def train(folder: str | Path) -> dict[str, Any]:
    """Run the step in `folder` and seal it; returns the final metrics.

    While people have not rated enough, it ends unsealed with the state `waiting`; run again it looks anew.
    """
    folder = Path(folder)
    settings = read_settings(folder, FeedbackSettings)
    run = Runtime(settings, folder)
    prompts = read_prompts(settings.prompts, settings.max_dropped).rows

    def begin() -> None:
        if (found := make_store(settings, folder / STORE)) is not None:
            run.say(f"begins with the answers and rankings of {found}")

    run.on_main(begin, STORE)
    with Store.open(folder / STORE) as store:
        if settings.choose_by:
            put_up_disputed(run, store, prompts)
        else:
            number = settings.num_prompts or len(prompts)
            sample(run, store, [prompts[i] for i in by_chance(number, len(prompts), settings.seed, settings.round)])
        found = run.from_main(lambda: ratings(run, store))
        if found.num_prompts == 0:
            raise DataError(
                "feedback: no prompt has two different answers, so there is nothing to rank; raise the temperatures"
            )
        if not found.is_done:
            run.num_steps = found.num_prompts
            run.write_status("waiting", found.num, missing(found, settings.target, store.path))
            run.close()
            return {}
        told = run.from_main(lambda: export(store, folder / RANKINGS, "rankings", settings.rule, settings.raters, True))
    metrics = {
        "num_prompts": found.num_prompts, "num_rankings": told.rows, "num_votes": told.num_rankings,
        "num_disagreed": told.num_disagreed, "num_tied": told.num_tied, "num_all_bad": told.num_all_bad,
        "num_prompts_flagged": told.num_flagged, "num_prompts_skipped": told.num_skipped, "round": settings.round,
    }  # fmt: skip
    return run.finish(metrics, {})


def put_up_disputed(run: Runtime[FeedbackSettings], store: Store, prompts: Sequence[Prompt]) -> None:
    """Sample answers to all prompts into a store aside, and put up those on which the reward models disagree most."""
    settings, aside = run.settings, run.folder / CANDIDATES

    if run.from_main(lambda: not aside.exists() and store.progress(round=settings.round).num_prompts > 0):
        return
    run.on_main(lambda: None if aside.exists() else Store.create(aside).close(), CANDIDATES)
    with Store.open(aside) as candidates:
        sample(run, candidates, prompts)

        def choose() -> None:
            with candidates.batch():
                ids = [candidates.add_prompt(prompt.messages) for prompt in prompts]
            answers = [candidates.answers(prompt_id) for prompt_id in ids]
            messages, texts = [prompt.messages for prompt in prompts], [[a.text for a in found] for found in answers]
            assert settings.num_prompts is not None
            run.say(f"{len(settings.choose_by)} reward models read the answers to {len(prompts)} prompts")
            chosen = most_disputed(settings.num_prompts, messages, texts, settings.choose_by, run.device)
            with store.batch():
                add_prompts(store, [prompts[place] for place in chosen], settings.overlap, settings.seed)
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
        writer = Writer(model, name, run.device, *length, dtype=run.low_precision)  # once there is something to write
        if settings.max_length > writer.num_positions:
            raise SettingsError(
                f"feedback.max_length is {settings.max_length}, but the model has {writer.num_positions} positions; "
                "lower it"
            )
        return [writer]

    # Rankings are written by the numbers that prompts got: these must not depend on which process was quicker.
    run.on_main(lambda: add_prompts(store, prompts, settings.overlap, settings.seed), STORE)
    pieces, told = list(law.pieces(prompts)), Filled()
    for start, piece in pieces[run.rank :: run.num_processes]:
        told.add(fill(store, writers, law, start, piece))
        run.say(f"prompt {start + len(piece)} of {len(prompts)} has its answers", now_and_then=True)
    run.wait_for_all()
    if (told := together(run, told)).num_prompts:
        for line in lines(told, law):
            run.say(line)


def together(run: Runtime[FeedbackSettings], told: Filled) -> Filled:
    """What became of the prompts of all processes."""
    found = Filled()
    for part in run.gather_objects([told]):
        found.add(part)
    return found


def ratings(run: Runtime[FeedbackSettings], store: Store) -> Rated:
    """How far the rating of this round is; where there is a judge, it rates now."""
    settings = run.settings
    if settings.by_people:
        return rated(store, settings.target, settings.round)
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
    num_prompts = store.progress(round=settings.round).num_prompts
    return Rated(settings.round, num_prompts, num_prompts)
