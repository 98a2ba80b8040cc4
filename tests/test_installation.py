"""An installation needs three packages and no PyTorch, brings its own BLAS, and refuses others' files in its folder."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import flashmoe
import flashmoe_layer
import numpy as np
import pytest
from flashmoe import _ffi
from flashmoe.cli import main
from flashmoe.system import drawing
from flashmoe.system.absent import hidden
from flashmoe.trace import Event, write_timeline

REQUIRED = {"numpy", "ml-dtypes", "apache-tvm-ffi"}
THEIR_OWN = {"typing-extensions"}
"""What the packages of `REQUIRED` require."""
FOLDERS = re.compile(r"(numpy|ml_dtypes|tvm_ffi|typing_extensions|apache_tvm_ffi)(\.libs|\.py|-.*)?")
"""The names that files and folders of all these packages have in site-packages."""

A_CALL = """
import sys
import numpy as np
import flashmoe
from flashmoe.launch import run_ranks

T, H, I, E, K = 64, 128, 96, 8, 2
rng = np.random.default_rng(0)
x, router, up, down = (
    (rng.standard_normal(s) / s[-1] ** 0.5).astype(np.float32) for s in ((T, H), (E, H), (E, 2 * I, H), (E, H, I))
)


def layer(rank, ranks, name, x):
    sizes = dict(max_tokens=T, hidden=H, intermediate=I, experts=E, top_k=K, dtype="float32")
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **sizes) as ctx:
        mine = ctx.local_experts()
        return flashmoe.moe(ctx, x, up[mine], down[mine], router=router, top_k=K), "torch" in sys.modules


if __name__ == "__main__":
    alone = flashmoe.moe(x, up, down, router=router, top_k=K)
    parts = run_ranks(3, layer, [(part,) for part in np.array_split(x, 3)])
    imported = "torch" in sys.modules or any(torch for _, torch in parts)
    print(np.array_equal(np.concatenate([y for y, _ in parts]), alone), imported)
"""
"""Prints whether the results of three ranks have the bits of one rank's, and whether a process has imported PyTorch."""


def run_python(*arguments: str | Path, python: str | Path = sys.executable, **environment: str):
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **environment}
    options = {"capture_output": True, "text": True, "timeout": 120, "env": environment}
    return subprocess.run([str(python), *map(str, arguments)], **options)


# ---- what is required ------------------------------------------------------------------------------------------------


def test_three_packages_are_required():
    required = [each for each in metadata.requires("flashmoe-layer") or () if "extra ==" not in each]
    assert {re.match(r"[\w-]+", each)[0] for each in required} == REQUIRED


def test_what_a_server_has_of_the_extras_may_stay():
    """The extras name no newest version, so that pip leaves what is installed as it is."""
    required = [each.partition(";") for each in metadata.requires("flashmoe-layer") or ()]
    named = [package for package, _, when in required if re.search("cli|plots", when)]
    assert len(named) == 3 and all(re.fullmatch(r"\w+>=[\d.]+", each) for each in named)


