"""Turn the R package `janeaustenr` (Debian: r-cran-janeaustenr) into one plain text file.

The six novels are in the public domain; the R package around them is MIT-licensed. Prepare with

    apt-get download r-cran-janeaustenr
    dpkg-deb --extract r-cran-janeaustenr_*.deb austen
    pip install rdata
    python examples/extract_corpus.py austen/usr/lib/R/site-library/janeaustenr/data .corpus/austen.txt
"""

from __future__ import annotations

import argparse
import gzip
import warnings
import zlib
from pathlib import Path
from typing import Any

import rdata  # type: ignore[import-not-found]

# Persuasion comes last: `train_tiny_moe.py` does not train on the end of the file, and measures the model there, on a
# novel of which the model has seen only the beginning.
NOVELS = (
    "sensesensibility",
    "prideprejudice",
    "mansfieldpark",
    "emma",
    "northangerabbey",
    "persuasion",
)


def unserialize(serialized: bytes) -> Any:
    """Convert one serialized R object, already decompressed, to Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rdata warns that it guesses the file type; the guess is right
        return rdata.conversion.convert(rdata.parser.parse_data(serialized))


def read_novels(data_folder: Path) -> dict[str, str]:
    """Read R's lazy-load database `Rdata.rdx` (the index) and `Rdata.rdb` (the objects).

    Each object is stored as its uncompressed length, 4 bytes big-endian, followed by a zlib stream.
    """
    index = unserialize(gzip.decompress((data_folder / "Rdata.rdx").read_bytes()))
    database = (data_folder / "Rdata.rdb").read_bytes()
    novels = {}
    for name, (offset, length) in index["variables"].items():
        record = database[offset : offset + length]
        raw = zlib.decompress(record[4:])
        if len(raw) != int.from_bytes(record[:4], "big"):
            raise ValueError(f"{name}: expected {int.from_bytes(record[:4], 'big')} bytes, got {len(raw)}")
        novels[str(name)] = "\n".join(map(str, unserialize(raw))).strip()
    return novels


def main() -> None:
    """Write the novels, in the order of `NOVELS`, to one UTF-8 file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_folder", type=Path, help="the package's data folder, holding Rdata.rdb")
    parser.add_argument("output", type=Path, help="the text file to write")
    arguments = parser.parse_args()

    novels = read_novels(arguments.data_folder)
    text = "\n\n\n".join(novels[name] for name in NOVELS) + "\n"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(text, encoding="utf-8")
    print(f"{arguments.output}: {len(NOVELS)} novels, {len(text):,} characters")


if __name__ == "__main__":
    main()
