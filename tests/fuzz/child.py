"""One target under libFuzzer (atheris): `python child.py TARGET RUNNING [libFuzzer's options] FOLDER...`.

This process writes each input to the file RUNNING before it runs it, since an input that ends the process may leave
nothing else. Coverage is that of the package's Python. `run.py` starts this process, and reports the result.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import atheris  # noqa: E402

with atheris.instrument_imports(include=["flashmoe"]):
    import json_mutations
    import targets


def main() -> None:
    name, running, *options = sys.argv[1:]
    with targets.made(name) as target, open(running, "wb", buffering=0) as file:

        def run(data: bytes) -> None:
            os.pwrite(file.fileno(), data, 0)
            os.ftruncate(file.fileno(), len(data))
            targets.checked(target, data)

        def mutate(data: bytes, most: int, seed: int) -> bytes:
            # One mutation in eight changes bytes, so that the target also sees inputs that are no JSON.
            changed = json_mutations.mutated(data, seed, target.words, target.repair) if seed % 8 else None
            return changed if changed is not None and len(changed) <= most else atheris.Mutate(data, most)

        # To merge folders, libFuzzer starts child processes: it passes this command to a shell.
        this = shlex.join([sys.executable, str(Path(__file__).resolve()), name, running])
        atheris.Setup([this, *options], run, custom_mutator=mutate)
        atheris.Fuzz()


main()
