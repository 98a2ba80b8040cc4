"""The cache of compiled kernels: its keys, many processes at once, and compilers that are missing, fail or are killed.

Here nvcc is a shell script, which compiles nothing and can be made to wait or to fail.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import build_release
import pytest
from flashmoe import FlashMoEError, cli, jit
from flashmoe.cli import info
from flashmoe.spec import ACTIVATIONS
from flashmoe.system import driver

FAKE_NVCC = """#!/bin/sh
echo "$@" >> {calls}
if [ "$1" = --version ]; then echo "release {release}"; exit 0; fi
{delay}
{outcome}
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""

COMPILE = "from flashmoe import jit; print(jit.compile_kernel(jit.Variant()).seconds)"


class Machine:
    """A stand-in for nvcc, and a cache folder. Each test has its own."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.nvcc, self.cache = folder / "calls", folder / "nvcc", folder / "cache"
        self.calls.touch()
        self.install()

    def install(self, release: str = "13.0", delay: str = "", outcome: str = "") -> None:
        script = FAKE_NVCC.format(calls=self.calls, release=release, delay=delay, outcome=outcome)
        self.nvcc.write_text(script)
        self.nvcc.chmod(0o755)

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()

    def compilations(self) -> list[str]:
        return [line for line in self.called() if "-cubin" in line]

    def start(self, program: str = COMPILE) -> subprocess.Popen:
        """A process of its own session, so that it and its nvcc can be killed together."""
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setenv("FLASHMOE_NVCC", str(machine.nvcc))
    monkeypatch.setenv("FLASHMOE_CACHE", str(machine.cache))
    monkeypatch.setattr(jit, "_known", {})
    return machine


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """The folder of a copy of the kernels' sources, which `jit` uses."""
    root = tmp_path / "sources"
    shutil.copytree(jit.source_root() / "include", root / "include")
    shutil.copytree(jit.source_root() / "csrc" / "cuda" / "entry", root / "csrc" / "cuda" / "entry")
    monkeypatch.setattr(jit, "source_root", lambda: root)
    return root


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_compiles_once(machine, capfd):
    first = jit.compile_kernel(jit.Variant())
    assert first.seconds is not None and first.path.read_text() == "compiled\n"
    assert first.path.parent == machine.cache and first.path.suffix == ".cubin"
    assert (
        capfd.readouterr().err
        == "flashmoe: compiling the bf16 SwiGLU kernel for sm_90a (once, one to four minutes) ...\n"
    )
    assert jit.compile_kernel(jit.Variant()) == jit.Compiled(first.path, None)
    assert jit.kernel(jit.Variant()).samefile(first.path)
    assert capfd.readouterr().err == ""
    assert [line.split()[0] for line in machine.called()] == [
        "--version",
        "-cubin",
    ]  # the version is asked for only once, too
    assert [path.suffix for path in machine.cache.iterdir() if path.is_dir()] == []


SPILLS = """cat <<END
ptxas info    : Function properties for flashmoe_moe
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Function properties for flashmoe_few
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
END"""


def test_a_kernel_that_spills_is_refused(machine):
    """Such a kernel would be slow, and nobody would know why. What ptxas said is kept in the log."""
    machine.install(outcome=SPILLS.format(stack=24, stores=8, loads=16))
    with pytest.raises(FlashMoEError) as refused:
        jit.compile_kernel(jit.Variant())
    said = str(refused.value)
    assert said.startswith(
        "nvcc: expected the bf16 SwiGLU kernel without spilled registers, got 24 bytes of spills from "
    )
    log = Path(said.partition("full log: ")[2].partition(";")[0])
    assert "8 bytes spill stores" in log.read_text()
    assert not list(machine.cache.glob("*.cubin"))
    assert "-Xptxas -v" in machine.compilations()[0]
    assert jit.compile_kernel(jit.Variant(trace=True)).path.exists()  # traced kernels may spill
    machine.install(outcome=SPILLS.format(stack=0, stores=0, loads=0))
    assert jit.compile_kernel(jit.Variant()).path.exists()


def set_release(headers: Path, release: str) -> None:
    """Makes NVSHMEM's headers say that they are of this release."""
    parts = zip(("MAJOR", "MINOR", "PATCH"), release.split("."), strict=True)
    text = "".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in parts)
    (headers / "non_abi" / "nvshmem_version.h").write_text(text)


@pytest.fixture
def nvshmem(tmp_path, monkeypatch) -> Path:
    """The folder of NVSHMEM's headers in a package that `flashmoe.nvshmem` finds."""
    folder = tmp_path / "nvshmem"
    (folder / "include" / "non_abi").mkdir(parents=True)
    set_release(folder / "include", "3.4.5")
    monkeypatch.setattr("flashmoe.nvshmem.package", lambda: iter([folder]))
    return folder / "include"


