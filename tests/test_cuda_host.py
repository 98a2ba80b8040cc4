"""The CUDA engine's host side, without a GPU. Its declarations of the driver's interface are compared with NVIDIA's,
and all that it does up to the launch runs on stand-ins for the driver and for NVSHMEM (fake_driver/)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nvshmem_headers
import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILE = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "include"), "-I", str(ROOT / "csrc")]

# Our header comes first, so that our declarations keep their names: macros of cuda.h rename functions to other symbols.
COMPARISON = """
#include "cuda/device/driver.h"
#include "flashmoe/gpu/kernel_args.h"
#include <cuda.h>

namespace ours = flashmoe::cuda;

template <class... A, class... B>
constexpr bool same(ours::CudaResult (*)(A...), CUresult (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) return false;
  else return ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...);
}
#define SAME(symbol, parameters) static_assert(same(decltype(ours::Driver::symbol){}, decltype(&::symbol){}), #symbol);
FLASHMOE_DRIVER_API(SAME)

static_assert(sizeof(ours::LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(ours::LaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(ours::LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(ours::LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(ours::LaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));
static_assert(sizeof(ours::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(ours::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(flashmoe::gpu::TensorMap) == sizeof(CUtensorMap));
static_assert(alignof(flashmoe::gpu::TensorMap) % 64 == 0);  // what cuTensorMapEncodeTiled asks for

static_assert(ours::kCudaOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kMultiprocessorCount == int{CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT});
static_assert(ours::kComputeCapabilityMajor == int{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR});
static_assert(ours::kComputeCapabilityMinor == int{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR});
static_assert(ours::kMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(ours::kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(ours::kHostAllocMapped == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(ours::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(ours::kMapUInt8 == int{CU_TENSOR_MAP_DATA_TYPE_UINT8});
static_assert(ours::kMapFloat16 == int{CU_TENSOR_MAP_DATA_TYPE_FLOAT16});
static_assert(ours::kMapFloat32 == int{CU_TENSOR_MAP_DATA_TYPE_FLOAT32});
static_assert(ours::kMapBFloat16 == int{CU_TENSOR_MAP_DATA_TYPE_BFLOAT16});
static_assert(ours::kMapInterleaveNone == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(ours::kMapSwizzle128B == CU_TENSOR_MAP_SWIZZLE_128B);
static_assert(ours::kMapPromotion256B == CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
static_assert(ours::kMapFillZero == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
static_assert(ours::kLaunchCooperative == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
"""


@pytest.fixture
def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def cuda_h() -> Path | None:
    """The folder of NVIDIA's header cuda.h, from a toolkit or from the PyPI packages that nvcc comes with."""
    folders = [*Path("/usr/local").glob("cuda*/include")]
    folders += [Path(folder) for path in sys.path for folder in Path(path).glob("nvidia/*/include")]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


def test_the_driver_is_declared_as_nvidia_does(compiler, tmp_path):
    folder = cuda_h()
    if folder is None:
        pytest.skip("no cuda.h on this machine")
    source = tmp_path / "comparison.cpp"
    source.write_text(COMPARISON)
    command = [compiler, *COMPILE, "-isystem", str(folder), "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


NVSHMEM_COMPARISON = """
#include "cuda/transport/nvshmem.h"
#include <host/nvshmem_api.h>
#include <host/nvshmemx_api.h>

namespace ours = flashmoe::cuda;

template <class R, class... A, class S, class... B>
constexpr bool same(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) return false;
  else return std::is_same_v<R, S> && ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...);
}
#define SAME(symbol, result, parameters) \
  static_assert(same(decltype(ours::Nvshmem::symbol){}, decltype(&::symbol){}), #symbol);
FLASHMOE_NVSHMEM_API(SAME)

static_assert(sizeof(ours::NvshmemVersion) == sizeof(nvshmemi_version_t));
static_assert(offsetof(ours::NvshmemVersion, patch) == offsetof(nvshmemi_version_t, patch));
static_assert(sizeof(ours::NvshmemUniqueId) == sizeof(nvshmemx_uniqueid_t));
static_assert(sizeof(ours::NvshmemUniqueIdArgs) == sizeof(nvshmemx_uniqueid_args_t));
static_assert(offsetof(ours::NvshmemUniqueIdArgs, rank) == offsetof(nvshmemx_uniqueid_args_t, myrank));
static_assert(offsetof(ours::NvshmemUniqueIdArgs, ranks) == offsetof(nvshmemx_uniqueid_args_t, nranks));
static_assert(sizeof(ours::NvshmemInitArgs) == sizeof(nvshmemx_init_args_t));
static_assert(offsetof(ours::NvshmemInitArgs, unique_id) == offsetof(nvshmemx_init_args_t, uid_args));
static_assert(sizeof(ours::NvshmemInitAttributes) == sizeof(nvshmemx_init_attr_t));
static_assert(offsetof(ours::NvshmemInitAttributes, args) == offsetof(nvshmemx_init_attr_t, args));
static_assert(ours::kNvshmemInitWithUniqueId == NVSHMEMX_INIT_WITH_UNIQUEID);

// Of what has got a second version since, a library still takes the first, by its number.
#ifndef NVSHMEM_INIT_ATTR_V1_IDENTIFIER
#define NVSHMEM_INIT_ATTR_V1_IDENTIFIER (1 << 16) + sizeof(nvshmemx_init_attr_t)
#endif
static_assert(ours::kNvshmemVersion<ours::NvshmemInitAttributes> == NVSHMEM_INIT_ATTR_V1_IDENTIFIER);
static_assert(sizeof(ours::NvshmemInitArgs) == sizeof(nvshmemx_init_args_v1));
static_assert(sizeof(ours::NvshmemInitAttributes) == sizeof(nvshmemx_init_attr_v1));
static_assert(ours::kNvshmemVersion<ours::NvshmemUniqueIdArgs> == (1 << 16) + sizeof(nvshmemx_uniqueid_args_v1));
static_assert(ours::kNvshmemVersion<ours::NvshmemUniqueId> == (1 << 16) + sizeof(nvshmemx_uniqueid_v1));
"""


@pytest.mark.parametrize("release", nvshmem_headers.RELEASES)
def test_nvshmem_is_declared_as_nvidia_does(compiler, tmp_path, release):
    cuda, folder = cuda_h(), nvshmem_headers.folder(release)
    assert folder.exists() or not os.environ.get("CI")
    if cuda is None or not folder.exists():
        pytest.skip(f"no cuda.h on this machine, or no headers of NVSHMEM {release} (python tools/nvshmem_headers.py)")
    source = tmp_path / "comparison.cpp"
    source.write_text(NVSHMEM_COMPARISON)
    command = [compiler, *COMPILE, "-isystem", str(cuda), "-isystem", str(folder), "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(1200)  # 250 cases, some with several processes: half a minute on idle cores, more on busy ones
def test_on_a_fake_driver(compiler, tmp_path):
    """Beside the fake driver there is a fake NVSHMEM, which has the memory of all ranks in shared memory."""
    pytest.importorskip("torch")
    sources = ROOT / "tests" / "fake_driver"
    for source, library in (("driver.cpp", "libcuda.so.1"), ("nvshmem.cpp", "libnvshmem_host.so.3")):
        command = [compiler, *COMPILE, "-O1", "-shared", "-fPIC", str(sources / source), "-o", str(tmp_path / library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    paths = os.pathsep.join([str(sources), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": paths}
    # The files of cases are not named as tests are, so that a run of all tests does not collect them: without the fake
    # driver they cannot be imported.
    cases = ["-p", "fake_gpu", "-o", "python_files=*_cases.py", str(sources)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_without_a_driver(tmp_path):
    """The process finds no driver, even if this machine has one. The error says what is missing."""
    (tmp_path / "libcuda.so.1").write_text("no library")
    program = (
        "import flashmoe\n"
        "sizes = dict(max_tokens=8, hidden=8, intermediate=8, experts=1, top_k=1)\n"
        "flashmoe.Context(**sizes).close()\n"
        "try:\n"
        "    flashmoe.Context(engine='cuda', **sizes)\n"
        "except flashmoe.FlashMoEError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "expected the NVIDIA driver's libcuda.so.1 on this machine" in done.stdout
