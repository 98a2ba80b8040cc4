"""Install the wheel of dist/ in clean environments, without compilers, and use it.

    python tools/check_wheel.py [--gpu] [--out FOLDER] [PYTHON ...]     (after tools/build_release.py)

PYTHON: paths of interpreters; default: the one that runs this script. (The script itself imports an installed
flashmoe.) Each interpreter gets an environment with only the packages that the wheel requires. There, the script makes
a call from Python; checks that each of the common kernels of the CUDA engine is found and is whole, without an nvcc
that could compile it; and checks that the command `flashmoe` says which extra it needs. Then it installs the extras cli
and plots, and runs `flashmoe run` on two ranks of the CPU engine, which compares its results with a reference.

`--gpu`: for machines with a GPU. The environment also has the packages of PYTHON, with PyTorch among them. Then
`flashmoe run` also uses the GPU, and each of the kernels computes a layer there (tests/release/, which needs pytest and
hypothesis).

`--out`: writes into FOLDER what was built (build-release/built.json) and where it ran. Without a network, pip's own
variables tell it so: PIP_NO_INDEX, PIP_NO_DEPS and PIP_FIND_LINKS.
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
"""The variables that the checked environments get from this one: their names, and how their names begin. PATH,
CUDA_HOME, CC and CXX are not among them, so that no compiler is found. Those that say how ranks share GPUs, and what
the GPUs' libraries may use, depend on the machine and stay."""

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

# Checks that the CUDA engine finds the common kernels in the package, without nvcc and with an empty cache, and that
# for another kernel it says that it needs nvcc.
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

# Checks that the command `flashmoe` names the extra to install if its packages are missing.
REFUSED = """
import subprocess, sys
done = subprocess.run(["flashmoe", "--version"], capture_output=True, text=True)
assert done.returncode == 2 and "pip install 'flashmoe-layer[cli]'" in done.stderr, done
"""


def share_packages(lender: str, borrower: Path) -> None:
    """Makes the Python `borrower` find the packages of the Python `lender` too, behind its own. This also works if
    `lender` is of a virtual environment, whose packages venv's --system-site-packages would not include."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_path('platlib'), sep='\\n')"
    lent, own = (subprocess.check_output([each, "-c", where], text=True) for each in (lender, borrower))
    (Path(own.splitlines()[0]) / "lent.pth").write_text(lent)


def check(wheel: Path, python: str, folder: Path, gpu: bool) -> dict[str, Any]:
    """Checks the wheel with this Python. Returns what the record says about it. Raises `CalledProcessError` if a check
    fails."""
    start = time.monotonic()
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    if gpu:
        share_packages(python, programs / "python")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--only-binary=:all:")
    # PYTHONPATH may have the flashmoe that this script imports. pip would take that one for installed.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, wheel], check=True, env=own)  # without the extras
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
    if not gpu:  # with --gpu, the packages of the command may be among the lent ones
        run(programs / "python", "-c", REFUSED, said="what the command needs")
    subprocess.run([*pip, f"{wheel}[cli,plots]"], check=True, env=own)
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
