// Tensor maps: what TMA knows of the weights and of the intermediate rows. (KernelArgs says which dimensions they have,
// and why.)
#pragma once

#include "cuda/arch.h"
#include "cuda/device/driver.h"
#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/spec/enums.h"

namespace flashmoe::cuda {

// Where the rows of the weight matrices of one or several experts lie, or the rows of the router. These are rows in
// memory: transposed weights have a row for each number that a product contracts over.
struct Matrix {
  uint64_t data = 0;  // address on the device; 0: there is none
  uint64_t row_bytes = 0;
  uint64_t expert_bytes = 0;
};

// The arguments of cuTensorMapEncodeTiled that depend on the tensor. strides: of dimensions 1 and up, in bytes.
struct TensorMapShape {
  uint32_t rank;
  uint64_t dims[5];
  uint64_t strides[4];
  uint32_t box[5];
};

TensorMapShape gate_up_shape(const Arch& arch, const Matrix& m, uint32_t element_bytes, uint32_t hidden,
                             uint32_t intermediate, uint32_t experts, bool gated, gpu::GatedRows rows);
TensorMapShape down_shape(const Arch& arch, const Matrix& m, uint32_t element_bytes, uint32_t hidden,
                          uint32_t intermediate, uint32_t experts);
// For transposed weights, for both products: an expert has `rows` rows, one for each number that the product contracts
// over. A row has `halves` times `columns` features. The second half begins `up` features behind the first.
TensorMapShape transposed_shape(const Arch& arch, const Matrix& m, uint32_t element_bytes, uint32_t columns,
                                uint32_t halves, uint32_t up, uint32_t rows, uint32_t experts);
TensorMapShape router_shape(const Arch& arch, const Matrix& m, uint32_t element_bytes, uint32_t hidden,
                            uint32_t experts);
// For a matrix whose rows go along the contracted axis and whose columns are loaded in spans, like those of transposed
// weights. The elements of a row need not fill a multiple of 16 bytes.
TensorMapShape spans_shape(const Arch& arch, uint64_t row_bytes, uint32_t element_bytes, uint32_t columns,
                           uint32_t rows);
TensorMapShape rows_shape(const Arch& arch, uint64_t row_bytes, uint32_t element_bytes, uint32_t columns,
                          uint64_t rows);
// For tiles of intermediate rows in e4m3.
TensorMapShape quantised_tiles_shape(const Arch& arch, uint64_t tile_bytes, uint32_t columns, uint64_t tiles);

// Host arithmetic only: touches neither the device nor a stream. `what` names the tensor in an error. promotion: how
// much the L2 loads if the copy engine asks for less.
gpu::TensorMap encode(const TensorMapShape& shape, uint64_t data, DType dtype, const char* what,
                      int promotion = kMapPromotion256B);

}  // namespace flashmoe::cuda
