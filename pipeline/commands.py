"""All commands, and the exit codes of what they raise. One imports what it needs when it runs: --help stays quick."""

import os
import sys
import traceback
from collections.abc import Sequence
from errno import ENOENT
from pathlib import Path
from typing import Annotated

import typer

from rlhf.data.errors import RefusedError, ToldHowToGoOn, of_file, printable
from rlhf.pipeline import streams
from rlhf.pipeline.data_cli import data_app
from rlhf.pipeline.errors import DEBUG, RunFailed, RunStopped
from rlhf.pipeline.eval_cli import eval_app
from rlhf.pipeline.feedback_cli import feedback_app
from rlhf.pipeline.model_cli import model_app
from rlhf.pipeline.rank_cli import rank_app
from rlhf.pipeline.report_cli import report_app
from rlhf.pipeline.run_cli import run_app
from rlhf.pipeline.sample_cli import sample_app
from rlhf.pipeline.start_cli import start_app
from rlhf.pipeline.tools_cli import tools_app
from rlhf.pipeline.usage import UsageError, is_help, told
from rlhf.stages.secrets import mask
from rlhf.stages.signals import exit_on_signal, handled

app = typer.Typer(
    name="rlhf",
    help="From raw text to a PPO-tuned language model: pretrain, sft, reward, ppo.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(start_app)
app.add_typer(run_app)
app.add_typer(eval_app)
app.add_typer(report_app)
app.add_typer(tools_app)
app.add_typer(model_app)
app.add_typer(sample_app)
app.add_typer(rank_app)
data_app.add_typer(feedback_app)
app.add_typer(data_app, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("rlhf-toolkit"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _rlhf(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
    is_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:  # --debug is read by carry_out, which shows the errors
        from rlhf.pipeline.welcome import welcome

        print(welcome(Path()))


def carry_out(arguments: Sequence[str] | None) -> None:
    """See `cli.main`."""
    if arguments is None:
        streams.prepare()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in words:
        os.environ[DEBUG] = "1"
    words = [word for word in words if word != "--debug"]
    streams.show_all_signs()
    try:
        with handled(exit_on_signal):
            code = app(words, prog_name="rlhf", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except RunStopped as stop:
        if str(stop):
            print(stop, file=sys.stderr)
        raise
    except SystemExit as stop:
        if stop.code in (130, 143):
            print("stopped; run again to go on", file=sys.stderr)
        raise
    except RefusedError as error:
        _show(error, str(error))
        sys.exit(2)
    except UsageError as error:
        if is_help(error):
            print(error, file=sys.stderr)
        else:
            _show(error, told(error))
        sys.exit(2)
    except (RunFailed, ToldHowToGoOn) as error:
        _show(error, str(error))
        sys.exit(1)
    except OSError as error:
        _show(error, f"{of_file(error)} (--debug shows where)")
        of_a_place = error.filename is not None or error.errno == ENOENT
        sys.exit(2 if error.errno is not None and of_a_place else 1)  # nothing has `begun`
    except Exception as error:
        _show(error, f"{type(error).__name__}: {error} (--debug shows where)")
        sys.exit(1)


def _show(error: Exception, message: str) -> None:
    if os.environ.get(DEBUG):
        print(mask("".join(traceback.format_exception(error))), file=sys.stderr)
    print(printable(mask(f"error: {message}")), file=sys.stderr)