def test_kernels_that_put(machine, nvshmem):
    made = [jit.compile_kernel(jit.Variant(rdma=rdma)).path for rdma in (True, False)]
    puts, plain = machine.compilations()
    assert f"-DFLASHMOE_RDMA=1 -I {jit.source_root()}/include -isystem {nvshmem} " in puts
    assert "RDMA" not in plain and "isystem" not in plain
    assert made[0].name.startswith("bf16-swiglu-rdma-") and made[0] != made[1]
    set_release(nvshmem, "3.4.6")
    again = [jit.compile_kernel(jit.Variant(rdma=rdma)).path for rdma in (True, False)]
    assert again[0] != made[0] and again[1] == made[1]
    (nvshmem / "non_abi" / "nvshmem_version.h").unlink()
    install = r"to install them: pip install 'nvidia-nvshmem-cu13>=3\.4,<3\.9'"
    with pytest.raises(FlashMoEError, match=rf"nvshmem: expected its headers, .* found none; {install}"):
        jit.compile_kernel(jit.Variant(rdma=True))
    assert jit.compile_kernel(jit.Variant()).path == made[1]


@pytest.mark.parametrize("release", ["3.3.24", "3.9.1", "3.10.0", "4.4.0", "2.8.0"])
def test_nvshmem_that_kernels_are_not_compiled_with(machine, nvshmem, release):
    set_release(nvshmem, release)
    with pytest.raises(FlashMoEError) as refusal:
        jit.compile_kernel(jit.Variant(rdma=True))
    assert str(refusal.value) == (
        "nvshmem: expected 3.4 to 3.8, whose inner parts kernels for transport 'rdma' are compiled with, got "
        f"{release} ({nvshmem}); to install one: pip install 'nvidia-nvshmem-cu13>=3.4,<3.9'"
    )
    assert machine.compilations() == []
    jit.compile_kernel(jit.Variant())  # includes nothing of NVSHMEM


@pytest.mark.parametrize("release", ["3.4.0", "3.5.21", "3.8.99"])
def test_nvshmem_that_kernels_are_compiled_with(machine, nvshmem, release):
    set_release(nvshmem, release)
    assert jit.compile_kernel(jit.Variant(rdma=True)).path.exists()


def test_headers_that_do_not_say_their_release(machine, nvshmem):
    (nvshmem / "non_abi" / "nvshmem_version.h").write_text("#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n")
    with pytest.raises(FlashMoEError, match=r"nvshmem: expected .*nvshmem_version\.h to define its release"):
        jit.compile_kernel(jit.Variant(rdma=True))


def test_flags(machine):
    jit.compile_kernel(jit.Variant("float32", "gelu", trace=True, exact=True))
    command = machine.compilations()[0]
    root = jit.source_root()
    for expected in (
        "-gencode arch=compute_90a,code=sm_90a -std=c++20 -O3",
        "-DFLASHMOE_DTYPE=0 -DFLASHMOE_ACTIVATION=1 -DFLASHMOE_TRACE=1 -DFLASHMOE_EXACT=1",
        f"-I {root}/include {root}/csrc/cuda/entry/moe.cu -o {machine.cache}/",
    ):
        assert expected in command


def test_what_a_build_is_told(tmp_path):
    """A macro for each option that is on. The options are those of the table in spec/build.h."""
    plain = jit.Variant("float16", "geglu").flags
    assert plain == [*jit.FLAGS, "-DFLASHMOE_DTYPE=2", "-DFLASHMOE_ACTIVATION=4"]
    told = jit.Variant(quantised=True, trace=True, few=True, group=True).flags[len(plain) :]
    assert told == [f"-DFLASHMOE_{name}=1" for name in ("TRACE", "QUANTISED", "GROUP", "FEW")]
    table = (jit.source_root() / "include" / "flashmoe" / "spec" / "build.h").read_text()
    rows = re.findall(r"^ *ROW\((\w+), (\w+)\)", table, re.M)
    # Only tests with the sanitizer define FLASHMOE_RACECHECK.
    assert dict(rows) == {**jit.OPTIONS, "racecheck": "FLASHMOE_RACECHECK"}
    assert [name for name, _ in rows if name != "racecheck"] == list(jit.OPTIONS)
    assert len(rows) == len(dict(rows))
    options = [each.name for each in dataclasses.fields(jit.Variant) if each.name not in ("dtype", "activation")]
    assert options == list(jit.OPTIONS)


