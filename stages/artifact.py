"""The folder a stage leaves behind: what it was made from, its key, and the manifest that seals it. No torch."""

import hashlib
import importlib
import importlib.util
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from rlhf.data import sources
from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.files import hash_file
from rlhf.stages.settings import StageSettings

AnyStage = TypeVar("AnyStage", bound=StageSettings)

STAGES = ("pretrain", "sft", "reward", "ppo")
TRACKER_FOLDER = "logs"
"""What trackers write of a stage lies there: not part of the result, so it may be deleted."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
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
    data = {name: sources.digest(source) for name, source in settings.sources().items()}
    data |= {name: code_digest(reference) for name, reference in settings.code().items()}
    kept = settings.result_settings()
    return Identity(settings.stage, inputs, data, kept)


class Artifact:
    """A stage's folder, finished or not."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def sealed(self) -> bool:
        return (self.folder / "manifest.json").is_file()

    @property
    def manifest(self) -> dict[str, Any]:
        path = self.folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            manifest = None
        if not isinstance(manifest, dict) or "files" not in manifest:
            raise SettingsError(f"{path}: is damaged; move its folder away, and the stage runs again")
        return manifest

    @property
    def digest(self) -> str:
        """Hash over the hashes of the model's files: two runs that wrote the same model have the same digest."""
        files = {p: h for p, h in self.manifest["files"].items() if p.startswith("model/")}
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl."""
        return self._rows("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Rows of samples.jsonl: held-out prompts with the answers of SFT and PPO."""
        return self._rows("samples.jsonl")

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut the last one short


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
    """Digest of a tokenizer: of its folder's files without weights, so that training does not change it, or hub id."""
    folder = Path(reference)
    if not folder.is_dir():
        return _hub_id(reference, where)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix not in _WEIGHTS)
    if not any(path.name.startswith(("tokenizer.", "vocab.")) or path.suffix == ".model" for path in files):
        raise SettingsError(f"{where}: '{reference}' holds no tokenizer.json; it must be a saved tokenizer or model")
    total = hashlib.sha256()
    for path in files:
        hash_file(total, path, path.name)
    return total.hexdigest()


def _hub_id(reference: str, where: str) -> str:
    """What stands for an id on the hub; refuses what can only be a folder."""
    if Path(reference).is_absolute() or reference.startswith(".") or reference.count("/") > 1 or "\\" in reference:
        raise SettingsError(f"{where}: no folder '{reference}'")
    return f"hub:{reference}"


def code_digest(reference: str) -> str:
    """Hash of a `module:function`: the function's name and the source of its module."""
    module = importlib.import_module(sources.load_function(reference).__module__)
    source = getattr(module, "__file__", None)
    name = reference.partition(":")[2].encode()
    return hashlib.sha256(name + b"\0" + Path(source).read_bytes() if source else reference.encode()).hexdigest()


def write_settings(folder: Path, settings: StageSettings) -> None:
    """Write settings.yaml, from which the stage can be run again."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"stage": settings.stage, **settings.model_dump(mode="json")}
    replace_text(folder / "settings.yaml", OmegaConf.to_yaml(OmegaConf.create(content)))


def read_settings(folder: Path, cls: type[AnyStage]) -> AnyStage:
    """Settings of the stage whose folder this is."""
    path = folder / "settings.yaml"
    if not path.is_file():
        raise RefusedError(f"{folder}: no settings.yaml; it names the settings that the stage runs with")
    content = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path), resolve=True))
    stage = content.pop("stage", cls.stage)
    if stage != cls.stage:
        raise SettingsError(f"{path}: holds settings of stage '{stage}', not '{cls.stage}'")
    return cls.load(content, cls.stage)


def seal(
    folder: Path, identity: Identity, metrics: dict[str, float], processes: int, hand_over: dict[str, Any]
) -> None:
    """Write manifest.json, last and atomically: from now on the artifact is finished and never changed.

    `hand_over` is what the next stage checks: tokenizer digest, vocabulary size, template, eos and pad ids.
    """
    files = {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not {"checkpoints", TRACKER_FOLDER} & set(path.relative_to(folder).parts)
        and path.name != "status.json"
    }
    manifest = {
        "stage": identity.stage,
        "key": identity.key,
        "inputs": identity.inputs,
        "data": identity.data,
        "settings": identity.settings,
        "hand_over": hand_over,
        "files": files,
        "made_with": {
            "versions": _versions(),
            "commit": _commit(),
            "processes": processes,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "metrics": metrics,
    }
    replace_text(folder / "manifest.json", json.dumps(manifest, indent=1))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: to a temporary name beside it, then os.replace."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


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
