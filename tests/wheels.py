"""The wheel, built of this checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ["data", "stages", "pipeline", "recipes"]


def build_wheel(folder: Path) -> Path:
    """Built in `folder` from a copy: a build in the checkout would leave build/ behind, which later wheels pick up."""
    source, out = folder / "source", folder / "wheel"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", out, source], check=True, capture_output=True, cwd=folder)
    return next(out.glob("*.whl"))


def newest_wheel(folder: Path) -> Path:
    """What `make typecheck` has built, if that is newer than all sources; else one is built in `folder`."""
    sources = [ROOT / "pyproject.toml", *(path for name in PACKAGES for path in (ROOT / name).rglob("*.*"))]
    changed = max(path.stat().st_mtime for path in sources if path.is_file() and path.suffix != ".pyc")
    built = [path for path in (ROOT / "build" / "wheel").glob("*.whl") if path.stat().st_mtime > changed]
    return built[0] if built else build_wheel(folder)
