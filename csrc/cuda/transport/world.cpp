#include "cuda/transport/world.h"

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

constexpr std::chrono::milliseconds kLook{25};

}  // namespace

World& world() {
  static auto* const w = new World;  // not destroyed at exit, when the driver may be gone
  return *w;
}

Lease::~Lease() {
  const std::lock_guard lock(world().mutex);
  for (SymmetricMemory& b : world().blocks) {
    if (b.number == number_) b.taken = false;
  }
}

uint8_t* Lease::take(SymmetricMemory& b) {
  b.taken = true;
  number_ = b.number;
  return b.address;
}

// Runs f, which all ranks run together. If a rank dies meanwhile, f may never return. So f runs in a thread of its own,
// which stays behind if this rank gives up waiting. For this reason f must not refer to anything that may be gone by
// then.
template <class F>
auto Together::run(const char* what, F f) const {
  auto begun = std::make_shared<std::promise<void>>();
  auto task = std::make_shared<std::packaged_task<decltype(f())()>>([this, begun, f] {
    const Device::Use use(device_);
    begun->set_value();
    return f();
  });
  auto done = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  begun->get_future().wait();  // from here on the thread does not use this object
  try {
    while (done.wait_for(kLook) != std::future_status::ready) notices_.watch_others(what);
  } catch (...) {
    world().broken = true;
    throw;
  }
  return done.get();
}

void Together::enter_world() const {
  World& w = world();
  if (w.ranks != 0) return;
  NvshmemInitAttributes attributes{};
  attributes.version = kNvshmemVersion<NvshmemInitAttributes>;
  attributes.args.version = kNvshmemVersion<NvshmemInitArgs>;
  attributes.args.unique_id = {kNvshmemVersion<NvshmemUniqueIdArgs>, nullptr, static_cast<int>(notices_.rank()),
                               static_cast<int>(notices_.ranks())};
  check_nvshmem(run("NVSHMEM's initialisation",
                    [init = api_.nvshmemx_hostlib_init_attr, attributes, id = notices_.of(0).id] {
                      NvshmemUniqueId world_id = id;
                      NvshmemInitAttributes with_id = attributes;
                      with_id.args.unique_id.id = &world_id;
                      return init(kNvshmemInitWithUniqueId, &with_id);
                    }),
                "nvshmemx_hostlib_init_attr");
  w.rank = notices_.rank();
  w.ranks = notices_.ranks();
}

uint8_t* Together::take_block(uint64_t bytes, Lease& lease) const {
  World& w = world();
  for (SymmetricMemory& b : w.blocks) {
    if (b.bytes == bytes && notices_.given_back_by_all(b.number)) return lease.take(b);
  }
  std::erase_if(w.blocks, [&](const SymmetricMemory& b) {
    if (!notices_.given_back_by_all(b.number)) return false;
    run("nvshmem_free", [free = api_.nvshmem_free, p = b.address] { free(p); });
    return true;
  });
  void* const made = run("nvshmem_malloc", [malloc = api_.nvshmem_malloc, bytes] { return malloc(bytes); });
  ++w.allocations;
  if (made == nullptr) {
    throw Error(Error::Kind::kHeap, concat("heap: expected ", bytes,
                                           " bytes of symmetric memory on every GPU of the "
                                           "group, got none; lower max_tokens"));
  }
  w.blocks.push_back({w.allocations, bytes, static_cast<uint8_t*>(made), false});
  return lease.take(w.blocks.back());
}

}  // namespace flashmoe::cuda
