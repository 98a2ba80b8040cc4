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

// A wait of a peer sees this rank's progress as often as this at least: it compares two looks half its timeout apart.
constexpr uint64_t kStatusesPerTimeout = 16;
constexpr uint64_t kMostStatusNs = 100'000'000, kLeastStatusNs = 2'000'000;
// While there is no call nobody watches; then only UCX's own timers want to be called.
constexpr uint64_t kIdleMs = 500;
// A rank that ends waits so long for others to have what it sent.
constexpr uint64_t kFarewellNs = 5'000'000'000;
// Looks at the network in a row, before letters and statuses have their turn.
constexpr int kLooks = 64;

uint64_t load(const uint64_t* word) {
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}
void store(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

uint32_t batch_of(const SpreadCall& c) {
  return c.machines.batch_blocks(c.block_tokens(), c.memory.token_row_bytes);
}

uint64_t status_interval(uint64_t timeout_ns) {
  if (timeout_ns == 0) return kMostStatusNs;
  return std::clamp(timeout_ns / kStatusesPerTimeout, kLeastStatusNs, kMostStatusNs);
}

}  // namespace

Courier::Courier(uint32_t rank, uint32_t ranks, const Key& key, uint64_t timeout_ns, const std::string& library,
                 const std::string& devices)
    : rank_(rank),
      ranks_(ranks),
      key_(key),
      timeout_ns_(timeout_ns),
      status_ns_(status_interval(timeout_ns)),
      wire_(std::make_unique<Wire>(library, devices, ranks)),
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
  wire_->deliver_to([this](const Header& h, const uint8_t* data, uint64_t bytes) { deliver(h, data, bytes); });
  for (uint32_t q = 0; q < ranks_; ++q) {  // the first message: each hears from each
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
  const std::string why =
      p.lost.empty() ? concat("nothing within ", static_cast<double>(timeout_ns_) * 1e-9, " s") : p.lost;
  throw Error(Error::Kind::kPeerTimeout,
              concat("network: rank ", rank_, " cannot reach rank ", missing, " on host ", p.host, " by UCX: ", why,
                     "; UCX_NET_DEVICES names the network interfaces that it uses"));
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

// Picks up the last signals itself: the next call's actors overwrite what they are about.
void Courier::end_call() {
  const std::lock_guard lock(mutex_);
  if (call_ == nullptr) return;
  pick_up();
  call_ = nullptr;
  bell_.ring();
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
  for (uint32_t n = 0; c.machines.is_relay(rank_, q) && n < peer.batches.size(); ++n) {
    bool picked = peer.batches[n];
    if (!is_new(picked, RelayPlace(c, c.machines, q, rank_).signal(n), word)) continue;
    peer.batches[n] = true;
    post(q, pick_up_batch(c, q, n, batch_of(c), word));
  }
  if (is_new(peer.returns, c.return_signal(q, rank_, 0), word)) post(q, pick_up_returns(c, place_.gradients, q, word));
  if (!peer.fault && load(&c.fault(q, rank_)->posted) != 0) {
    peer.fault = true;
    post(q, pick_up_fault(c, q));
  }
}

void Courier::post(uint32_t q, Messages messages) {
  for (auto& m : messages) {
    m->header.key = key_;
    m->header.source = rank_;
    m->header.number = ++peers_[q].last;
    const uint64_t bytes = m->data.size() - m->header.ranges * sizeof(Range);
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
  for (int i = 0; i < kLooks && wire_->progress(); ++i) busy = true;
  std::vector<Letter> letters;
  {
    const std::lock_guard lock(mutex_);
    if (bell_.take()) {
      busy = true;
      status_due_ = true;  // a call begins or ends, or has achieved something
      if (call_ != nullptr) pick_up();
    }
    note_losses();
    letters.swap(letters_);
  }
  for (Letter& l : letters) {
    l.message->header.received = peers_[l.peer].inbox.complete();
    wire_->send(l.peer, std::move(l.message));
  }
  send_status();
  return busy || !letters.empty();
}

void Courier::note_losses() {
  bool any = false;
  for (uint32_t q = 0; q < ranks_; ++q) {
    if (peers_[q].lost.empty() && !wire_->lost(q).empty()) peers_[q].lost = wire_->lost(q), any = true;
  }
  if (any) news_.notify_all();
}

// This rank's status, and which messages are here, now and then, or when there is a reason.
void Courier::send_status() {
  const uint64_t now = monotonic_ns();
  const bool often = now - status_sent_ns_ < kLeastStatusNs;
  if (!(status_due_ && !often) && now - status_sent_ns_ < status_ns_) return;
  status_sent_ns_ = now;
  status_due_ = false;
  ++status_number_;
  const Status* own = status_at(place_.heap);
  const Status status{load(&own->entered), load(&own->left), load(&own->heartbeat), load(&own->progress)};
  for (uint32_t q = 0; q < ranks_; ++q) {
    if (peers_[q].mirror == nullptr) continue;
    auto m = std::make_unique<Message>();
    m->header = {key_, rank_, Header::kStatus, status_number_, peers_[q].inbox.complete(), 0, {}};
    m->data.resize(sizeof(Status));
    std::memcpy(m->data.data(), &status, sizeof(Status));
    wire_->send(q, std::move(m));
  }
}

// ---- What comes ---------------------------------------------------------------------------------------------------

// Whatever does not fit is not of this group, and is dropped: anyone on the network may send to a worker of UCX.
void Courier::deliver(const Header& header, const uint8_t* data, uint64_t bytes) {
  if (header.key != key_ || header.source >= ranks_ || peers_[header.source].mirror == nullptr) return;
  Peer& peer = peers_[header.source];
  if (header.kind == Header::kStatus) {
    if (header.number <= peer.last_status) return;
    peer.last_status = header.number;
    write_status(peer, data, bytes);
  } else {
    uint8_t* const to = header.kind == Header::kConfigs ? peer.mirror : place_.heap;
    if (header.kind != Header::kGoodbye && !write_ranges(to, header, data, bytes)) return;
    if (!peer.inbox.take(header.number)) return;
    if (header.word.offset != Word::kNone) peer.inbox.hold(header.number, header.word);
    peer.inbox.release([&](const Word& w) {
      auto* const word = reinterpret_cast<uint64_t*>(place_.heap + w.offset);
      if (w.value > load(word)) store(word, w.value);  // of a later call: it has overtaken this one
    });
  }
  const std::lock_guard lock(mutex_);
  // Who begins, and who goes, waits for the answer; all others have it in time.
  if (header.kind == Header::kGoodbye) peer.gone = true;
  if (header.kind == Header::kGoodbye || (header.kind != Header::kStatus && header.number == 1)) status_due_ = true;
  peer.acknowledged = std::max(peer.acknowledged, header.received);
  news_.notify_all();
}

bool Courier::write_ranges(uint8_t* to, const Header& header, const uint8_t* data, uint64_t bytes) const {
  const Word& word = header.word;
  if (word.offset != Word::kNone && (word.offset % 8 != 0 || word.offset > place_.heap_bytes - 8)) return false;
  if (header.ranges > bytes / sizeof(Range)) return false;
  uint64_t left = bytes - header.ranges * sizeof(Range);
  std::vector<Range> ranges(header.ranges);
  if (!ranges.empty()) std::memcpy(ranges.data(), data, ranges.size() * sizeof(Range));
  for (const Range& r : ranges) {
    if (r.bytes > left || r.bytes > place_.heap_bytes || r.offset > place_.heap_bytes - r.bytes) return false;
    left -= r.bytes;
  }
  const uint8_t* from = data + ranges.size() * sizeof(Range);
  for (const Range& r : ranges) {
    std::memcpy(to + r.offset, from, r.bytes);
    from += r.bytes;
  }
  return left == 0;
}

void Courier::write_status(Peer& peer, const uint8_t* data, uint64_t bytes) const {
  if (bytes != sizeof(Status)) return;
  Status s;
  std::memcpy(&s, data, sizeof(s));
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
      return p.mirror == nullptr || p.gone || !p.lost.empty() || p.acknowledged >= p.last;
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
