#include "sim/links.h"

#include <algorithm>

namespace flashmoe::sim {

TaskTimes::Point TaskTimes::at(uint32_t product, uint32_t rows) const {
  const std::vector<Point>& points = of[product];
  const auto above = std::find_if(points.begin(), points.end(), [&](const Point& point) { return point.rows >= rows; });
  if (above == points.end()) return points.back();
  if (above == points.begin()) return points.front();
  const Point &a = *(above - 1), &b = *above;
  const double part = static_cast<double>(rows - a.rows) / (b.rows - a.rows);
  return {rows, a.stage_us + part * (b.stage_us - a.stage_us), a.epilogue_us + part * (b.epilogue_us - a.epilogue_us)};
}

// Bytes queue up at both ends as if they had come now, also those that do so later (`at`) or still wait on their way out: so
// neither end is kept from others that come meanwhile.
Links::Transfer Links::pass(Port& from, Port& to, double rate, Time latency, uint64_t bytes, Time at) {
  const Time takes = rate == 0 ? 0 : static_cast<Time>(static_cast<double>(bytes) * 1e12 / rate);
  const Time now = World::of_lane().now();
  from.out = std::max(now, from.out) + takes;
  to.in = std::max(now + latency, to.in) + takes;
  const Time sent = std::max(at + takes, from.out);
  return {sent, std::max(sent + latency, to.in)};
}

Links::Transfer Links::send(uint32_t from, uint32_t to, bool remote, uint64_t bytes, Time at) {
  if (!remote) {
    sent_[from].nvlink += bytes;
    return pass(nvlink_[from], nvlink_[to], machine_.links.nvlink, machine_.costs.peer_store, bytes, at);
  }
  sent_[from].nic += bytes;
  ++sent_[from].messages;
  return pass(nic_[from], nic_[to], machine_.links.nic, machine_.costs.network, bytes, at);
}

}  // namespace flashmoe::sim
