#include "cuda/transport/group.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "cuda/transport/notices.h"
#include "cuda/transport/nvshmem.h"
#include "cuda/transport/world.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

class SingleGpuGroup final : public host::Group {
 public:
  SingleGpuGroup(const Device& device, uint64_t bytes) : memory_(device, bytes, "heap") {
    heaps_ = {memory_.as<uint8_t>()};
  }

 private:
  DeviceMemory memory_;
};

void refuse_broken_world(const std::string& group) {
  if (!world().broken) return;
  throw Error(Error::Kind::kGroup,
              concat("group '", group,
                     "': an earlier group of this process broke while its ranks joined; start a new process"));
}

// Refuses puts that the GPU itself makes, which are options of NVSHMEM. The kernel is compiled without such puts. If
// they are switched on, there may be no proxy, which makes the kernel's puts otherwise.
void refuse_puts_by_gpu() {
  for (const char* const name : {"NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_GPUNETIO_ENABLE_GDAKI"}) {
    const char* const set = std::getenv(name);
    if (set == nullptr || std::strcmp(set, "") == 0 || std::strcmp(set, "0") == 0) continue;
    throw Error(Error::Kind::kInvalidArgument,
                concat(name,
                       ": expected it unset or 0 with transport 'rdma', whose puts to other nodes are NVSHMEM's "
                       "proxy's, got ",
                       set));
  }
}

// Most ranks on one GPU. Ranks that share a GPU take turns of milliseconds, and each waits for the others' turns,
// unless MPS lets them run side by side. Results are right, but only tests have a use for this.
uint32_t most_on_a_gpu() {
  const char* const set = std::getenv("FLASHMOE_SHARE_GPUS");
  return set == nullptr ? 1 : static_cast<uint32_t>(std::max(1, std::atoi(set)));
}

void check_devices(const Notices& notices) {
  const uint32_t most = most_on_a_gpu();
  for (uint32_t p = 0; p < notices.ranks(); ++p) {
    uint32_t sharing = 1;
    for (uint32_t q = 0; q < p; ++q) {
      if (std::memcmp(notices.of(p).device, notices.of(q).device, sizeof(Notice::device)) == 0 && ++sharing > most) {
        throw Error(Error::Kind::kInvalidArgument,
                    concat("device: expected a GPU of its own for each rank, got the same for ranks ", q, " and ", p));
      }
    }
    const uint32_t ranks = notices.of(p).world_ranks;
    if (ranks != world().ranks || (ranks != 0 && (ranks != notices.ranks() || notices.of(p).world_rank != p))) {
      throw Error(Error::Kind::kGroup, concat("group '", notices.group(),
                                              "': expected the ranks of this process's first group of several GPUs, "
                                              "which NVSHMEM was initialised for, got others (rank ",
                                              p, ")"));
    }
  }
}

class NvshmemGroup final : public host::Group {
 public:
  NvshmemGroup(const Device& device, const Membership& who, const Limits& limits, uint64_t bytes, uint64_t timeout_ns,
               const std::function<void()>& prepare)
      : device_(device), notices_(who.name, who.rank, limits, timeout_ns) {
    const std::lock_guard lock(world().mutex);
    try {
      join(who, limits, bytes, prepare);
    } catch (const Error& e) {
      notices_.fail(e.what());
      throw;
    } catch (const NotMapped&) {  // thrown on all ranks: there is nobody to tell
      throw;
    } catch (...) {
      notices_.fail("it was interrupted");
      throw;
    }
  }

  std::string obituary(uint32_t p) const override { return notices_.obituary(p); }

 private:
  void join(const Membership& who, const Limits& limits, uint64_t bytes, const std::function<void()>& prepare) {
    const Nvshmem& api = nvshmem(who.nvshmem);
    if (limits.rdma != 0) refuse_puts_by_gpu();
    refuse_broken_world(who.name);
    prepare();
    post(api);
    notices_.await_all(Notice::kPosted);
    check_devices(notices_);
    const Together together(device_, notices_, api);
    together.enter_world();
    uint8_t* const own = together.take_block(bytes, lease_);
    heaps_.assign(limits.ranks, nullptr);
    heaps_[who.rank] = own;
    if (limits.rdma == 0) map_all(api);
    clear(own, bytes);
    notices_.set_stage(Notice::kReady);
    notices_.await_all(Notice::kReady);
  }

  void post(const Nvshmem& api) const {
    Notice& own = notices_.own();
    own.world_rank = world().rank;
    own.world_ranks = world().ranks;
    for (const SymmetricMemory& b : world().blocks) {
      if (!b.taken && own.free_blocks < Notice::kMostFree) own.free[own.free_blocks++] = b.number;
    }
    device_.identify(own.device);
    if (notices_.rank() == 0 && world().ranks == 0) {
      own.id.version = kNvshmemVersion<NvshmemUniqueId>;
      check_nvshmem(api.nvshmemx_get_uniqueid(&own.id), "nvshmemx_get_uniqueid");
    }
    notices_.set_stage(Notice::kPosted);
  }

  // Ranks agree on whether every rank has mapped every other rank's memory. If one of them has not, all ranks must
  // reach all others by puts, and all throw NotMapped.
  void map_all(const Nvshmem& api) {
    const uint32_t rank = notices_.rank();
    for (uint32_t q = 0; q < notices_.ranks(); ++q) {
      if (q != rank) heaps_[q] = static_cast<uint8_t*>(api.nvshmem_ptr(heaps_[rank], static_cast<int>(q)));
    }
    notices_.own().maps_all = std::find(heaps_.begin(), heaps_.end(), nullptr) == heaps_.end() ? 1 : 0;
    notices_.set_stage(Notice::kLooked);
    bool all = true;
    for (uint32_t p = 0; p < notices_.ranks(); ++p) {
      notices_.await(p, Notice::kLooked);
      all = all && notices_.of(p).maps_all != 0;
    }
    if (!all) throw NotMapped{};
  }

  void clear(uint8_t* heap, uint64_t bytes) const {
    const Device::Use use(device_);
    check(driver().cuMemsetD8_v2(reinterpret_cast<DevicePtr>(heap), 0, bytes), "heap");
    check(driver().cuCtxSynchronize(), "heap");
  }

  const Device& device_;
  const Notices notices_;
  Lease lease_;
};

}  // namespace

std::unique_ptr<host::Group> make_single_gpu_group(const Device& device, uint64_t heap_bytes) {
  return std::make_unique<SingleGpuGroup>(device, heap_bytes);
}

std::unique_ptr<host::Group> join_gpu_group(const Device& device, const Membership& who, const Limits& limits,
                                            uint64_t heap_bytes, uint64_t timeout_ns,
                                            const std::function<void()>& prepare) {
  return std::make_unique<NvshmemGroup>(device, who, limits, heap_bytes, timeout_ns, prepare);
}

}  // namespace flashmoe::cuda
