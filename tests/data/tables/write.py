"""Write the files beside this one with the tools that they are called after: ``python tests/data/tables/write.py``.

Needs pandas, fastparquet and duckdb, which hotbed does not; tests read what they wrote.
"""

import datetime
from pathlib import Path

import duckdb
import pandas as pd

N = 60
HERE = Path(__file__).parent
START = datetime.datetime(2024, 3, 1, tzinfo=datetime.UTC)
frame = pd.DataFrame(
    {
        "label": [i % 2 for i in range(N)],
        "user": [None if i == 3 else i % 7 + 1 for i in range(N)],
        "city": [None if i == 4 else f"city {i % 5}" for i in range(N)],
        "price": [None if i == 5 else i / 4 for i in range(N)],
        "member": [i % 3 == 0 for i in range(N)],
        "when": [START + datetime.timedelta(hours=i) for i in range(N)],
    }
)

# Integers where one is missing are floats, as ever.
frame.to_parquet(HERE / "pandas_plain.parquet", row_group_size=25)
# A column of the index is stored beside the others.
frame.set_index(pd.Index([i * 3 % 61 for i in range(N)])).to_parquet(HERE / "pandas_index.parquet")
frame.astype({"user": "Int64", "city": "category", "member": "boolean", "label": "int8"}).to_parquet(
    HERE / "pandas_nullable.parquet"
)
frame.convert_dtypes(dtype_backend="pyarrow").to_parquet(HERE / "pandas_arrow.parquet")
frame.astype({"city": "category"}).to_parquet(HERE / "fastparquet_plain.parquet", engine="fastparquet")
duckdb.from_df(frame).write_parquet(str(HERE / "duckdb_plain.parquet"))