@pytest.mark.parametrize(
    ("options", "title", "entry"),
    [
        ({}, "bf16 SwiGLU", "moe"),
        ({"dtype": "float32", "exact": True, "trace": True}, "exact fp32 SwiGLU traced", "moe"),
        ({"quantised": True, "machines": True}, "FP8 bf16 SwiGLU machines", "moe"),
        ({"rdma": True, "transposed": True, "trace": True}, "bf16 SwiGLU transposed traced RDMA", "moe_by_puts"),
        ({"keeps": True, "on_input": True}, "bf16 SwiGLU keeping weights on the input", "moe_keeping"),
        ({"keeps": True, "group": True, "sliced": True}, "bf16 SwiGLU keeping group sliced", "moe_keeping_group"),
        ({"backward": True, "group": True}, "bf16 SwiGLU backward group", "moe_backward"),
        ({"few": True, "trace": True}, "bf16 SwiGLU few tokens traced", "decode"),
        ({"few": True, "mxfp4": True}, "MXFP4 bf16 SwiGLU few tokens", "decode_mxfp4"),
        ({"few": True, "group": True, "quantised": True}, "FP8 bf16 SwiGLU few tokens of a group", "decode_fp8_group"),
    ],
)
def test_titles_and_sources(options, title, entry):
    variant = jit.Variant(**options)
    assert (variant.title, variant.entry) == (title, entry)
    assert jit.entry_of(jit.source_root(), variant).is_file()


def test_what_there_is_no_kernel_of():
    with pytest.raises(ValueError, match=r"^mxfp4: expected few=True, .*, got few=False$"):
        jit.Variant(mxfp4=True)
    for name in ("rdma", "transposed", "keeps", "backward", "on_input", "sliced", "machines"):
        with pytest.raises(ValueError, match=rf"^few: expected .*, got \['{name}'\]$"):
            jit.Variant(few=True, **{name: True})


def test_kernels_of_a_rank_alone():
    """Most layers have two, the general kernel and the kernel for a few tokens; some layers have only one of these."""
    assert jit.variants_alone() == [jit.Variant(), jit.Variant(few=True)]
    exact = {"exact": True, "trace": True}
    assert jit.variants_alone("float32", "gelu", **exact) == [
        jit.Variant("float32", "gelu", **exact, few=few) for few in (False, True)
    ]
    assert jit.variants_alone(transposed=True) == [jit.Variant(transposed=True)]
    assert jit.variants_alone(mxfp4=True) == [jit.Variant(mxfp4=True, few=True)]


def test_a_release_carries_both_kernels_of_a_plain_layer():
    """For each general kernel of a plain layer, it also has the one for a few tokens. It has some for groups, too."""
    for variant in jit.COMMON:
        trains = variant.keeps or variant.backward
        if not (variant.transposed or trains or variant.few):
            assert dataclasses.replace(variant, few=True) in jit.COMMON
    assert len(set(jit.COMMON)) == len(jit.COMMON)
    assert sum(each.few for each in jit.COMMON) == 3 + 1 + 1 + 3 + 1


# ---- several at a time -----------------------------------------------------------------------------------------------


def test_two_kernels_are_compiled_at_the_same_time(machine):
    """Each compilation waits until the other has begun, so they would fail if they ran one after the other."""
    begun = f"[ $(grep -c -- -cubin {machine.calls}) = 2 ]"
    machine.install(delay=f"for i in $(seq 300); do {begun} && break; sleep 0.1; done; {begun} || exit 1")
    both = jit.variants_alone()
    paths = jit.kernels(both)
    assert len(machine.compilations()) == 2
    assert [jit.kernel(each) for each in both] == paths and not paths[0].samefile(paths[1])
    assert jit.kernels(both) == paths and len(machine.compilations()) == 2


@pytest.mark.parametrize("failing", ["decode.cu", "moe.cu"])
def test_one_of_two_kernels_that_cannot_be_compiled(machine, failing):
    """The error names the kernel that failed. The other one is in the cache when both are asked for again."""
    machine.install(outcome=f'case "$*" in *{failing}*) echo wrong; exit 1;; esac')
    title = "bf16 SwiGLU few tokens" if failing == "decode.cu" else "bf16 SwiGLU"
    with pytest.raises(FlashMoEError, match=rf"^nvcc: cannot compile the {title} kernel \(exit status 1\)"):
        jit.kernels(jit.variants_alone())
    machine.install()
    assert len(jit.kernels(jit.variants_alone())) == 2
    assert len(machine.compilations()) == 3


def test_a_kernel_that_was_removed_is_compiled_again(machine):
    path = jit.compile_kernel(jit.Variant()).path
    path.unlink()
    assert jit.compile_kernel(jit.Variant()).path == path and path.exists()


