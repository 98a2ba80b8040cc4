"""Install the wheel of dist/ in clean environments, without compilers, and use it.

    python tools/check_wheel.py [--gpu] [--out FOLDER] [PYTHON ...]     (after tools/build_release.py)

PYTHON: paths of interpreters; without, this one, which needs flashmoe itself to say what it ran on. In each
environment, with what the package requires and nothing else: a call from Python; of the CUDA engine, that each of the
common kernels is found and is whole, with no nvcc to compile it; and that the command says what it needs. Then, with
the extras cli and plots: `flashmoe run` on two ranks of the CPU engine, whose results it compares with a reference.

`--gpu`: on a machine that has one, with the packages that the Python has, PyTorch among them; then `flashmoe run` uses
the GPU too, and each of the kernels computes a layer there (tests/release/, which needs pytest and hypothesis).

`--out`: leaves in FOLDER what was built (build-release/built.json) and where it ran. Where there is no network, pip is
told so by its own variables, PIP_NO_INDEX, PIP_NO_DEPS and PIP_FIND_LINKS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flashmoe.bench.origin import as_typed, cpu_model, nvidia_smi, result_path, write

ROOT = Path(__file__).resolve().parent.parent
DIST, BUILT = ROOT / "dist", ROOT / "build-release" / "built.json"

KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "FLASHMOE_SHARE_GPUS")
KEPT_OF = ("NVIDIA_", "NVSHMEM_", "NCCL_", "TORCH_")
"""Names, and how names begin, of all that an environment has of this one's variables: neither PATH nor CUDA_HOME, CC or
CXX. How GPUs are shared, and what their libraries may use, is the machine's to say."""

WHERE = """
import platform, sys, flashmoe
assert flashmoe.__file__.startswith(sys.prefix), flashmoe.__file__
print(platform.python_version(), platform.libc_ver()[1])
"""

CALL = """
import numpy as np
import flashmoe
from flashmoe.reference import moe_reference

T, H, I, E, K = 64, 128, 96, 8, 2
rng = np.random.default_rng(0)
x, router, up, down = (
    rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
    for shape in ((T, H), (E, H), (E, 2 * I, H), (E, H, I))
)
with flashmoe.Context(max_tokens=T, hidden=H, intermediate=I, experts=E, top_k=K, dtype="float32") as ctx:
    y = flashmoe.moe(ctx, x, up, down, router=router, top_k=K)
    report = ctx.last_call
expected = moe_reference(x, up, down, topk_ids=report.topk_ids, topk_weights=report.topk_weights).y
error = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
assert error < 1e-5, error
print(f"a call from Python: off by {error:.1e}")
"""

# Of the CUDA engine, where there is neither nvcc nor anything in a cache.
FIND_KERNELS = """
from flashmoe import jit
assert len(jit.shipped_kernels()) == len(jit.COMMON)
for variant in jit.COMMON:
    kernel = jit.kernel(variant).read_bytes()
    assert kernel[:4] == b"\\x7fELF" and int.from_bytes(kernel[18:20], "little") == 190, variant  # EM_CUDA
try:
    jit.kernel(jit.Variant(activation="relu2"))
except jit.FlashMoEError as error:
    assert str(error).startswith("FLASHMOE_NVCC: expected the path of nvcc")
else:
    raise AssertionError("a kernel was made from nothing")
print(f"{len(jit.COMMON)} kernels found")
"""

# The command without its packages.
REFUSED = """
import subprocess, sys
done = subprocess.run(["flashmoe", "--version"], capture_output=True, text=True)
assert done.returncode == 2 and "pip install 'flashmoe-layer[cli]'" in done.stderr, done
"""


def share_packages(lender: str, borrower: Path) -> None:
    """What one Python has installed, the other finds behind its own packages: also where the first is of a virtual
    environment, whose packages --system-site-packages leaves out."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_path('platlib'), sep='\\n')"
    lent, own = (subprocess.check_output([each, "-c", where], text=True) for each in (lender, borrower))
    (Path(own.splitlines()[0]) / "lent.pth").write_text(lent)


def check(wheel: Path, python: str, folder: Path, gpu: bool) -> dict[str, Any]:
    """What the evidence says of this Python. Raises `CalledProcessError` where something fails."""
    start = time.monotonic()
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    if gpu:
        share_packages(python, programs / "python")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--only-binary=:all:")
    subprocess.run([*pip, wheel], check=True)  # without the extras
    environment = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_OF)}
    environment |= {"PATH": str(programs), "FLASHMOE_NVCC": "/none", "FLASHMOE_CACHE": str(folder / "cache")}
    ran = []

    def run(*command: str | Path, said: str, cwd: Path = folder) -> str:
        done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        done.check_returncode()
        ran.append(said)
        return done.stdout

    version, libc = run(programs / "python", "-c", WHERE, said="import").split()
    run(programs / "python", "-c", CALL, said="a call from Python")
    run(programs / "python", "-c", FIND_KERNELS, said="kernels found")
    if not gpu:  # where this environment's packages are lent, typer is among them
        run(programs / "python", "-c", REFUSED, said="what the command needs")
    subprocess.run([*pip, f"{wheel}[cli,plots]"], check=True)
    demo = (programs / "flashmoe", "run", "--out", folder / "out", "--engine")
    run(*demo, "cpu", "--ranks", "2", said="flashmoe run, CPU engine")
    found: dict[str, Any] = {"python": version, "glibc": libc, "ran": ran}
    if gpu:
        run(*demo, "cuda", said="flashmoe run, CUDA engine")
        tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/release")
        found["tests"] = run(programs / "python", *tests, cwd=ROOT, said="tests/release").splitlines()[-1]
    return found | {"seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    [wheel] = DIST.glob("*.whl")
    found = []
    for python in args.pythons:
        with tempfile.TemporaryDirectory(prefix="flashmoe-wheel-") as folder:
            found.append(check(wheel, python, Path(folder), args.gpu))
    print(f"{wheel.name} runs with Python {', '.join(each['python'] for each in found)}, without compilers")
    if args.out:
        name, gpus = (nvidia_smi("name").splitlines()[0], 1) if args.gpu else (cpu_model(), 0)
        built = json.loads(BUILT.read_text())
        assert built["wheel"]["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
        origin = {"device": name if gpus else f"{name} x0", "command": as_typed("python", sys.argv)}
        if gpus:
            origin["driver"] = nvidia_smi("driver_version").splitlines()[0]
        write(args.out / result_path("release", name, gpus).name, origin | built | {"pythons": found})


if __name__ == "__main__":
    main()
