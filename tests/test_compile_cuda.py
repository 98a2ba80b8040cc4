"""What tools/compile_cuda.py refuses, and what it needs for that."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

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
    assert len(exact) == 5  # one of them traced
    assert tool.report(exact[0], compiled(tool, sass=SASS.replace("HGMMA", "FFMA"))) == 0
    assert "  1 UTMALDG, 2 LDGSTS" in capsys.readouterr().out
    assert tool.report(exact[0], compiled(tool, sass=SASS.replace("LDGSTS", "NOP"))) == 1


def test_instances(tool):
    found = tool.instances()
    assert len(found) == len(set(found)) == 16 + 4 + 3
    assert sum(tool.TRACE in defines for defines in found) == 4 + 3
    assert all(tool.RDMA not in defines for defines in found)


def test_what_needs_headers_of_nvshmem_is_skipped_by_name(tool, tmp_path, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(tool, "find_nvcc", lambda: Path("true"))
    monkeypatch.setattr(tool, "find_nvdisasm", lambda nvcc: Path("nvdisasm"))
    monkeypatch.setattr(tool, "compile_unit", lambda nvcc, nvdisasm, unit: compiled.append(unit) or tool.Compiled(""))
    monkeypatch.setattr(tool, "report", lambda unit, compiled: 0)
    monkeypatch.setattr(tool.sys, "path", [str(tmp_path)])
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert "SKIPPED, no headers of NVSHMEM: csrc/cuda/entry/moe.cu -DFLASHMOE_DTYPE=1 -DFLASHMOE_ACTIVATION=3 " in out
    assert not any(tool.RDMA in unit.defines for unit in compiled)
    (tmp_path / "nvidia" / "nvshmem" / "include").mkdir(parents=True)
    (tmp_path / "nvidia" / "nvshmem" / "include" / "nvshmem.h").touch()
    assert tool.main() == 0 and "SKIPPED" not in capsys.readouterr().out
    assert sum(tool.RDMA in unit.defines for unit in compiled) == len(tool.rdma_instances())


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
