"""settings.yaml of a stage's folder: written when the stage is begun, and read by whoever runs it. No torch."""

import re
from pathlib import Path
from typing import Any

import yaml

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages.disk import replace_text
from rlhf.stages.settings import AnyStage, StageSettings


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads plain values as OmegaConf does, in a tenth of its time."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes what `_Loader` and OmegaConf read as it was."""


for _kind in (_Loader, _Dumper):  # to YAML 1.1, 1e-5 is a word
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+$"), [*"+-0123456789"])


def yaml_text(content: Any) -> str:
    """Plain values as YAML, in their order."""
    return yaml.dump(content, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def write_settings(folder: Path, settings: StageSettings) -> None:
    """Write settings.yaml, from which the stage can be run again."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"stage": settings.stage, **settings.model_dump(mode="json")}
    replace_text(folder / "settings.yaml", yaml_text(content))


def read_settings(folder: Path, cls: type[AnyStage]) -> AnyStage:
    """Settings of the stage whose folder this is. Raises RefusedError for a file that is not there or is damaged."""
    path, content = folder / "settings.yaml", settings_in(folder)
    stage = content.pop("stage", cls.stage)
    if stage != cls.stage:
        raise SettingsError(f"{path}: holds settings of stage '{stage}', not '{cls.stage}'")
    try:
        return cls.load(content, cls.stage)
    except SettingsError as error:
        raise SettingsError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def settings_in(folder: Path) -> dict[str, Any]:
    """What the settings.yaml of a stage's folder says, not yet checked. Raises as `read_settings` does."""
    path = folder / "settings.yaml"
    if not path.is_file():
        raise RefusedError(
            f"{folder}: no settings.yaml, which names the settings that the stage runs with; put it there"
        )
    try:
        content = _Loader(path.read_text(encoding="utf-8")).get_single_data()
        what = "it holds no settings"
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        content, what = None, " ".join(str(error).split()).replace('in "<unicode string>", ', "")
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: cannot be read as a stage's settings ({what}); put it back as it was")
    return content
