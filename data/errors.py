"""The errors people see: what was found, where, and what would work; and what a signal raises."""


class RefusedError(ValueError):
    """Bad input found before anything was trained; the command line exits with code 2."""


class DataError(RefusedError):
    """A file, row or column that cannot be used; the message names it and the cure."""


class SettingsError(RefusedError):
    """A recipe or setting that cannot be used; the message names the key and the cure."""


class Stopped(SystemExit):
    """A signal ended what was being done, which can be resumed; `code` is the exit code that goes with it."""


def first_line(error: Exception) -> str:
    """What an error says first; libraries go on for pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
