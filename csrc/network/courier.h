// The courier: a rank's thread that carries what its actors write for ranks on other machines, and what these send, so
// that the protocol and its actors need not know that there is a network.
//
// A rank on another machine has a mirror here: memory laid out as its symmetric heap. Actors write rows there and
// signal, as in a heap that is mapped, and ring. The courier looks which signals are new, picks up what they announce
// (pickup.h) and sends both. At the other end a courier writes it to its rank's heap, the signal last, with a release.
// So a mirror holds what this rank has sent, and the argument by which a heap is never written too early
// (docs/protocol.md, "Why nothing is cleared") covers the mirror as well. What actors read in a peer's heap, its
// status, its courier sends again and again, to the mirror.
//
// Bytes are encrypted, sent and received only while somebody does it: that, too, is why there is a thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "host/bell.h"
#include "network/pickup.h"
#include "network/wire.h"

namespace flashmoe::network {

// What has crossed to other machines since the courier began: data and signals, without what each message says of
// itself.
struct Crossed {
  uint64_t messages = 0, bytes = 0;
  // How many of the bytes were in messages of 2^n bytes to below twice as many; beyond the last, in the last.
  std::array<uint64_t, 32> bytes_of_size{};
};

class Courier final : private Receiver {
 public:
  // library, at: see Wire. Throws Error.
  Courier(uint32_t rank, uint32_t ranks, const GroupKey& key, uint64_t timeout_ns, const std::string& library,
          const std::string& at);
  ~Courier() { stop(); }
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  std::string address() const { return wire_->address(); }

  struct Place {
    uint8_t* heap;                  // this rank's
    std::vector<uint8_t*> mirrors;  // by rank; null for those of this machine
    uint64_t heap_bytes;
    Layout<HeapField> layout;
    GradientLayout gradients;
  };
  // Begins to listen and to send. addresses, hosts: by rank.
  void start(const Place& place, const std::vector<std::string>& addresses, std::vector<std::string> hosts);
  // Waits, within bounds, until others have what was sent to them, and carries nothing more.
  void stop();
  // Waits until every mirrored rank and this one have heard from one another; throws Error that names one that has not.
  void await_peers();

  host::Bell& bell() { return bell_; }
  void begin_call(const SpreadCall& call);
  void end_call();
  // Between calls. Sends what lies at `from` in the mirror of rank q, and then the word.
  void tell(uint32_t q, const void* from, uint64_t bytes, const uint64_t* at, uint64_t word);
  // Why nothing more comes from rank p, as far as is known; else empty.
  std::string obituary(uint32_t p) const;
  Crossed crossed() const;

 private:
  struct Peer {
    uint8_t* mirror = nullptr;
    std::string host, lost, trouble;  // of the wire, why it is lost, and why it is not there yet
    bool gone = false;                // it has said goodbye
    uint64_t sent = 0;                // messages to it, but for statuses
    uint64_t acknowledged = 0;        // of those that it has
    uint64_t received = 0;            // from it; of the courier's thread, as what follows
    Status status{};                  // as it comes
    // Of the call: which signals are picked up.
    bool call = false, returns = false, fault = false;
    std::vector<bool> batches;  // to a relay
  };
  struct Letter {
    uint32_t peer;
    std::unique_ptr<Message> message;
  };

  void run();
  bool deliver_and_send();
  void pick_up();
  void pick_up(uint32_t q, Peer& peer);
  void post(uint32_t q, Messages messages);
  void send_status();
  void note_losses();
  std::vector<Receiver::Place> places(uint32_t q, const Header& header, const std::vector<Range>& ranges) override;
  void arrived(uint32_t q, const Header& header) override;
  void write_status(const Peer& peer) const;
  Status* status_at(uint8_t* heap) const { return place_.layout.at<Status>(heap, HeapField::kStatus); }
  bool await(uint64_t deadline_ns, bool interruptible, const std::function<bool()>& over);
  void say_goodbye();

  const uint32_t rank_, ranks_;
  const uint64_t timeout_ns_, status_ns_;
  Place place_{};
  std::unique_ptr<Wire> wire_;  // of the courier's thread, while there is one
  host::Bell bell_;

  mutable std::mutex mutex_;  // of what follows, but for what is of the courier's thread
  std::condition_variable news_;
  std::vector<Peer> peers_;
  std::vector<Letter> letters_;  // not yet given to the wire
  const SpreadCall* call_ = nullptr;
  Crossed crossed_;
  bool stopping_ = false;
  bool packed_ = true;                // all that the wire has
  std::atomic<bool> packing_{false};  // somebody waits until it is

  uint64_t status_sent_ns_ = 0;  // of the courier's thread
  bool status_due_ = false;
  std::thread thread_;
};

}  // namespace flashmoe::network
