// NVLink and network interfaces: which rank sends how many bytes to which, and when they are there.
//
// A GPU's link has a way out and a way in. Each way passes messages in the order in which they come, at the measured
// rate. A message passes the sender's way out and the receiver's way in at the same time, as far as both are free.
// The switch between the GPUs of a machine, and the network between machines, never limit the rate. Whatever puts a
// message on a network (a thread of the host, or the network interface) takes time for each message; this time is not
// known, and is left out.
#pragma once

#include <vector>

#include "sim/machine.h"

namespace flashmoe::sim {

class Links {
 public:
  Links(const Machine& machine, uint32_t ranks) : machine_(machine), nvlink_(ranks), nic_(ranks) {}

  struct Transfer {
    Time sent, there;  // when the last byte has left, and when it has arrived
  };
  // Sends over NVLink, between simulated ranks.
  Transfer send(uint32_t from, uint32_t to, uint64_t bytes, Time at);

  // Send over the network. leave() returns the time at which the first byte leaves. At that time the caller calls
  // arrive(), which returns the time at which the last byte has arrived.
  Time leave(uint32_t from, uint64_t bytes, Time at);
  Time arrive(uint32_t to, uint64_t bytes);

  struct Bytes {
    uint64_t nvlink = 0, nic = 0, messages = 0;
  };
  // What a rank has sent.
  const Bytes& sent(uint32_t rank) const { return sent_[rank]; }

 private:
  struct Port {
    Time out = 0, in = 0;  // from when on each way is free
  };

  const Machine& machine_;
  std::vector<Port> nvlink_, nic_;
  std::vector<Bytes> sent_ = std::vector<Bytes>(nvlink_.size());
};

}  // namespace flashmoe::sim
