// A message from a rank to a rank on another machine. Most messages have data for the receiver's symmetric heap. The
// data that one signal announces may take several messages; the last of these also has the signal. Other messages
// have the sender's status, or say that the sender leaves. Messages arrive in the order in which they are sent, and
// from a rank that has proved which rank it is (tls.h).
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

// A word for the receiver's heap. The receiver writes it after all data that was sent before it, so no signal is
// written before the data that it announces.
struct Word {
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t offset = kNone, value = 0;
};

struct Header {
  enum Kind : uint32_t {
    kData = 0,     // ranges of the receiver's heap, their bytes one behind the other, and `word`
    kStatus = 1,   // the sender's Status, for the receiver's mirror of the sender's heap
    kConfigs = 2,  // the same, but for that mirror: configurations about which ranks disagree
    kGoodbye = 3,  // the sender needs and sends nothing more, once its messages are acknowledged
  };
  uint64_t bytes;  // how many bytes follow the header
  uint32_t kind, ranges;
  uint64_t received;  // how many messages the sender has got from the receiver, of all kinds but kStatus
  Word word;
};

class Message {
 public:
  // bytes: how many follow the header. The caller fills them in.
  explicit Message(uint64_t bytes) : size(sizeof(Header) + bytes) {
    header.bytes = bytes;
    allocate();
  }
  // A message of parts of a heap. pack() copies the parts later, when the message is about to be sent. Until then,
  // they must stay as they are.
  Message(const uint8_t* heap, std::vector<Range> ranges, uint64_t bytes)
      : size(sizeof(Header) + ranges.size() * sizeof(Range) + bytes), heap_(heap), ranges_(std::move(ranges)) {
    header.bytes = size - sizeof(Header);
    header.ranges = static_cast<uint32_t>(ranges_.size());
  }

  Header header{};
  const uint64_t size;  // bytes in all

  // The message in the form in which it is sent: the header, the ranges, the bytes of the ranges. Only once the
  // message is packed.
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
  // Writes the header in front of the packed bytes. Called when the header will not change any more.
  void seal() { std::memcpy(bytes_.get(), &header, sizeof(Header)); }

 private:
  void allocate() { bytes_ = std::make_unique_for_overwrite<uint8_t[]>(size); }

  const uint8_t* heap_ = nullptr;
  std::vector<Range> ranges_;
  std::unique_ptr<uint8_t[]> bytes_;
};

// The most bytes of data that a message has (more only if one add() of Packing has more). This is enough for the
// speed of a fast network, and so few that a receiver need not keep much data that it cannot use yet. Tests make the
// number smaller, before there is a courier.
inline uint64_t most_message_bytes = 512 << 10;

// Makes messages of parts of a heap. When a message is full, the next one begins.
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

  // Returns all messages. The last one has `word`, which belongs at `word_at` in the heap, unless word_at is null.
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
