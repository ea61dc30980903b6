"""The words of a command that is a process of its own, which are refused as any bad input is: in one line."""

import argparse
from typing import NoReturn

from rlhf.data.errors import SettingsError


class Arguments(argparse.ArgumentParser):
    """Raises SettingsError for words that make no sense."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; `{self.prog} --help` tells more")
