"""Kill -9 of the ranking page's server while people rank, and what their rankings come to.

    python benchmarks/rank_kills.py                          10 people × 200 rankings, ten kills
    python benchmarks/rank_kills.py --raters 4 --kills 3     others

Each person ranks over HTTP, and sends a ranking again, with the same id, until the server has said that it is kept. A
ranking is lost if the server said so and the store does not have it, and doubled if a person's ranking of a prompt is
there twice. Exits 1 if one of the two is not zero.
"""

import argparse
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "pipeline"))

from rank_kills import campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--raters", type=int, default=10)
    parser.add_argument("--rankings", type=int, default=200, help="of each rater")
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        outcome = campaign(Path(folder), options.raters, options.rankings, options.kills)
    doubled = len(outcome.stored) - options.raters * options.rankings
    print(f"{options.raters} raters × {options.rankings} rankings, {options.kills} kills, {outcome.seconds:.0f} s")
    print(f"acknowledged {len(outcome.acknowledged)}, sent more than once {outcome.again}")
    print(f"lost {outcome.lost}, doubled {doubled}")
    sys.exit(1 if outcome.lost or doubled else 0)


if __name__ == "__main__":
    main()
