// A message from a rank to a rank on another machine. It has parts of the receiver's symmetric heap. If it is the last
// message of what a signal announces, it also has the signal. Other messages have the sender's status, or say that the
// sender leaves. Messages to a rank come in the order in which they are sent, from a rank that has proved who it is
// (tls.h).
#pragma once

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "flashmoe/protocol/status.h"

namespace flashmoe::network {

// A range of bytes in a heap.
struct Range {
  uint64_t offset, bytes;
};

// A word of a heap. It is written after everything that was sent before it has been written, so no signal is written
// before the data that it announces.
struct Word {
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t offset = kNone, value = 0;
};

struct Header {
  enum Kind : uint32_t {
    kData = 0,     // `ranges`, their bytes one behind the other, and `word`
    kStatus = 1,   // the sender's Status, which is not for the receiver's heap
    kConfigs = 2,  // `ranges` of the sender's heap, not the receiver's: to describe a disagreement
    kGoodbye = 3,  // the sender needs and sends nothing more, once its messages are acknowledged
  };
  uint64_t bytes;  // number of bytes behind the header
  uint32_t kind, ranges;
  uint64_t received;  // how many of the receiver's messages have come, of all kinds but kStatus
  Word word;
};

class Message {
 public:
  // bytes: the number behind the header. The caller fills these bytes in.
  explicit Message(uint64_t bytes) : size(sizeof(Header) + bytes) {
    header.bytes = bytes;
    allocate();
  }
  // A message of parts of a heap. They are copied when the message's turn comes (pack()), and must stay as they are
  // until then.
  Message(const uint8_t* heap, std::vector<Range> ranges, uint64_t bytes)
      : size(sizeof(Header) + ranges.size() * sizeof(Range) + bytes), heap_(heap), ranges_(std::move(ranges)) {
    header.bytes = size - sizeof(Header);
    header.ranges = static_cast<uint32_t>(ranges_.size());
  }

  Header header{};
  const uint64_t size;  // bytes in all

  // The message in the form in which it is sent: the header, ranges, their bytes. Only once it is packed.
  const uint8_t* bytes() const { return bytes_.get(); }
  uint8_t* behind_header() { return bytes_.get() + sizeof(Header); }
  uint64_t payload() const { return header.bytes - header.ranges * sizeof(Range); }

  bool is_packed() const { return bytes_ != nullptr; }
  void pack() {
    if (is_packed()) return;
    allocate();
    uint8_t* to = behind_header();
    const uint64_t words = ranges_.size() * sizeof(Range);
    if (words != 0) std::memcpy(to, ranges_.data(), words);
    to += words;
    for (const Range& r : ranges_) {
      std::memcpy(to, heap_ + r.offset, r.bytes);
      to += r.bytes;
    }
  }
  // Writes the header. Called when the header does not change any more.
  void seal() { std::memcpy(bytes_.get(), &header, sizeof(Header)); }

 private:
  void allocate() { bytes_ = std::make_unique_for_overwrite<uint8_t[]>(size); }

  const uint8_t* heap_ = nullptr;
  std::vector<Range> ranges_;
  std::unique_ptr<uint8_t[]> bytes_;
};

// The size of a message, if there are enough tokens: large enough for a fast network, and small enough that a receiver
// need not keep much data that it cannot use yet. Tests make it smaller, before there is a courier.
inline uint64_t most_message_bytes = 512 << 10;

// Makes messages of parts of a heap. A message that is full is closed, and the next one begins.
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

  // All messages. The last one has the word.
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
    messages_.push_back(std::make_unique<Message>(heap_, std::move(ranges_), bytes_));
    ranges_.clear();
    bytes_ = 0;
  }

  const uint8_t* const heap_;
  std::vector<Range> ranges_;
  uint64_t bytes_ = 0;
  std::vector<std::unique_ptr<Message>> messages_;
};

}  // namespace flashmoe::network
