#!/usr/bin/env python3
"""A stand-in for nvcc in GPU tests. It takes kernels that were compiled before from a store, and records its calls.

Each file of tests begins with an empty kernel cache. So its processes ask the compiler for every kernel that they load,
and the recorded calls name all kernels of the file. python/flashmoe/jit.py makes the name of the output's folder from
everything that a kernel is compiled from, so this name also identifies the kernel in the store. A file may load a
hundred kernels, so this program must start quickly: it imports nothing of this project.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys


def main() -> int:
    nvcc, store = os.environ["FLASHMOE_TESTS_NVCC"], os.environ["FLASHMOE_TESTS_STORE"]
    if "-cubin" not in sys.argv:
        return subprocess.run([nvcc, *sys.argv[1:]]).returncode
    with open(os.environ["FLASHMOE_TESTS_ASKED"], "a") as asked:
        asked.write(json.dumps([flag for flag in sys.argv if flag.startswith("-DFLASHMOE_")]) + "\n")
    output = sys.argv[sys.argv.index("-o") + 1]
    name = os.path.basename(os.path.dirname(output)).rsplit(".", 2)[0]
    if appended := os.environ.get("NVCC_APPEND_FLAGS"):
        name += "-" + hashlib.sha256(appended.encode()).hexdigest()[:16]
    stored = os.path.join(store, name)
    if not all(os.path.exists(f"{stored}.{kind}") for kind in ("cubin", "log")):
        done = subprocess.run([nvcc, *sys.argv[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        sys.stdout.buffer.write(done.stdout)
        if done.returncode == 0:
            with open(f"{stored}.{os.getpid()}", "wb") as log:
                log.write(done.stdout)
            os.replace(f"{stored}.{os.getpid()}", f"{stored}.log")  # first, so that a stored kernel always has its log
            shutil.copyfile(output, f"{stored}.{os.getpid()}")
            os.replace(f"{stored}.{os.getpid()}", f"{stored}.cubin")
        return done.returncode
    with open(f"{stored}.log", "rb") as log:  # as nvcc's output: its caller looks for spills there
        sys.stdout.buffer.write(log.read())
    shutil.copyfile(f"{stored}.cubin", output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
