"""Real tables with their text columns, as CSV files that anybody might have."""

import csv
import gzip
from itertools import islice

from fedapp.data.schema import REGISTRY

AIRLINE = (
    *("Month", "DayofMonth", "DayOfWeek", "CRSDepTime", "UniqueCarrier", "DepDelay"),
    *("Origin", "Dest", "Distance", "TaxiOut"),
)
LATE = 15  # minutes
KDDCUP_ROWS, AIRLINE_ROWS = 494_021, 183_527


def write_csv(path, columns, rows):
    """A CSV of these rows; ``?`` is missing."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([["" if cell == "?" else cell for cell in row] for row in rows])
    return path


def adult(folder, real, n_rows):
    """Census rows: eight text columns, three of them with missing values; label income."""
    columns = REGISTRY["adult"].reader.columns
    with gzip.open(real / "adult.txt.gz", "rt") as file:
        rows = [line.split() for line in islice(file, n_rows)]
    return write_csv(folder / "adult.csv", columns, rows)


def kddcup(folder, real, n_rows):
    """Network connections: three text columns, up to 23 classes, one text missing in every 11th
    row; label label."""
    columns, every = REGISTRY["kddcup99"].reader.columns, KDDCUP_ROWS // n_rows
    with gzip.open(real / "kddcup99-10pct.csv.gz", "rt") as file:
        chosen = islice(file, 0, n_rows * every, every)
        rows = [line.rstrip().split(",") for line in chosen]
    for number, row in enumerate(rows):
        if number % 11 == 0:
            row[2] = ""
    return write_csv(folder / "kddcup.csv", columns, rows)


def airline(folder, real, n_rows):
    """Flights with carrier, origin and destination (hundreds of airports; the last missing in every
    13th row); labels late (1 is more than 15 minutes) and ArrDelay in minutes."""
    with gzip.open(real / "airline-delayed-2008-01.csv.gz", "rt") as file:
        names = file.readline().rstrip().split(",")
        lines = islice(file, 0, None, AIRLINE_ROWS // n_rows)
        flights = [dict(zip(names, line.rstrip("\n").split(","), strict=True)) for line in lines]
    rows = [
        [*(row[name] for name in AIRLINE), row["ArrDelay"], str(int(float(row["ArrDelay"]) > LATE))]
        for row in flights
        if row["ArrDelay"]
    ]
    for row in rows[::13]:
        row[AIRLINE.index("Dest")] = ""
    return write_csv(folder / "airline.csv", [*AIRLINE, "ArrDelay", "late"], rows)
