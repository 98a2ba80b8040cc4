// The courier: a rank's thread that carries rows and signals between this rank and ranks on other machines. It sends
// what this rank's actors write for those ranks, and writes to this rank's heap what those ranks send. So the
// protocol and its actors need not know that there is a network.
//
// A rank on another machine has a mirror here: memory laid out as that rank's symmetric heap. Actors write rows and
// signals to the mirror, as to a mapped heap, and ring the bell. The courier finds the new signals, picks up the data
// that they announce (pickup.h), and sends both. At the other end, the receiving rank's courier writes the data to
// the rank's heap, and the signal last, with a release. So a mirror holds what this rank has sent, and the argument
// why a heap is never written too early (docs/protocol.md, "Why nothing is cleared") covers the mirror as well.
// Actors also read a peer's status, which lies in the peer's heap. So the peer's courier sends the status again and
// again, and this rank's courier writes it to the mirror.
//
// Bytes are encrypted, sent and received only while some thread executes the code for this. That is another reason
// why the courier is a thread: it does so while the actors compute.
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

// What this rank has had to send to other machines since the courier began, without statuses: how many messages, and
// how many bytes of data. The bytes of headers (which have the signals) and of ranges are not counted.
struct Crossed {
  uint64_t messages = 0, bytes = 0;
  // [n]: how many of the bytes were in messages that have at least 2^n and fewer than 2^(n+1) bytes. The last element
  // also counts the bytes of all larger messages.
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
  // Waits until the other ranks have received what was sent to them, for a limited time. Then ends the courier's
  // thread.
  void stop();
  // Waits until this rank has heard from every mirrored rank, and every mirrored rank from this one. If a rank cannot
  // be reached in time, throws an Error that names it.
  void await_peers();

  host::Bell& bell() { return bell_; }
  void begin_call(const SpreadCall& call);
  void end_call();
  // Called between calls of the layer. Sends to rank q the `bytes` bytes at `from`, then `word`, which belongs at
  // `at`. Both addresses lie in the mirror of rank q.
  void tell(uint32_t q, const void* from, uint64_t bytes, const uint64_t* at, uint64_t word);
  // Why nothing more comes from rank p, if that is known; else empty.
  std::string obituary(uint32_t p) const;
  Crossed crossed() const;

 private:
  struct Peer {
    uint8_t* mirror = nullptr;
    // What the wire says: `lost` is why the connection to the peer is lost, `trouble` why there is none yet. Either
    // may be empty.
    std::string host, lost, trouble;
    bool gone = false;          // the peer has said goodbye
    uint64_t sent = 0;          // messages to the peer, without statuses
    uint64_t acknowledged = 0;  // how many of these the peer is known to have received
    uint64_t received = 0;      // messages from the peer; only the courier's thread uses `received` and `status`
    Status status{};            // the peer's status, as it comes
    // Which of this call's signals to the peer have been picked up.
    bool call = false, returns = false, fault = false;
    std::vector<bool> batches;  // [n] the signal of the n-th batch, if the peer is a relay
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
  bool packed_ = true;                // whether all messages that the wire has are packed
  std::atomic<bool> packing_{false};  // end_call() waits until all these messages are packed

  uint64_t status_sent_ns_ = 0;  // only the courier's thread uses this and status_due_
  bool status_due_ = false;
  std::thread thread_;
};

}  // namespace flashmoe::network
