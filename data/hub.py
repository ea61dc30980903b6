"""What a model's name means where no folder here is called so: a slip, or an id of the hub. No torch."""

import difflib
import os
from pathlib import Path

from rlhf.data.errors import SettingsError, first_line

RUNS = Path("runs")
"""Where run folders lie by default."""
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""One of them is in the hub's cache here where anything of a model or tokenizer is."""
_SHOWN = 5


def refuse_missing_folder(reference: str, where: str = "") -> None:
    """Raise SettingsError where no folder is called so and the name can only be meant as a path. Asks nobody.

    `where` is the setting or option that names it.
    """
    path = Path(reference)
    if path.is_dir():
        return
    first, _, rest = reference.partition("/")
    if path.exists():
        raise SettingsError(f"{_before(where)}{reference} is a file; name a model's folder or a hub id")
    is_path = (
        path.is_absolute()
        or reference.startswith((".", "~"))
        or "\\" in reference
        or reference.count("/") > 1
        or (rest == "" and reference.endswith("/"))
        or first == RUNS.name
    )
    if is_path or (rest and Path(first).is_dir()):
        near = nearby(reference)
        raise SettingsError(f"{_before(where)}no folder '{reference}'{near and f'; {near}'}")


def refuse_unknown(reference: str, where: str = "") -> None:
    """Raise SettingsError where it is no folder here, and no model in the hub's cache here or on the hub.

    The hub gets one request and has ten seconds to answer it (HF_HUB_ETAG_TIMEOUT).
    """
    refuse_missing_folder(reference, where)
    if Path(reference).is_dir():
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if any(isinstance(try_to_load_from_cache(reference, name), str) for name in _FILES):
            return
        get_hf_file_metadata(hf_hub_url(reference, _FILES[0]))
        return
    except EntryNotFoundError:  # the repository is there; what it lacks is told when it is loaded
        return
    except HFValidationError:
        why = "it is no name that the hub could have"
    except GatedRepoError:
        why = "the hub gives it to those alone who were let in: ask on its page, and set HF_TOKEN or `hf auth login`"
    except RepositoryNotFoundError:
        why = "the hub has no such model (a private one is seen with HF_TOKEN or after `hf auth login`)"
    except OfflineModeIsEnabled:
        why = "HF_HUB_OFFLINE is set and the hub's cache here has no such model"
    except Exception as error:  # no network, a proxy that refuses, a hub that is down
        why = f"the hub could not be reached ({first_line(error)})"
    near = nearby(reference)
    raise SettingsError(f"{_before(where)}no folder '{reference}' here{near and f' ({near})'}, and {why}")


def nearby(reference: str) -> str:
    """Folders that may have been meant, in words; empty where there are none."""
    path = Path(reference)
    parent = next((folder for folder in path.parents if folder.is_dir()), Path())
    inside = _folders(parent)
    runs = _folders(RUNS)
    wanted = path.relative_to(parent).parts[:1]
    close = [f"{inside[name]}" for word in wanted for name in difflib.get_close_matches(word, inside, n=2)]
    close += [f"{runs[name]}" for name in difflib.get_close_matches(path.name, runs, n=2)]
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    if parent != Path():
        return f"{parent} has {_listed(list(inside))}" if inside else f"{parent} has no folders"
    return f"runs here: {_listed([str(folder) for folder in runs.values()])}" if runs else ""


def _folders(parent: Path) -> dict[str, Path]:
    try:
        names = sorted(entry.name for entry in os.scandir(parent) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return {}
    return {name: parent / name for name in names}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _before(where: str) -> str:
    return f"{where}: " if where else ""
