// The courier: a rank's thread that carries rows and signals to and from ranks on other machines. It carries what this
// rank's actors write for them, and what they send. So the protocol and its actors need not know that there is a
// network.
//
// A rank on another machine has a mirror here: memory laid out as its symmetric heap. Actors write rows and signals to
// the mirror, as to a mapped heap, and ring the bell. The courier finds the new signals, picks up the data that they
// announce (pickup.h), and sends both. At the other end a courier writes the data to its rank's heap, and the signal
// last, with a release. So a mirror holds what this rank has sent. The argument why a heap is never written too early
// (docs/protocol.md, "Why nothing is cleared") covers the mirror as well. Actors also read a peer's status in the
// peer's heap. The peer's courier sends this status again and again, to the mirror.
//
// Bytes are encrypted, sent and received only while somebody works on them. This is another reason for a thread.
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

// What has crossed to other machines since the courier began: data and signals, without the messages' headers.
struct Crossed {
  uint64_t messages = 0, bytes = 0;
  // [n] how many of the bytes were in messages of 2^n bytes to below twice as many. The last element also counts all
  // larger messages.
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
    uint8_t* heap;                  // this rank's heap
    std::vector<uint8_t*> mirrors;  // by rank; null for ranks of this machine
    uint64_t heap_bytes;
    Layout<HeapField> layout;
    GradientLayout gradients;
  };
  // Begins to listen and to send. addresses, hosts: by rank.
  void start(const Place& place, const std::vector<std::string>& addresses, std::vector<std::string> hosts);
  // Waits, within bounds, until the others have what was sent to them. Then carries nothing more.
  void stop();
  // Waits until every mirrored rank and this one have heard from each other. Throws an Error that names a rank that has
  // not.
  void await_peers();

  host::Bell& bell() { return bell_; }
  void begin_call(const SpreadCall& call);
  void end_call();
  // Called between calls. Sends the bytes at `from` in the mirror of rank q, and then the word.
  void tell(uint32_t q, const void* from, uint64_t bytes, const uint64_t* at, uint64_t word);
  // Why nothing more comes from rank p, if that is known; else empty.
  std::string obituary(uint32_t p) const;
  Crossed crossed() const;

 private:
  struct Peer {
    uint8_t* mirror = nullptr;
    // From the wire: why the peer is lost, and why it is not there yet.
    std::string host, lost, trouble;
    bool gone = false;          // the peer has said goodbye
    uint64_t sent = 0;          // messages to the peer, without statuses
    uint64_t acknowledged = 0;  // how many of those it has received
    uint64_t received = 0;      // from the peer; only the courier's thread uses this and what follows
    Status status{};            // the peer's status, as it comes
    // Which signals of the call are picked up.
    bool call = false, returns = false, fault = false;
    std::vector<bool> batches;  // batches to a relay
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
  std::unique_ptr<Wire> wire_;  // used by the courier's thread, while there is one
  host::Bell bell_;

  mutable std::mutex mutex_;  // guards what follows, except what only the courier's thread uses
  std::condition_variable news_;
  std::vector<Peer> peers_;
  std::vector<Letter> letters_;  // letters that the wire does not have yet
  const SpreadCall* call_ = nullptr;
  Crossed crossed_;
  bool stopping_ = false;
  bool packed_ = true;                // whether everything that the wire has is packed
  std::atomic<bool> packing_{false};  // a thread waits until it is packed

  uint64_t status_sent_ns_ = 0;  // used by the courier's thread
  bool status_due_ = false;
  std::thread thread_;
};

}  // namespace flashmoe::network
