"""A thousand spoilt recipes and a thousand spoilt data files, each through the command line.

    python benchmarks/fuzz.py                  a few minutes
    python benchmarks/fuzz.py --number 100 --seed 7

Each must end with 0, or with 2 and a message that names the place: no traceback, nothing that never ends, no file
outside of the run folder. Recipes go through `rlhf plan`, a tenth of them through a run of one step; data files
through `rlhf data check`, a tenth through the reading before a run. Prints a table and every case that fails; exits 1
if there is one.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "faults"))

from faults_world import RECIPE, Server, write_world
from fuzzing import Case, run_case
from spoilt_data import data_files
from spoilt_recipes import recipes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--number", type=int, default=1000, help="of recipes, and of data files")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    began = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        write_world(home)
        (home / "good.yaml").write_text(RECIPE)
        os.chdir(home)
        os.environ |= {"HOME": name, "HF_HUB_OFFLINE": "1"}
        server = Server(home)
        print(f"{'':14}{'cases':>7}{'exit 0':>8}{'exit 2':>8}{'failed':>8}")
        for what, cases in (
            ("recipes", recipes(options.seed, options.number, run_share=0.1)),
            ("data files", data_files(options.seed, options.number, run_share=0.1)),
        ):
            codes: Counter[str] = Counter()
            for number, case in enumerate(cases):
                result = run_case(case, home, server)
                codes["failed" if result.problems else str(result.code)] += 1
                if result.problems:
                    show(what, number, case, result.problems, result.message)
            failed += codes["failed"]
            print(f"{what:14}{codes.total():7}{codes['0']:8}{codes['2']:8}{codes['failed']:8}")
        os.chdir("/")
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(1 if failed else 0)


def show(what: str, number: int, case: Case, problems: list[str], message: str) -> None:
    print(f"{what} {number}: rlhf {' '.join(case.words)}\n  {case.what}\n  {'; '.join(problems)}\n  {message[-300:]!r}")


if __name__ == "__main__":
    main()
