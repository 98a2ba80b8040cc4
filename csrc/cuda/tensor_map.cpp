#include "cuda/tensor_map.h"

#include "cuda/device/driver.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

// Rows go through TMA in groups of 8, one period of the 128-byte swizzle.
constexpr uint32_t kRowGroup = 8;

int map_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return kMapFloat32;
    case DType::kBFloat16: return kMapBFloat16;
    case DType::kFloat8E4M3:
    case DType::kMxFp4: return kMapUInt8;  // copied as bytes
    case DType::kFloat16: break;
  }
  return kMapFloat16;
}

}  // namespace

TensorMapShape gate_up_shape(const Arch& arch, const Matrix& m, uint32_t element_bytes, uint32_t hidden,
                             uint32_t intermediate, uint32_t experts, bool gated, gpu::GatedRows rows) {
  const uint32_t halves = gated ? 2 : 1;
  return {5,
          {hidden, kRowGroup, halves, intermediate / kRowGroup, experts},
          {rows.step * m.row_bytes, rows.up * m.row_bytes, kRowGroup * rows.step * m.row_bytes, m.expert_bytes},
          {arch.stage_bytes / element_bytes, kRowGroup, halves, arch.box_features / kRowGroup / halves, 1}};
}

TensorMapShape down_shape(const Arch& arch, const Matrix& m, uint32_t element_bytes, uint32_t hidden,
                          uint32_t intermediate, uint32_t experts) {
  return {5,
          {intermediate, kRowGroup, 1, hidden / kRowGroup, experts},
          {m.row_bytes, hidden * m.row_bytes, kRowGroup * m.row_bytes, m.expert_bytes},
          {arch.stage_bytes / element_bytes, kRowGroup, 1, arch.box_features / kRowGroup, 1}};
}

TensorMapShape transposed_shape(const Arch& arch, const Matrix& m, uint32_t element_bytes, uint32_t columns,
                                uint32_t halves, uint32_t up, uint32_t rows, uint32_t experts) {
  return {5,
          {columns, rows, halves, 1, experts},
          {m.row_bytes, uint64_t{halves == 1 ? columns : up} * element_bytes, rows * m.row_bytes, m.expert_bytes},
          {arch.stage_bytes / element_bytes, arch.stage_bytes / element_bytes, 1, 1, 1}};
}

// E need not be a multiple of 8, so rows do not come in groups of 8. The map has further dimensions of size 1, so that
// the kernel can use it like the maps of the weights.
TensorMapShape router_shape(const Arch& arch, const Matrix& m, uint32_t element_bytes, uint32_t hidden,
                            uint32_t experts) {
  const uint64_t all = experts * m.row_bytes;
  const uint32_t rows = arch.gate_features(experts);
  return {
      5, {hidden, experts, 1, 1, 1}, {m.row_bytes, all, all, all}, {arch.stage_bytes / element_bytes, rows, 1, 1, 1}};
}

TensorMapShape spans_shape(const Arch& arch, uint64_t row_bytes, uint32_t element_bytes, uint32_t columns,
                           uint32_t rows) {
  const uint64_t all = rows * row_bytes;
  return {5,
          {columns, rows, 1, 1, 1},
          {row_bytes, all, all, all},
          {arch.stage_bytes / element_bytes, arch.stage_bytes / element_bytes, 1, 1, 1}};
}

TensorMapShape rows_shape(const Arch& arch, uint64_t row_bytes, uint32_t element_bytes, uint32_t columns,
                          uint64_t rows) {
  return {2, {columns, rows}, {row_bytes}, {arch.stage_bytes / element_bytes, arch.box_rows}};
}

TensorMapShape quantised_tiles_shape(const Arch& arch, uint64_t tile_bytes, uint32_t columns, uint64_t tiles) {
  return {3,
          {columns, arch.tile_rows, tiles},
          {arch.quantised_pitch(columns), tile_bytes},
          {arch.stage_bytes, arch.box_rows, 1}};
}

gpu::TensorMap encode(const TensorMapShape& shape, uint64_t data, DType dtype, const char* what, int promotion) {
  constexpr uint32_t kEveryElement[5] = {1, 1, 1, 1, 1};
  gpu::TensorMap map;
  const CudaResult result = driver().cuTensorMapEncodeTiled(
      &map, map_type(dtype), shape.rank, reinterpret_cast<void*>(data), shape.dims, shape.strides, shape.box,
      kEveryElement, kMapInterleaveNone, kMapSwizzle128B, promotion, kMapFillZero);
  // Most calls of a layer encode a map, so the message is only put together if encoding fails.
  if (result != kCudaSuccess) check(result, host::concat("cannot describe ", what, " to the copy engine").c_str());
  return map;
}

}  // namespace flashmoe::cuda