def packed(folder: Path) -> Path:
    """A wheel made from the installed package. This takes a second; to build one takes a minute."""
    files = [
        file
        for file in metadata.files("flashmoe-layer") or ()
        if file.parts[0] != ".." and file.name not in ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")
    ]
    files = [file for file in files if "__pycache__" not in file.parts]
    about = next(file.parent for file in files if file.name == "METADATA")
    wheel = folder / f"{about.name.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for file in files:
            archive.write(file.locate(), str(file))
        archive.writestr(f"{about}/RECORD", "".join(f"{file},,\n" for file in [*files, about / "RECORD"]))
    return wheel


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """The programs of an environment in which pip has installed the package with what it requires, and nothing else.

    The required packages are those of this environment, so that nothing is fetched."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    for lender in {Path(metadata.distribution(name).locate_file("")) for name in REQUIRED | THEIR_OWN}:
        for path in lender.iterdir():
            if FOLDERS.fullmatch(path.name):
                (site / path.name).symlink_to(path)
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check")
    subprocess.run([*pip, "install", "--quiet", "--no-index", packed(folder)], check=True)
    listed = subprocess.check_output([*pip, "list", "--format=json"], text=True)
    found = {each["name"].lower().replace("_", "-") for each in json.loads(listed)}
    assert found == REQUIRED | THEIR_OWN | {"flashmoe-layer"}
    return programs


def test_ranks_run_with_what_is_required_alone(clean, tmp_path):
    (tmp_path / "call.py").write_text(A_CALL)
    done = run_python(tmp_path / "call.py", python=clean / "python")
    assert (done.stdout, done.stderr, done.returncode) == ("True False\n", "", 0)


@pytest.mark.parametrize("arguments", [["--version"], ["run"], []], ids=lambda each: each[0] if each else "nothing")
def test_the_command_says_what_it_needs(clean, arguments):
    done = subprocess.run([clean / "flashmoe", *arguments], capture_output=True, text=True)
    needs = "flashmoe: expected typer and rich, which the command needs, found none"
    assert done.stderr == f"error: {needs}; to install: pip install 'flashmoe-layer[cli]'\n"
    assert (done.stdout, done.returncode) == ("", 2)


def test_its_modules_say_so_too(clean):
    done = run_python("-m", "flashmoe.bench", python=clean / "python")
    assert done.returncode == 2 and done.stderr.endswith("to install: pip install 'flashmoe-layer[cli]'\n")
    assert done.stderr.count("\n") == 1


NEEDS_MATPLOTLIB = "pictures need matplotlib, found none; to install: pip install 'flashmoe-layer[plots]'"


@pytest.fixture
def no_matplotlib():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "missing", lambda: NEEDS_MATPLOTLIB)
        yield


def test_what_is_said_without_matplotlib(monkeypatch):
    assert drawing.missing() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert drawing.missing() == NEEDS_MATPLOTLIB


def test_pictures_say_what_they_need(no_matplotlib, tmp_path, capsys):
    with pytest.raises(flashmoe.FlashMoEError, match="matplotlib"):
        write_timeline(tmp_path / "timeline.png", [[Event("os", "gate", 0, 1, 0, 0)]])
    assert main(["simulate", "--model", "qwen3-30b-a3b", "--png", str(tmp_path / "scaling.png")]) == 2
    assert capsys.readouterr().err == f"error: {NEEDS_MATPLOTLIB}\n"


def test_a_run_without_matplotlib_leaves_out_the_picture_alone(no_matplotlib, tmp_path, capsys):
    assert main(["run", "--ranks", "1", "--tokens", "64", "--out", str(tmp_path)]) == 0
    assert NEEDS_MATPLOTLIB in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def test_calls_with_numpy_import_no_pytorch(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "call.py").write_text(A_CALL)
    done = run_python(tmp_path / "call.py")
    assert (done.stdout, done.stderr) == ("True False\n", "")


def test_pytorch_may_come_after_numpy(tmp_path):
    """After calls with NumPy, calls with PyTorch's tensors give the same results, and gradients too."""
    pytest.importorskip("torch")
    program = A_CALL.replace("import torch", "") + (
        "    import torch\n"
        "    tensors = [torch.from_numpy(a).requires_grad_() for a in (x, up, down)]\n"
        "    y = flashmoe.moe(*tensors, router=torch.from_numpy(router), top_k=K)\n"
        "    y.sum().backward()\n"
        "    print(np.array_equal(y.detach().numpy(), alone), bool(tensors[1].grad.abs().sum() > 0))\n"
    )
    (tmp_path / "call.py").write_text(program)
    done = run_python(tmp_path / "call.py")
    assert (done.stdout, done.stderr) == ("True False\nTrue True\n", "")


