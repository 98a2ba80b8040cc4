// NVLink and network interfaces: who sends how many bytes where, and when they are there.
//
// A GPU's link has a way out and a way in, each of which takes messages in the order in which they come, as fast as it was
// measured; a message passes both at once, as far as both are free. The switch between the GPUs of a machine, and the
// network between machines, are not what is full. What a message costs whoever puts it on a network, the host's thread or the
// network interface, is not known, and left out.
#pragma once

#include <vector>

#include "sim/machine.h"

namespace flashmoe::sim {

class Links {
 public:
  Links(const Machine& machine, uint32_t ranks) : machine_(machine), nvlink_(ranks), nic_(ranks) {}

  struct Transfer {
    Time sent, there;  // when the last byte has left, and is there
  };
  // Over NVLink, between simulated ranks.
  Transfer send(uint32_t from, uint32_t to, uint64_t bytes, Time at);

  // Over the network. Returns when the first byte leaves, at which time arrive() is to be called; that returns when the last
  // one is there.
  Time leave(uint32_t from, uint64_t bytes, Time at);
  Time arrive(uint32_t to, uint64_t bytes);

  struct Bytes {
    uint64_t nvlink = 0, nic = 0, messages = 0;
  };
  // Sent by a rank.
  const Bytes& sent(uint32_t rank) const { return sent_[rank]; }

 private:
  struct Port {
    Time out = 0, in = 0;  // when either is free
  };

  const Machine& machine_;
  std::vector<Port> nvlink_, nic_;
  std::vector<Bytes> sent_ = std::vector<Bytes>(nvlink_.size());
};

}  // namespace flashmoe::sim
