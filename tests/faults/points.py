"""Where a process can be killed by itself: before, in the middle of or after a call of what changes files."""

import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

STAGES = ("pretrain", "sft", "reward", "ppo")
OUTSIDE = "between"
"""What a process does before, between and after the stages: plan, summary, settings, report."""


@dataclass(frozen=True)
class Point:
    """The `number`-th call (from 1) of `function` while `stage` runs."""

    stage: str
    function: str
    number: int
    mode: str
    """before, middle or after."""

    def __str__(self) -> str:
        return f"{self.mode} {self.function} {self.number} in {self.stage}"


def instrument(trace: int, point: Point | None) -> None:
    """Write down each call of the functions that change files, and be killed at `point`."""
    import safetensors.torch
    import torch

    stage = OUTSIDE
    counts: Counter[tuple[str, str]] = Counter()

    def enter(name: str) -> None:
        nonlocal stage
        stage = name
        os.write(trace, f"stage {name}\n".encode())

    def watched(name: str, function: Callable[..., Any], half: Callable[..., None] | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            os.write(trace, f"call {name}\n".encode())
            counts[stage, name] += 1
            here = point is not None and (stage, name, counts[stage, name]) == (
                point.stage, point.function, point.number,
            )  # fmt: skip
            mode = point.mode if point is not None and here else ""
            if mode == "before":
                die()
            if mode == "middle" and half is not None:
                half(*args, **kwargs)
                die()
            found = function(*args, **kwargs)
            if mode:
                die()
            return found

        return call

    for name in STAGES:
        module = sys.modules[f"rlhf.stages.{name}.train"]

        def train(folder: Any, name: str = name, real: Callable[..., Any] = module.train) -> Any:
            enter(name)
            found = real(folder)
            enter(OUTSIDE)
            return found

        module.train = train  # type: ignore[attr-defined]
    real_open, rmtree, copytree = Path.open, shutil.rmtree, shutil.copytree
    serialize, torch_save = safetensors.torch.serialize_file, torch.save

    def cut(path: Any) -> None:
        os.truncate(path, os.path.getsize(path) // 2)

    def half_serialize(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        serialize(tensors, path, *args, **kwargs)
        cut(path)

    def half_save(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        torch_save(content, path, *args, **kwargs)
        if isinstance(path, str | os.PathLike):
            cut(path)

    def half_rmtree(folder: Any, *_: Any, **__: Any) -> None:
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        for path in files[: (len(files) + 1) // 2]:
            path.unlink()

    def half_copytree(source: Any, target: Any, *_: Any, **__: Any) -> None:
        files = sorted(path for path in Path(source).rglob("*") if path.is_file())
        for path in files[: (len(files) + 1) // 2]:
            copy = Path(target) / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)

    class Writing:
        """A file whose writes can be cut short."""

        def __init__(self, file: Any) -> None:
            self.file = file
            self.write = watched("write", self.whole, self.half)

        def whole(self, content: Any) -> Any:
            number = self.file.write(content)
            self.file.flush()  # or a kill right after it would be one before it
            return number

        def half(self, content: Any) -> None:
            self.whole(content[: len(content) // 2])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> "Writing":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __iter__(self) -> Iterator[Any]:
            return iter(self.file)

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real_open(path, mode, *args, **kwargs)
        return Writing(file) if set(mode) & {"w", "a", "x"} else file

    def write_text(path: Path, text: str, **kwargs: Any) -> int:
        with opened(path, "w", **kwargs) as file:
            return int(file.write(text))

    Path.open, Path.write_text = opened, write_text  # type: ignore[method-assign, assignment]
    shutil.rmtree = watched("rmtree", rmtree, half_rmtree)  # type: ignore[assignment]
    shutil.copytree = watched("copytree", copytree, half_copytree)
    safetensors.torch.serialize_file = watched("serialize_file", serialize, half_serialize)
    torch.save = watched("torch.save", torch_save, half_save)
    for name in ("replace", "rename", "fsync"):
        setattr(os, name, watched(f"os.{name}", getattr(os, name)))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does not go on")


def random_point(rng: random.Random, calls: dict[tuple[str, str], int], stage: str) -> Point:
    """Some call that the stage makes in an undisturbed run; rare functions as often as frequent ones.

    Early calls more often: a resumed stage makes fewer.
    """
    function = rng.choice(sorted(name for where, name in calls if where == stage))
    number = rng.randint(1, max(1, round(calls[stage, function] * rng.random())))
    whole = function in ("os.replace", "os.rename", "os.fsync")
    return Point(stage, function, number, rng.choice(("before", "after") if whole else ("before", "middle", "after")))
