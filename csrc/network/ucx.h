// The library that carries messages between machines: UCX, of which UCP's active messages are used. Found at run time,
// so that neither a build nor a wheel needs it.
//
// What is declared here is the part of UCP's interface that is used, with the layouts that it has had since 1.13. UCX
// only ever adds to its structures, and a mask says which of their fields a caller knows.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace flashmoe::network {

using UcsStatus = int8_t;  // an enumeration in a byte; 0: done, 1: in progress, below 0: failed
inline constexpr UcsStatus kUcsOk = 0, kUcsErrBusy = -15;

using UcpContext = void*;
using UcpWorker = void*;
using UcpEndpoint = void*;

struct UcpParams {
  static constexpr uint64_t kFeatures = 1 << 0;
  static constexpr uint64_t kWakeup = 1 << 4, kActiveMessages = 1 << 6;  // features
  uint64_t field_mask;
  uint64_t features;
  size_t request_size;
  void *request_init, *request_cleanup;
  uint64_t tag_sender_mask;
  int mt_workers_shared;
  size_t estimated_num_eps, estimated_num_ppn;
  const char* name;
  size_t later[8];
};

struct UcpWorkerParams {
  static constexpr uint64_t kThreadMode = 1 << 0;
  static constexpr int kSerialized = 1;  // any thread, one at a time
  uint64_t field_mask;
  int thread_mode;
  uint64_t cpu_mask[16];
  unsigned events;
  void* user_data;
  int event_fd;
  uint64_t flags;
  const char* name;
  size_t am_alignment;
  uint64_t client_id;
  size_t later[8];
};

struct UcpEndpointParams {
  static constexpr uint64_t kAddress = 1 << 0, kErrorMode = 1 << 1, kErrorHandler = 1 << 2;
  static constexpr int kPeerFailures = 1;  // are told, and end no more than the endpoint
  uint64_t field_mask;
  const void* address;
  int err_mode;
  struct {
    void (*call)(void* arg, UcpEndpoint, UcsStatus);
    void* arg;
  } err_handler;
  void* user_data;
  unsigned flags;
  struct SocketAddress {
    const sockaddr* address;
    socklen_t length;
  };
  SocketAddress remote;
  void* conn_request;
  const char* name;
  SocketAddress local;
  size_t later[8];
};

struct UcpReceived;
using UcpReceive = UcsStatus (*)(void* arg, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const UcpReceived*);
struct UcpReceived {
  static constexpr uint64_t kNotHere = 1 << 17;  // data is to be asked for
  uint64_t attributes;
  UcpEndpoint reply;
};

struct UcpHandler {
  static constexpr uint64_t kId = 1 << 0, kFlags = 1 << 1, kCall = 1 << 2, kArgument = 1 << 3;
  static constexpr uint32_t kWholeMessages = 1 << 0;
  uint64_t field_mask;
  unsigned id;
  uint32_t flags;
  UcpReceive call;
  void* arg;
};

struct UcpRequest {
  static constexpr uint32_t kCallback = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4;
  static constexpr uint32_t kEager = 1 << 1;        // of a message: it is sent without asking
  static constexpr uint32_t kForcedClose = 1 << 0;  // of an endpoint's end: it waits for nobody
  uint32_t mask, flags;
  void* request;
  void (*sent)(void* request, UcsStatus, void* user_data);
  uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  void* receive_info;
  void* memory;
  size_t later[8];
};

// The functions that are called, by name.
#define FLASHMOE_UCX_API(X)                                                                                           \
  X(ucp_get_version, void, (unsigned* major, unsigned* minor, unsigned* release))                                     \
  X(ucp_config_read, UcsStatus, (const char* prefix, const char* file, void** config))                                \
  X(ucp_config_modify, UcsStatus, (void* config, const char* name, const char* value))                                \
  X(ucp_config_release, void, (void* config))                                                                         \
  X(ucp_init_version, UcsStatus, (unsigned major, unsigned minor, const UcpParams*, const void* config, UcpContext*)) \
  X(ucp_cleanup, void, (UcpContext))                                                                                  \
  X(ucp_worker_create, UcsStatus, (UcpContext, const UcpWorkerParams*, UcpWorker*))                                   \
  X(ucp_worker_destroy, void, (UcpWorker))                                                                            \
  X(ucp_worker_get_address, UcsStatus, (UcpWorker, void** address, size_t* bytes))                                    \
  X(ucp_worker_release_address, void, (UcpWorker, void* address))                                                     \
  X(ucp_worker_get_efd, UcsStatus, (UcpWorker, int* fd))                                                              \
  X(ucp_worker_arm, UcsStatus, (UcpWorker))                                                                           \
  X(ucp_worker_progress, unsigned, (UcpWorker))                                                                       \
  X(ucp_worker_set_am_recv_handler, UcsStatus, (UcpWorker, const UcpHandler*))                                        \
  X(ucp_ep_create, UcsStatus, (UcpWorker, const UcpEndpointParams*, UcpEndpoint*))                                    \
  X(ucp_ep_close_nbx, void*, (UcpEndpoint, const UcpRequest*))                                                        \
  X(ucp_am_send_nbx, void*,                                                                                           \
    (UcpEndpoint, unsigned id, const void* header, size_t header_bytes, const void* data, size_t bytes,               \
     const UcpRequest*))                                                                                              \
  X(ucp_request_free, void, (void* request))                                                                          \
  X(ucs_status_string, const char*, (UcsStatus))

struct Ucx {
#define FLASHMOE_UCX_MEMBER(name, result, parameters) result(*name) parameters;
  FLASHMOE_UCX_API(FLASHMOE_UCX_MEMBER)
#undef FLASHMOE_UCX_MEMBER
};

// The library at `path`, loaded once for the process. Throws Error that says what to install.
const Ucx& ucx(const std::string& path);

// Throws Error where `status` says that `what` failed.
void check_ucx(const Ucx& api, UcsStatus status, const char* what);

}  // namespace flashmoe::network
