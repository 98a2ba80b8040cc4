// What has come from one rank on another machine, and in which order it counts.
#pragma once

#include <set>
#include <vector>

#include "network/message.h"

namespace flashmoe::network {

class Inbox {
 public:
  // Notes message `number`; false if it has been here before.
  bool take(uint64_t number) {
    if (number <= complete_ || !beyond_.insert(number).second) return false;
    while (!beyond_.empty() && *beyond_.begin() == complete_ + 1) {
      beyond_.erase(beyond_.begin());
      ++complete_;
    }
    return true;
  }
  void hold(uint64_t number, const Word& word) { words_.push_back({number, word}); }

  // Calls write(word) for those whose message, and all before, are here.
  template <class F>
  void release(F&& write) {
    size_t kept = 0;
    for (const Held& h : words_) {
      if (h.number <= complete_) {
        write(h.word);
      } else {
        words_[kept++] = h;
      }
    }
    words_.resize(kept);
  }

  // All messages up to this number are here.
  uint64_t complete() const { return complete_; }

 private:
  struct Held {
    uint64_t number = 0;
    Word word;
  };
  uint64_t complete_ = 0;
  std::set<uint64_t> beyond_;  // numbers of messages that have overtaken others
  std::vector<Held> words_;
};

}  // namespace flashmoe::network
