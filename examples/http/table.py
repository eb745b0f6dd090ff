"""A range of a stream as a pandas table: python table.py http://localhost:8080 FIRST LAST"""

from __future__ import annotations

import sys
import urllib.request

import pandas as pd
import pyarrow as pa


def table(url: str, first: int, last: int) -> pd.DataFrame:
    """The entries from `first` to `last` (included): columns number, type, data."""
    path = f"{url}/v1/entries?from={first}&to={last}&format=arrow"
    with urllib.request.urlopen(path) as answer:  # noqa: S310 - the caller's URL
        return pa.ipc.open_stream(answer).read_pandas()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    found = table(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    found["bytes"] = found["data"].str.len()
    print(found.groupby("type")["bytes"].agg(["count", "sum"]))
