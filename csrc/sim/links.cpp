#include "sim/links.h"

#include <algorithm>

#include "network/message.h"

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

namespace {

Time time_of(uint64_t bytes, double rate) {
  return rate == 0 ? 0 : static_cast<Time>(static_cast<double>(bytes) * 1e12 / rate);
}

}  // namespace

// The bytes join the queues of both ends now, even if they are sent later (at the time `at`), or still wait for the
// way out. So bytes that are still to come do not keep either end from passing others meanwhile.
Links::Transfer Links::send(uint32_t from, uint32_t to, uint64_t bytes, Time at) {
  sent_[from].nvlink += bytes;
  const Time takes = time_of(bytes, machine_.links.nvlink), latency = machine_.costs.peer_store;
  const Time now = World::of_lane().now();
  Time &out = nvlink_[from].out, &in = nvlink_[to].in;
  out = std::max(now, out) + takes;
  in = std::max(now + latency, in) + takes;
  const Time sent = std::max(at + takes, out);
  return {sent, std::max(sent + latency, in)};
}

// Messages over the network are long. So a message joins the receiving end's queue only when its first byte leaves
// the sending end (arrive()).
Time Links::leave(uint32_t from, uint64_t bytes, Time at) {
  sent_[from].nic += bytes;
  sent_[from].messages += ceil_div(bytes, network::most_message_bytes);
  const Time leaves = std::max(at, nic_[from].out);
  nic_[from].out = leaves + time_of(bytes, machine_.links.nic);
  return leaves;
}

Time Links::arrive(uint32_t to, uint64_t bytes) {
  Time& in = nic_[to].in;
  in = std::max(World::of_lane().now() + machine_.costs.network, in) + time_of(bytes, machine_.links.nic);
  return in;
}

}  // namespace flashmoe::sim
