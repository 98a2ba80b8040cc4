// Messages to ranks on other machines, by UCX: an endpoint for each, one worker for all. One thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "network/message.h"
#include "network/ucx.h"

namespace flashmoe::network {

class Wire {
 public:
  // What comes, before it is known from whom: `data` is the caller's only until it returns.
  using Deliver = std::function<void(const Header&, const uint8_t* data, uint64_t bytes)>;

  // devices: network interfaces, as UCX_NET_DEVICES has them; empty: all. Throws Error.
  Wire(const std::string& library, const std::string& devices, uint32_t ranks);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // By which others reach this worker.
  std::string address() const;
  void connect(uint32_t peer, const std::string& address);
  void deliver_to(Deliver deliver) { deliver_ = std::move(deliver); }
  // Sends, sooner or later, unless the peer is lost.
  void send(uint32_t peer, std::unique_ptr<Message> message);
  // Receives and sends what can be; whether there was anything.
  bool progress();
  // Waits until there may be something, until `fd` can be read, or for so long.
  void wait(int fd, int milliseconds);
  // Why nothing more gets to or from the peer; empty as long as it does.
  const std::string& lost(uint32_t peer) const { return peers_[peer].lost; }

 private:
  struct Peer {
    Wire* wire = nullptr;
    UcpEndpoint endpoint = nullptr;
    std::string lost;
  };
  static void failed(void* peer, UcpEndpoint, UcsStatus status);
  static void sent(void* request, UcsStatus, void* message);
  static UcsStatus received(void* wire, const void* header, size_t header_bytes, void* data, size_t bytes,
                            const UcpReceived* how);
  void close(Peer& peer);
  void open(const std::string& devices);

  const Ucx& api_;
  UcpContext context_ = nullptr;
  UcpWorker worker_ = nullptr;
  int event_ = -1;
  std::vector<Peer> peers_;
  Deliver deliver_;
};

}  // namespace flashmoe::network
