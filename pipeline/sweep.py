"""A sweep: the pretrain stage of one recipe in several variants, in one run folder, with a table of them all.

`rlhf pretrain RECIPE --sweep FILE`. The file is a list of mappings of pretrain settings, each a variant; or a mapping
of lists, a grid of which every combination is a variant.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path
from typing import Any

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.plan import Scope
from rlhf.pipeline.preflight import Say
from rlhf.pipeline.recipe import Recipe, load_recipe, read_yaml, resolved
from rlhf.pipeline.runner import checked, render_report, run_steps, write_recipe
from rlhf.pipeline.scaling import Evaluation, study
from rlhf.pipeline.summary import Entry, duration, write_summary
from rlhf.stages.artifact import Artifact
from rlhf.stages.disk import replace_text

SWEEP = "sweep.json"
"""In the run folder: a row per variant of the last sweep, and the scaling study where there are sizes to compare."""


@dataclass(frozen=True)
class Variant:
    """A recipe that differs from the others of its sweep in some settings of pretrain."""

    name: str
    settings: dict[str, Any]
    recipe: Recipe


def load_sweep(sweep: str, recipe: str, overrides: Sequence[str] = ()) -> list[Variant]:
    """The variants of a sweep file (a path or a shipped name), each laid over the recipe and validated.

    Raises SettingsError naming the file and the entry, and what would work.
    """
    if load_recipe(recipe, overrides).pretrain is None:  # on its own first: its mistakes are not the sweep's
        raise SettingsError(f"{recipe}: no section 'pretrain', which is what a sweep varies; add one")
    variants: list[Variant] = []
    entries = _entries(sweep)
    names = [entry.pop("name", None) for entry in entries]
    differing = _differing(entries)
    for place, (given, settings) in enumerate(zip(names, entries, strict=True), start=1):
        name = str(given or _description(settings, differing))
        where = f"{sweep}: entry {place} ({name})"
        try:
            variant = Variant(name, settings, load_recipe(recipe, overrides, settings))
        except SettingsError as error:
            raise SettingsError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None
        for other in variants:
            if other.name == name:
                raise SettingsError(f"{where}: an entry before it has the same name; give it another")
            if _result_of(other) == _result_of(variant):
                raise SettingsError(f"{where}: trains the same model as entry '{other.name}'; take one out")
        variants.append(variant)
    if not variants:
        raise SettingsError(f"{sweep}: no variants; list some, or give each setting at least one value")
    return variants


def shipped_sweeps() -> dict[str, Traversable]:
    """The sweeps that come with the package, by name."""
    files = resources.files("rlhf.recipes").joinpath("sweeps").iterdir()
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}


def run_sweep(
    variants: Sequence[Variant], run_dir: Path, force: bool = False, say: Say = print, source: Path | None = None
) -> list[dict[str, Any]]:
    """Train all variants in one run folder, reusing and resuming as any run does; the rows of sweep.json.

    Everything is checked before the first is trained. A variant that breaks has an `error` in its row and the others
    go on; running again resumes it. In the end recipe.yaml, summary.json and report.html are those of the best
    variant, so the run can go on with it: `rlhf run RUN/recipe.yaml --run-dir RUN`.
    """
    scope = Scope("pretrain", "pretrain", frozenset(["pretrain"] if force else ()))
    known_seconds = {row["folder"]: row["seconds"] for row in read_sweep(run_dir)["rows"]}
    rows: list[dict[str, Any]] = []
    best: tuple[float, Recipe, dict[str, Entry]] | None = None
    with checked([variant.recipe for variant in variants], run_dir, scope, say, source) as (lock, plans):
        for place, (variant, steps) in enumerate(zip(variants, plans, strict=True), start=1):
            step = next(step for step in steps if step.stage == "pretrain")
            assert step.folder is not None
            line = f"[{place}/{len(variants)}] {variant.name}:"
            say(f"{line} {step.action} {step.folder.name}")
            error = None
            entries = {"pretrain": Entry("failed", folder=step.folder.name)}
            try:
                entries = run_steps(steps, variant.recipe, run_dir, scope, lock, _say_nothing)[0]
            except (RunFailed, RefusedError) as failure:
                error = str(failure)
            entry = entries["pretrain"]
            if entry.seconds is None:
                entry = entries["pretrain"] = replace(entry, seconds=known_seconds.get(step.folder.name))
            rows.append(row := _row(variant, entry, error))
            _write(run_dir, rows)
            say(f"{line} {error or f'val_loss {_loss(row)}'}  {duration(entry.seconds)}".rstrip())
            if row["val_loss"] is not None and (best is None or row["val_loss"] < best[0]):
                best = row["val_loss"], variant.recipe, entries
        if best is not None:
            write_summary(run_dir, best[2])
            write_recipe(run_dir, best[1])
            render_report(run_dir)
    return rows


def read_sweep(run_dir: Path) -> dict[str, Any]:
    """What sweep.json holds; no rows if there is none."""
    path = run_dir / SWEEP
    if not path.is_file():
        return {"rows": [], "scaling": None}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path}: not the result of a sweep ({error}); delete it and run the sweep again") from None
    return content


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells, best variant first, those without a result last; of the settings those that differ."""
    ranked = sorted(rows, key=lambda row: math.inf if row["val_loss"] is None else row["val_loss"])
    shown = _differing([row["settings"] for row in rows])
    named = any(row["name"] != _description(row["settings"], shown) for row in rows)
    columns = [*(["variant"] if named else []), *shown]
    columns += ["parameters", "not embeddings", "tokens", "val_loss", "behind best", "best step", "time", "folder"]
    cells = []
    for place, row in enumerate(ranked):
        behind = "" if row["val_loss"] is None else f"{row['val_loss'] - ranked[0]['val_loss']:+.4f}"
        counts = [row[name] for name in ("num_parameters", "num_non_embedding_parameters", "num_tokens")]
        cells.append([
            *([row["name"]] if named else []), *(str(row["settings"].get(name, "")) for name in shown),
            *("" if count is None else f"{count:,}" for count in counts), _loss(row), behind if place else "",
            str(row["best_step"] or ""), duration(row["seconds"]), row["folder"],
        ])  # fmt: skip
    return columns, cells


