// Reads what a finished call has left in the device's memory, for the call's report.
#pragma once

#include "cuda/machines.h"

namespace flashmoe::cuda {

// Reads [tokens, top_k] chosen experts (where there is none, Choice::recorded says why) and weights. limits: the limits
// that `workspace` was made for. c: any call of the context; it gives the layout.
void read_routing(const Call& c, const DeviceMemory& workspace, const Limits& limits, uint32_t tokens, uint32_t top_k,
                  int32_t* ids, float* weights);

// Adds to rows[p * El + l] the number of rows that rank p's tokens have with local expert l. layer: a call of the
// layer, whose epoch is ignored. heap: this rank's heap, on the device. machines: null if all ranks are on one machine.
RowsSent read_received(const Call& layer, const Device& device, const DeviceMemory& workspace, const uint8_t* heap,
                       const DeviceMachines* machines, int32_t* rows);

}  // namespace flashmoe::cuda
