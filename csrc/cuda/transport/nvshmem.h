// The part of NVSHMEM's host library that the CUDA engine uses: memory that every GPU of a group has mapped, and, if
// peers are reached by puts, what a module that puts needs. The library is loaded when the first group of several GPUs
// is made, so that nothing else needs it.
//
// Names, signatures and layouts are those of NVSHMEM 3's host ABI. A later library serves this ABI too: its structures
// may have more fields, which are zero here, and versions of their own. tests/test_cuda_host.py compares names,
// signatures and layouts with the headers of the oldest and the newest release that kernels are compiled with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/device/driver.h"

namespace flashmoe::cuda {

struct NvshmemVersion {  // nvshmemi_version_t
  int major, minor, patch;
  bool operator==(const NvshmemVersion&) const = default;
};
struct NvshmemUniqueId {  // nvshmemx_uniqueid_v1
  int version;
  char internal[124];
};
struct NvshmemUniqueIdArgs {  // nvshmemx_uniqueid_args_v1
  int version;
  NvshmemUniqueId* id;
  int rank, ranks;
};
struct NvshmemInitArgs {  // nvshmemx_init_args_v1
  int version;
  NvshmemUniqueIdArgs unique_id;
  char content[96];
};
struct NvshmemInitAttributes {  // nvshmemx_init_attr_v1
  int version;
  void* mpi_comm;
  NvshmemInitArgs args;
};
inline constexpr unsigned kNvshmemInitWithUniqueId = 1u << 3;
// A structure's version says its size.
template <class T>
inline constexpr int kNvshmemVersion = (1 << 16) + static_cast<int>(sizeof(T));

// X(symbol, result, parameters)
#define FLASHMOE_NVSHMEM_API(X)                                                   \
  X(nvshmemx_vendor_get_version_info, void, (int* major, int* minor, int* patch)) \
  X(nvshmemx_get_uniqueid, int, (NvshmemUniqueId*))                               \
  X(nvshmemx_hostlib_init_attr, int, (unsigned flags, NvshmemInitAttributes*))    \
  X(nvshmem_malloc, void*, (size_t bytes))                                        \
  X(nvshmem_free, void, (void*))                                                  \
  X(nvshmem_ptr, void*, (const void* symmetric, int rank))                        \
  X(nvshmemx_buffer_register, int, (void*, size_t bytes))                         \
  X(nvshmemx_buffer_unregister, int, (void*))                                     \
  X(nvshmemx_cumodule_init, int, (DriverModule))                                  \
  X(nvshmemx_cumodule_finalize, int, (DriverModule))

struct Nvshmem {
#define FLASHMOE_NVSHMEM_MEMBER(symbol, result, parameters) result(*symbol) parameters;
  FLASHMOE_NVSHMEM_API(FLASHMOE_NVSHMEM_MEMBER)
#undef FLASHMOE_NVSHMEM_MEMBER
  std::string path;

  NvshmemVersion version() const;
};

// Throws Error unless the status is success.
void check_nvshmem(int status, const char* what);

// Throws Error unless a kernel that puts was compiled with the headers of the library's own release. The kernel's code
// reads structures that the library fills in, and writes requests that the library decodes. Both have the form that
// they have in that release.
void check_headers(const Nvshmem& api, const NvshmemVersion& compiled_with);

// The library at this path (or, without a folder, wherever the loader finds it). Throws Error if there is none.
const Nvshmem& nvshmem(const std::string& path);

}  // namespace flashmoe::cuda
