"""How ranks reach each other's memory: mapped, or by NVSHMEM's puts, which have kernels of their own."""

from __future__ import annotations

import pytest
from fake_gpu import SIZES, E, H, K
from fake_group import put_by
from flashmoe import jit
from flashmoe import nvshmem as nvshmem_files
from flashmoe.contexts.memory import plan_memory


@pytest.mark.parametrize("mode", ["auto", "reduced"])
def test_puts(cubin, mode):
    plan = plan_memory(engine="cuda", ranks=3, transport="rdma", **SIZES)
    mapped = plan_memory(engine="cuda", ranks=3, return_mode="reduced", **SIZES)
    of_weights = 4 * SIZES["max_tokens"] * K  # gradients of combine weights: returned to mapped memory only
    reasons = 3 * 512  # of refused calls: written to mapped memory only
    assert plan.heap_bytes + -(-of_weights // 256) * 256 + reasons == mapped.heap_bytes
    words = 2 * 256  # returns_ready and returns_sent: a word for each rank, rounded up to 256 bytes
    units = 4 * (E + 2048 // 16)  # counters of units, for calls that promise few tokens: mapped memory only
    assert plan.workspace_bytes == mapped.workspace_bytes + words + SIZES["max_tokens"] * H * 2 - -(-units // 256) * 256
    told = put_by(3, {"transport": "rdma", "return_mode": mode}, cubin=cubin)
    for seen in told:
        assert (seen.transport, seen.return_mode) == ("rdma", "reduced")
        assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
        assert (seen.registered_bytes, seen.modules) == (plan.workspace_bytes, 1)
        assert seen.left == (0, 0)
        assert seen.variants == [jit.Variant("bfloat16", "swiglu", rdma=True)]
        assert (seen.launch["mapped"], seen.launch["return_mode"], seen.launch["groups"]) == (1, 1, [0, 1])


def test_where_memory_is_mapped_nothing_is_put(cubin):
    for seen in put_by(2, {}, cubin=cubin):
        assert (seen.transport, seen.registered_bytes, seen.modules) == ("mapped", 0, 0)
        assert seen.variants == [jit.Variant("bfloat16", "swiglu")] and seen.launch["mapped"] == 2


def test_memory_that_one_rank_cannot_map(cubin):
    """If one rank cannot map the memory of the others, all ranks put."""
    plan = plan_memory(engine="cuda", ranks=3, transport="rdma", **SIZES)
    unmapped = {"FAKE_NVSHMEM_UNMAPPED": "1"}
    for seen in put_by(3, {}, cubin=cubin, environment=unmapped):
        assert (seen.transport, seen.return_mode, seen.launch["mapped"]) == ("rdma", "reduced", 1)
        assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
    for told in put_by(3, {"return_mode": "direct"}, cubin=cubin, environment=unmapped):
        assert told == (
            "InvalidArgument: return_mode: expected 'reduced' or 'auto' with transport 'rdma', got 'direct'"
        )


def test_ranks_that_want_other_transports(cubin):
    reduced = {"return_mode": "reduced"}
    first, second = put_by(2, {**reduced, "transport": "rdma"}, reduced, cubin=cubin)
    assert "rdma (transport): rank 0 has 1, rank 1 has 0" in first
    assert "rdma (transport): rank 1 has 0, rank 0 has 1" in second


def test_a_kernel_compiled_with_other_headers_than_the_library_has(cubin):
    """NVSHMEM itself would accept such a kernel, because the headers are older than the library."""
    old = {"FAKE_DRIVER_OLD_HEADERS": "1"}
    for told in put_by(2, {"transport": "rdma"}, cubin=cubin, environment=old):
        assert told == (
            "FlashMoEError: nvshmem: expected a kernel compiled with the headers of 3.8.0, the release of "
            "libnvshmem_host.so.3, got one compiled with those of 3.4.5; to have both of one release: "
            f"{nvshmem_files.INSTALL}"
        )


def test_a_module_of_another_nvshmem(cubin):
    other = {"FAKE_NVSHMEM_OTHER_VERSION": "1"}
    for told in put_by(2, {"transport": "rdma"}, cubin=cubin, environment=other):
        assert told.startswith("FlashMoEError: nvshmem: nvshmemx_cumodule_init failed with status 1")


@pytest.mark.parametrize("name", ["NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_GPUNETIO_ENABLE_GDAKI"])
def test_puts_by_the_gpu_itself_are_refused(cubin, name):
    for told in put_by(2, {"transport": "rdma"}, cubin=cubin, environment={name: "1"}):
        assert told.startswith(f"InvalidArgument: {name}: expected it unset or 0 with transport 'rdma'")


@pytest.mark.parametrize("used", [None, "tcp,cuda_copy", "all", "^rc", "rc,tcpcm"])
@pytest.mark.parametrize("transport", ["auto", "rdma"])
def test_a_network_on_which_anybody_writes_is_refused(cubin, transport, used):
    """It is refused even if all memory is mapped, because NVSHMEM would open the network there, too."""
    environment = {"NVSHMEM_REMOTE_TRANSPORT": "ucx"} | ({"NVSHMEM_UCX_TLS": used} if used else {})
    for told in put_by(2, {"transport": transport}, cubin=cubin, environment=environment):
        assert told.startswith("InvalidArgument: NVSHMEM_REMOTE_TRANSPORT: expected none, ibrc,")
        assert f"got ucx with {used or 'all of them'}" in told


def test_ucx_without_tcp_is_not_refused(cubin):
    environment = {"NVSHMEM_REMOTE_TRANSPORT": "ucx", "NVSHMEM_UCX_TLS": "rc,cuda_copy"}
    for seen in put_by(2, {"transport": "rdma"}, cubin=cubin, environment=environment):
        assert seen.transport == "rdma"
