// Inner products of a few rows with four others, as both products and scores need them.
#pragma once

#include "vec.h"

namespace treadle {

constexpr int QUAD = 4; // rows of the one side in registers
constexpr int TRIPLE = 3; // rows of the other: with a quad, twelve sums and seven operands

// found[m][r] = x[m] . w[r] over `width` numbers, a multiple of LANES; ROWS rows of x. W: floats, or bytes as they are.
template <int ROWS, class W>
inline void dots(const float* x, int64_t x_stride, const W* w, int64_t w_stride, int width, f4* found) {
  f8 total[ROWS][QUAD] = {};
  for (int k = 0; k < width; k += LANES) {
    f8 input[ROWS];
    for (int m = 0; m < ROWS; ++m) {
      input[m] = load8(x + m * x_stride + k);
    }
    for (int r = 0; r < QUAD; ++r) { // one of these at a time: sixteen registers are all that AVX2 has
      f8 own = load8(w + r * w_stride + k);
      for (int m = 0; m < ROWS; ++m) {
        total[m][r] += own * input[m];
      }
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    found[m] = sums(total[m][0], total[m][1], total[m][2], total[m][3]);
  }
}

template <class W>
inline void dots(int rows, const float* x, int64_t x_stride, const W* w, int64_t w_stride, int width, f4* found) {
  switch (rows) {
    case 1: return dots<1>(x, x_stride, w, w_stride, width, found);
    case 2: return dots<2>(x, x_stride, w, w_stride, width, found);
    default: return dots<3>(x, x_stride, w, w_stride, width, found);
  }
}

} // namespace treadle