def test_a_package_is_hidden_in_one_block_of_one_thread(tmp_path, monkeypatch):
    (tmp_path / "a_package_of_this_test.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    with hidden("a_package_of_this_test"), pytest.raises(ModuleNotFoundError, match="a_package_of_this_test"):
        import a_package_of_this_test
    assert sys.meta_path == before
    import a_package_of_this_test

    with hidden("a_package_of_this_test"):  # hides nothing that has been imported
        import a_package_of_this_test  # noqa: F401


def test_another_thread_imports_what_is_hidden_here(tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor
    from importlib import import_module

    (tmp_path / "another_package_of_this_test.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden("another_package_of_this_test"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(import_module, "another_package_of_this_test").result()


# ---- the BLAS --------------------------------------------------------------------------------------------------------

LIBRARY = Path(_ffi.__file__).parent / "lib" / "libflashmoe_blas.so"


def digest_of_products(library: Path, function: str) -> str:
    """A digest of products by a library's cblas_sgemm. Other libraries see the library's symbols (RTLD_GLOBAL)."""
    sgemm = getattr(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), function)
    rng, digest = np.random.default_rng(0), hashlib.sha256()
    for m, n, k in [(1, 256, 256), (7, 33, 129), (64, 64, 64), (128, 256, 512)]:
        a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
        c = np.zeros((m, n), np.float32)
        at = [ctypes.c_void_p(each.ctypes.data) for each in (a, b, c)]
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        sgemm(101, 111, 111, m, n, k, one, at[0], k, at[1], n, zero, at[2], n)  # row-major, not transposed
        np.testing.assert_allclose(c, a @ b, atol=1e-4 * k)
        digest.update(c.tobytes())
    return digest.hexdigest()


TWO = """
import sys
sys.path.insert(0, {tests!r})
from test_installation import *
import scipy_openblas32
theirs = Path(scipy_openblas32.get_lib_dir()) / "libscipy_openblas.so"
pair = [(LIBRARY, "flashmoe_scipy_cblas_sgemm"), (theirs, "scipy_cblas_sgemm")]
digests = [digest_of_products(*each) for each in {order}]
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line or "flashmoe_blas" in line]
print(len(set(digests)), len({{Path(each).name for each in mapped}} & {{LIBRARY.name, theirs.name}}))
"""


@pytest.mark.parametrize("order", ["pair", "pair[::-1]"], ids=["ours first", "theirs first"])
def test_two_openblas_in_one_process(order):
    """Both are loaded and compute the same bits, because the package's OpenBLAS is the other with renamed symbols."""
    pytest.importorskip("scipy_openblas32")
    done = run_python("-c", TWO.format(tests=str(Path(__file__).parent), order=order), OPENBLAS_NUM_THREADS="1")
    assert (done.stdout, done.stderr) == ("1 2\n", "")


def test_no_symbol_of_the_blas_is_anybody_elses():
    listed = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines()]
    assert len(names) > 5000 and all(name.startswith("flashmoe_") for name in names)


def test_the_licences_of_the_blas_are_beside_it():
    text = LIBRARY.with_name("libflashmoe_blas.LICENSE.txt").read_text()
    for part in ("The OpenBLAS Project", "GCC RUNTIME LIBRARY EXCEPTION", "GNU GENERAL PUBLIC LICENSE"):
        assert part in text


# ---- other distributions ---------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder of packages that has this package: `flashmoe` as a link, `flashmoe_layer` as a copy."""
    here = Path(flashmoe_layer.__file__).parents[1]
    (tmp_path / "flashmoe").symlink_to(Path(flashmoe.__file__).parent)
    shutil.copytree(here / "flashmoe_layer", tmp_path / "flashmoe_layer")
    (tmp_path / "flashmoe_layer-0.2.0.dist-info").mkdir()
    (tmp_path / "flashmoe_layer-0.2.0.dist-info" / "RECORD").write_text("flashmoe/__init__.py,,\n")
    return tmp_path


def install(site: Path, name: str, files: str = "flashmoe/__init__.py,sha256=x,1\n") -> None:
    (site / name).mkdir()
    (site / name / "RECORD").write_text(files)


COMMAND = "from flashmoe_layer.command import main; raise SystemExit(main())"
REFUSED = "flashmoe: expected files of flashmoe-layer alone in {}/flashmoe, got files of {} too"


@pytest.mark.parametrize(
    ("folder", "name"),
    [("flashmoe_py-0.1.2.dist-info", "flashmoe-py"), ("flashmoe-0.0.1.dev0.dist-info", "flashmoe")],
    ids=["the authors'", "a sample package"],
)
def test_another_distribution_in_the_same_folder_is_refused(site, folder, name):
    install(site, folder)
    told = REFUSED.format(site, name)
    done = run_python("-c", "import flashmoe", PYTHONPATH=str(site))
    assert f"ImportError: {told}" in done.stderr and f"pip uninstall {name} flashmoe-layer" in done.stderr
    done = run_python("-c", COMMAND, "info", PYTHONPATH=str(site))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {told}")
    assert done.stderr.count("\n") == 1


def test_the_command_is_ours_even_where_their_files_came_last(site):
    (site / "flashmoe").unlink()
    (site / "flashmoe").mkdir()
    (site / "flashmoe" / "__init__.py").write_text("raise ImportError('of theirs')")
    install(site, "flashmoe_py-0.1.2.dist-info")
    done = run_python("-c", COMMAND, "info", PYTHONPATH=str(site))
    assert done.returncode == 2 and done.stderr.startswith("error: " + REFUSED.format(site, "flashmoe-py"))


def test_what_lies_elsewhere_is_not_refused(site):
    install(site, "flashmoe_tools-1.dist-info", "flashmoe_tools/__init__.py,,\n")  # no file of it lies among ours
    (site / "flashmoe_broken-1.dist-info").mkdir()  # without a list of files
    assert flashmoe_layer.other_distributions(site) == []
    assert run_python("-c", "import flashmoe", PYTHONPATH=str(site)).returncode == 0


def test_looking_costs_one_list_of_a_folder(site, monkeypatch):
    """Lists of files are read only for distributions whose names begin with flashmoe."""
    for number in range(300):
        install(site, f"package{number}-1.dist-info", "flashmoe/__init__.py,,\n")
    read, read_text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: read.append(path) or read_text(path, **options))
    assert flashmoe_layer.other_distributions(site) == [] and read == []
