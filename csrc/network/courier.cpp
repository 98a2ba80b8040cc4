#include "network/courier.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <utility>

#include "host/clock.h"
#include "host/error.h"
#include "host/interrupt.h"
#include "host/text.h"

namespace flashmoe::network {
namespace {

using host::concat;
using host::Error;
using host::monotonic_ns;

// During a call, the courier sends this rank's status at least this many times per timeout (less often only if the
// interval would be shorter than kLeastStatusNs). A waiting peer compares two values of this rank's progress, which
// it reads half of its timeout apart.
constexpr uint64_t kStatusesPerTimeout = 16;
constexpr uint64_t kMostStatusNs = 100'000'000, kLeastStatusNs = 2'000'000;
// The courier's longest sleep while there is no call. This rank makes no progress then that a peer would have to see.
constexpr uint64_t kIdleMs = 500;
// How long, at most, a rank that leaves its group waits until the others have received what it has sent.
constexpr uint64_t kFarewellNs = 5'000'000'000;
// How many times in a row the courier looks at the network before letters and statuses have their turn.
constexpr int kLooks = 64;

uint64_t load(const uint64_t* word) {
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}
void store(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

uint32_t batch_of(const SpreadCall& c) {
  return c.spread.batch_blocks(c.block_tokens(), c.memory.token_row_bytes);
}

uint64_t status_interval(uint64_t timeout_ns) {
  if (timeout_ns == 0) return kMostStatusNs;
  return std::clamp(timeout_ns / kStatusesPerTimeout, kLeastStatusNs, kMostStatusNs);
}

}  // namespace

Courier::Courier(uint32_t rank, uint32_t ranks, const GroupKey& key, uint64_t timeout_ns, const std::string& library,
                 const std::string& at)
    : rank_(rank),
      ranks_(ranks),
      timeout_ns_(timeout_ns),
      status_ns_(status_interval(timeout_ns)),
      wire_(std::make_unique<Wire>(library, key, rank, ranks, at)),
      peers_(ranks) {}

void Courier::stop() {
  if (!thread_.joinable()) return;
  say_goodbye();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  bell_.ring();
  thread_.join();
  wire_.reset();
}

void Courier::start(const Place& place, const std::vector<std::string>& addresses, std::vector<std::string> hosts) {
  place_ = place;
  for (uint32_t q = 0; q < ranks_; ++q) {
    peers_[q].mirror = place.mirrors[q];
    peers_[q].host = std::move(hosts[q]);
    if (peers_[q].mirror != nullptr) wire_->connect(q, addresses[q]);
  }
  wire_->deliver_to(*this);
  for (uint32_t q = 0; q < ranks_; ++q) {  // a first message without data, because a connection counts as made only
                                           // when each side has heard from the other
    if (peers_[q].mirror != nullptr) post(q, Packing(peers_[q].mirror).take(Header::kData, nullptr, 0));
  }
  thread_ = std::thread([this] { run(); });
}

void Courier::await_peers() {
  const uint64_t deadline = timeout_ns_ == 0 ? UINT64_MAX : monotonic_ns() + timeout_ns_;
  uint32_t missing = ranks_;
  const auto heard = [&](const Peer& p) { return p.mirror == nullptr || p.acknowledged != 0; };
  const bool met = await(deadline, true, [&] {
    const auto first =
        std::find_if(peers_.begin(), peers_.end(), [&](const Peer& p) { return !heard(p) || !p.lost.empty(); });
    missing = static_cast<uint32_t>(first - peers_.begin());
    return missing == ranks_ || !peers_[missing].lost.empty();
  });
  if (met && missing == ranks_) return;
  const std::lock_guard lock(mutex_);
  const Peer& p = peers_[missing];
  std::string why = p.lost;
  if (why.empty()) {
    why = concat("nothing within ", static_cast<double>(timeout_ns_) * 1e-9, " s");
    if (!p.trouble.empty()) why += concat(" (", p.trouble, ")");
  }
  throw Error(Error::Kind::kPeerTimeout,
              concat("network: rank ", rank_, " cannot reach rank ", missing, " on host ", p.host, ": ", why,
                     "; FLASHMOE_INTERFACE names the network interfaces where a rank is reached"));
}

// ---- Calls ------------------------------------------------------------------------------------------------------

void Courier::begin_call(const SpreadCall& call) {
  const std::lock_guard lock(mutex_);
  for (Peer& p : peers_) {
    p.call = p.returns = p.fault = false;
    p.batches.assign(ceil_div(call.blocks(), batch_of(call)), false);
  }
  call_ = &call;
  bell_.ring();
}

// Picks up the call's last signals in the calling thread. Then has the data of all messages that are not sent yet
// copied from the mirrors into the messages, because the actors of the next call overwrite the mirrors.
void Courier::end_call() {
  std::unique_lock lock(mutex_);
  if (call_ == nullptr) return;
  pick_up();
  call_ = nullptr;
  for (const Letter& l : letters_) l.message->pack();
  packing_ = !packed_;
  bell_.ring();
  news_.wait(lock, [&] { return !packing_; });  // ends soon: the courier's thread waits for no other actor
}

void Courier::tell(uint32_t q, const void* from, uint64_t bytes, const uint64_t* at, uint64_t word) {
  const std::lock_guard lock(mutex_);
  Packing packing(peers_[q].mirror);
  packing.add(from, bytes);
  post(q, packing.take(Header::kData, at, word));
  bell_.ring();
}

void Courier::pick_up() {
  for (uint32_t q = 0; q < ranks_; ++q) {
    if (peers_[q].mirror != nullptr) pick_up(q, peers_[q]);
  }
}

void Courier::pick_up(uint32_t q, Peer& peer) {
  const SpreadCall& c = *call_;
  const auto is_new = [&](bool& picked, const uint64_t* at, uint64_t& word) {
    if (picked || Signal::epoch(word = load(at)) != c.epoch) return false;
    return picked = true;
  };
  uint64_t word = 0;
  if (is_new(peer.call, c.call_signal(q, rank_), word)) post(q, pick_up_call(c, q, word));
  for (uint32_t n = 0; c.spread.is_relay(rank_, q) && n < peer.batches.size(); ++n) {
    bool picked = peer.batches[n];
    if (!is_new(picked, RelayPlace(c, c.spread, q, rank_).signal(n), word)) continue;
    peer.batches[n] = true;
    post(q, pick_up_batch(c, q, n, batch_of(c), word));
  }
  if (is_new(peer.returns, c.return_signal(q, rank_, 0), word)) post(q, pick_up_returns(c, place_.gradients, q, word));
  if (!peer.fault && load(&c.fault(q, rank_)->posted) == FaultRecord::kFailed) {
    peer.fault = true;
    post(q, pick_up_fault(c, q));
  }
}

void Courier::post(uint32_t q, Messages messages) {
  for (auto& m : messages) {
    ++peers_[q].sent;
    const uint64_t bytes = m->payload();
    crossed_.messages += 1;
    crossed_.bytes += bytes;
    const size_t size = bytes == 0 ? 0 : static_cast<size_t>(std::bit_width(bytes) - 1);
    crossed_.bytes_of_size[std::min(size, crossed_.bytes_of_size.size() - 1)] += bytes;
    letters_.push_back({q, std::move(m)});
  }
}

// ---- The thread ---------------------------------------------------------------------------------------------------

void Courier::run() {
  while (true) {
    if (deliver_and_send()) continue;
    bool calls = false;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      calls = call_ != nullptr;
    }
    const uint64_t ms = status_due_ ? kLeastStatusNs / 1'000'000 : calls ? status_ns_ / 1'000'000 : kIdleMs;
    wire_->wait(bell_.descriptor(), static_cast<int>(ms));
  }
}

bool Courier::deliver_and_send() {
  bool busy = false;
  for (int i = 0; i < kLooks && !packing_ && wire_->progress(); ++i) busy = true;
  std::vector<Letter> letters;
  {
    const std::lock_guard lock(mutex_);
    if (bell_.take()) {
      busy = true;
      status_due_ = true;  // for example, a call has begun or ended, or an actor has signalled
      if (call_ != nullptr) pick_up();
    }
    note_losses();
    if (packing_) {
      wire_->pack();
      packing_ = false;
      news_.notify_all();
    }
    letters.swap(letters_);
    packed_ = letters.empty() && wire_->is_packed();
  }
  for (Letter& l : letters) {
    l.message->header.received = peers_[l.peer].received;
    wire_->send(l.peer, std::move(l.message));
  }
  send_status();
  return busy || !letters.empty();
}

void Courier::note_losses() {
  bool any = false;
  for (uint32_t q = 0; q < ranks_; ++q) {
    if (peers_[q].lost.empty() && !wire_->lost(q).empty()) peers_[q].lost = wire_->lost(q), any = true;
    peers_[q].trouble = wire_->trouble(q);
  }
  if (any) news_.notify_all();
}

// Sends to each mirrored rank this rank's status, and how many of that rank's messages have come: every status_ns_,
// or earlier if status_due_ is set, but at intervals of at least kLeastStatusNs.
void Courier::send_status() {
  const uint64_t now = monotonic_ns();
  const bool often = now - status_sent_ns_ < kLeastStatusNs;
  if (!(status_due_ && !often) && now - status_sent_ns_ < status_ns_) return;
  status_sent_ns_ = now;
  status_due_ = false;
  const Status* own = status_at(place_.heap);
  const Status status{load(&own->entered), load(&own->left), load(&own->heartbeat), load(&own->progress)};
  for (uint32_t q = 0; q < ranks_; ++q) {
    if (peers_[q].mirror == nullptr) continue;
    auto m = std::make_unique<Message>(sizeof(Status));
    m->header.kind = Header::kStatus;
    m->header.received = peers_[q].received;
    std::memcpy(m->behind_header(), &status, sizeof(Status));
    wire_->send(q, std::move(m));
  }
}

// ---- What comes ---------------------------------------------------------------------------------------------------

// TLS lets in only messages from a rank of the group, and keeps their order. If a message nevertheless has bytes that
// would not lie within the heap, its sender is of another version or is damaged. Then this rank gives up the
// connection.
std::vector<Receiver::Place> Courier::places(uint32_t q, const Header& header, const std::vector<Range>& ranges) {
  Peer& peer = peers_[q];
  if (header.kind == Header::kStatus) return {{reinterpret_cast<uint8_t*>(&peer.status), sizeof(Status)}};
  if (header.kind > Header::kGoodbye) throw Error(Error::Kind::kGroup, "it sends a message of an unknown kind");
  const uint64_t word = header.word.offset;
  bool lies_within = word == Word::kNone || (word % 8 == 0 && word <= place_.heap_bytes - 8);
  uint8_t* const to = header.kind == Header::kConfigs ? peer.mirror : place_.heap;
  std::vector<Receiver::Place> places;
  for (const Range& r : ranges) {
    lies_within = lies_within && r.bytes <= place_.heap_bytes && r.offset <= place_.heap_bytes - r.bytes;
    places.push_back({to + r.offset, r.bytes});
  }
  if (!lies_within) throw Error(Error::Kind::kGroup, "what it sends does not lie within the heap");
  return places;
}

void Courier::arrived(uint32_t q, const Header& header) {
  Peer& peer = peers_[q];
  if (header.kind == Header::kStatus) {
    write_status(peer);
  } else {
    ++peer.received;
    const Word& word = header.word;
    if (word.offset != Word::kNone) store(reinterpret_cast<uint64_t*>(place_.heap + word.offset), word.value);
  }
  const std::lock_guard lock(mutex_);
  // A peer that has just connected, or that leaves, waits for the acknowledgement of its message, so it gets the next
  // status at once. For all others the acknowledgement can come with the next regular status.
  if (header.kind == Header::kGoodbye) peer.gone = true;
  if (header.kind == Header::kGoodbye || (header.kind != Header::kStatus && peer.received == 1)) status_due_ = true;
  peer.acknowledged = std::max(peer.acknowledged, header.received);
  news_.notify_all();
}

void Courier::write_status(const Peer& peer) const {
  const Status& s = peer.status;
  Status* const to = status_at(peer.mirror);
  store(&to->heartbeat, s.heartbeat);
  store(&to->progress, s.progress);
  store(&to->left, s.left);
  store(&to->entered, s.entered);
}

// ---- For other threads ------------------------------------------------------------------------------------------

bool Courier::await(uint64_t deadline_ns, bool interruptible, const std::function<bool()>& over) {
  std::unique_lock lock(mutex_);
  while (!over()) {
    if (monotonic_ns() > deadline_ns) return false;
    news_.wait_for(lock, std::chrono::milliseconds(20));
    if (!interruptible) continue;
    lock.unlock();
    host::check_interrupt();
    lock.lock();
  }
  return true;
}

void Courier::say_goodbye() {
  {
    const std::lock_guard lock(mutex_);
    call_ = nullptr;
    for (uint32_t q = 0; q < ranks_; ++q) {
      if (peers_[q].mirror == nullptr || peers_[q].gone) continue;
      post(q, Packing(peers_[q].mirror).take(Header::kGoodbye, nullptr, 0));
    }
  }
  bell_.ring();
  const uint64_t most = timeout_ns_ == 0 ? kFarewellNs : std::min(timeout_ns_, kFarewellNs);
  await(monotonic_ns() + most, false, [&] {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) {
      return p.mirror == nullptr || p.gone || !p.lost.empty() || p.acknowledged >= p.sent;
    });
  });
}

std::string Courier::obituary(uint32_t p) const {
  const std::lock_guard lock(mutex_);
  const Peer& peer = peers_[p];
  if (peer.gone) return concat("it has left the group (host ", peer.host, ")");
  if (!peer.lost.empty()) return concat("the connection to it is lost (host ", peer.host, "): ", peer.lost);
  return {};
}

Crossed Courier::crossed() const {
  const std::lock_guard lock(mutex_);
  return crossed_;
}

}  // namespace flashmoe::network
