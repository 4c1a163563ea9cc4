// y = x W^T for float32 rows of x and weights in any of the forms below.
//
// Each result is a sum over the inputs in a fixed order, whatever the number of threads and tiles: eight lanes take every
// eighth input, are added up at the end of each run of at most RUN inputs, and the runs one after another. Up to FEW rows
// meet the codes of quantised weights and the scales afterwards, more rows the weights; the number of rows changes
// nothing else. So a row's result is the same bits alone and in a step of up to FEW rows.
#pragma once

#include "vec.h"

namespace treadle {

constexpr int FEW = 16; // rows that quantised weights are not unpacked to memory for
constexpr int RUN = 640; // inputs; eight unpacked rows of them and three of x fit the first-level cache

inline int run_length(int inputs) {
  int runs = (inputs + RUN - 1) / RUN;
  int length = (inputs + runs - 1) / runs;
  return (length + BLOCK - 1) / BLOCK * BLOCK;
}

enum class Form { Affine4, Affine8, Float32, Float16, BFloat16 };
enum class Kind { Float32, Float16, BFloat16 };

struct Linear {
  Form form;
  int outputs;
  int inputs;
  const void* weight; // row by row; codes of quantised ones as MLX packs them
  int group; // inputs that share a scale
  Kind kind; // of scales and biases
  const void* scales;
  const void* biases; // of the groups
  const float* bias; // of the outputs, or null
};

// One product among several of the same x: y [rows, outputs] without gaps gets x W^T + bias + residual.
struct Product {
  Linear layer;
  float* y;
  const float* residual = nullptr; // [rows, outputs] or null; not y, which holds the sum of the first runs meanwhile
};

// x [rows, inputs] with rows `stride` floats apart. All layers have the same inputs. Uses the threads of the pool.
void multiply(const Product* products, int count, const float* x, int64_t stride, int rows);

} // namespace treadle