def test_what_the_key_depends_on(machine, sources):
    def path() -> Path:
        return jit.compile_kernel(jit.Variant()).path

    first = path()
    assert path() == first
    variants = {
        jit.compile_kernel(jit.Variant(*values)).path
        for values in (
            ("float16",),
            ("bfloat16", "relu"),
            ("bfloat16", "swiglu", True),
            ("float32", "swiglu", False, True),
        )
    }
    assert len(variants | {first}) == 5

    header = sources / "include" / "flashmoe" / "protocol" / "task.h"
    header.write_text(header.read_text() + "\n")
    second = path()
    assert second != first
    (header.parent / "another.h").write_text("\n")  # no file includes it
    assert path() == second
    machine.install(release="13.1")
    third = path()
    assert third not in (first, second)
    machine.install(release="13.0")  # another nvcc, of the first version
    assert path() == second


EACH_SOURCE = [
    *(jit.Variant(few=True, group=group, **of) for group in (False, True) for of in ({}, {"quantised": True})),
    jit.Variant(few=True, mxfp4=True),
    jit.Variant(),
    *(jit.Variant(**{which: True}, group=group) for which in ("keeps", "backward") for group in (False, True)),
]
"""Variants that cover every source of kernels, except the one that needs NVSHMEM's headers."""


def test_a_comment_in_a_room_recompiles_who_includes_it(machine, sources):
    def paths() -> dict[jit.Variant, Path]:
        return {variant: jit.compile_kernel(variant).path for variant in EACH_SOURCE}

    def changed_by(name: str) -> set[jit.Variant]:
        before = paths()
        header = sources / "include" / "flashmoe" / "sm90" / name
        header.write_text("// Another comment.\n" + header.read_text())
        after = paths()
        return {variant for variant in EACH_SOURCE if before[variant] != after[variant]}

    few = {variant for variant in EACH_SOURCE if variant.few}
    backward = {variant for variant in EACH_SOURCE if variant.backward}
    assert changed_by("decode/block.cuh") == few
    assert changed_by("decode/products_mxfp4.cuh") == {variant for variant in few if variant.mxfp4}
    assert changed_by("gradients/router.cuh") == backward
    assert changed_by("roles/clerk.cuh") == set(EACH_SOURCE) - few
    assert changed_by("geometry.h") == set(EACH_SOURCE)


