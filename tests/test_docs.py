"""The documentation says what the program does."""

import importlib.util
import re
from pathlib import Path

import pytest

from rlhf.pipeline.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["recipes", "data"])
def test_a_page_that_is_written_by_the_code_is_the_one_that_it_writes(name: str) -> None:
    spec = importlib.util.spec_from_file_location(f"make_{name}", ROOT / "docs" / f"make_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == module.page(), f"run docs/make_{name}.py"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_recipe_in_the_readme_is_valid(tmp_path: Path) -> None:
    recipe = load_recipe(str(readme_recipe(tmp_path)))
    assert recipe.stages == ["sft", "reward", "ppo"]


def readme_recipe(folder: Path) -> Path:
    path = folder / "mine.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", README, re.DOTALL).group(1), encoding="utf-8")  # type: ignore[union-attr]
    return path
