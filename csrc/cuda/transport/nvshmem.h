// The part of NVSHMEM's host library that the CUDA engine uses: memory that every GPU of a group has mapped, and where puts
// reach what is not, what a module that puts needs. Resolved when the first group of several GPUs is made, so that nothing
// else needs the library.
//
// Names, signatures and layouts are those of NVSHMEM 3's host ABI; tests/test_cuda_host.py compares them with its headers
// where these are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace flashmoe::cuda {

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
#define FLASHMOE_NVSHMEM_API(X)                                                \
  X(nvshmemx_get_uniqueid, int, (NvshmemUniqueId*))                            \
  X(nvshmemx_hostlib_init_attr, int, (unsigned flags, NvshmemInitAttributes*)) \
  X(nvshmem_malloc, void*, (size_t bytes))                                     \
  X(nvshmem_free, void, (void*))                                               \
  X(nvshmem_ptr, void*, (const void* symmetric, int rank))                     \
  X(nvshmemx_buffer_register, int, (void*, size_t bytes))                      \
  X(nvshmemx_buffer_unregister, int, (void*))                                  \
  X(nvshmemx_cumodule_init, int, (DriverModule))                               \
  X(nvshmemx_cumodule_finalize, int, (DriverModule))

struct Nvshmem {
#define FLASHMOE_NVSHMEM_MEMBER(symbol, result, parameters) result(*symbol) parameters;
  FLASHMOE_NVSHMEM_API(FLASHMOE_NVSHMEM_MEMBER)
#undef FLASHMOE_NVSHMEM_MEMBER
};

// Throws Error unless the status is success.
void check_nvshmem(int status, const char* what);

// The library at this path (or, without a folder, wherever the loader finds it). Throws Error where there is none.
const Nvshmem& nvshmem(const std::string& path);

}  // namespace flashmoe::cuda
