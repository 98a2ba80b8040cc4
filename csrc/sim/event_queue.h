// The queue of events, in the order of (time, number). Times are in picoseconds (`Time` in world.h). Events of the
// next millisecond lie on a wheel of buckets, each of which is 66 ns of the clock. Later events lie in a heap.
//
// Only the earliest bucket is sorted; the others have their events in the order in which they were pushed. So most
// events need no walk through a heap of all pending events, which with tens of thousands of actors would take most of
// a simulation's time. The clock may still be before the earliest bucket. So a new event may be earlier than this
// bucket, too; it then goes into this bucket.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace flashmoe::sim {

// Event: has `at`, `number` and operator<, by which the earlier of two events is the greater one.
template <class Event>
class EventQueue {
 public:
  bool empty() const { return size_ == 0; }

  void push(const Event& e) {
    ++size_;
    const uint64_t bucket = e.at >> kLog2Width;
    if (bucket <= first_) {
      now_.insert(std::upper_bound(now_.begin(), now_.end(), e), e);
    } else if (bucket < first_ + kBuckets) {
      add(bucket, e);
    } else {
      far_.push_back(e);
      std::push_heap(far_.begin(), far_.end());
    }
  }

  // The earliest event. The queue must not be empty.
  const Event& front() {
    if (now_.empty()) advance();
    return now_.back();
  }
  Event pop() {
    const Event e = front();
    now_.pop_back();
    --size_;
    return e;
  }
  // The n-th event after the earliest, if the earliest bucket has so many; else null. The caller may prefetch what
  // this event will touch.
  const Event* next(uint32_t n) const { return n < now_.size() ? &now_[now_.size() - 1 - n] : nullptr; }

 private:
  // A bucket is 2^16 ps = 66 ns, and the wheel 1 ms.
  static constexpr uint32_t kLog2Width = 16;
  static constexpr uint64_t kBuckets = 1u << 14;

  void add(uint64_t bucket, const Event& e) {
    const uint64_t i = bucket % kBuckets;
    wheel_[i].push_back(e);
    used_[i / 64] |= uint64_t{1} << i % 64;
  }

  // Makes the next bucket that has events the earliest one.
  void advance() {
    const uint64_t next = next_used(), of_far = far_.empty() ? ~uint64_t{0} : far_.front().at >> kLog2Width;
    first_ = std::min(next, of_far);
    if (first_ == next) {
      const uint64_t i = first_ % kBuckets;
      now_.swap(wheel_[i]);
      used_[i / 64] &= ~(uint64_t{1} << i % 64);
    }
    while (!far_.empty() && far_.front().at >> kLog2Width == first_) {
      now_.push_back(far_.front());
      std::pop_heap(far_.begin(), far_.end());
      far_.pop_back();
    }
    std::sort(now_.begin(), now_.end());
  }

  // The number of the first bucket behind the earliest that has events; if none on the wheel has, the largest number.
  uint64_t next_used() const {
    for (uint64_t n = 1; n < kBuckets;) {
      const uint64_t i = (first_ + n) % kBuckets, bits = used_[i / 64] >> i % 64;
      if (bits != 0) return first_ + n + static_cast<uint64_t>(std::countr_zero(bits));
      n += 64 - i % 64;
    }
    return ~uint64_t{0};
  }

  uint64_t first_ = 0, size_ = 0;  // first_: number of the earliest bucket
  std::vector<Event> now_;         // the earliest bucket's events, the earliest event last
  std::vector<std::vector<Event>> wheel_ = std::vector<std::vector<Event>>(kBuckets);
  std::array<uint64_t, kBuckets / 64> used_{};  // a bit for each bucket: whether it has events
  std::vector<Event> far_;                      // events beyond the wheel, as a heap
};

}  // namespace flashmoe::sim
