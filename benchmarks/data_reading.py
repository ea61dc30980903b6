"""How fast rows of preferences are read from JSON Lines and checked, and in how much memory.

    python benchmarks/data_reading.py                  100,000 rows of 2 kB, against 10,000 for the memory

Each reading is a process of its own, with one thread, that goes through `rlhf.data.rows.iterate` and keeps nothing. The
file is written just before, so that the disk plays no part. `rows/s` counts the process's seconds on a core, which
other work on the machine changes little; `on the clock` counts the seconds that went by. Half of the rows are plain
ASCII; the others hold line ends and letters of several bytes, as real texts do.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

SENTENCE = "the a small grey fox says that it was never there before because nobody asked for more than this"
SHAPES = {
    "prompt, chosen, rejected": lambda prompt, answers: {
        "prompt": prompt,
        "chosen": answers[0],
        "rejected": answers[1],
    },
    "chosen, rejected as messages": lambda prompt, answers: {
        name: [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for name, answer in zip(("chosen", "rejected"), answers, strict=True)
    },
    "prompt, responses, ranks": lambda prompt, answers: {"prompt": prompt, "responses": answers, "ranks": [1, 2]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=2000, help="of a row")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.read)))
        return
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'shape':30}{'rows':>9}{'MB':>6}{'rows/s':>9}{'on the clock':>14}{'peak MiB':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            for rows in (options.rows // 10, options.rows):
                file = Path(folder) / "rows.jsonl"
                write(file, shape, rows, options.bytes)
                size = file.stat().st_size / 1e6
                words = [sys.executable, __file__, "--read", str(file)]
                answer = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
                assert answer["kept"] == rows
                speed, clock = rows / answer["core_seconds"], rows / answer["seconds"]
                print(
                    f"{shape:30}{rows:>9,}{size:>6.0f}{speed:>9,.0f}{clock:>14,.0f}{answer['mib']:>10.1f}", flush=True
                )


def write(file: Path, shape: str, rows: int, size: int) -> None:
    """Rows of `size` bytes: a prompt of a seventh of them, and two answers."""
    random.seed(0)
    with file.open("w", encoding="utf-8") as stream:
        for number in range(rows):
            break_, letter = ("\n\n", "é") if number % 2 else (" ", "")
            texts = []
            for share in (0.14, 0.3, 0.3):
                words = f"{number} " + " ".join(random.choices(SENTENCE.split(), k=int(share * size / 4.9)))
                texts.append(words.replace(" was ", letter + break_))
            row = json.dumps(SHAPES[shape](texts[0], texts[1:]), ensure_ascii=False)
            missing = size - len(row.encode()) - 1 - len(', "note": ""')
            stream.write(row[:-1] + f', "note": "{"n" * max(missing, 0)}"}}\n')


def read(file: Path) -> dict[str, float]:
    """Rows kept, seconds on a core and on the clock, and the process's peak memory."""
    from rlhf.data.rows import Report, iterate
    from rlhf.data.sources import Source

    report = Report("preferences")
    begin, begin_core = time.perf_counter(), time.process_time()
    for _ in iterate(Source(path=str(file)), "preferences", report):
        pass
    seconds, core_seconds = time.perf_counter() - begin, time.process_time() - begin_core
    status = Path("/proc/self/status").read_text()  # getrusage would count what the parent held when it started us
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return {"kept": report.kept, "seconds": seconds, "core_seconds": core_seconds, "mib": peak}


if __name__ == "__main__":
    main()
