"""How fast the ranking page answers, and how large it is.

    python benchmarks/rank_page.py                  100,000 prompts with 4 answers of 400 characters each

Over HTTP, in a process of its own: `next` is the page with another prompt after a ranking, `rank` a ranking until the
server says that it is kept. The first row is of a rater who has ranked nothing, the second of one with many rankings.
"""

import argparse
import os
import platform
import re
import signal
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "pipeline"))

from feedback_store import fill, rank_many, timed
from rank_kills import Server
from rank_world import Person, ranking

from rlhf.data.feedback.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=200, help="rankings of each rater")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.sqlite"
        with Store.create(path) as store:
            fill(store, options.prompts)
            own = options.prompts // 20
            rank_many(store, store.add_rater("many"), own)
        server = Server(path)
        print(f"{'own rankings':>14}{'next ms':>10}{'p99':>8}{'rank ms':>10}{'p99':>8}")
        for name, num in (("new", 0), ("many", own)):
            measure(Person(server.port), name, num, options.times)
        sizes(Person(server.port))
        server.end(signal.SIGTERM)


def measure(person: Person, name: str, own: int, times: int) -> None:
    person.enter(name)
    given, taken = [], []
    for _ in range(times):
        seconds, form = timed(person.form)
        given.append(seconds)
        said = ranking(form, 1, 2, 3, 4)
        seconds, reply = timed(lambda said=said: person.post("/rank", said))  # type: ignore[misc]
        assert reply.status == 200, reply.text
        taken.append(seconds)
    cells = "".join(f"{1e3 * median(t):>10.1f}{1e3 * sorted(t)[-1 - len(t) // 100]:>8.1f}" for t in (given, taken))
    print(f"{own:>14,}{cells}", flush=True)


def sizes(person: Person) -> None:
    """The page, and everything that a browser loads with it the first time."""
    page = person.enter("new").get().text
    [folder] = set(re.findall(r'"/([0-9a-f]{12})/', page))
    names = set(re.findall(rf'"/{folder}/([^"]+)"', page))
    names |= set(re.findall(r'from "\./([^"]+)"', person.get(f"/{folder}/page.js").text))
    rest = "".join(person.get(f"/{folder}/{name}").text for name in sorted(names))
    whole = len((page + rest).encode())
    print(f"page {len(page.encode()) / 1e3:.1f} kB, with styles and scripts {whole / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
