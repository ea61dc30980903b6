"""Files and folders that are written whole or not at all, and are on the disk when they are said to be. No torch."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rlhf.data.errors import SettingsError, is_utf8


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Hashes of several files, a few at a time: hashing lets other threads run."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(file_digest, paths))


def replace_text(path: Path, text: str, sync: bool = True) -> None:
    """Write a whole file or nothing: to a temporary name beside it, then os.replace.

    With `sync` that holds after a power cut too; without, it is for what is written often and means little then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # the name that people know
        raise
    if sync:
        sync_path(path.parent)


def refuse_other_than_utf8(folder: Path, where: str = "") -> None:
    """Refuse a folder to write to whose name the libraries could not write models under; `where` names its option."""
    name = str(folder.absolute())
    if not is_utf8(name):
        raise SettingsError(
            f"{where}{name!r}: the name is not UTF-8, in which models and recipes are saved; choose one that is"
        )


def refuse_no_room_beside(path: Path) -> None:
    """Refuse a place for something new whose folder is not there, cannot be written to, or has an impossible name."""
    refuse_other_than_utf8(path)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise SettingsError(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{path}: {folder} cannot be written to; change its mode, or name another place")


def copy_folder(source: Path, folder: Path) -> None:
    """Copy a folder beside `folder`, then swap it in: nothing that an earlier attempt left there stays."""
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    shutil.copytree(source, writing)
    swap_folder(writing, folder)


def swap_folder(writing: Path, folder: Path) -> None:
    """Put a folder that was written aside in the place of `folder`, once all of it is on the disk itself."""
    written = tree(writing)
    give_usual_modes(path for path in written if path.is_file())
    sync(written)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(writing, folder)
    sync_path(folder.parent)


def give_usual_modes(files: Iterable[Path]) -> None:
    """Let others read and write files as the umask says; safetensors makes its own for their owner alone."""
    usual: dict[Path, int] = {}
    for path in files:
        if path.stat().st_mode & 0o777 != 0o600:
            continue
        if path.parent not in usual:
            probe = path.with_name(f".{path.name}.{os.getpid()}.writing")  # asking for the umask would change it
            probe.touch()
            usual[path.parent] = probe.stat().st_mode & 0o777
            probe.unlink()
        path.chmod(usual[path.parent])


def sync_path(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself, where a power cut does not reach them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts cannot
            raise
    finally:
        os.close(descriptor)


def sync(paths: Iterable[Path]) -> None:
    """The same for many, several at a time: the disk then waits for all of them together."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync_path, paths))


def tree(folder: Path) -> list[Path]:
    """A folder and all that is in it."""
    return [folder, *folder.rglob("*")]
