#pragma once

#include <cstdint>

namespace treadle {

// An array [rows, heads, length, dim]; strides in elements, dim without gaps.
template <class T>
struct HeadsAs {
  const T* data;
  int64_t row, head, item;

  const T* at(int64_t r, int64_t h, int64_t i) const { return data + r * row + h * head + i * item; }
};

using Heads = HeadsAs<float>;

struct HeadsOut {
  float* data;
  int64_t row, head, item;

  float* at(int64_t r, int64_t h, int64_t i) const { return data + r * row + h * head + i * item; }
};

} // namespace treadle
