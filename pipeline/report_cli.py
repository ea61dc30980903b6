"""`rlhf report`: the page of one run, or several runs compared."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlhf.data.errors import SettingsError

report_app = typer.Typer()
COMPARISON = Path("comparison.html")


@report_app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folder of a run; several to compare them.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Where a comparison goes; comparison.html by default.", show_default=False
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="PRICE",
            help="What an hour of the run's machines costs, to show what each stage cost.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a run's report.html anew, or compare runs.

    A comparison says which settings differ and puts metrics, curves and answers side by side, in a page of its own; the
    main figures are printed as well.
    """
    from rlhf.pipeline.progress import waiting

    if len(run_dirs) == 1:
        if out is not None:
            raise SettingsError("--out: goes with several runs; the report of one is its report.html")
        with waiting("drawing the report"):
            from rlhf.pipeline.report.page import draw, refuse_unwritable  # matplotlib takes its time
            from rlhf.pipeline.report.run import read_run

            run = read_run(run_dirs[0])
            refuse_unwritable(run.folder / "report.html")
            page = draw(run, price_per_hour)
        _warn(run.warnings)
        print(page)
        return
    if price_per_hour is not None:
        raise SettingsError("--price-per-hour: goes with one run")
    from rlhf.pipeline.report.compare import Comparison
    from rlhf.pipeline.report.page import refuse_unwritable, write
    from rlhf.pipeline.tables import show_table

    refuse_unwritable(out or COMPARISON, "--out" if out else "")
    with waiting("comparing the runs"):
        comparison = Comparison(run_dirs)
        write(out or COMPARISON, comparison.page())
    _warn([warning for run in comparison.runs for warning in run.warnings])
    if equality := comparison.equality():
        print(equality)
    show_table(*comparison.table())
    print(out or COMPARISON)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
