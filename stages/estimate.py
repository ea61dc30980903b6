"""GiB and seconds of a recipe's stages on a device, before anything is run; and what to change where it does not fit.

Run by `rlhf estimate`, which has read the recipe: it writes a request to the standard input, as JSON, and is told the
same way. What a stage holds and does is in `budget` and its like; this module says what that comes to on a device.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlhf.data.errors import RefusedError
from rlhf.stages.budget_changes import changes
from rlhf.stages.budget_parallel import LAYOUTS
from rlhf.stages.budget_ppo import notes
from rlhf.stages.budget_recipe import Request, phases_of, refuse_too_long
from rlhf.stages.budget_seconds import chosen, seconds, sending
from rlhf.stages.devices import PER_MACHINE, Device
from rlhf.stages.logs import be_quiet
from rlhf.stages.ppo.config import PPOSettings


def main() -> None:
    """Read a request, write each stage as it begins and the answer in the last line."""
    be_quiet()
    request = Request(**json.load(sys.stdin))
    print(json.dumps(answer(request, lambda stage: print(f"estimating {stage}", flush=True))))


def answer(request: Request, tell: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """Of every stage: its phases, whether they fit, and if not, what to change. A stage that begins is told."""
    refuse_too_long(request)
    device = chosen(request.device)
    stages = {}
    for stage in request.stages:
        tell(stage)
        stages[stage] = _best(request, stage, device)
    return {
        "device": {"name": device.name, "gib": round(device.gib, 2), "usable_gib": round(device.usable, 2)},
        "fits": all(found["fits"] for found in stages.values()),
        "stages": stages,
    }


def _best(request: Request, stage: str, device: Device) -> dict[str, Any]:
    """The stage in the layout that is asked for; or in the first that fits, or else in the last."""
    settings, asked = request.section(stage), request.layouts.get(stage, "ddp")
    can_spread = request.processes_of(stage) > 1 and next(settings.why_not_spread(), None) is None
    peaks: dict[str, float] = {}
    for layout in (asked,) if asked is not None else LAYOUTS if can_spread else LAYOUTS[:1]:
        in_layout = replace(request, layouts=request.layouts | {stage: layout})
        found = _told(in_layout, stage, settings, device)
        peaks[layout] = found["peak_gib"]
        if found["fits"]:
            break
    else:
        found["changes"] = changes(in_layout, stage, settings, device)
    return found | {"peak_gib_in": peaks}


def _told(request: Request, stage: str, settings: Any, device: Device) -> dict[str, Any]:
    phases, precision = phases_of(request, stage, settings, device)
    num = request.processes_of(stage)
    found = [
        {
            "name": phase.name, "gib": {kind: round(size, 4) for kind, size in phase.gib.items()},
            "total_gib": round(phase.total, 4), "seconds": seconds(phase, device, precision, num),
            "seconds_sending": sending(phase, device, num), "times": phase.times,
        }
        for phase in phases
    ]  # fmt: skip
    peak = max(phase.total for phase in phases)
    known_times = all(phase.times is not None for phase in phases)
    total = max(
        sum(seconds(phase, device, precision, num) * (phase.times or 0) for phase in phases if phase.beside is beside)
        for beside in (False, True)
    )
    return {
        "num_processes": num, "machines": math.ceil(num / PER_MACHINE), "layout": request.layouts[stage],
        "precision": precision, "peak_gib": round(peak, 4), "fits": peak <= device.usable,
        "seconds": total if known_times else None, "phases": found, "changes": [],
        "notes": notes(settings) if isinstance(settings, PPOSettings) else [],
    }  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except RefusedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
