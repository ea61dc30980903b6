"""Whether people have rated enough to go on."""

from pathlib import Path

from rlhf.data.feedback.store import Store


def dealt_with(store: Store, target: int) -> tuple[int, int]:
    """How many prompts have been dealt with by `target` people, of how many that have something to rank.

    Who skips or flags a prompt has dealt with it, too: else one that nobody can rank would keep all others waiting.
    """
    told = store.progress(target=target)
    set_aside = 0
    for judged in store.rankings():
        rated = sum(vote.rater.kind == "person" for vote in judged.votes)
        if rated < target <= rated + judged.num_skips + len(judged.flags):
            newest = max(answer.round for answer in store.answers(judged.prompt_id))
            set_aside += judged.round == newest
    return told.num_target + set_aside, told.num_prompts


def missing(num_rated: int, num_prompts: int, target: int, store: Path) -> str:
    """What is still to be rated, and what to do about it."""
    if num_rated >= num_prompts:
        return f"all {num_prompts} prompts are rated; run again to go on"
    people, option = ("a person", "") if target == 1 else (f"{target} people", f" --target {target}")
    return f"{num_rated} of {num_prompts} prompts are rated by {people}: `rlhf rank {store}{option}`, then run again"
