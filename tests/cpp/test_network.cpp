// Ranks that believe themselves to be on several machines. Each is a thread with a courier. They have connections
// over loopback, by OpenSSL or by a stand-in for OpenSSL (tests/fake_openssl). They make random calls, whose results
// are compared with a reference in fp64. The test is above all for ThreadSanitizer.
//
//   test_network [calls [libssl.so.3]]    returns 77 if there is no such library
#include <dlfcn.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <thread>

#include "network/group.h"
#include "random_calls.h"

namespace flashmoe::test {
namespace {

constexpr uint64_t kTimeoutNs = 120'000'000'000;

// The ranks of one machine. As threads, they have one another's heaps; as processes, they would have them mapped.
class Machine final : public host::Group {
 public:
  Machine(std::shared_ptr<std::vector<host::Mapping>> heaps, const std::vector<uint32_t>& here)
      : kept_(std::move(heaps)) {
    heaps_.resize(kRanks);
    for (const uint32_t p : here) heaps_[p] = (*kept_)[p].base();
  }

 private:
  std::shared_ptr<std::vector<host::Mapping>> kept_;
};

void run_group(const std::vector<std::vector<uint32_t>>& machines, uint32_t first, uint32_t n, const char* library,
               std::atomic<uint32_t>& verified) {
  Limits l = call_limits();
  std::vector<uint32_t> of(kRanks);
  for (uint32_t m = 0; m < machines.size(); ++m) {
    for (const uint32_t p : machines[m]) of[p] = m;
  }
  host::MachineTables(of, kRanks, 0).set(l);
  const auto heaps = std::make_shared<std::vector<host::Mapping>>();
  for (uint32_t p = 0; p < kRanks; ++p) heaps->emplace_back(-1, member_heap_bytes(l));
  std::vector<std::shared_ptr<network::Courier>> couriers;
  std::vector<std::string> addresses;
  for (uint32_t p = 0; p < kRanks; ++p) {
    const network::GroupKey key{7, static_cast<uint8_t>(first)};
    couriers.push_back(std::make_shared<network::Courier>(p, kRanks, key, kTimeoutNs, library, "127.0.0.1"));
    addresses.push_back(couriers[p]->address());
  }
  std::barrier listening(kRanks);
  std::vector<std::thread> ranks;
  for (uint32_t p = 0; p < kRanks; ++p) {
    ranks.emplace_back([&, p] {
      network::Spread spread{{}, addresses, std::vector<std::string>(kRanks, "here")};
      for (const auto& m : machines) {
        if (std::find(m.begin(), m.end(), p) != m.end()) spread.here = m;
      }
      auto group =
          network::join_network_group(std::make_unique<Machine>(heaps, spread.here), p, l, couriers[p], spread);
      listening.arrive_and_wait();
      couriers[p]->await_peers();
      cpu::Context context(std::move(group), p, l, kTimeoutNs, of);
      context.set_tile(7, 5);
      for (uint32_t i = first; i < first + n; ++i) {
        Work work(i, l);
        work.run(p, context);
        if (work.verify(p)) ++verified;
      }
    });
  }
  for (std::thread& t : ranks) t.join();
}

}  // namespace
}  // namespace flashmoe::test

int main(int argc, char** argv) {
  using namespace flashmoe::test;
  const uint32_t calls = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 150;
  const char* const library = argc > 2 ? argv[2] : FLASHMOE_FAKE_OPENSSL;
  if (dlopen(library, RTLD_NOW) == nullptr) {
    std::printf("skipped: expected the library %s, got: %s\n", library, dlerror());
    return 77;
  }
  flashmoe::network::records_per_key = 40;      // keys change while messages are on their way
  flashmoe::network::most_message_bytes = 100;  // the data of a signal takes several messages
  flashmoe::host::batch_bytes = 2000;           // and a source has several batches
  std::atomic<uint32_t> verified = 0;
  run_group({{0}, {1}, {2}, {3}}, 1, calls, library, verified);
  run_group({{0, 3}, {1, 2}}, 1 + calls, calls, library, verified);
  run_group({{0, 1, 2}, {3}}, 1 + 2 * calls, calls, library, verified);
  std::printf("%u calls on %u ranks, %u outputs verified\n", 3 * calls, kRanks, verified.load());
  CHECK(verified.load() > 3 * calls);  // of kRanks times as many; with a nearly undecided router nothing is compared
}
