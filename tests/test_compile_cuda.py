"""What tools/compile_cuda.py refuses, and what it needs for that."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import nvshmem_headers
import pytest
from flashmoe import jit, nvshmem, spec

TOOL = Path(__file__).resolve().parent.parent / "tools" / "compile_cuda.py"
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
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def compiled(tool: ModuleType, spilled: int = 0, sass: str = SASS):
    return tool.Compiled(LOG.format(spilled=spilled), opcodes=Counter(tool.OPCODE.findall(sass)))


def test_opcodes(tool):
    assert Counter(tool.OPCODE.findall(SASS)) == {"BRA": 1, "HGMMA": 1, "UIADD3": 1, "UTMALDG": 1, "LDGSTS": 2}


def test_report(tool, capsys):
    fused = next(unit for unit in tool.units() if unit.fused)
    assert tool.report(fused, compiled(tool)) == 0
    assert "1 HGMMA, 1 UTMALDG, 2 LDGSTS" in capsys.readouterr().out
    assert tool.report(fused, compiled(tool, spilled=8)) == 1
    assert "FAILED: flashmoe_moe spills 16 bytes" in capsys.readouterr().out
    for name in ("HGMMA", "UTMALDG", "LDGSTS"):
        assert tool.report(fused, compiled(tool, sass=SASS.replace(name, "NOP"))) == 1
        assert f"FAILED: no {name} instruction" in capsys.readouterr().out
    assert tool.report(fused, tool.Compiled("", "nvdisasm exited with 1: no cubin")) == 1


def test_exact_instances_need_no_wgmma(tool, capsys):
    exact = [unit for unit in tool.units() if tool.EXACT in unit.defines]
    assert len(exact) == 1
    assert tool.report(exact[0], compiled(tool, sass=SASS.replace("HGMMA", "FFMA"))) == 0
    assert "  1 UTMALDG, 2 LDGSTS" in capsys.readouterr().out
    assert tool.report(exact[0], compiled(tool, sass=SASS.replace("LDGSTS", "NOP"))) == 1


@pytest.mark.parametrize("every", [False, True])
def test_instances(tool, every):
    """Each once, and `every` one includes all others."""
    of_kinds = [
        tool.instances,
        tool.transposed_instances,
        tool.quantised_instances,
        tool.mxfp4_instances,
        tool.training_instances,
        tool.machines_instances,
        tool.few_group_instances,
    ]
    found = [defines for of_kind in of_kinds for defines in of_kind(every)]
    assert len(found) == len(set(found))
    assert set(found) <= {defines for of_kind in of_kinds for defines in of_kind(True)}
    assert all(tool.RDMA not in defines for defines in found)
    compiled = [unit.defines for unit in tool.units(every) if not unit.nvshmem and unit.fused]
    assert sorted(compiled) == sorted(found)


def test_instances_of_plain_layers(tool):
    # bfloat16, of which one is traced, float16, float32, exact float32.
    assert len(tool.instances(False)) == 3 + 1 + 1 + 2 + 1
    assert len(tool.instances(True)) == 4 * 7 * 2


def test_instances_of_transposed_weights(tool):
    assert len(tool.transposed_instances(False)) == len(tool.quantised_instances(False)) == 2
    for defines in tool.transposed_instances(True):
        assert tool.TRANSPOSED in defines and "-DFLASHMOE_DTYPE=0" not in defines


def test_instances_of_experts_in_fp8(tool):
    units = [unit for unit in tool.units() if tool.QUANTISED in unit.defines]
    of_groups = [unit for unit in units if tool.FEW_GROUP in unit.defines]
    assert len(of_groups) == 1 and of_groups[0].required == (tool.MMA, *tool.LOADS)
    units = [unit for unit in units if unit not in of_groups]
    assert [unit.defines for unit in units] == tool.quantised_instances(False)
    assert all({tool.WGMMA, tool.WGMMA_FP8} <= set(unit.required) for unit in units)


def test_instances_of_experts_in_mxfp4(tool, capsys):
    units = [unit for unit in tool.units() if tool.MXFP4 in unit.defines]
    assert [unit.defines for unit in units] == tool.mxfp4_instances(False)
    assert tool.report(units[0], compiled(tool)) == 1  # there is no mma.sync
    assert "no HMMA instruction" in capsys.readouterr().out
    assert tool.report(units[0], compiled(tool, sass=SASS.replace("HGMMA", "HMMA"))) == 0


def test_instances_of_training(tool):
    fp32, reasons = "-DFLASHMOE_DTYPE=0", {tool.ON_INPUT, tool.SLICED}
    # 504: 6 types and layouts, 7 activations, 2 passes, alone and in groups, and 3 sets of reasons besides none.
    for every, of_each, in_group, of_fp32, of_reasons in ((False, 3, 1, 0, 2), (True, 28, 28, 7 * 2 * 4, 504)):
        found = tool.training_instances(every)
        assert len(set(found)) == len(found)
        assert not any({tool.QUANTISED, tool.MXFP4} & set(defines) for defines in found)
        assert not any({fp32, tool.TRANSPOSED} <= set(defines) for defines in found)
        assert sum(not reasons.isdisjoint(defines) for defines in found) == of_reasons
        found = [defines for defines in found if reasons.isdisjoint(defines)]
        assert sum(fp32 in defines for defines in found) == of_fp32
        found = [defines for defines in found if fp32 not in defines]
        for which in (tool.KEEP, tool.BACKWARD):
            assert sum(which in defines for defines in found) == of_each + in_group
            assert sum({which, tool.GROUP} <= set(defines) for defines in found) == in_group


def test_every_kernel_of_training_that_a_call_may_ask_for_is_compiled_at_night(tool):
    """What the first-use compiler is told of each, beside what the tool defines."""
    compiled = {frozenset(defines) for defines in tool.training_instances(True)}
    types = [{"dtype": dtype, "transposed": each} for dtype in jit.TRANSPOSED for each in (False, True)]
    types += [{"dtype": "float32", "exact": each} for each in (False, True)]
    asked = [
        jit.Variant(**of, activation=activation, **{which: True}, group=group, on_input=on_input, sliced=sliced)
        for of, activation, which, group, on_input, sliced in itertools.product(
            types, spec.ACTIVATIONS, ("keeps", "backward"), *[(False, True)] * 3
        )
    ]
    assert {each.dtype for each in asked} == set(jit.TRAINED)
    assert len(asked) == len(compiled) == 672
    for variant in asked:
        defines = {
            flag for flag in variant.flags if flag.startswith("-D") and not flag.endswith(("TRACE=0", "EXACT=0"))
        }
        assert defines in compiled, variant.title


def test_backward_passes_of_float32_multiply_by_fragments(tool, capsys):
    unit = next(u for u in tool.units() if {tool.BACKWARD, "-DFLASHMOE_DTYPE=0"} <= set(u.defines))
    assert tool.report(unit, compiled(tool)) == 1
    assert "no HMMA instruction" in capsys.readouterr().out
    assert tool.report(unit, compiled(tool, sass=SASS.replace("HGMMA", "HMMA"))) == 0


def test_kernels_that_put_are_compiled_with_both_ends_of_nvshmems_releases(tool):
    puts = [unit for unit in tool.units(True) if tool.RDMA in unit.defines]
    by_release = Counter(unit.nvshmem for unit in puts)
    assert by_release == dict(zip(nvshmem_headers.RELEASES, (1, 6), strict=True))
    assert len({unit.title for unit in puts}) == 7  # of whose words the names of the results are made
    always = Counter(unit.nvshmem for unit in tool.units() if tool.RDMA in unit.defines)
    assert always == dict(zip(nvshmem_headers.RELEASES, (1, 3), strict=True))
    ends = [tuple(map(int, release.split(".")[:2])) for release in nvshmem_headers.RELEASES]
    assert ends == [nvshmem.OLDEST, nvshmem.NEWEST]
    assert not any(unit.nvshmem for unit in tool.units() if unit not in puts)


def test_what_needs_headers_of_nvshmem_is_skipped_by_name_but_in_ci(tool, tmp_path, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(tool, "find_nvcc", lambda: Path("true"))
    monkeypatch.setattr(tool, "find_nvdisasm", lambda nvcc: Path("nvdisasm"))
    monkeypatch.setattr(tool, "compile_unit", lambda nvcc, nvdisasm, unit: compiled.append(unit) or tool.Compiled(""))
    monkeypatch.setattr(tool, "report", lambda unit, compiled: 0)
    monkeypatch.setattr(nvshmem_headers, "folder", lambda release: tmp_path / release)
    oldest, newest = nvshmem_headers.RELEASES
    (tmp_path / oldest).mkdir()
    first = f"csrc/cuda/entry/moe.cu -DFLASHMOE_DTYPE=1 -DFLASHMOE_ACTIVATION=3 {tool.RDMA} (NVSHMEM {newest})"
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
    assert compiled == tool.units()


def test_a_kernel_that_puts_keeps_what_nvshmem_looks_for(tool, tmp_path, monkeypatch):
    """A compiler that writes a cubin of these symbols, and a disassembler that says nothing."""
    monkeypatch.setattr(tool, "OUTPUT", tmp_path)
    unit = next(unit for unit in tool.units() if unit.nvshmem)
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
    other = next(unit for unit in tool.units() if not unit.fused)
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
