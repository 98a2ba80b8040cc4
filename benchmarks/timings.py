"""Times layers with the installed flashmoe, as another process tells it over a pipe: the worker of old_new.py.

Each line of standard input is a command, a JSON object; each is answered by a line on standard output. The context and
the weights of a layer stay from the command `make` to the command `drop`, so that processes with different versions can
be timed in turn.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import flashmoe
import torch
from lone_layer import LoneLayer


def loaded(path: str) -> ModuleType:
    """The module `flashmoe.bench.measure` of the process that gives the commands. All versions are timed with its
    timers, while `flashmoe` is the version that is measured."""
    spec = importlib.util.spec_from_file_location("measure", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def called(measure: ModuleType, layer: LoneLayer, backward_pass: bool) -> tuple[Callable[[int], Any], int]:
    """The function of a layer that is timed, and for how many cycles the "busy" timer occupies the GPU before it."""
    if not backward_pass:
        return layer, measure.BUSY_CYCLES
    return measure.passes(layer)["backward"], measure.AUTOGRAD_CYCLES


def hash_of(results: torch.Tensor | tuple[torch.Tensor, ...]) -> str:
    """A hash of the bytes of all results."""
    digest = hashlib.sha256()
    for result in (results,) if isinstance(results, torch.Tensor) else results:
        digest.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def occupy(call: Callable[[int], Any], seconds: float) -> None:
    """Makes calls without a pause for so many seconds."""
    end = time.monotonic() + seconds
    i = 0
    while time.monotonic() < end:
        for _ in range(8):
            call(i)
            i += 1
        torch.cuda.synchronize()


def main() -> None:
    # From here on, standard output goes to standard error: only answers may go into the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer(device=torch.cuda.get_device_name(), torch=torch.__version__, package=flashmoe.__file__)
    measure = loaded(sys.argv[1])
    made, call, cycles = None, None, 0
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "make":
            made = LoneLayer(told["sizes"], told["tokens"], round_logits=told["round_logits"])
            call, cycles = called(measure, made, told["backward"])
            results = call(0)
            made.context.synchronize()
            answer(hash=hash_of(results))
        elif told["do"] == "time":
            answer(ms=measure.milliseconds(call, told["repeats"], told["busy"], cycles=cycles))
        elif told["do"] == "occupy":
            occupy(call, told["seconds"])
            answer()
        else:
            made.close()
            made = call = results = None
            torch.cuda.empty_cache()
            answer()


if __name__ == "__main__":
    main()
