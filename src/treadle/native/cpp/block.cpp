#include "block.h"

#include <cmath>
#include <memory>

namespace treadle {

std::vector<float> frequencies_of(int dims, float base, const float* freqs, float scale) {
  int half = dims / 2;
  std::vector<float> found(half);
  for (int i = 0; i < half; ++i) {
    found[i] = scale * (freqs ? 1.0f / freqs[i] : std::exp(-float(i) * (std::log(base) / half)));
  }
  return found;
}

void ask(const Block& b, const float* x, int rows, int length, Positions positions, float* queries, float* keys,
         float* values) {
  int64_t tokens = int64_t(rows) * length;
  std::unique_ptr<float[]> normed(new float[tokens * b.size]);
  normalise(x, b.before.weight, b.before.eps, tokens, b.size, normed.get());
  Product products[] = {{b.query, queries}, {b.key, keys}, {b.value, values}};
  multiply(products, 3, normed.get(), b.size, tokens);
  struct Part {
    float* data;
    int heads;
    Norm norm;
  };
  for (const Part& part : {Part{queries, b.heads, b.query_norm}, Part{keys, b.shared, b.key_norm}}) {
    if (part.norm.weight) {
      normalise(part.data, part.norm.weight, part.norm.eps, tokens * part.heads, b.dim, part.data);
    }
    int64_t item = int64_t(part.heads) * b.dim, row = item * length;
    Turn turn{int(b.frequencies.size()), b.traditional, b.frequencies.data()};
    rotate({{part.data, row, b.dim, item}, rows, part.heads, length, b.dim, turn, positions},
           {part.data, row, b.dim, item});
  }
}

int64_t rest_space(const Block& b, int tokens) {
  return int64_t(tokens) * (2 * int64_t(b.size) + 2 * int64_t(b.gate.outputs));
}

void rest(const Block& b, const float* x, const float* attended, int tokens, float* space, float* y) {
  float *stream = space, *normed = stream + int64_t(tokens) * b.size;
  float *gates = normed + int64_t(tokens) * b.size, *ups = gates + int64_t(tokens) * b.gate.outputs;
  Product out{b.out, stream, x};
  multiply(&out, 1, attended, b.out.inputs, tokens);
  normalise(stream, b.behind.weight, b.behind.eps, tokens, b.size, normed);
  Product wide[] = {{b.gate, gates}, {b.up, ups}};
  multiply(wide, 2, normed, b.size, tokens);
  gate(gates, ups, int64_t(tokens) * b.gate.outputs, gates);
  Product down{b.down, y, stream};
  multiply(&down, 1, gates, b.gate.outputs, tokens);
}

} // namespace treadle
