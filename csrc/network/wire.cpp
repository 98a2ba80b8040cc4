#include "network/wire.h"

#include <poll.h>

#include <cstdlib>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::network {
namespace {

using host::concat;
using host::Error;

constexpr unsigned kHandler = 0;

// A message until it is sent.
struct Outgoing {
  const Ucx* api;
  std::unique_ptr<Message> message;
};

// UCX has statuses from 0 down to -100 at the end of the address space; a request lies elsewhere.
UcsStatus status_of(const void* request) {
  return static_cast<UcsStatus>(reinterpret_cast<intptr_t>(request));
}
bool is_status(const void* request) {
  return reinterpret_cast<uintptr_t>(request) >= static_cast<uintptr_t>(-100);
}

// UCX's own settings count first: a user may know a better network than the one that all machines have.
void set(const Ucx& api, void* config, const char* variable, const char* name, const std::string& value) {
  if (value.empty() || std::getenv(variable) != nullptr) return;
  check_ucx(api, api.ucp_config_modify(config, name, value.c_str()), variable);
}

}  // namespace

Wire::Wire(const std::string& library, const std::string& devices, uint32_t ranks) : api_(ucx(library)), peers_(ranks) {
  for (Peer& p : peers_) p.wire = this;
  try {
    open(devices);
  } catch (...) {
    if (worker_ != nullptr) api_.ucp_worker_destroy(worker_);
    if (context_ != nullptr) api_.ucp_cleanup(context_);
    throw;
  }
}

void Wire::open(const std::string& devices) {
  void* config = nullptr;
  check_ucx(api_, api_.ucp_config_read(nullptr, nullptr, &config), "reading its settings");
  UcpParams params{};
  params.field_mask = UcpParams::kFeatures;
  params.features = UcpParams::kActiveMessages | UcpParams::kWakeup;
  UcsStatus made = kUcsOk;
  try {
    set(api_, config, "UCX_TLS", "TLS", "tcp");
    set(api_, config, "UCX_NET_DEVICES", "NET_DEVICES", devices);
    made = api_.ucp_init_version(1, 13, &params, config, &context_);
  } catch (...) {
    api_.ucp_config_release(config);
    throw;
  }
  api_.ucp_config_release(config);
  check_ucx(api_, made, "looking for networks");
  UcpWorkerParams worker{};
  worker.field_mask = UcpWorkerParams::kThreadMode;
  worker.thread_mode = UcpWorkerParams::kSerialized;
  check_ucx(api_, api_.ucp_worker_create(context_, &worker, &worker_), "opening a network");
  check_ucx(api_, api_.ucp_worker_get_efd(worker_, &event_), "waiting for a network");
  UcpHandler handler{};
  handler.field_mask = UcpHandler::kId | UcpHandler::kFlags | UcpHandler::kCall | UcpHandler::kArgument;
  handler.id = kHandler;
  handler.flags = UcpHandler::kWholeMessages;
  handler.call = received;
  handler.arg = this;
  check_ucx(api_, api_.ucp_worker_set_am_recv_handler(worker_, &handler), "listening for messages");
}

Wire::~Wire() {
  deliver_ = nullptr;
  for (Peer& p : peers_) close(p);
  // What is still on its way is dropped, and given back, with its worker.
  for (int i = 0; i < 1000 && api_.ucp_worker_progress(worker_) != 0; ++i) {
  }
  api_.ucp_worker_destroy(worker_);
  api_.ucp_cleanup(context_);
}

void Wire::close(Peer& peer) {
  if (peer.endpoint == nullptr) return;
  UcpRequest how{};
  how.mask = UcpRequest::kFlags;
  how.flags = UcpRequest::kForcedClose;
  void* const request = api_.ucp_ep_close_nbx(peer.endpoint, &how);
  peer.endpoint = nullptr;
  if (request != nullptr && !is_status(request)) api_.ucp_request_free(request);  // when it is done
}

std::string Wire::address() const {
  void* address = nullptr;
  size_t bytes = 0;
  check_ucx(api_, api_.ucp_worker_get_address(worker_, &address, &bytes), "asking for its address");
  std::string copy(static_cast<const char*>(address), bytes);
  api_.ucp_worker_release_address(worker_, address);
  return copy;
}

void Wire::connect(uint32_t peer, const std::string& address) {
  UcpEndpointParams params{};
  params.field_mask = UcpEndpointParams::kAddress | UcpEndpointParams::kErrorMode | UcpEndpointParams::kErrorHandler;
  params.address = address.data();
  params.err_mode = UcpEndpointParams::kPeerFailures;
  params.err_handler = {failed, &peers_[peer]};
  check_ucx(api_, api_.ucp_ep_create(worker_, &params, &peers_[peer].endpoint), "connecting");
}

void Wire::failed(void* arg, UcpEndpoint, UcsStatus status) {
  Peer& peer = *static_cast<Peer*>(arg);
  if (peer.lost.empty()) peer.lost = peer.wire->api_.ucs_status_string(status);
}

void Wire::sent(void* request, UcsStatus, void* message) {
  const std::unique_ptr<Outgoing> out(static_cast<Outgoing*>(message));
  out->api->ucp_request_free(request);
}

void Wire::send(uint32_t peer, std::unique_ptr<Message> message) {
  Peer& to = peers_[peer];
  if (to.endpoint == nullptr || !to.lost.empty()) return;
  auto out = std::make_unique<Outgoing>(&api_, std::move(message));
  const Message& m = *out->message;
  UcpRequest how{};
  how.mask = UcpRequest::kCallback | UcpRequest::kUserData | UcpRequest::kFlags;
  how.flags = UcpRequest::kEager;
  how.sent = sent;
  how.user_data = out.get();
  void* const request =
      api_.ucp_am_send_nbx(to.endpoint, kHandler, &m.header, sizeof(Header), m.data.data(), m.data.size(), &how);
  if (request != nullptr && !is_status(request)) {
    out.release();  // sent() will be called, and not before this thread makes progress
    return;
  }
  if (is_status(request) && to.lost.empty()) to.lost = api_.ucs_status_string(status_of(request));
}

UcsStatus Wire::received(void* arg, const void* header, size_t header_bytes, void* data, size_t bytes,
                         const UcpReceived* how) {
  const Wire& wire = *static_cast<const Wire*>(arg);
  // Others send neither. What a stranger sends is dropped.
  if (header_bytes != sizeof(Header) || (how->attributes & UcpReceived::kNotHere) != 0) return kUcsOk;
  Header copy;
  std::memcpy(&copy, header, sizeof(copy));
  if (wire.deliver_) wire.deliver_(copy, static_cast<const uint8_t*>(data), bytes);
  return kUcsOk;
}

bool Wire::progress() {
  const bool any = api_.ucp_worker_progress(worker_) != 0;
  for (Peer& p : peers_) {
    if (!p.lost.empty()) close(p);  // not from within failed()
  }
  return any;
}

void Wire::wait(int fd, int milliseconds) {
  if (api_.ucp_worker_arm(worker_) != kUcsOk) return;  // there is something
  pollfd on[2] = {{event_, POLLIN, 0}, {fd, POLLIN, 0}};
  poll(on, 2, milliseconds);
}

}  // namespace flashmoe::network
