"""Peak memory and seconds of a PPO iteration by layout, each in a process of its own.

    python benchmarks/ppo_memory.py                      three layouts of a 90M model, on a CPU (about three minutes)
    python benchmarks/ppo_memory.py 1b                   the same of a 1.2B model, on a GPU
    python benchmarks/ppo_memory.py 8b adapters          one layout of an 8.0B model (Llama 3's shape) in bf16

Worlds and processes are those of ppo_step.py, which has a peer beside them. The first iteration is not timed.
"""

import argparse
import platform
import tempfile
from datetime import date
from pathlib import Path

from ppo_step import LAYOUTS, SIZES, child, device, make_world, summed_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("size", choices=SIZES, nargs="?", default="90m")
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, help=f"of {', '.join(LAYOUTS)}; all by default")
    parser.add_argument("--iterations", type=int, default=2, help="the first is not timed")
    parser.add_argument("--settings", default="{}", help="further settings of ppo, as JSON")
    options = parser.parse_args()
    if options.iterations < 2:
        parser.error("--iterations must be 2 or more: the first is not timed")
    if wrong := set(options.layouts) - set(LAYOUTS):
        parser.error(f"no layout called {', '.join(wrong)}")
    print(f"{date.today()}, {device()}, Python {platform.python_version()}, {options.size}")
    print(f"{'layout':16}{'peak GiB':>10}{'of separate':>14}{'seconds':>10}")
    with tempfile.TemporaryDirectory() as name:
        make_world(Path(name), options.size)
        first = None
        for layout in options.layouts:
            found = summed_up([child(options, options.size, layout, name)], SIZES[options.size]["prompts"])
            if "error" in found:
                print(f"{layout:16} failed: {found['error']}")
                continue
            first = found["gib"] if layout == "separate" else first
            share = f"{found['gib'] / first:.2f}" if first else "–"
            print(f"{layout:16}{found['gib']:>10.2f}{share:>14}{found['seconds']:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
