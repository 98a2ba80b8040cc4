// NVSHMEM for tests of the host side: ranks are processes, symmetric memory is shared memory, and what all ranks do together
// does not wait for them, but may be told to hang.
#include "cuda/transport/nvshmem.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>

using flashmoe::cuda::NvshmemInitAttributes;
using flashmoe::cuda::NvshmemUniqueId;

namespace {

struct Allocation {
  unsigned number;
  size_t bytes;
};

std::string world;
int own_rank = -1;
unsigned allocated = 0;
std::map<const void*, Allocation> allocations;
std::map<const void*, size_t> registered;
std::multiset<flashmoe::cuda::DriverModule> modules;

std::string name_of(unsigned number, int rank) {
  return "/" + world + "-" + std::to_string(number) + "-" + std::to_string(rank);
}

// Whoever comes first makes it.
void* map(unsigned number, int rank, size_t bytes) {
  const int fd = shm_open(name_of(number, rank).c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return p == MAP_FAILED ? nullptr : p;
}

}  // namespace

extern "C" {

unsigned fake_nvshmem_allocations() {
  return static_cast<unsigned>(allocations.size());
}

size_t fake_nvshmem_allocated_bytes() {
  size_t sum = 0;
  for (const auto& [address, allocation] : allocations) sum += allocation.bytes;
  return sum;
}

size_t fake_nvshmem_registered_bytes() {
  size_t sum = 0;
  for (const auto& [address, bytes] : registered) sum += bytes;
  return sum;
}

unsigned fake_nvshmem_modules() {
  return static_cast<unsigned>(modules.size());
}

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  *major = 3, *minor = 8, *patch = 0;
}

int nvshmemx_buffer_register(void* p, size_t bytes) {
  return registered.emplace(p, bytes).second ? 0 : 1;
}

int nvshmemx_buffer_unregister(void* p) {
  return registered.erase(p) == 1 ? 0 : 1;
}

int nvshmemx_cumodule_init(flashmoe::cuda::DriverModule module) {
  if (std::getenv("FAKE_NVSHMEM_OTHER_VERSION") != nullptr) return 1;
  modules.insert(module);
  return 0;
}

int nvshmemx_cumodule_finalize(flashmoe::cuda::DriverModule module) {
  modules.erase(modules.find(module));
  return 0;
}

int nvshmemx_get_uniqueid(NvshmemUniqueId* id) {
  std::snprintf(id->internal, sizeof(id->internal), "%s", std::getenv("FAKE_NVSHMEM_WORLD"));
  return 0;
}

int nvshmemx_hostlib_init_attr(unsigned flags, NvshmemInitAttributes* a) {
  while (std::getenv("FAKE_NVSHMEM_HANGS") != nullptr) sleep(1);
  if (flags != flashmoe::cuda::kNvshmemInitWithUniqueId || own_rank != -1) return 1;
  world = a->args.unique_id.id->internal;
  own_rank = a->args.unique_id.rank;
  return 0;
}

void* nvshmem_malloc(size_t bytes) {
  void* const p = map(++allocated, own_rank, bytes);
  if (p != nullptr) allocations[p] = {allocated, bytes};
  return p;
}

void nvshmem_free(void* p) {
  munmap(p, allocations[p].bytes);
  shm_unlink(name_of(allocations[p].number, own_rank).c_str());
  allocations.erase(p);
}

void* nvshmem_ptr(const void* p, int rank) {
  // To one rank alone: what the others can map is not enough for them.
  const char* const unmapped = std::getenv("FAKE_NVSHMEM_UNMAPPED");
  if (unmapped != nullptr && std::atoi(unmapped) == own_rank) return nullptr;
  return map(allocations[p].number, rank, allocations[p].bytes);
}
}
