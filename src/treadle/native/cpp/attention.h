// softmax(scale Q K^T + mask) V, for few queries over many columns and for long prompts.
#pragma once

#include <cstdint>

#include "heads.h"
#include "vec.h"

namespace treadle {

// Which columns a query sees: all, those up to its own, or what an array [rows, heads, queries, columns] says: bytes
// that are not 0, or floats to be added. Strides in elements; 0 where an axis is shared.
struct Mask {
  enum class Kind { None, Causal, Boolean, Additive } kind = Kind::None;
  const void* data = nullptr;
  int64_t row = 0, head = 0, query = 0, column = 0;
};

// Rows of bytes: a value is scale * code + bias of its group of `group` values, a multiple of LANES. The last axis of
// scales and biases counts groups.
struct PackedHeads {
  HeadsAs<uint8_t> codes;
  HeadsAs<Brain> scales, biases;
  int group;
};

struct Attention {
  Heads queries, keys, values;
  PackedHeads packed_keys, packed_values;
  int packed; // the first columns, which are packed; the others are those of `keys` and `values`
  int rows, heads, shared, num_queries, columns; // `shared`: heads of keys and values
  int dim, value_dim; // multiples of LANES
  float scale;
  Mask mask;
};

// out [rows, queries, heads, value_dim] without gaps. A query that sees nothing gets zeros. Uses the pool's threads.
void attend(const Attention& problem, float* out);

} // namespace treadle
