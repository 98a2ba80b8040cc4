// How many bytes the wire between two hosts carries in a second, in messages of several sizes. network.py starts a
// process of it for each side. It can be built with the sources of this version, or of an earlier version whose wire
// used UCX.
//
//   wire RANK FOLDER LIBRARY AT     rank 0 sends, rank 1 receives; each side writes its address to a file in FOLDER
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "network/wire.h"

namespace {

using namespace flashmoe::network;

constexpr uint64_t kSizes[] = {512 << 10, 64 << 10, 8 << 10};
constexpr uint64_t kTotal = uint64_t{512} << 20, kWarmUp = uint64_t{32} << 20;  // bytes sent in messages of each size
// The receiver answers after every kAnswer bytes. The sender sends no more while kAhead bytes are not answered.
constexpr uint64_t kAhead = 16 << 20, kAnswer = 4 << 20;

struct Side {
  std::vector<uint8_t> heap = std::vector<uint8_t>(1 << 20);
  uint64_t bytes = 0, answers = 0;  // received so far
};

#if __has_include("network/ucx.h")
struct End {
  End(Side& s, uint32_t rank, const char* library, const char*) : wire(library, "eth0", 2), peer(1 - rank) {
    wire.deliver_to([&s](const Header& h, const uint8_t* data, uint64_t bytes) {
      if (bytes != 0) std::memcpy(s.heap.data(), data, bytes);
      h.kind == Header::kData ? s.bytes += bytes : ++s.answers;
    });
  }
  void send(Header::Kind kind, const std::vector<uint8_t>& data) {
    auto m = std::make_unique<Message>();
    m->header.kind = kind;
    m->data.resize(data.size());
    if (!data.empty()) std::memcpy(m->data.data(), data.data(), data.size());
    wire.send(peer, std::move(m));
  }
  Wire wire;
  const uint32_t peer;
};
#else
struct End final : Receiver {
  End(Side& side, uint32_t rank, const char* library, const char* at)
      : s(side), wire(library, GroupKey{1}, rank, 2, at), peer(1 - rank) {
    wire.deliver_to(*this);
  }
  std::vector<Place> places(uint32_t, const Header& h, const std::vector<Range>&) override {
    return {{s.heap.data(), h.bytes}};
  }
  void arrived(uint32_t, const Header& h) override { h.kind == Header::kData ? s.bytes += h.bytes : ++s.answers; }
  void send(Header::Kind kind, const std::vector<uint8_t>& data) {
    auto m = std::make_unique<Message>(data.size());
    m->header.kind = kind;
    if (!data.empty()) std::memcpy(m->behind_header(), data.data(), data.size());
    wire.send(peer, std::move(m));
  }
  Side& s;
  Wire wire;
  const uint32_t peer;
};
#endif

std::string read_once_there(const std::string& path) {
  while (access(path.c_str(), R_OK) != 0) usleep(1000);
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void go_on(End& end) {
  if (!end.wire.progress()) end.wire.wait(-1, 1);
  if (!end.wire.lost(end.peer).empty()) std::fprintf(stderr, "%s\n", end.wire.lost(end.peer).c_str()), std::exit(1);
}

// Sends `total` bytes, and waits for the last answer.
void send_all(End& end, const Side& s, uint64_t total, const std::vector<uint8_t>& data) {
  const uint64_t answered = s.answers;
  for (uint64_t sent = 0; (s.answers - answered) * kAnswer < total;) {
    while (sent < total && sent - (s.answers - answered) * kAnswer < kAhead) {
      end.send(Header::kData, data);
      sent += data.size();
    }
    go_on(end);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return std::fprintf(stderr, "wire RANK FOLDER LIBRARY AT\n"), 2;
  const auto rank = static_cast<uint32_t>(std::atoi(argv[1]));
  const std::string folder = argv[2];
  Side side;
  End end(side, rank, argv[3], argv[4]);
  const std::string own = folder + "/" + argv[1];
  std::ofstream(own + ".part", std::ios::binary) << end.wire.address();
  std::rename((own + ".part").c_str(), own.c_str());
  end.wire.connect(end.peer, read_once_there(folder + "/" + std::to_string(end.peer)));
  if (rank == 1) {  // like rank 0 below, first exchanges one message, so that the connection stands
    end.send(Header::kStatus, {});
    while (side.answers == 0) go_on(end);
    for (uint64_t answered = 0; answered < std::size(kSizes) * (kTotal + kWarmUp);) {
      go_on(end);
      for (; side.bytes - answered >= kAnswer; answered += kAnswer) end.send(Header::kStatus, {});
    }
    // Sends the last answer on its way, and goes on until the other side has closed the connection.
    for (int i = 0; i < 1000 && end.wire.lost(end.peer).empty(); ++i) {
      if (!end.wire.progress()) end.wire.wait(-1, 1);
    }
    return 0;
  }
  end.send(Header::kStatus, {});
  while (side.answers == 0) go_on(end);
  for (const uint64_t size : kSizes) {
    const std::vector<uint8_t> data(size, 7);
    send_all(end, side, kWarmUp, data);
    const auto since = std::chrono::steady_clock::now();
    send_all(end, side, kTotal, data);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - since;
    std::printf("%llu %.1f\n", static_cast<unsigned long long>(size >> 10),
                static_cast<double>(kTotal) / took.count() / 1e6);
    std::fflush(stdout);
  }
}
