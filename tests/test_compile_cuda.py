"""tools/compile_cuda.py: which kernels it compiles, which it refuses, and which programs and headers it needs."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda_units
import nvshmem_headers
import pytest
from flashmoe import jit, nvshmem, spec

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "compile_cuda.py"
LOG = """\
ptxas info    : Compiling entry function 'flashmoe_moe' for 'sm_90a'
ptxas info    : Function properties for flashmoe_moe
    0 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 2048 bytes smem
"""
SASS = """\
.section .text.flashmoe_moe,"ax",@progbits
.L_x_1:
        /*0000*/              @!P0 BRA `(.L_x_1) ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0020*/             @!UPT UIADD3 URZ, UPT, UPT, URZ, URZ, URZ ;
        /*0030*/              @UP0 UTMALDG.5D [UR8], [UR6], desc[UR16] ;
        /*10040*/             @P1  LDGSTS.E.BYPASS.LTC128B.128 [R67], desc[UR4][R64.64] ;
        /*10050*/                  LDGSTS.E.BYPASS.LTC128B.128 [R67+0x400], desc[UR4][R62.64] ;
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_cuda", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look modules up there
    spec.loader.exec_module(module)
    return module


def compiled(tool: ModuleType, spilled: int = 0, sass: str = SASS):
    return tool.Compiled(LOG.format(spilled=spilled), opcodes=Counter(tool.OPCODE.findall(sass)))


def test_opcodes(tool):
    assert Counter(tool.OPCODE.findall(SASS)) == {"BRA": 1, "HGMMA": 1, "UIADD3": 1, "UTMALDG": 1, "LDGSTS": 2}


def test_report(tool, capsys):
    fused = next(unit for unit in cuda_units.units() if unit.variant)
    assert tool.report(fused, compiled(tool)) == 0
    assert "1 HGMMA, 1 UTMALDG, 2 LDGSTS" in capsys.readouterr().out
    assert tool.report(fused, compiled(tool, spilled=8)) == 1
    assert "FAILED: flashmoe_moe spills 16 bytes" in capsys.readouterr().out
    for name in ("HGMMA", "UTMALDG", "LDGSTS"):
        assert tool.report(fused, compiled(tool, sass=SASS.replace(name, "NOP"))) == 1
        assert f"FAILED: no {name} instruction" in capsys.readouterr().out
    assert tool.report(fused, tool.Compiled("", "nvdisasm exited with 1: no cubin")) == 1


def variants(every: bool = False, **options: Any) -> list[jit.Variant]:
    """The kernels among the units that have these options."""
    found = [unit.variant for unit in cuda_units.units(every) if unit.variant]
    return [each for each in found if all(getattr(each, name) == value for name, value in options.items())]


@pytest.mark.parametrize("few", [False, True])
def test_exact_instances_need_no_tensor_cores(tool, capsys, few):
    [exact] = [cuda_units.Unit(each) for each in variants(exact=True, few=few)]
    assert tool.report(exact, compiled(tool, sass=SASS.replace("HGMMA", "FFMA"))) == 0
    assert "  1 UTMALDG, 2 LDGSTS" in capsys.readouterr().out
    assert tool.report(exact, compiled(tool, sass=SASS.replace("LDGSTS", "NOP"))) == 1


@pytest.mark.parametrize("every", [False, True])
def test_instances(tool, every):
    """Each instance occurs once, and no source is left out. With `every`, there are also all instances that there are
    without it."""
    units = cuda_units.units(every)
    assert len(units) == len(set(units)) == len({unit.title for unit in units})  # files are named after titles
    assert {unit for unit in cuda_units.units() if unit.variant} <= set(cuda_units.units(True))
    assert all(bool(unit.nvshmem) == (unit.variant is not None and unit.variant.rdma) for unit in units)
    assert {unit.source for unit in units} == {*(ROOT / "csrc").rglob("*.cu"), *(ROOT / "benchmarks").rglob("*.cu")}
    assert len(units) == (NIGHTLY if every else 43)


NIGHTLY = 1176
"""The number of units with `every`. The tool's description has it rounded up to the next ten."""


def test_the_description_says_how_many(tool):
    assert f"some {NIGHTLY // 10 * 10 + 10} compilations" in " ".join(tool.__doc__.split())


def test_a_unit_is_told_what_the_compiler_on_first_use_is(tool, monkeypatch, tmp_path):
    """The compiler's flags are those of a compilation on first use, except that warnings are errors here."""
    commands = []

    def run(command, **how):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "")

    monkeypatch.setattr(tool, "OUTPUT", tmp_path)
    monkeypatch.setattr(tool.subprocess, "run", run)
    variant = jit.Variant("float32", "gelu", few=True, exact=True)
    for of in (variant, ROOT / "benchmarks" / "protocol.cu"):
        tool.compile_unit(Path("nvcc"), Path("nvdisasm"), cuda_units.Unit(of))
    kernel, program = (" ".join(command) for command in commands)
    assert kernel.startswith(f"nvcc {' '.join(variant.flags)} -Xptxas -v -Werror all-warnings ")
    assert f" {ROOT}/csrc/cuda/entry/decode.cu -o {tmp_path}/" in kernel and kernel.endswith(".cubin")
    assert program.startswith(f"nvcc -c {' '.join(jit.FLAGS[1:])} -Xptxas -v ") and "FLASHMOE" not in program
    assert program.endswith(".o")


def test_instances_of_plain_layers():
    # Three in bfloat16, and one of these also traced; then float16, float32 and exact float32.
    assert len(cuda_units.plain_variants(False)) == 3 + 1 + 1 + 2 + 1
    assert len(cuda_units.plain_variants(True)) == 4 * len(spec.ACTIVATIONS) * 2
    assert not any(each.few for each in cuda_units.plain_variants(True))


def test_instances_of_transposed_weights():
    assert len(cuda_units.transposed_variants(False)) == len(cuda_units.quantised_variants(False)) == 2
    for variant in cuda_units.transposed_variants(True):
        assert variant.transposed and variant.dtype != "float32"


def test_instances_of_experts_in_fp8():
    units = [cuda_units.Unit(each) for each in variants(quantised=True, few=False)]
    assert [unit.variant for unit in units] == cuda_units.quantised_variants(False)
    assert all({cuda_units.WGMMA, cuda_units.WGMMA_FP8} <= set(unit.required) for unit in units)


def test_instances_of_few_tokens(tool, capsys):
    """There are instances for each type and encoding, also with the activation that takes the most registers, and for
    groups. At night, there are instances for all layers that have this kernel."""
    least = variants(few=True)
    assert least == cuda_units.few_variants(False)
    of_kinds = Counter((each.quantised, each.mxfp4, each.group) for each in least)
    plain = len(cuda_units.plain_variants(False))
    assert of_kinds == {
        (False, False, False): plain,
        (True, False, False): 2,
        (False, True, False): 2,
        (False, False, True): 1,
        (True, False, True): 1,
    }
    assert sum(each.trace for each in least) == 1
    # Each of the two 16-bit types: plain, FP8 and MXFP4 for a rank alone, plain and FP8 for groups. Float32, exact or
    # not, for a rank alone. Each of these with all activations, untraced and traced.
    assert len(cuda_units.few_variants(True)) == (2 * (3 + 2) + 2) * len(spec.ACTIVATIONS) * 2
    for variant in least:
        unit = cuda_units.Unit(variant)
        products = {cuda_units.MMA} if variant.dtype != "float32" else set()
        if products and not (variant.group or variant.quantised or variant.mxfp4):
            products.add(cuda_units.WGMMA)
        assert set(unit.required) == products | set(cuda_units.LOADS)
    unit = cuda_units.Unit(next(each for each in least if each.mxfp4))
    assert tool.report(unit, compiled(tool)) == 1  # there is no mma.sync
    assert "no HMMA instruction" in capsys.readouterr().out
    assert tool.report(unit, compiled(tool, sass=SASS.replace("HGMMA", "HMMA"))) == 0


def test_instances_of_training():
    # At night, for each activation: 6 combinations of type and layout, 2 passes, alone and in groups; each of these
    # with neither of the options `on_input` and `sliced`, with one, and with both (`of_reasons` counts the last two).
    a = len(spec.ACTIVATIONS)
    for every, of_each, in_group, of_fp32, of_reasons in ((False, 3, 1, 0, 2), (True, 4 * a, 4 * a, 8 * a, 72 * a)):
        found = cuda_units.training_variants(every)
        assert len(set(found)) == len(found)
        assert not any(each.quantised or each.mxfp4 for each in found)
        assert not any(each.dtype == "float32" and each.transposed for each in found)
        assert sum(each.on_input or each.sliced for each in found) == of_reasons
        found = [each for each in found if not (each.on_input or each.sliced)]
        assert sum(each.dtype == "float32" for each in found) == of_fp32
        found = [each for each in found if each.dtype != "float32"]
        for which in ("keeps", "backward"):
            of_pass = [each for each in found if getattr(each, which)]
            assert len(of_pass) == of_each + in_group
            assert sum(each.group for each in of_pass) == in_group


def test_every_kernel_of_training_that_a_call_may_ask_for_is_compiled_at_night():
    types = [{"dtype": dtype, "transposed": each} for dtype in jit.TRANSPOSED for each in (False, True)]
    types += [{"dtype": "float32", "exact": each} for each in (False, True)]
    asked = {
        jit.Variant(**of, activation=activation, **{which: True}, group=group, on_input=on_input, sliced=sliced)
        for of, activation, which, group, on_input, sliced in itertools.product(
            types, spec.ACTIVATIONS, ("keeps", "backward"), *[(False, True)] * 3
        )
    }
    assert {each.dtype for each in asked} == set(jit.TRAINED)
    assert asked == set(cuda_units.training_variants(True)) and len(asked) == 96 * len(spec.ACTIVATIONS)


def test_every_kernel_for_a_few_tokens_that_layers_have_is_compiled_at_night():
    """The kernels are untraced and traced, for a rank alone and for a group."""
    kinds = [{"dtype": dtype} for dtype in spec.DTYPES] + [{"dtype": "float32", "exact": True}]
    kinds += [{"dtype": dtype, which: True} for dtype in jit.BESIDE_QUANTISED for which in ("quantised", "mxfp4")]
    alone = {
        each
        for of, activation, trace in itertools.product(kinds, spec.ACTIVATIONS, (False, True))
        for each in jit.variants_alone(**of, activation=activation, trace=trace)
        if each.few
    }
    groups = {replace(each, group=True) for each in alone if each.dtype != "float32" and not each.mxfp4}
    assert set(cuda_units.few_variants(True)) == alone | groups


def test_backward_passes_of_float32_multiply_by_fragments(tool, capsys):
    unit = cuda_units.Unit(next(each for each in variants(backward=True, dtype="float32")))
    assert tool.report(unit, compiled(tool)) == 1
    assert "no HMMA instruction" in capsys.readouterr().out
    assert tool.report(unit, compiled(tool, sass=SASS.replace("HGMMA", "HMMA"))) == 0


def test_kernels_that_put_are_compiled_with_both_ends_of_nvshmems_releases():
    puts = [unit for unit in cuda_units.units(True) if unit.nvshmem]
    by_release = Counter(unit.nvshmem for unit in puts)
    assert by_release == dict(zip(nvshmem_headers.RELEASES, (1, 6), strict=True))
    always = Counter(unit.nvshmem for unit in cuda_units.units() if unit.nvshmem)
    assert always == dict(zip(nvshmem_headers.RELEASES, (1, 3), strict=True))
    ends = [tuple(map(int, release.split(".")[:2])) for release in nvshmem_headers.RELEASES]
    assert ends == [nvshmem.OLDEST, nvshmem.NEWEST]


def test_what_needs_headers_of_nvshmem_is_skipped_by_name_but_in_ci(tool, tmp_path, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(tool, "find_nvcc", lambda: Path("true"))
    monkeypatch.setattr(tool, "find_nvdisasm", lambda nvcc: Path("nvdisasm"))
    monkeypatch.setattr(tool, "compile_unit", lambda nvcc, nvdisasm, unit: compiled.append(unit) or tool.Compiled(""))
    monkeypatch.setattr(tool, "report", lambda unit, compiled: 0)
    monkeypatch.setattr(nvshmem_headers, "folder", lambda release: tmp_path / release)
    oldest, newest = nvshmem_headers.RELEASES
    (tmp_path / oldest).mkdir()
    defines = "-DFLASHMOE_DTYPE=1 -DFLASHMOE_ACTIVATION=3 -DFLASHMOE_RDMA=1"
    first = f"csrc/cuda/entry/moe_by_puts.cu {defines} (NVSHMEM {newest})"
    without = f"no headers of NVSHMEM for {first}, "

    monkeypatch.setenv("CI", "true")
    assert tool.main() == 1
    assert f"FAILED: {without}" in capsys.readouterr().err and not compiled
    monkeypatch.delenv("CI")
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert f"SKIPPED, {without}" in out and "python tools/nvshmem_headers.py" in out
    assert {unit.nvshmem for unit in compiled} == {"", oldest}

    (tmp_path / newest).mkdir()
    compiled.clear()
    assert tool.main() == 0 and "SKIPPED" not in capsys.readouterr().out
    assert compiled == cuda_units.units()


def test_a_kernel_that_puts_keeps_what_nvshmem_looks_for(tool, tmp_path, monkeypatch):
    """The compiler here is a script that writes a cubin with given symbols, and the disassembler prints nothing."""
    monkeypatch.setattr(tool, "OUTPUT", tmp_path)
    unit = next(unit for unit in cuda_units.units() if unit.nvshmem)
    nvcc = tmp_path / "nvcc"
    nvcc.touch(mode=0o755)

    def compile_with(symbols: str):
        nvcc.write_text(f"#!/bin/sh\nwhile [ $1 != -o ]; do shift; done\nprintf '{symbols}' > \"$2\"\n")
        return tool.compile_unit(nvcc, Path("true"), unit)

    assert compile_with(r"\0nvshmemi_device_state_d\0nvshmemi_device_lib_version_d\0").failure == ""
    assert compile_with(r"\0_N23nvshmemi_device_state_dE\0").failure == (
        "no symbol nvshmemi_device_state_d and no nvshmemi_device_lib_version_d"
    )


def test_other_kernels_need_no_particular_instruction(tool):
    other = next(unit for unit in cuda_units.units() if not unit.variant)
    assert tool.report(other, compiled(tool, sass="")) == 0


def test_nvdisasm_is_that_of_nvcc_or_of_pip(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool.sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    nvcc = tmp_path / "toolkit" / "nvcc"
    assert tool.find_nvdisasm(nvcc) is None
    for folder in (tmp_path / "packages" / "nvidia" / "cu13" / "bin", nvcc.parent):
        folder.mkdir(parents=True)
        (folder / "nvdisasm").touch()
        assert tool.find_nvdisasm(nvcc) == folder / "nvdisasm"


def test_without_nvdisasm_nothing_passes(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(tool, "find_nvdisasm", lambda nvcc: None)
    assert tool.main() == 1
    assert "no nvdisasm" in (error := capsys.readouterr().err) and "pip install nvidia-cuda-nvdisasm" in error
