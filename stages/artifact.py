"""The folder a stage leaves behind: what it was made from, its key, and the manifest that seals it. No torch."""

import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from typing import Any

from rlhf.data import sources
from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.files import hash_file
from rlhf.data.hub import refuse_missing_folder
from rlhf.stages.disk import file_digest, file_digests, give_usual_modes, replace_text, sync
from rlhf.stages.settings import StageSettings

STAGES = ("pretrain", "sft", "reward", "ppo")
"""What trains a model."""
STEPS = ("pretrain", "sft", "feedback", "reward", "ppo")
"""What a run goes through, in order: the stages, and between them what leaves a folder of the same kind."""
STORE = "feedback.sqlite"
"""In the folder of a feedback step: the store, which is not sealed, since people may rate on."""
CANDIDATES = "candidates.sqlite"
"""Beside it, where prompts are chosen by their answers: the store of all answers."""
OF_PEOPLE = (STORE, f"{STORE}-wal", f"{STORE}-shm")
"""What is never deleted."""
TRACKER_FOLDER = "logs"
"""What trackers write of a stage lies there: not part of the result, so it may be deleted."""
RESULTS = (
    "settings.yaml", "metrics.jsonl", "samples.jsonl", "corpus.json", "answers.jsonl", "card.json",
    "worst_pairs.jsonl", "rankings.jsonl", "model", "adapter", "critic", "ema",
)  # fmt: skip
"""What the result of a stage consists of: files, and folders with all that is in them. The manifest names these alone:
what else lies in a stage's folder is somebody's, and neither sealed nor touched."""
_OURS_WHOLE = ("checkpoints", "model", "adapter", "critic", "ema")
BESIDE = (
    "manifest.json", "status.json", "error.log", "sampled.jsonl", f"{STORE}.replies.jsonl", CANDIDATES,
    f"{CANDIDATES}-wal", f"{CANDIDATES}-shm", "checkpoints", "profile", TRACKER_FOLDER,
)  # fmt: skip
"""What else a stage writes into its folder."""
_OF_A_TOKENIZER = (
    "tokenizer", "vocab", "merges", "spiece", "special_tokens_map", "added_tokens", "chat_template",
)  # fmt: skip
"""How the names of a tokenizer's files begin."""
_EDGE = 1 << 20  # bytes hashed at either end of a large file of a model that has no manifest