@pytest.mark.parametrize("variant", EACH_SOURCE, ids=lambda variant: variant.title)
def test_sources_are_what_the_compiler_includes(variant):
    try:
        nvcc = jit.find_nvcc()
    except FlashMoEError as error:
        pytest.skip(str(error))
    root = jit.source_root()
    command = [nvcc, "-M", *variant.flags[1:], f"-I{root / 'include'}", jit.entry_of(root, variant)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = {Path(name).resolve() for name in said.partition(":")[2].replace("\\\n", " ").split()}
    assert {path for path in files if path.is_relative_to(root.resolve())} == set(jit.sources_of(root, variant))


def test_few_headers_make_the_kernel_for_a_few_tokens():
    headers = [path for path in jit.sources_of(jit.source_root(), jit.Variant(few=True)) if path.suffix != ".cu"]
    assert len(headers) <= 45


def test_many_processes_compile_once(machine):
    machine.install(delay="sleep 2")
    processes = [machine.start() for _ in range(6)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6
    assert len(machine.compilations()) == 1
    assert sum("None" not in printed for printed, _ in outputs) == 1
    assert sum("flashmoe: compiling the bf16 SwiGLU kernel" in said for _, said in outputs) == 1
    waited = [
        said for _, said in outputs if "waiting for another process, which compiles the bf16 SwiGLU kernel" in said
    ]
    assert waited and len(waited) <= 5


def test_a_process_killed_half_way(machine):
    machine.install(delay="sleep 100")
    killed = machine.start()
    wait_for(machine.compilations)
    waiting = machine.start()
    assert "waiting for another process" in waiting.stderr.readline()
    machine.install()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    printed, said = waiting.communicate(timeout=60)  # the lock was released when its process died
    assert waiting.returncode == 0 and printed != "None\n"
    assert "compiling the bf16 SwiGLU kernel" in said
    assert not list(machine.cache.glob("*.tmp"))  # the killed process's folder is gone


def test_no_compiler(machine, monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHMOE_NVCC")
    monkeypatch.setattr(jit, "_candidates", lambda: iter([tmp_path / "nowhere" / "nvcc"]))
    with pytest.raises(FlashMoEError, match=r"in PATH, in /usr/local/cuda.*nvidia-cuda-nvcc, found none.*pip install"):
        jit.find_nvcc()
    with pytest.raises(FlashMoEError, match=r"^nvcc: expected the CUDA compiler, for the fp16 GELU kernel, as \$FLASH"):
        jit.compile_kernel(jit.Variant("float16", "gelu"))


def test_a_compiler_that_is_not_one(machine, monkeypatch):
    monkeypatch.setenv("FLASHMOE_NVCC", "/no/such/nvcc")
    with pytest.raises(FlashMoEError, match="FLASHMOE_NVCC: expected the path of nvcc, got '/no/such/nvcc'"):
        jit.find_nvcc()


def test_where_nvcc_is_looked_for(machine, monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHMOE_NVCC")
    places = [tmp_path / "home" / "bin", tmp_path / "path", tmp_path / "packages" / "nvidia" / "cu13" / "bin"]
    for place in places:
        place.mkdir(parents=True)
        shutil.copy(machine.nvcc, place / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(places[1]))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    found = [path for path in jit._candidates() if not path.is_relative_to("/usr/local")]
    assert found[:2] == [place / "nvcc" for place in places[:2]]
    assert places[2] / "nvcc" in found[2:]
    assert jit.find_nvcc() == places[0] / "nvcc"
    monkeypatch.delenv("CUDA_HOME")
    assert jit.find_nvcc() == places[1] / "nvcc"


def test_a_compilation_that_fails(machine):
    machine.install(outcome="for i in $(seq 40); do echo line $i; done; echo wrong here >&2; exit 2")
    for _ in range(2):
        with pytest.raises(FlashMoEError) as error:
            jit.compile_kernel(jit.Variant())
        message = str(error.value)
        assert "cannot compile the bf16 SwiGLU kernel (exit status 2)" in message
        assert message.endswith("line 40\nwrong here") and "line 27\n" in message and "line 26\n" not in message
        log = next(machine.cache.glob("*.log"))
        assert str(log) in message and "line 1\n" in log.read_text()
    assert not list(machine.cache.glob("*.cubin")) and not list(machine.cache.glob("*.tmp"))
    machine.install()
    assert jit.compile_kernel(jit.Variant()).path.exists()


def test_a_cache_that_cannot_be_written(machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHMOE_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.raises(FlashMoEError, match=r"cache: cannot write to .*file/folder: .*; set FLASHMOE_CACHE"):
        jit.compile_kernel(jit.Variant())


def test_cache_folder(machine, monkeypatch, tmp_path):
    assert jit.cache_folder() == machine.cache
    monkeypatch.delenv("FLASHMOE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_folder() == tmp_path / "xdg" / "flashmoe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jit.cache_folder() == tmp_path / ".cache" / "flashmoe"


def test_installed_sources_come_first(monkeypatch, tmp_path):
    package = tmp_path / "flashmoe"
    installed = package / "cuda" / "csrc" / "cuda" / "entry" / "moe.cu"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(jit, "__file__", str(package / "jit.py"))
    with pytest.raises(FlashMoEError, match=f"kernel: expected its sources in {package}/cuda"):
        jit.source_root()
    installed.touch()
    assert jit.source_root() == package / "cuda"


# ---- kernels that the package carries ------------------------------------------------------------------------


@pytest.fixture
def carried(machine, sources, monkeypatch) -> Path:
    """The path of a kernel that the package carries. There is neither a compiler nor a cache."""
    folder = sources / "kernels"
    folder.mkdir()
    path = jit.ship(jit.Variant(), folder)
    monkeypatch.setattr(jit, "_known", {})
    shutil.rmtree(machine.cache)
    machine.nvcc.unlink()
    return path


def test_a_carried_kernel_needs_no_compiler(machine, carried):
    assert jit.shipped_kernels() == [carried]
    assert jit.compile_kernel(jit.Variant()) == jit.Compiled(carried, None)
    assert jit.kernel(jit.Variant()).read_text() == "compiled\n"
    assert len(machine.compilations()) == 1 and not machine.cache.exists()


@pytest.mark.parametrize("other", [jit.Variant(activation="gelu"), jit.Variant("float16"), jit.Variant(rdma=True)])
def test_what_is_not_carried_is_compiled(machine, carried, other):
    with pytest.raises(FlashMoEError, match="FLASHMOE_NVCC: expected the path of nvcc"):
        jit.compile_kernel(other)


def test_a_carried_kernel_of_other_sources_is_not_taken(machine, carried, sources):
    with (sources / "include" / "flashmoe" / "sm90" / "roles" / "kernel.cuh").open("a") as header:
        header.write("// changed\n")
    with pytest.raises(FlashMoEError, match="FLASHMOE_NVCC"):
        jit.compile_kernel(jit.Variant())


def test_a_damaged_carried_kernel_is_not_taken(machine, carried):
    carried.write_bytes(b"compi")
    machine.install()
    assert jit.compile_kernel(jit.Variant()).path.parent == machine.cache


def test_all_that_a_release_carries_is_found(machine, sources):
    compiled = build_release.kernels(sources / "kernels")
    assert len(machine.compilations()) == len(set(compiled)) == len(jit.COMMON)
    jit._known.clear()
    shutil.rmtree(machine.cache)
    machine.nvcc.unlink()
    for variant, path in zip(jit.COMMON, compiled, strict=True):
        assert path.name.startswith(variant.title.replace(" ", "-").lower())
        assert jit.compile_kernel(variant) == jit.Compiled(path, None)


def test_a_release_is_compiled_by_one_nvcc(machine):
    machine.install(release="13.0, V13.0.88")
    assert build_release.nvcc_release() == "release 13.0, V13.0.88"
    machine.install(release="13.01")
    with pytest.raises(SystemExit, match=r"nvcc: expected release 13\.0, got .*/nvcc:\nrelease 13\.01"):
        build_release.nvcc_release()


def test_a_driver_too_old_for_what_is_carried(machine, carried, monkeypatch):
    """Such a driver needs a kernel that an nvcc of its own CUDA release has compiled."""
    monkeypatch.setattr(driver, "cuda_release", lambda: (12, 4))
    monkeypatch.delenv("FLASHMOE_NVCC")
    with monkeypatch.context() as without:
        without.setattr(jit, "_candidates", lambda: iter(()))
        said = r"for the bf16 SwiGLU kernel, as .*found none; to install: an nvcc of CUDA 12, as the driver is"
        with pytest.raises(
            FlashMoEError, match=said + r" \(12\.4\), or a driver for CUDA 13, which also loads the ker"
        ):
            jit.compile_kernel(jit.Variant())
        assert "; of compiled kernels, the package's own need a driver for CUDA 13, this" in info._driver().detail
        assert jit.shipped_kernels() == []
    machine.install(release="12.4")
    monkeypatch.setenv("FLASHMOE_NVCC", str(machine.nvcc))
    assert jit.compile_kernel(jit.Variant()).path.parent == machine.cache
    monkeypatch.setattr(driver, "cuda_release", lambda: (13, 0))
    assert jit.compile_kernel(jit.Variant()).path == carried


# ---- a cache that others could write to, or that is damaged -------------------------------------------------


def test_the_cache_is_made_for_its_user_alone(machine):
    before = os.umask(0)
    try:
        made = jit.compile_kernel(jit.Variant()).path
    finally:
        os.umask(before)
    assert machine.cache.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in machine.cache.iterdir() if path.stat().st_mode & 0o022] == []
    assert next(machine.cache.glob("*.lock")).stat().st_mode & 0o777 == 0o600  # no other user can lock it
    assert made.read_text() == "compiled\n"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_cache_to_which_others_can_write(machine, mode, capsys):
    jit.compile_kernel(jit.Variant())
    machine.cache.chmod(mode)
    expected = (
        rf"^cache: {machine.cache}: expected a folder of user {os.geteuid()}.* to which nobody else can write, found "
        rf"one of user {os.geteuid()}.*, mode {mode:04o}; see that its files are yours and chmod go-w it, or set FLASH"
    )
    for use in (jit.compile_kernel, jit.kernel):
        with pytest.raises(FlashMoEError, match=expected):
            use(jit.Variant())
    assert cli.main(["compile"]) == 2
    assert capsys.readouterr().err.endswith("to a folder of your own\n")
    machine.cache.chmod(0o755)
    assert jit.compile_kernel(jit.Variant()).seconds is None


def cut_short(path: Path) -> None:
    os.truncate(path, 3)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def changed(path: Path) -> None:
    path.write_text("Compiled\n")


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def made_a_link(path: Path) -> None:
    """The link leads to the undamaged kernel."""
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGES = (cut_short, emptied, changed, open_to_others, made_a_folder, made_a_pipe, made_a_link)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damaged", DAMAGES)
def test_a_damaged_kernel_is_compiled_again(machine, damaged, capfd):
    path = jit.compile_kernel(jit.Variant()).path
    damaged(path)
    assert jit.compiled_kernels() == (machine.cache, 0)
    again = jit.compile_kernel(jit.Variant())
    assert again.seconds is not None and len(machine.compilations()) == 2
    assert f"flashmoe: {path} is not what was compiled\n" in capfd.readouterr().err
    assert again.path.is_file() and not again.path.is_symlink() and again.path.read_text() == "compiled\n"
    assert not again.path.stat().st_mode & 0o022
    assert jit.kernel(jit.Variant()).samefile(again.path)
    assert jit.compiled_kernels() == (machine.cache, 1)


def test_a_kernel_under_the_name_of_another_is_not_taken(machine):
    """The file is undamaged and has the wanted kernel's name, but the content and the digest of another kernel."""
    wanted, other = (jit.compile_kernel(jit.Variant(dtype)).path for dtype in ("bfloat16", "float16"))
    stem, digest = wanted.stem.rpartition("-")[0], other.stem.rpartition("-")[2]
    wanted.unlink()
    shutil.copy(other, machine.cache / f"{stem}-{digest}.cubin")
    assert jit.compile_kernel(jit.Variant()).seconds is not None


def test_a_compiler_that_makes_an_empty_file(machine):
    machine.install(outcome='while [ "$1" != -o ]; do shift; done; : > "$2"; exit 0')
    with pytest.raises(FlashMoEError, match=r"cannot compile the bf16 SwiGLU kernel \(exit status 0\)"):
        jit.compile_kernel(jit.Variant())
    assert not list(machine.cache.glob("*.cubin"))


def test_what_was_checked_is_what_is_loaded(machine):
    """The checked kernel is loaded even if another folder takes the place of the cache meanwhile."""
    path = jit.kernel(jit.Variant())
    machine.cache.rename(machine.cache.with_name("away"))
    shutil.copytree(machine.cache.with_name("away"), machine.cache)
    for kernel in machine.cache.glob("*.cubin"):
        kernel.write_text("another\n")
    assert path.read_text() == jit.kernel(jit.Variant()).read_text() == "compiled\n"


def test_nothing_is_written_through_a_link(machine, tmp_path):
    machine.install(outcome="echo wrong here; exit 2")
    with pytest.raises(FlashMoEError, match="wrong here"):
        jit.compile_kernel(jit.Variant())
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    log, lock = (next(machine.cache.glob(f"*.{kind}")) for kind in ("log", "lock"))
    log.unlink()
    log.symlink_to(precious)
    with pytest.raises(FlashMoEError, match="wrong here"):
        jit.compile_kernel(jit.Variant())
    assert "wrong here" in log.read_text() and not log.is_symlink()
    lock.unlink()
    lock.symlink_to(tmp_path / "made by another")
    with pytest.raises(FlashMoEError, match=f"^cache: {lock}: expected a regular file, found a symbolic link; remove"):
        jit.compile_kernel(jit.Variant())
    assert precious.read_text() == "as it was" and not (tmp_path / "made by another").exists()


@pytest.mark.timeout(60)
def test_a_lock_that_is_not_released(machine, monkeypatch, capfd):
    path = jit.compile_kernel(jit.Variant()).path
    path.unlink()
    monkeypatch.setattr(jit, "LOCK_SECONDS", 0.5, raising=False)
    with open(next(machine.cache.glob("*.lock")), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        holder = f"(process {os.getpid()}|another process)"
        expected = rf"^cache: waited 0\.5 s for the lock {lock.name}, which {holder} holds; end that process"
        with pytest.raises(FlashMoEError, match=expected):
            jit.compile_kernel(jit.Variant())
        assert time.monotonic() - start < 30
    assert "waiting for another process" in capfd.readouterr().err
    assert jit.compile_kernel(jit.Variant()).path == path


@pytest.mark.timeout(60)
def test_a_compiler_that_hangs(machine, monkeypatch):
    monkeypatch.setattr(jit, "NVCC_SECONDS", 0.5, raising=False)
    machine.install(delay="exec sleep 100")
    with pytest.raises(FlashMoEError, match=r"nvcc: expected the bf16 SwiGLU kernel within 0\.5 s, got none from"):
        jit.compile_kernel(jit.Variant())
    assert not list(machine.cache.glob("*.tmp"))


def test_a_user_without_a_home(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "FLASHMOE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(FlashMoEError, match=r"^cache: user \d+ has no home folder; set FLASHMOE_CACHE to a folder of"):
        jit.cache_folder()


# ---- the same, done by a second user ------------------------------------------------------------------------


FOREIGN = b"of another user"


def plant(folder: Path, path: Path) -> None:
    """Writes another kernel to `folder`, undamaged, in the place of the one at `path`."""
    stem = path.stem.rpartition("-")[0]
    digest = hashlib.sha256(f"{stem}\n".encode() + FOREIGN).hexdigest()[:32]
    (folder / f"{stem}-{digest}.cubin").write_bytes(FOREIGN)


def test_a_cache_that_another_user_has_made(machine, monkeypatch, second_user):
    path = jit.compile_kernel(jit.Variant()).path
    squatted = second_user.place / "cache"
    second_user.does(lambda: (squatted.mkdir(0o755), plant(squatted, path)))
    monkeypatch.setenv("FLASHMOE_CACHE", str(squatted))
    expected = rf"^cache: {squatted}: expected .* user 0 .*, found one of user {second_user.uid}, mode 0755; set FLASH"
    for use in (jit.compile_kernel, jit.kernel):
        with pytest.raises(FlashMoEError, match=expected):
            use(jit.Variant())


def test_a_cache_that_another_user_has_poisoned(machine, monkeypatch, second_user):
    """A kernel that another user put there while the cache was open to all is not used after the mode is corrected."""
    own = second_user.place / "cache"
    monkeypatch.setenv("FLASHMOE_CACHE", str(own))
    path = jit.compile_kernel(jit.Variant()).path
    path.unlink()
    own.chmod(0o777)
    second_user.does(lambda: plant(own, path))
    with pytest.raises(FlashMoEError, match=r"mode 0777; see that its files are yours and chmod go-w it"):
        jit.kernel(jit.Variant())
    own.chmod(0o755)
    assert jit.kernel(jit.Variant()).read_text() == "compiled\n"
    assert [each.read_text() for each in own.glob("*.cubin")] == ["compiled\n"]


@pytest.mark.timeout(60)
def test_a_lock_that_another_user_would_hold(machine, monkeypatch, second_user):
    """Another user cannot even open the lock, although all users can read the cache."""
    own = second_user.place / "cache"
    monkeypatch.setenv("FLASHMOE_CACHE", str(own))
    jit.compile_kernel(jit.Variant()).path.unlink()
    own.chmod(0o755)

    def hold() -> None:
        for lock in own.glob("*.lock"):
            with pytest.raises(PermissionError):
                os.open(lock, os.O_RDONLY)

    second_user.does(hold)
    assert jit.compile_kernel(jit.Variant()).seconds is not None


def test_a_cache_of_root_serves_all_users(machine, monkeypatch, second_user):
    """Other users can only read the cache: they cannot add kernels that are missing."""
    sources, shared = jit.source_root(), second_user.place / "cache"
    if not all(folder.stat().st_mode & 0o005 == 0o005 for folder in (sources, *sources.parents)):
        pytest.skip(f"expected sources that a second user can read, found them in {sources}")
    monkeypatch.setenv("FLASHMOE_CACHE", str(shared))
    nvcc = shutil.copy(machine.nvcc, second_user.place)
    monkeypatch.setenv("FLASHMOE_NVCC", str(nvcc))
    path = jit.compile_kernel(jit.Variant()).path
    shared.chmod(0o755)

    def use() -> None:
        assert jit.compile_kernel(jit.Variant()) == jit.Compiled(path, None)
        with pytest.raises(FlashMoEError, match=f"^cache: cannot write {shared}/fp16.*: Permission denied; set FLASH"):
            jit.compile_kernel(jit.Variant("float16"))

    second_user.does(use)


# ---- flashmoe compile ------------------------------------------------------------------------------------


def test_command(machine, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["compile"]) == 0
    assert cli.main(["compile", "--dtype", "float32", "--activation", "gelu", "--exact", "--trace"]) == 0
    assert cli.main(["compile", "--transposed"]) == 0
    assert cli.main(["compile", "--all"]) == 0
    printed = capsys.readouterr().out
    assert "exact fp32 GELU traced" in printed and printed.count("cached") == 2
    assert "exact fp32 GELU few tokens traced" in printed and "bf16 SwiGLU transposed" in printed
    kinds = len(ACTIVATIONS)
    # Each layer has two kernels, but one if it is transposed. --all has three types; two of its kernels were there.
    known = 2 + 2 + 1 + 3 * kinds * 2 - 2
    assert len(machine.compilations()) == len(list(machine.cache.glob("*.cubin"))) == known
    assert cli.main(["compile", "--all", "--transposed"]) == 0
    assert len(machine.compilations()) == known + 2 * kinds - 1  # two types of 16 bits; one was there


@pytest.mark.parametrize(
    "options",
    [["--dtype", "int8"], ["--activation", "tanh"], ["--exact"], ["--transposed", "--dtype", "float32"]],
    ids=lambda options: options[0],
)
def test_command_refuses(machine, capsys, options):
    assert cli.main(["compile", *options]) == 2
    assert f"error: {options[0]}: expected" in capsys.readouterr().err
    assert machine.called() == []