def _entries(sweep: str) -> list[dict[str, Any]]:
    """The settings of each variant; those of a grid in the order of nested loops."""
    content = resolved(read_yaml(sweep, shipped_sweeps(), "sweep"), sweep)
    if isinstance(content, dict):
        lists = [value if isinstance(value, list) else [value] for value in content.values()]
        return [dict(zip(map(str, content), values, strict=True)) for values in product(*lists) if content]
    for place, entry in enumerate(content, start=1):
        if not isinstance(entry, dict):
            raise SettingsError(f"{sweep}: entry {place} is {entry!r}; it must be a mapping of pretrain settings")
    return [{str(name): value for name, value in entry.items()} for entry in content]


def _differing(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The settings that are not the same in all entries."""
    names = dict.fromkeys(name for entry in entries for name in entry)
    return [name for name in names if any(name not in e or e[name] != entries[0].get(name) for e in entries)]


def _description(settings: dict[str, Any], differing: Sequence[str]) -> str:
    """The name of a variant that was given none."""
    return ", ".join(f"{name}={settings[name]}" for name in differing if name in settings) or "as the recipe"


def _result_of(variant: Variant) -> dict[str, Any]:
    """The settings that decide the result; equal ones would train into one folder."""
    pretrain = variant.recipe.pretrain
    assert pretrain is not None
    return pretrain.model_dump(mode="json", exclude=set(pretrain.not_in_key))


def _row(variant: Variant, entry: Entry, error: str | None) -> dict[str, Any]:
    metrics = (
        "num_parameters", "num_non_embedding_parameters", "num_tokens", "vocab_size", "val_loss", "best_step",
    )  # fmt: skip
    return {
        "name": variant.name,
        "settings": variant.settings,
        "folder": entry.folder,
        **{name: entry.metrics.get(name) for name in metrics},
        "seconds": entry.seconds,
        "error": error,
    }


def _write(run_dir: Path, rows: Sequence[dict[str, Any]]) -> None:
    scaling = _scaling(run_dir, rows)
    replace_text(run_dir / SWEEP, json.dumps({"rows": rows, "scaling": scaling}, indent=1))


def _scaling(run_dir: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The scaling study; None without sizes to compare, or where vocabularies differ: losses per token do not compare
    then."""
    counted = [row for row in rows if row["val_loss"] and row["num_non_embedding_parameters"]]
    if len({row["vocab_size"] for row in counted}) > 1:
        return None
    sizes = [(float(row["num_non_embedding_parameters"]), float(row["val_loss"])) for row in counted]
    evaluations = [
        Evaluation(row["name"], row["num_non_embedding_parameters"], num_tokens, loss)
        for row in counted
        for num_tokens, loss in _evaluations(Artifact(run_dir / row["folder"]))
    ]
    found = study(sizes, evaluations)
    if found is None:
        return None
    return {name: part | {"fit": part["fit"] and asdict(part["fit"])} for name, part in found.items()}


def _evaluations(artifact: Artifact) -> list[tuple[int, float]]:
    """Tokens seen and held-out loss of each evaluation."""
    found = {}
    for row in artifact.metrics:  # a resumed stage logs some again: the later row is the one that counts
        loss = row.get("val_loss")
        if loss is not None and math.isfinite(loss) and row.get("num_tokens"):
            found[row["num_tokens"]] = loss
    return sorted(found.items())


def _loss(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return "failed"
    return "" if row["val_loss"] is None else f"{row['val_loss']:.4f}"


def _say_nothing(_text: str) -> None:
    """A sweep has its own lines."""