@dataclass(frozen=True)
class Identity:
    """What decides a stage's result, and the key that stands for it."""

    stage: str
    inputs: dict[str, str]
    """Digest of each input model, by field name."""
    data: dict[str, str]
    """Digest of each source of rows (and of the code of judges and rewards), by field name."""
    settings: dict[str, Any]
    """The settings that change the result."""
    code: dict[str, str] = field(default_factory=dict)
    """Each `module:function` whose digest is in `data`, by field name; told of, and not in the key."""

    @property
    def key(self) -> str:
        text = json.dumps([self.stage, self.settings, self.inputs, self.data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        return f"{self.stage}-{self.key[:8]}"


def identify(settings: StageSettings) -> Identity:
    """Key = hash of stage, result-changing settings, digests of inputs and of data.

    Raises RefusedError for what is not there.
    """
    inputs = {}
    for name, reference in settings.inputs().items():
        if reference is None:
            raise SettingsError(
                f"{settings.stage}.{name}: not set; name a model folder or hub id, or run the stage before it"
            )
        inputs[name] = input_digest(name, reference, settings.stage)
    return Identity(settings.stage, inputs, data_digests(settings), settings.result_settings(), settings.code())


def data_digests(settings: StageSettings) -> dict[str, str]:
    """Digest of each source of rows and of each judge's or reward's code; an error says whose."""
    parts: list[tuple[str, Any, Callable[[Any], str]]] = [
        (name, source, sources.digest) for name, source in settings.sources().items()
    ]
    parts += [(name, reference, code_digest) for name, reference in settings.code().items()]
    found = {}
    for name, part, digest in parts:
        try:
            found[name] = digest(part)
        except RefusedError as error:
            raise type(error)(f"{settings.stage}.{name}: {error}") from None
    return found


class Artifact:
    """A stage's folder, finished or not."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def sealed(self) -> bool:
        try:
            return (self.folder / "manifest.json").is_file()
        except PermissionError:
            raise SettingsError(f"{self.folder}: may not be looked into; change its mode") from None

    @property
    def manifest(self) -> dict[str, Any]:
        path = self.folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            manifest = None
        except PermissionError:
            raise SettingsError(f"{path}: may not be read; change its mode") from None
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
            raise SettingsError(f"{path}: is damaged; move its folder away, and the stage runs again")
        return manifest

    @property
    def digest(self) -> str:
        """Hash over the hashes of the model's files: two runs that wrote the same model have the same digest.

        An adapter's config says in which folder its base lay; what it does is in the merged weights beside it.
        """
        files = {p: h for p, h in self.manifest["files"].items() if p.startswith("model/")}
        files.pop("model/adapter/adapter_config.json", None)
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def damage(self, hashes: bool, below: str = "") -> dict[str, str]:
        """Files of the manifest that are not as they were sealed, each with what is wrong; those that begin with
        `below`. Sizes are compared always, what the files hold with `hashes`."""
        manifest, found = self.manifest, {}
        sizes = manifest.get("sizes", {})
        for name, digest in manifest["files"].items():
            path = self.folder / name
            if not name.startswith(below):
                continue
            if not os.path.isfile(path):  # and not Path.is_file, which raises where the folder may not be looked into
                found[name] = "is missing since it was sealed"
            elif not os.access(path, os.R_OK):
                found[name] = "may not be read"
            elif name in sizes and path.stat().st_size != sizes[name]:
                found[name] = f"was changed since it was sealed: {path.stat().st_size} bytes, not {sizes[name]}"
            elif hashes and file_digest(path) != digest:
                found[name] = "was changed since it was sealed"
        return found

    def refuse_damage(self, hashes: bool, below: str = "") -> None:
        """Raise SettingsError with the first file that `damage` finds, and the cure."""
        for name, what in self.damage(hashes, below).items():
            raise SettingsError(f"{self.folder.name}: {name} {what}; restore it, or delete the folder to make it anew")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl.

        Raises RefusedError for a line that cannot be read, the last one apart: a kill may have cut it short.
        """
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:  # UnicodeDecodeError is one
                if number < len(lines):
                    what = "it was changed since the stage wrote it; put it back as it was, or delete the line"
                    raise RefusedError(f"{path} line {number}: cannot be read ({error}); {what}") from None
        return rows


def refuse_finished(folder: Path, stage: str) -> None:
    """Refuse to train in a folder that is sealed, with what runs the stage once more."""
    if Artifact(folder).sealed:
        others = (folder / f"../../again{number}" / folder.name for number in chain([""], count(2)))
        new = Path(next(path for path in map(os.path.normpath, others) if not os.path.lexists(path)))
        words = [
            ["mkdir", "-p", new],
            ["cp", folder / "settings.yaml", new],
            ["python", "-m", f"rlhf.stages.{stage}", new],
        ]
        again = " && ".join(shlex.join(map(str, each)) for each in words)
        raise RefusedError(
            f"{folder}: is finished (it has a manifest.json) and stays as it is; to run it once more in another folder "
            f"with its settings: `{again}`"
        )


def refuse_damaged_model(model: Path, hashes: bool = False) -> None:
    """Refuse a model that a stage sealed and that is not what it was: what is built on it would bear a key that is not
    true. Sizes are compared always, what the files hold with `hashes`. Other models are taken as they are."""
    artifact = Artifact(model.parent)
    if model.name == "model" and model.is_dir() and artifact.sealed:
        artifact.refuse_damage(hashes, "model/")


def input_digest(name: str, reference: str, stage: str) -> str:
    """Digest of one of a stage's `inputs`: a model, or under the name `tokenizer` a tokenizer alone."""
    where = f"{stage}.{name}"
    return tokenizer_digest(reference, where) if name == "tokenizer" else model_digest(reference, where)


def model_digest(reference: str, where: str) -> str:
    """Digest of a model: its manifest's if it has one, its files' (large ones by size and ends), or the hub id."""
    folder = Path(reference)
    if not folder.is_dir():
        return _hub_id(reference, where)
    if folder.name == "model" and (artifact := Artifact(folder.parent)).sealed:
        return artifact.digest
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{where}: '{reference}' holds no config.json; it must be a saved model")
    total = hashlib.sha256()
    files = [*folder.iterdir(), *(folder / "adapter").glob("*")]  # PPO reads a reward model's adapter
    for path in sorted(p for p in files if p.is_file()):
        size = path.stat().st_size
        total.update(f"{path.relative_to(folder).as_posix()}:{size}".encode())
        with path.open("rb") as file:
            total.update(file.read(_EDGE))
            file.seek(max(size - _EDGE, 0))
            total.update(file.read(_EDGE))
    return total.hexdigest()


def tokenizer_digest(reference: str, where: str) -> str:
    """Digest of a tokenizer: of its own files, so that the model beside it does not change it; or hub id."""
    folder = Path(reference)
    if not folder.is_dir():
        return _hub_id(reference, where)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name.startswith(_OF_A_TOKENIZER))
    if not any(path.name.startswith(("tokenizer.", "vocab.", "spiece.")) for path in files):
        raise SettingsError(f"{where}: '{reference}' holds no tokenizer.json; it must be a saved tokenizer or model")
    total = hashlib.sha256()
    for path in files:
        hash_file(total, path, path.name)
    return total.hexdigest()


def _hub_id(reference: str, where: str) -> str:
    """What stands for an id on the hub; refuses what can only be a folder."""
    refuse_missing_folder(reference, where)
    return f"hub:{reference}"


def code_digest(reference: str) -> str:
    """Hash of a `module:function`: the function's name and the source of its module."""
    module = importlib.import_module(sources.load_function(reference).__module__)
    source = getattr(module, "__file__", None)
    name = reference.partition(":")[2].encode()
    return hashlib.sha256(name + b"\0" + Path(source).read_bytes() if source else reference.encode()).hexdigest()


def seal(
    folder: Path,
    identity: Identity,
    metrics: dict[str, float],
    processes: int,
    hand_over: dict[str, Any],
    rows: dict[str, Any] | None = None,
) -> None:
    """Write manifest.json, last and atomically: from now on the artifact is finished and never changed.

    `hand_over` is what the next stage checks: tokenizer digest, vocabulary size, template, eos and pad ids. `rows` says
    of each source what was kept of its rows, and what left out and why.
    """
    remove_temporaries(folder)
    found = result_files(folder)
    names = [path.relative_to(folder).as_posix() for path in found]
    files = dict(zip(names, file_digests(found), strict=True))
    sizes = dict(zip(names, (path.stat().st_size for path in found), strict=True))
    give_usual_modes(found)
    sync({folder, *found, *(path.parent for path in found)})
    manifest = {
        "stage": identity.stage,
        "key": identity.key,
        "inputs": identity.inputs,
        "data": identity.data,
        "code": identity.code,
        "rows": rows or {},
        "settings": identity.settings,
        "hand_over": hand_over,
        "files": files,
        "sizes": sizes,
        "made_with": {
            "versions": _versions(),
            "commit": _commit(),
            "processes": processes,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "metrics": metrics,
    }
    replace_text(folder / "manifest.json", json.dumps(manifest, indent=1))


def result_files(folder: Path) -> list[Path]:
    """The files of a stage's result that are there, in order; links to folders are not followed."""
    found = [path for name in RESULTS for path in [folder / name, *(folder / name).rglob("*")]]
    return sorted(path for path in found if path.is_file())


def temporaries(folder: Path) -> list[Path]:
    """What a write that did not come to its end left below a stage's folder."""
    found = [
        path
        for path in folder.rglob(".*writing")
        if path.relative_to(folder).parts[0] in _OURS_WHOLE or is_temporary(path, folder, (*RESULTS, *BESIDE))
    ]
    return [path for path in found if not any(parent in found for parent in path.parents)]


def is_temporary(path: Path, folder: Path, names: Sequence[str]) -> bool:
    """Whether it lies in `folder` and is called as `replace_text` and others call what becomes one of `names`."""
    match = re.fullmatch(r"\.(.+?)(\.\d+)?\.writing", path.name)
    return path.parent == folder and match is not None and match[1] in names


def remove_temporaries(folder: Path) -> None:
    """Delete them; only a stage that nobody else is working on has any that are left over."""
    for path in temporaries(folder):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in (
        "rlhf-toolkit",
        "torch",
        "transformers",
        "trl",
        "peft",
        "datasets",
        "accelerate",
        "tokenizers",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def _commit() -> str | None:
    """Commit of the checkout that this code runs from, if it is one."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    answer = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None
