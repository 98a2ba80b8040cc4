// What a call that is over left in the device's memory, for its report.
#pragma once

#include "cuda/machines.h"

namespace flashmoe::cuda {

// Reads [tokens, top_k] chosen experts (or as Choice::recorded) and weights. limits: those that `workspace` was made for; c: any
// call of the context, for the layout.
void read_routing(const Call& c, const DeviceMemory& workspace, const Limits& limits, uint32_t tokens, uint32_t top_k,
                  int32_t* ids, float* weights);

// Adds to rows[p * El + l] the rows that rank p's tokens have with local expert l. layer: a call of the layer, its epoch
// ignored; heap: this rank's, on the device; machines: null where all ranks are on one.
RowsSent read_received(const Call& layer, const Device& device, const DeviceMemory& workspace, const uint8_t* heap,
                       const DeviceMachines* machines, int32_t* rows);

}  // namespace flashmoe::cuda
