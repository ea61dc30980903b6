"""How fast a feedback store gives out prompts and takes rankings.

    python benchmarks/feedback_store.py                  100,000 prompts with 4 answers of 400 characters each

Each row is a state of the store: how many prompts have a ranking, and how many of those are this rater's own (the
others are a judge's and other people's). `next` is the time of `next_prompt` after a ranking, when another prompt has
to be chosen, `rank` that of `rank` until it is on disk. `progress` is what a page shows of one rater's progress.
"""

import argparse
import os
import platform
import random
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from rlhf.data.feedback.records import Answer, Task
from rlhf.data.feedback.store import Store

WORDS = (
    "the",
    "a",
    "small",
    "grey",
    "fox",
    "says",
    "that",
    "it",
    "was",
    "never",
    "there",
    "before",
    "because",
    "nobody",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=200, help="prompts asked for in each state")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "f.sqlite") as store:
        began = time.perf_counter()
        fill(store, options.prompts)
        seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6
        print(f"{options.prompts:,} prompts × 4 answers added in {seconds:.0f} s, {size:.0f} MB")
        print(
            f"{'ranked':>10}{'by this rater':>15}{'next ms':>10}{'p99':>8}{'rank ms':>10}{'p99':>8}{'progress ms':>13}"
        )
        anna, bob = store.add_rater("anna"), store.add_rater("bob")
        measure(store, anna, 0, 0, options.times)
        half = options.prompts // 2
        rank_many(store, anna, half)
        measure(store, anna, half, half, options.times)
        measure(store, bob, half, 0, options.times)
        rank_many(store, anna, options.prompts)
        measure(store, anna, options.prompts, options.prompts, options.times, target=2)
        measure(store, bob, options.prompts, 0, options.times, target=2)


def fill(store: Store, num: int) -> None:
    """Prompts with answers, a thousand in a transaction; every hundredth must be rated by all."""
    chance = random.Random(0)
    for start in range(0, num, 1000):
        with store.batch():
            for number in range(start, min(num, start + 1000)):
                prompt = store.add_prompt(f"Question {number}: {_text(chance, 100)}", overlap=number % 100 == 0)
                store.add_answers(prompt, [Answer(_text(chance, 400), "model") for _ in range(4)])


def rank_many(store: Store, rater: int, num: int) -> None:
    """Rankings of the first `num` prompts that this rater has not ranked."""
    with store.batch():
        for place, task in enumerate(store.tasks(rater)):
            if place == num:
                break
            rank(store, rater, task)


def rank(store: Store, rater: int, task: Task) -> None:
    shown = [answer.id for answer in task.answers]
    ranks = {id_: place for place, id_ in enumerate(shown, 1)}
    store.rank(str(uuid.uuid4()), task.prompt_id, rater, ranks, seconds=20.0, shown=shown, note="short")


def measure(store: Store, rater: int, ranked: int, own: int, times: int, target: int = 1) -> None:
    given, taken = [], []
    for _ in range(times):
        seconds, task = timed(lambda: store.next_prompt(rater, target=target))
        given.append(seconds)
        if task is not None:
            taken.append(timed(lambda task=task: rank(store, rater, task))[0])  # type: ignore[misc]
    shown = timed(lambda: store.progress(rater))[0]
    cells = "".join(
        f"{1e3 * median(t):>10.1f}{1e3 * sorted(t)[-1 - len(t) // 100]:>8.1f}" for t in (given, taken or [0])
    )
    print(f"{ranked:>10,}{own:>15,}{cells}{1e3 * shown:>13.1f}", flush=True)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _text(chance: random.Random, length: int) -> str:
    return " ".join(chance.choices(WORDS, k=length // 5))


if __name__ == "__main__":
    main()
