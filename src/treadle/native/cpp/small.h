// What stands between products: normalisation, rotary positions, gates. Rows are shared among the pool's threads.
#pragma once

#include <cstdint>

#include "heads.h"

namespace treadle {

// y = x / sqrt(mean(x^2) + eps) * weight, for `rows` rows of `width` floats without gaps; weight may be null; y may be x.
void normalise(const float* x, const float* weight, float eps, int64_t rows, int width, float* y);

// y = gate / (1 + e^-gate) * up, over `count` floats; y may be either.
void gate(const float* gates, const float* ups, int64_t count, float* y);

// Rotary positions: the angle of pair i at a position is position * frequencies[i]. The first 2 * `pairs` numbers of a
// head turn, in pairs of neighbours (`traditional`) or of halves.
struct Turn {
  int pairs;
  bool traditional;
  const float* frequencies;
};

// Positions of the items of each row: a first one for all rows, one for each row, or one for each item.
struct Positions {
  enum class Kind { Shared, PerRow, PerItem } kind;
  const int32_t* data;

  float at(int64_t row, int64_t item, int length) const {
    return kind == Kind::PerItem ? data[row * length + item] : data[kind == Kind::PerRow ? row : 0] + item;
  }
};

// Turns x [rows, heads, length, dim] into y; y may be x.
struct Rotation {
  Heads x;
  int rows, heads, length, dim;
  Turn turn;
  Positions positions;
};

void rotate(const Rotation& r, HeadsOut y);

} // namespace treadle
