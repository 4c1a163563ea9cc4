// A decoder layer of the usual kind, but for its attention: two steps in place of some twenty operations of MLX, which
// cost more than they compute where there is one token.
#pragma once

#include <vector>

#include "heads.h"
#include "linear.h"
#include "small.h"

namespace treadle {

struct Norm {
  const float* weight; // null: there is no such norm
  float eps;
};

struct Block {
  int size, heads, shared, dim;
  Norm before, behind; // of the hidden state, in front of attention and of the MLP
  Norm query_norm, key_norm; // of each head
  Linear query, key, value, out, gate, up, down;
  bool traditional;
  float scale; // of positions
  std::vector<float> frequencies;
};

// Queries, keys and values [rows, length, heads, dim] of the hidden state x [rows, length, size], all without gaps.
void ask(const Block& block, const float* x, int rows, int length, Positions positions, float* queries, float* keys,
         float* values);

// The hidden state behind the layer; `attended` [rows, length, heads * dim]. `space` for `rest_space` floats.
void rest(const Block& block, const float* x, const float* attended, int tokens, float* space, float* y);
int64_t rest_space(const Block& block, int tokens);

// Frequencies of rotary embeddings: 1 / freqs, or base^(-2 i / dims) where there are none.
std::vector<float> frequencies_of(int dims, float base, const float* freqs, float scale);

} // namespace treadle
