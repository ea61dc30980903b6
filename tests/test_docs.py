"""The documentation says what the program does."""

import importlib.util
import re
from pathlib import Path

from rlhf.pipeline.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_of_settings_is_the_one_that_the_settings_write() -> None:
    spec = importlib.util.spec_from_file_location("make_recipes", ROOT / "docs" / "make_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == module.page(), "run docs/make_recipes.py"


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
