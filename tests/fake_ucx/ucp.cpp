// What csrc/network calls of UCX, within one process: a worker is a queue, an address its number. Messages between two
// workers overtake one another now and then, as UCX allows. A sender's buffers are read when the receiver makes
// progress, and given back when the sender does, so that ThreadSanitizer sees whoever changes them too early.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "network/ucx.h"

using namespace flashmoe::network;

namespace {

struct Worker;

// A message on its way: what was sent stays the sender's until `read`.
struct Sent {
  const void *header, *data;
  size_t header_bytes, bytes;
  Worker* sender;
  void (*sent)(void*, UcsStatus, void*);
  void* user_data;
};

struct Worker {
  int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  uint64_t number = 0;
  std::mutex mutex;
  std::deque<Sent> arrived;  // at this worker
  std::deque<Sent> read;     // of those it has sent
  UcpHandler handler{};
  std::mt19937 random;

  void ring() const {
    const uint64_t one = 1;
    (void)!write(event, &one, sizeof(one));
  }
};

struct Endpoint {
  Worker* own;
  uint64_t to;
};

std::mutex workers_mutex;
std::map<uint64_t, Worker*> workers;  // that have not been destroyed
uint64_t last_number = 0;

bool take(std::mutex& mutex, std::deque<Sent>& from, size_t at, Sent& to) {
  const std::lock_guard lock(mutex);
  if (from.empty()) return false;
  at = at < from.size() ? at : 0;
  to = from[at];
  from.erase(from.begin() + static_cast<std::ptrdiff_t>(at));
  return true;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1, *minor = 13, *release = 0;
}
EXPORT UcsStatus ucp_config_read(const char*, const char*, void** config) {
  *config = nullptr;
  return kUcsOk;
}
EXPORT UcsStatus ucp_config_modify(void*, const char*, const char*) {
  return kUcsOk;
}
EXPORT void ucp_config_release(void*) {}
EXPORT UcsStatus ucp_init_version(unsigned, unsigned, const UcpParams*, const void*, UcpContext* context) {
  *context = nullptr;
  return kUcsOk;
}
EXPORT void ucp_cleanup(UcpContext) {}
EXPORT UcsStatus ucp_worker_create(UcpContext, const UcpWorkerParams*, UcpWorker* worker) {
  auto* const made = new Worker;
  const std::lock_guard lock(workers_mutex);
  made->number = ++last_number;
  made->random.seed(static_cast<unsigned>(made->number));
  workers[made->number] = made;
  *worker = made;
  return kUcsOk;
}
EXPORT void ucp_worker_destroy(UcpWorker worker) {
  auto* const w = static_cast<Worker*>(worker);
  {
    const std::lock_guard lock(workers_mutex);
    workers.erase(w->number);
    // What it has sent and nobody has read is gone, and what it was sent is given back.
    for (auto& [number, other] : workers) {
      const std::lock_guard inner(other->mutex);
      std::erase_if(other->arrived, [&](const Sent& s) {
        if (s.sender != w) return false;
        w->read.push_back(s);
        return true;
      });
    }
    for (const Sent& s : w->arrived) {
      if (s.sender == w) continue;
      const std::lock_guard inner(s.sender->mutex);
      s.sender->read.push_back(s);
    }
  }
  for (const Sent& s : w->read) s.sent(new char, kUcsOk, s.user_data);
  close(w->event);
  delete w;
}
EXPORT UcsStatus ucp_worker_get_address(UcpWorker worker, void** address, size_t* bytes) {
  const std::string text = std::to_string(static_cast<Worker*>(worker)->number);
  *address = strdup(text.c_str());
  *bytes = text.size() + 1;
  return kUcsOk;
}
EXPORT void ucp_worker_release_address(UcpWorker, void* address) {
  std::free(address);
}
EXPORT UcsStatus ucp_worker_get_efd(UcpWorker worker, int* fd) {
  *fd = static_cast<Worker*>(worker)->event;
  return kUcsOk;
}
EXPORT UcsStatus ucp_worker_arm(UcpWorker worker) {
  auto* const w = static_cast<Worker*>(worker);
  uint64_t rings;
  (void)!read(w->event, &rings, sizeof(rings));
  const std::lock_guard lock(w->mutex);
  return w->arrived.empty() && w->read.empty() ? kUcsOk : kUcsErrBusy;
}
EXPORT unsigned ucp_worker_progress(UcpWorker worker) {
  auto* const w = static_cast<Worker*>(worker);
  Sent s;
  if (take(w->mutex, w->read, 0, s)) {
    s.sent(new char, kUcsOk, s.user_data);
    return 1;
  }
  if (!take(w->mutex, w->arrived, w->random() % 4 == 0 ? 1 : 0, s)) return 0;
  const UcpReceived how{};
  std::vector<uint8_t> data(static_cast<const uint8_t*>(s.data), static_cast<const uint8_t*>(s.data) + s.bytes);
  w->handler.call(w->handler.arg, s.header, s.header_bytes, data.data(), data.size(), &how);
  const std::lock_guard lock(workers_mutex);  // a worker that is gone has had its messages given back
  for (auto& [number, other] : workers) {
    if (other != s.sender) continue;
    const std::lock_guard inner(other->mutex);
    other->read.push_back(s);
    other->ring();
  }
  return 1;
}
EXPORT UcsStatus ucp_worker_set_am_recv_handler(UcpWorker worker, const UcpHandler* handler) {
  static_cast<Worker*>(worker)->handler = *handler;
  return kUcsOk;
}
EXPORT UcsStatus ucp_ep_create(UcpWorker worker, const UcpEndpointParams* params, UcpEndpoint* endpoint) {
  *endpoint =
      new Endpoint{static_cast<Worker*>(worker), std::strtoull(static_cast<const char*>(params->address), nullptr, 10)};
  return kUcsOk;
}
EXPORT void* ucp_ep_close_nbx(UcpEndpoint endpoint, const UcpRequest*) {
  delete static_cast<Endpoint*>(endpoint);
  return nullptr;
}
EXPORT void* ucp_am_send_nbx(UcpEndpoint endpoint, unsigned, const void* header, size_t header_bytes, const void* data,
                             size_t bytes, const UcpRequest* how) {
  const auto* const e = static_cast<const Endpoint*>(endpoint);
  const std::lock_guard lock(workers_mutex);
  const auto to = workers.find(e->to);
  if (to == workers.end()) return reinterpret_cast<void*>(intptr_t{-25});  // the connection is reset
  const std::lock_guard inner(to->second->mutex);
  to->second->arrived.push_back({header, data, header_bytes, bytes, e->own, how->sent, how->user_data});
  to->second->ring();
  static char request;
  return &request;
}
EXPORT void ucp_request_free(void* request) {
  delete static_cast<char*>(request);
}
EXPORT const char* ucs_status_string(UcsStatus status) {
  return status == -25 ? "Connection reset by remote peer" : "failed";
}
