#include "cuda/transport/group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>

#include "cuda/transport/nvshmem.h"
#include "host/interrupt.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;
using Clock = std::chrono::steady_clock;

class SingleGpuGroup final : public host::Group {
 public:
  SingleGpuGroup(const Device& device, uint64_t bytes) : memory_(device, bytes, "heap") {
    heaps_ = {memory_.as<uint8_t>()};
  }

 private:
  DeviceMemory memory_;
};

// Symmetric memory is allocated and freed by all ranks together, so a rank that closes its context cannot free: others may
// never come to it. It gives its block back, and the next joining of the group, where all ranks are, takes it again or
// frees it. Allocations are numbered alike on all ranks.
struct Block {
  uint64_t number, bytes;
  uint8_t* address;
  bool taken;
};
struct World {
  // Recursive: the hook that a joining rank calls runs the user's code, which may drop another context, and its lease.
  std::recursive_mutex mutex;
  uint32_t rank = 0, ranks = 0;  // 0: not initialised
  bool broken = false;           // a thread is still in what all ranks should have done together
  uint64_t allocations = 0;
  std::vector<Block> blocks;
};
World& world() {
  static auto* const w = new World;  // not destroyed at exit, when the driver may be gone
  return *w;
}

// A block that this rank uses, given back at the end.
class Lease {
 public:
  Lease() = default;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    const std::lock_guard lock(world().mutex);
    for (Block& b : world().blocks) {
      if (b.number == number_) b.taken = false;
    }
  }
  uint8_t* take(Block& b) {
    b.taken = true;
    number_ = b.number;
    return b.address;
  }

 private:
  uint64_t number_ = 0;
};

// What a rank tells the others while joining: its heap in the group of shared memory.
struct Notice {
  static constexpr uint32_t kMostFree = 64;
  enum Stage : uint32_t { kNothing, kPosted, kLooked, kReady };

  uint32_t stage;
  uint32_t failed;  // it goes no further, see failure
  uint32_t world_rank, world_ranks;
  uint32_t maps_all;  // once it has looked: whether it has every rank's memory mapped
  uint32_t free_blocks;
  uint64_t free[kMostFree];  // numbers of blocks that this rank has given back
  char device[16];           // which GPU
  NvshmemUniqueId id;        // of rank 0, before there is a world
  char failure[512];         // why it does not join
};

class NvshmemGroup final : public host::Group {
 public:
  NvshmemGroup(const Device& device, const Membership& who, const Limits& limits, uint64_t bytes, uint64_t timeout_ns,
               const std::function<void()>& prepare)
      : device_(device),
        who_(who),
        ranks_(limits.ranks),
        timeout_ns_(timeout_ns),
        deadline_(Clock::now() + std::chrono::nanoseconds(timeout_ns)),
        control_(host::join_process_group(who.name, who.rank, limits, sizeof(Notice), timeout_ns)) {
    const std::lock_guard lock(world().mutex);
    try {
      api_ = &nvshmem(who.nvshmem);
      if (limits.rdma != 0) refuse_ibgda();
      refuse_broken_world();
      prepare();
      post();
      await_all(Notice::kPosted);
      check_devices();
      enter_world();
      own_ = take_block(bytes);
      heaps_.assign(ranks_, nullptr);
      heaps_[who_.rank] = own_;
      if (limits.rdma == 0) map_all();
      clear(bytes);
      set_stage(Notice::kReady);
      await_all(Notice::kReady);
    } catch (const Error& e) {
      fail(e.what());
      throw;
    } catch (const NotMapped&) {  // so it is on all ranks
      throw;
    } catch (...) {
      fail("it was interrupted");
      throw;
    }
  }

  std::string obituary(uint32_t p) const override { return control_->obituary(p); }

 private:
  static constexpr uint32_t kRarely = 128;  // looks between two calls of the hook: 25 ms
  static constexpr std::chrono::milliseconds kLook{25};

  Notice& notice(uint32_t p) const { return *reinterpret_cast<Notice*>(control_->heaps()[p]); }
  void set_stage(Notice::Stage s) const {
    std::atomic_ref(notice(who_.rank).stage).store(s, std::memory_order_release);
  }

  void fail(const char* why) const {
    Notice& own = notice(who_.rank);
    std::snprintf(own.failure, sizeof(Notice::failure), "%s", why);
    std::atomic_ref(own.failed).store(1, std::memory_order_release);
  }

