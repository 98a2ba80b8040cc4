// What a call that is over left in the device's memory, for its report.
#pragma once

#include "cuda/device.h"
#include "flashmoe/protocol/call.h"

namespace flashmoe::cuda {

// Reads [tokens, top_k] chosen experts (-1: dropped) and weights. limits: those that `workspace` was made for; c: any
// call of the context, for the layout.
void read_routing(const Call& c, const DeviceMemory& workspace, const Limits& limits, uint32_t tokens, uint32_t top_k,
                  int32_t* ids, float* weights);

// Adds to rows[p * El + l] the rows that rank p's tokens have with local expert l; returns how many rows went to other ranks
// as results. layer: a call of the layer, its epoch ignored; heap: this rank's, on the device.
uint64_t read_received(const Call& layer, const Device& device, const DeviceMemory& workspace, const uint8_t* heap,
                       int32_t* rows);

}  // namespace flashmoe::cuda
