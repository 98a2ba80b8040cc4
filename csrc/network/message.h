// What goes from one rank's machine to another's, in one message: parts of the receiver's symmetric heap and, in the
// last message of what a signal announces, the signal; or the sender's status, or nothing, by which it says that it
// goes.
//
// A message is told by who knows the group's key, which comes with each. It is not encrypted (docs/security.md).
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "flashmoe/protocol/status.h"

namespace flashmoe::network {

using Key = std::array<uint64_t, 2>;

// Bytes of a heap.
struct Range {
  uint64_t offset, bytes;
};

// A word of a heap, written once all that was sent before has been: no signal is written before what it announces, also
// where messages overtake one another.
struct Word {
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t offset = kNone, value = 0;
};

struct Header {
  enum Kind : uint32_t {
    kData = 0,     // `ranges`, their bytes one behind the other, and `word`
    kStatus = 1,   // the sender's Status: data too, but of none of the receiver's memory; the newest counts
    kConfigs = 2,  // `ranges` of the sender's heap, not of the receiver's: how it words a disagreement
    kGoodbye = 3,  // the sender will need and send nothing more, once what it has sent is acknowledged
  };
  Key key;
  uint32_t source, kind;
  uint64_t number;    // 1, 2, ... to this receiver, over all kinds but kStatus; that of a status is of its own
  uint64_t received;  // all of the receiver's messages up to this number are here
  uint64_t ranges;
  Word word;
};

struct Message {
  Header header{};
  std::vector<uint8_t> data;  // the ranges, then their bytes
};

// Where tokens suffice a message has so many bytes: enough for a fast network, and little enough that a receiver need
// not keep much of what it cannot use yet. Tests make it smaller, before there is a courier.
inline uint64_t most_message_bytes = 512 << 10;

// Makes messages of parts of a heap. One that is full is handed on before the last one is asked for.
class Packing {
 public:
  explicit Packing(const uint8_t* heap) : heap_(heap) {}

  void add(const void* from, uint64_t bytes) {
    const uint64_t offset = static_cast<uint64_t>(static_cast<const uint8_t*>(from) - heap_);
    if (bytes == 0) return;
    if (bytes_ + bytes > most_message_bytes && bytes_ != 0) close();
    bytes_ += bytes;
    if (!ranges_.empty() && ranges_.back().offset + ranges_.back().bytes == offset) {
      ranges_.back().bytes += bytes;
    } else {
      ranges_.push_back({offset, bytes});
    }
  }

  // All messages, the last of which has the word.
  std::vector<std::unique_ptr<Message>> take(Header::Kind kind, const uint64_t* word_at, uint64_t word) {
    close();
    Header& last = messages_.back()->header;
    for (auto& m : messages_) m->header.kind = kind;
    if (word_at != nullptr) {
      last.word = {static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(word_at) - heap_), word};
    }
    return std::move(messages_);
  }

 private:
  void close() {
    auto m = std::make_unique<Message>();
    m->header.ranges = ranges_.size();
    m->data.resize(ranges_.size() * sizeof(Range) + bytes_);
    if (!ranges_.empty()) std::memcpy(m->data.data(), ranges_.data(), ranges_.size() * sizeof(Range));
    uint8_t* to = m->data.data() + ranges_.size() * sizeof(Range);
    for (const Range& r : ranges_) {
      std::memcpy(to, heap_ + r.offset, r.bytes);
      to += r.bytes;
    }
    messages_.push_back(std::move(m));
    ranges_.clear();
    bytes_ = 0;
  }

  const uint8_t* const heap_;
  std::vector<Range> ranges_;
  uint64_t bytes_ = 0;
  std::vector<std::unique_ptr<Message>> messages_;
};

}  // namespace flashmoe::network
