// Groups that are spread over machines: which rank is whose relay, where the fields of each source lie, when a relay
// may end a call, and whole calls with relays, with warps of 1 to 8 lanes, over mapped memory.
#include <map>
#include <set>

#include "lane_calls.h"

namespace flashmoe::test {
namespace {

using Spread = std::vector<uint32_t>;

// Checks the tables of all ranks. of: the machine of each rank; machines are numbered in the order of their lowest
// ranks.
void check_tables(const Spread& of) {
  const auto ranks = static_cast<uint32_t>(of.size());
  Limits l = limits(ranks, 1);
  std::map<uint32_t, std::vector<uint32_t>> machines;
  for (uint32_t p = 0; p < ranks; ++p) machines[of[p]].push_back(p);
  host::MachineTables(of, ranks, 0).set(l);
  std::map<uint32_t, std::vector<uint32_t>> sources;  // by relay
  for (uint32_t q = 0; q < ranks; ++q) {
    host::MachineTables tables(of, ranks, q);
    const Machines m = tables.machines(l);
    CHECK_EQ(m.count, static_cast<uint32_t>(machines.size()));
    if (m.count == 1) CHECK(l.relayed == 0 && l.machine_ranks == 0 && m.layout.bytes == 0 && m.source_count == 0);
    std::set<uint32_t> slots;
    for (uint32_t i = 1; i <= ranks; ++i) {
      const uint32_t p = (q + i) % ranks;
      CHECK_EQ(m.of[p], of[p]);
      CHECK_EQ(m.rank_at(of[p], m.place[p]), p);
      CHECK_EQ(m.together(p, q), of[p] == of[q]);
      if (of[p] == of[q]) {
        CHECK_EQ(m.returner(p, q), q);
        continue;
      }
      const std::vector<uint32_t>& there = machines[of[q]];
      const uint32_t relay = m.relay(p, of[q]);
      CHECK_EQ(relay, there[m.place[p] % there.size()]);
      CHECK_EQ(m.is_relay(p, q), relay == q);
      CHECK_EQ(m.returner(p, q), q);
      Machines summing = m;
      summing.sums = true;
      CHECK_EQ(summing.returner(p, q), relay);
      if (relay != q) continue;
      sources[q].push_back(p);
      CHECK(m.slot(p, of[q]) < l.relayed);
      CHECK(slots.insert(m.slot(p, of[q])).second);  // each slot has one writer
    }
    CHECK(std::equal(sources[q].begin(), sources[q].end(), m.sources, m.sources + m.source_count));
  }
}

void check_tables() {
  check_tables({0});
  check_tables({0, 0, 0});
  Limits l = limits(4, 1);
  host::MachineTables({5, 2, 5, 2}, 4, 1).set(l);  // machines may have any numbers
  CHECK(l.machine_ranks == 2 && l.relayed == 1);
  uint32_t checked = 0;
  for (uint32_t ranks = 2; ranks <= 6; ++ranks) {  // all ways to spread them
    Spread of(ranks);
    const auto place = [&](auto&& next, uint32_t p, uint32_t machines) -> void {
      if (p == ranks) {
        check_tables(of);
        ++checked;
        return;
      }
      for (of[p] = 0; of[p] <= machines; ++of[p]) next(next, p + 1, max_of(machines, of[p] + 1));
    };
    place(place, 0, 0);
  }
  std::printf("%u spreads\n", checked);
}

// When a relay's OS actor may leave a call: all packets must be passed on, and all sums be here. The signal of a sum
// may also be of a later call, because a rank without experts signals as soon as the source has begun that call.
// Machines are {0} and {1, 2}, and rank 1 is the relay of rank 0.
void check_completion() {
  using P = SpreadPlatform<cpu::CpuPlatform, true>;
  Limits l = limits(3, 1);
  const Helpers helpers{.relays = 1, .machines = {0, 1, 1}};
  host::MachineTables(helpers.machines, 3, 0).set(l);
  AbstractGroup<P> group(l, helpers);
  Rank<P>& rank = group.rank(1);
  uint32_t checked = 0;
  for (const Problem& x : Problems(l, 7).draw(40)) {
    rank.prepare(x);
    const SpreadCall& c = rank.call;
    Relay<P> relay(c);
    CHECK(!relay.complete());  // rank 0 has not begun the call, so its packets may still come
    *c.call_signal(1, 0) = Signal::make(c.epoch, CallPayload::make(x.of[0].tokens, x.of[0].log2_block));
    c.call_config(1, 0)->hash = c.config.hash;
    const uint32_t packets = 2 * c.blocks_of(0);
    if (packets != 0) CHECK(!relay.complete());
    *c.spread.packets_passed(c.parity(), 0) = packets;
    const bool sums = c.reduced() && packets != 0;
    CHECK_EQ(relay.complete(), !sums);
    if (!sums) continue;
    const RelayPlace from(c, c.spread, 1, 0);
    for (uint32_t g = 0; g < c.policy.groups; ++g) *from.sum_signal(0, g) = Signal::make(c.epoch, 0);
    Fault fault{.kind = FaultKind::kLocal, .actor = Actor::kOs, .awaited = 1};
    relay.explain(fault);
    CHECK(fault.kind == FaultKind::kReturn && fault.awaited == 2 && fault.index == 0 && fault.expected == c.epoch);
    for (uint32_t g = 0; g < c.policy.groups; ++g) {
      CHECK(!relay.complete());
      *from.sum_signal(1, g) = Signal::make(c.epoch + g % 2, 0);
    }
    CHECK(relay.complete());
    for (uint32_t g = 0; g < c.policy.groups; ++g) *from.sum_signal(1, g) = Signal::make(c.epoch, 0);
    ++checked;
  }
  CHECK(checked > 5);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe;
  using namespace flashmoe::test;
  using One = SpreadPlatform<cpu::CpuPlatform>;
  // Relays are actors of their own, as a GPU's are.
  using Apart = SpreadPlatform<cpu::CpuPlatform, true>;
  using WarpsApart = SpreadPlatform<WarpPlatform<4>, true>;
  check_tables();
  check_completion();
  for (const uint64_t bytes : {1u, 2000u}) {  // so that a message has one token block, or several
    host::batch_bytes = bytes;
    for (const uint64_t seed : {1, 2}) {
      run_calls<One>("1 lane, 2 machines", limits(4, 2), 40, seed, {.machines = {0, 1, 1, 0}});
      run_calls<One>("1 lane, 3 machines", wide(), 40, seed, {.machines = {0, 0, 1, 2, 2}});
      run_calls<One>("1 lane, uneven machines", limits(5, 1), 40, seed, {.formers = 2, .machines = {0, 1, 1, 1, 1}});
    }
    run_calls<SpreadPlatform<WarpPlatform<4>>>("4 lanes, 2 machines", limits(3, 1), 8, 3, {.machines = {0, 1, 1}});
    run_calls<SpreadPlatform<WarpPlatform<2, 3>>>("3 warps of 2 lanes", limits(3, 1), 8, 4,
                                                  {.formers = 2, .machines = {0, 1, 0}});
    for (const uint32_t relays : {1u, 3u}) {
      run_calls<Apart>("1 lane, relays apart", limits(4, 2), 40, relays, {.relays = relays, .machines = {0, 1, 1, 0}});
      run_calls<Apart>("1 lane, 3 machines, relays apart", wide(), 40, relays,
                       {.relays = relays, .machines = {0, 1, 1, 2, 2}});
    }
    run_calls<WarpsApart>("4 lanes, relays apart", limits(3, 1), 8, 3,
                          {.formers = 1, .relays = 2, .machines = {0, 1, 1}});
  }
  run_calls<SpreadPlatform<WarpPlatform<8>>>("8 lanes, 2 machines", limits(3, 1), 5, 6, {.machines = {0, 0, 1}});
}