  void refuse_broken_world() const {
    if (!world().broken) return;
    throw Error(Error::Kind::kGroup,
                concat("group '", who_.name,
                       "': an earlier group of this process broke while its ranks joined; start a new process"));
  }

  void post() const {
    Notice& own = notice(who_.rank);
    own.world_rank = world().rank;
    own.world_ranks = world().ranks;
    for (const Block& b : world().blocks) {
      if (!b.taken && own.free_blocks < Notice::kMostFree) own.free[own.free_blocks++] = b.number;
    }
    device_.identify(own.device);
    if (who_.rank == 0 && world().ranks == 0) {
      own.id.version = kNvshmemVersion<NvshmemUniqueId>;
      check_nvshmem(api_->nvshmemx_get_uniqueid(&own.id), "nvshmemx_get_uniqueid");
    }
    set_stage(Notice::kPosted);
  }

  void await(uint32_t p, Notice::Stage stage) const {
    auto reached = [&] { return std::atomic_ref(notice(p).stage).load(std::memory_order_acquire); };
    for (uint32_t looks = 1; reached() < stage; ++looks) {
      if (std::atomic_ref(notice(p).failed).load(std::memory_order_acquire) != 0 && reached() < stage) {
        throw Error(Error::Kind::kGroup,
                    concat("group '", who_.name, "': rank ", p, " did not join: ", notice(p).failure));
      }
      if (looks % kRarely == 0) host::check_interrupt();
      const std::string gone = control_->obituary(p);
      if (!gone.empty() || (timeout_ns_ != 0 && Clock::now() > deadline_)) {
        throw Error(Error::Kind::kPeerTimeout,
                    concat("group '", who_.name, "': rank ", p, " did not finish joining: ",
                           gone.empty() ? "it makes no progress" : gone, " (rank ", who_.rank, " waited)"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  void await_all(Notice::Stage stage) const {
    for (uint32_t p = 0; p < ranks_; ++p) await(p, stage);
  }

  // Ranks that share a GPU take turns of milliseconds, each waiting for the others, unless MPS lets them run side by side:
  // right, but of use to tests alone.
  static uint32_t most_on_a_gpu() {
    const char* const set = std::getenv("FLASHMOE_SHARE_GPUS");
    return set == nullptr ? 1 : static_cast<uint32_t>(std::max(1, std::atoi(set)));
  }

  void check_devices() const {
    const uint32_t most = most_on_a_gpu();
    for (uint32_t p = 0; p < ranks_; ++p) {
      uint32_t sharing = 1;
      for (uint32_t q = 0; q < p; ++q) {
        if (std::memcmp(notice(p).device, notice(q).device, sizeof(Notice::device)) == 0 && ++sharing > most) {
          throw Error(
              Error::Kind::kInvalidArgument,
              concat("device: expected a GPU of its own for each rank, got the same for ranks ", q, " and ", p));
        }
      }
      const uint32_t ranks = notice(p).world_ranks;
      if (ranks != world().ranks || (ranks != 0 && (ranks != ranks_ || notice(p).world_rank != p))) {
        throw Error(Error::Kind::kGroup, concat("group '", who_.name,
                                                "': expected the ranks of this process's first group of several GPUs, "
                                                "which NVSHMEM was initialised for, got others (rank ",
                                                p, ")"));
      }
    }
  }

  // What all ranks do together has no bound of its own: a rank may die in the midst of it. Then the task stays behind, and
  // f must refer to nothing that is gone by then.
  template <class F>
  auto together(const char* what, F f) const {
    auto begun = std::make_shared<std::promise<void>>();
    auto task = std::make_shared<std::packaged_task<decltype(f())()>>([this, begun, f] {
      const Device::Use use(device_);
      begun->set_value();
      return f();
    });
    auto done = task->get_future();
    std::thread([task] { (*task)(); }).detach();
    begun->get_future().wait();  // the device is not looked at again
    try {
      while (done.wait_for(kLook) != std::future_status::ready) watch_others(what);
    } catch (...) {
      world().broken = true;
      throw;
    }
    return done.get();
  }

  void watch_others(const char* what) const {
    host::check_interrupt();
    for (uint32_t p = 0; p < ranks_; ++p) {
      if (const std::string gone = control_->obituary(p); !gone.empty()) {
        throw Error(Error::Kind::kPeerTimeout, concat("group '", who_.name, "': rank ", p, ": ", gone));
      }
    }
    if (timeout_ns_ != 0 && Clock::now() > deadline_) {
      throw Error(Error::Kind::kPeerTimeout,
                  concat("group '", who_.name, "': ", what, " did not end within ",
                         static_cast<double>(timeout_ns_) * 1e-9, " s (rank ", who_.rank, " waited)"));
    }
  }

  void enter_world() const {
    World& w = world();
    if (w.ranks != 0) return;
    NvshmemInitAttributes attributes{};
    attributes.version = kNvshmemVersion<NvshmemInitAttributes>;
    attributes.args.version = kNvshmemVersion<NvshmemInitArgs>;
    attributes.args.unique_id = {kNvshmemVersion<NvshmemUniqueIdArgs>, nullptr, static_cast<int>(who_.rank),
                                 static_cast<int>(ranks_)};
    check_nvshmem(together("NVSHMEM's initialisation",
                           [init = api_->nvshmemx_hostlib_init_attr, attributes, id = notice(0).id] {
                             NvshmemUniqueId world_id = id;
                             NvshmemInitAttributes with_id = attributes;
                             with_id.args.unique_id.id = &world_id;
                             return init(kNvshmemInitWithUniqueId, &with_id);
                           }),
                  "nvshmemx_hostlib_init_attr");
    w.rank = who_.rank;
    w.ranks = ranks_;
  }

  // The kernel is compiled without it, and where it is on there may be no proxy that serves puts instead.
  static void refuse_ibgda() {
    const char* const set = std::getenv("NVSHMEM_IB_ENABLE_IBGDA");
    if (set == nullptr || std::strcmp(set, "") == 0 || std::strcmp(set, "0") == 0) return;
    throw Error(
        Error::Kind::kInvalidArgument,
        concat("NVSHMEM_IB_ENABLE_IBGDA: expected it unset or 0 with transport 'rdma', whose puts to other nodes are "
               "NVSHMEM's proxy's, got ",
               set));
  }

  bool given_back_by_all(uint64_t number) const {
    for (uint32_t p = 0; p < ranks_; ++p) {
      const Notice& n = notice(p);
      if (std::find(n.free, n.free + n.free_blocks, number) == n.free + n.free_blocks) return false;
    }
    return true;
  }

  // A block of that size that nobody uses any more, else a new one, for which all that nobody uses are freed.
  uint8_t* take_block(uint64_t bytes) {
    World& w = world();
    for (Block& b : w.blocks) {
      if (b.bytes == bytes && given_back_by_all(b.number)) return lease_.take(b);
    }
    std::erase_if(w.blocks, [&](const Block& b) {
      if (!given_back_by_all(b.number)) return false;
      together("nvshmem_free", [free = api_->nvshmem_free, p = b.address] { free(p); });
      return true;
    });
    void* const made = together("nvshmem_malloc", [malloc = api_->nvshmem_malloc, bytes] { return malloc(bytes); });
    ++w.allocations;
    if (made == nullptr) {
      throw Error(Error::Kind::kHeap, concat("heap: expected ", bytes,
                                             " bytes of symmetric memory on every GPU of the "
                                             "group, got none; lower max_tokens"));
    }
    w.blocks.push_back({w.allocations, bytes, static_cast<uint8_t*>(made), false});
    return lease_.take(w.blocks.back());
  }

  // Ranks agree on whether all have all mapped: what reaches one peer by puts must be sent so by all.
  void map_all() {
    for (uint32_t q = 0; q < ranks_; ++q) {
      if (q != who_.rank) heaps_[q] = static_cast<uint8_t*>(api_->nvshmem_ptr(own_, static_cast<int>(q)));
    }
    notice(who_.rank).maps_all = std::find(heaps_.begin(), heaps_.end(), nullptr) == heaps_.end() ? 1 : 0;
    set_stage(Notice::kLooked);
    bool all = true;
    for (uint32_t p = 0; p < ranks_; ++p) {
      await(p, Notice::kLooked);
      all = all && notice(p).maps_all != 0;
    }
    if (!all) throw NotMapped{};
  }

  void clear(uint64_t bytes) const {
    const Device::Use use(device_);
    check(driver().cuMemsetD8_v2(reinterpret_cast<DevicePtr>(own_), 0, bytes), "heap");
    check(driver().cuCtxSynchronize(), "heap");
  }

  const Device& device_;
  const Membership who_;
  const uint32_t ranks_;
  const uint64_t timeout_ns_;
  const Clock::time_point deadline_;
  const std::unique_ptr<host::Group> control_;
  const Nvshmem* api_ = nullptr;
  Lease lease_;
  uint8_t* own_ = nullptr;
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
