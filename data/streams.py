"""Hub data sets that are streamed, copied to the disk in shares: one for each file that the data set consists of.

A share is there whole or not at all, so that it does not matter who makes which one, nor when. Of a row only the
columns are kept that its text is read from.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.data.columns import find
from rlhf.data.sources import AnySource, Source, from_hub, hub_set


def shares(source: Source, folder: Path) -> list[Path]:
    """Files for all shares, in the order of the data set."""
    return [folder / f"{number:06}.jsonl.zst" for number in range(hub_set(source).num_shards)]


def copy_share(source: Source, number: int, file: Path) -> None:
    """Download a share, from 0, into `file`. Raises ConnectionLost; the shares that are there stay."""
    import pyarrow

    kept = f"; what was copied is kept in {file.parent}"
    share = f"share {number + 1}"
    with from_hub(source, share, kept):  # the set was opened when its shares were counted
        rows = hub_set(source)
    wanted = (find(name, rows.column_names or []) for name in {source.column, *source.map.values()})
    columns = sorted({column for column in wanted if column is not None})
    if columns:  # without, reading says which ones there are instead
        rows = rows.select_columns(columns)

    def read() -> Iterator[Any]:  # apart from the writing, whose errors are none of the hub's
        with from_hub(source, share, kept):
            yield from rows.shard(num_shards=rows.num_shards, index=number)

    writing = file.with_name(f".{file.name}.writing")
    with pyarrow.output_stream(str(writing), compression="zstd") as stream:
        for row in read():
            stream.write(json.dumps(row, default=str).encode() + b"\n")
    os.replace(writing, file)


def copied(source: AnySource, folder: Path) -> AnySource:
    """The source, to be read from its copies in `folder`."""
    return source.model_copy(update={"path": str(folder), "streaming": False})
