// Turns Python's maps into this project's structs. A missing key (unless its field is optional), a key that nothing
// reads, and a value that its field cannot hold are errors that name the key. So if the Python code and this library
// are of different versions, nothing is computed.
#pragma once

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "flashmoe/protocol/heap_layout.h"
#include "flashmoe/protocol/order.h"
#include "flashmoe/spec/layer.h"
#include "host/error.h"
#include "host/machines.h"
#include "host/placement.h"
#include "host/text.h"

namespace flashmoe {

namespace ffi = tvm::ffi;
using Map = ffi::Map<ffi::String, ffi::Any>;

// Reads the fields of one struct from a map, each field once. done() then refuses keys that were not read.
class Fields {
 public:
  // what: the map's name in errors.
  Fields(const char* what, Map map) : what_(what), map_(std::move(map)) {}

  template <class T>
  void operator()(const char* name, T& to) {
    const ffi::String key(name);
    if (map_.count(key) == 0) refuse(name, "a value", "none");
    read(name, map_.at(key), to);
    read_.push_back(key);
  }

  template <class T>
  T take(const char* name) {
    T to{};
    (*this)(name, to);
    return to;
  }

  // For an optional field. If the map does not have it, `to` keeps its value, and the result is false.
  template <class T>
  bool if_given(const char* name, T& to) {
    const bool given = map_.count(ffi::String(name)) != 0;
    if (given) (*this)(name, to);
    return given;
  }

  void done() const {
    if (read_.size() == map_.size()) return;
    for (const auto& [key, value] : map_) {
      if (std::find(read_.begin(), read_.end(), key) == read_.end()) refuse(key.c_str(), "no such key", "a value");
    }
  }

 private:
  template <class T>
  void read(const char* name, const ffi::Any& value, T& to) const {
    if constexpr (std::is_enum_v<T>) {
      const auto text = value.try_cast<ffi::String>();
      for (size_t i = 0; text && i < kValues<T>; ++i) {
        if (*text == Names<T>::kAll[i]) {
          to = static_cast<T>(i);
          return;
        }
      }
      std::string known;
      for (const char* each : Names<T>::kAll) known += known.empty() ? each : host::concat(", ", each);
      refuse(name, host::concat("one of ", known), text ? std::string(*text) : "no text");
    } else if constexpr (std::is_floating_point_v<T>) {
      const auto number = value.try_cast<double>();
      if (!number) refuse(name, "a number", "something else");
      to = static_cast<T>(*number);
    } else {
      const auto number = value.try_cast<int64_t>();
      constexpr uint64_t kMost = std::min<uint64_t>(std::numeric_limits<T>::max(), INT64_MAX);
      if (!number || *number < 0 || static_cast<uint64_t>(*number) > kMost) {
        refuse(name, host::concat("an integer in [0, ", kMost, "]"),
               number ? std::to_string(*number) : "something else");
      }
      to = static_cast<T>(*number);
    }
  }

  [[noreturn]] void refuse(const char* name, const std::string& expected, const std::string& got) const {
    throw host::Error(host::Error::Kind::kOther,
                      host::concat(what_, ": ", name, ": expected ", expected, ", got ", got));
  }

