// NVLink and network interfaces: which rank sends how many bytes to which, and when they are there.
//
// A GPU's link has a way out and a way in. Each passes messages in the order in which they come, at the measured rate.
// A message passes both ways at once, as far as both are free. The switch between the GPUs of a machine, and the
// network between machines, never limit the rate. What a message costs whoever puts it on a network, the host's thread
// or the network interface, is not known and is left out.
#pragma once

#include <vector>

#include "sim/machine.h"

namespace flashmoe::sim {

class Links {
 public:
  Links(const Machine& machine, uint32_t ranks) : machine_(machine), nvlink_(ranks), nic_(ranks) {}

  struct Transfer {
    Time sent, there;  // when the last byte has left, and when it is there
  };
  // Sends over NVLink, between simulated ranks.
  Transfer send(uint32_t from, uint32_t to, uint64_t bytes, Time at);

  // Sends over the network. leave() returns when the first byte leaves. The caller calls arrive() at that time, which
  // returns when the last byte is there.
  Time leave(uint32_t from, uint64_t bytes, Time at);
  Time arrive(uint32_t to, uint64_t bytes);

  struct Bytes {
    uint64_t nvlink = 0, nic = 0, messages = 0;
  };
  // What a rank has sent.
  const Bytes& sent(uint32_t rank) const { return sent_[rank]; }

 private:
  struct Port {
    Time out = 0, in = 0;  // when each way is free
  };

  const Machine& machine_;
  std::vector<Port> nvlink_, nic_;
  std::vector<Bytes> sent_ = std::vector<Bytes>(nvlink_.size());
};

}  // namespace flashmoe::sim
