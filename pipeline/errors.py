"""How a run that was not refused can end other than well; the command line makes exit codes of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.data.errors import of_file

DEBUG = "RLHF_DEBUG"
"""Set in the environment: tracebacks are shown, in this process and in those of the stages. `--debug` sets it."""


class RunFailed(RuntimeError):
    """Something broke during the run; finished work is kept, running again resumes. Exit code 1."""


class RunStopped(SystemExit):
    """A signal ended the run with its state saved. `code` is 128 + the signal's number; the message is empty where the
    stage said it all."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def begun() -> Iterator[None]:
    """Something has begun: what the system says of a file from here on is a failure. Before, it is a refusal."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"{of_file(error)} (--debug shows where)") from error