  const char* what_;
  Map map_;
  std::vector<ffi::String> read_;
};

inline Limits limits_of(Map map) {
  Fields f("limits", std::move(map));
  Limits l;
  f("ranks", l.ranks);
  f("max_tokens", l.max_tokens);
  f("hidden", l.hidden);
  f("intermediate", l.intermediate);
  f("experts", l.experts);
  f("max_local_experts", l.max_local_experts);
  f("top_k", l.top_k);
  f("shared", l.shared);
  f("x_bytes", l.x_bytes);
  f("intermediate_bytes", l.intermediate_bytes);
  f("return_bytes", l.return_bytes);
  f("return_slots", l.return_slots);
  f("capacity", l.capacity);
  f("redispatch", l.redispatch);
  f("staging", l.staging);
  f("rdma", l.rdma);
  f("processors", l.processors);
  f.if_given("tile_rows", l.tile_rows);
  f.if_given("gemm0_columns_per_task", l.columns_per_task[kFirst]);
  f.if_given("gemm1_columns_per_task", l.columns_per_task[kReturning]);
  f.done();
  return l;
}
inline std::vector<uint32_t> numbers_of(const ffi::Array<int64_t>& array) {
  std::vector<uint32_t> numbers;
  for (const int64_t each : array) numbers.push_back(static_cast<uint32_t>(each));
  return numbers;
}
// Adds to `limits` how the group's ranks are spread. machines: the machine of each rank; empty: all are on one machine.
inline Limits spread_over(Limits limits, const ffi::Array<int64_t>& machines) {
  host::MachineTables(numbers_of(machines), limits.ranks, 0).set(limits);
  return limits;
}
// Reads the limits of a context. Checks the number of tiles, because a task word has only TileIndex::kTileBits bits for
// the number of its tile.
inline Limits context_limits_of(Map map) {
  const Limits l = limits_of(std::move(map));
  if (l.max_tiles() > TileIndex::kMostTiles) {
    throw host::Error(host::Error::Kind::kInvalidArgument,
                      host::concat("max_tokens: expected calls of at most ", TileIndex::kMostTiles, " tiles of ",
                                   l.tile_rows, " rows, got up to ", l.max_tiles()));
  }
  return l;
}

// Reads a layer. Throws Error if no engine supports its combination of element types, or if it has scales of weights
// although weights of its type have none, or the other way round.
inline LayerSpec layer_of(Map map) {
  Fields f("layer", std::move(map));
  LayerSpec l;
  for_each_field(l, f);
  f.done();
  DType expected{}, other{};
  if (const char* const name = differing_type(l, expected)) {
    for_each_field(l, [&](const char* each, auto& field) {
      if constexpr (std::is_same_v<decltype(field), DType&>) {
        if (std::string_view(each) == name) other = field;
      }
    });
    throw host::Error(
        host::Error::Kind::kInvalidArgument,
        host::concat(name, ": expected ", name_of(expected), " beside weights of ", name_of(l.weight_type),
                     " and a y of ", name_of(l.y_type), ", got ", name_of(other)));
  }
  const bool scaled = has_scales(l.weight_type);
  if (scaled != (l.weight_scales != WeightScales::kNone)) {
    throw host::Error(host::Error::Kind::kInvalidArgument,
                      host::concat("weight_scales: expected ", scaled ? "some" : "none", " with weights of ",
                                   name_of(l.weight_type), ", got ", name_of(l.weight_scales)));
  }
  return l;
}

// Reads a policy. A field is OrderPolicy::kBuiltIn if the policy leaves the choice to the engine.
inline OrderPolicy order_of(Map map) {
  Fields f("order", std::move(map));
  OrderPolicy o;
  f("gemm1_lag", o.gemm1_lag);
  f("raster", o.raster);
  f("window", o.window);
  f("gemm1_lists", o.gemm1_lists);
  f("own_first", o.own_first);
  f("senders", o.senders);
  f("link_clusters", o.link_clusters);
  f.done();
  return o;
}

// Reads a placement from one list. For each expert the list has a rank that holds it, and then ~q for each further rank
// q.
inline host::Holders holders_of(const ffi::Array<int64_t>& placement) {
  host::Holders out;
  for (const int64_t q : placement) {
    if (q >= 0 || out.experts() == 0) {
      out.expert(static_cast<uint32_t>(q));
    } else {
      out.copy(static_cast<uint32_t>(~q));
    }
  }
  return out;
}

// The fields of heap and workspace for these limits, each with its size and purpose (bindings/cpu.cpp). gradients,
// refusals, few: whether to list the fields of backward passes, of refused calls, of the kernel for a few tokens.
using FieldRows = ffi::Array<ffi::Map<ffi::String, ffi::Any>>;
FieldRows field_rows(const Limits& limits, bool gradients, bool refusals, bool few);

}  // namespace flashmoe
