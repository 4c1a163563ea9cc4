#include "attention.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "dots.h"
#include "pool.h"

namespace treadle {
namespace {

constexpr int PART = 128; // columns that one chunk of few queries reads
constexpr int FEW = 32; // queries of a head of keys, up to which columns are split instead of queries
constexpr int TILE = 48; // queries that go over the columns together
constexpr int SPAN = 64; // columns that such a tile reads at a time
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

int round_up(int n, int grain) {
  return (n + grain - 1) / grain * grain;
}

// Query `q` of the group that shares a head of keys: its heads one after another.
struct Group {
  const Attention& p;
  int row, shared;

  int size() const { return p.heads / p.shared * p.num_queries; }
  int head(int q) const { return shared * (p.heads / p.shared) + q / p.num_queries; }
  int query(int q) const { return q % p.num_queries; }
  const float* at(int q) const { return p.queries.at(row, head(q), query(q)); }
  float* in(float* out, int q) const {
    return out + ((int64_t(row) * p.num_queries + query(q)) * p.heads + head(q)) * p.value_dim;
  }
  int sees(int q) const { // columns before this one; the rest is hidden
    return p.mask.kind == Mask::Kind::Causal ? p.columns - p.num_queries + query(q) + 1 : p.columns;
  }
};

// Scores of columns [from, from + count) become those that query `q` sees; behind them nothing up to `width`.
void apply_mask(const Group& g, int q, int from, int count, int width, float* scores) {
  const Mask& mask = g.p.mask;
  int64_t at = g.row * mask.row + g.head(q) * mask.head + g.query(q) * mask.query;
  if (mask.kind == Mask::Kind::Boolean) {
    const bool* seen = static_cast<const bool*>(mask.data) + at;
    for (int c = 0; c < count; ++c) {
      scores[c] = seen[(from + c) * mask.column] ? scores[c] : HIDDEN;
    }
  } else if (mask.kind == Mask::Kind::Additive) {
    const float* added = static_cast<const float*>(mask.data) + at;
    for (int c = 0; c < count; ++c) {
      scores[c] += added[(from + c) * mask.column];
    }
  }
  std::fill(scores + std::clamp(g.sees(q) - from, 0, count), scores + width, HIDDEN);
}

// Whether any of some queries may see any of some columns. Masks of prompts in chunks hide whole spans from most tiles.
bool sees_any(const Group& g, int first, int queries, int from, int columns) {
  const Mask& mask = g.p.mask;
  if (mask.kind != Mask::Kind::Boolean) {
    return true;
  }
  for (int q = first; q < first + queries; ++q) {
    const bool* seen = static_cast<const bool*>(mask.data) + g.row * mask.row + g.head(q) * mask.head +
                       g.query(q) * mask.query + from * mask.column;
    bool any = false;
    if (mask.column == 1) {
      for (int c = 0; c < columns; ++c) {
        any |= seen[c];
      }
    } else {
      for (int c = 0; c < columns; ++c) {
        any |= seen[c * mask.column];
      }
    }
    if (any) {
      return true;
    }
  }
  return false;
}

float most_of(const float* scores, int width) {
  f8 most = all(HIDDEN);
  for (int c = 0; c < width; c += LANES) {
    most = larger(most, load8(scores + c));
  }
  return largest(most);
}

// Scores become weights e^(score - most); their sum.
float weigh(float* scores, int width, float most) {
  f8 total = {};
  for (int c = 0; c < width; c += LANES) {
    f8 weight = exponential(load8(scores + c) - all(most));
    store(scores + c, weight);
    total += weight;
  }
  return sum(total);
}

// to[q] += sum over columns of weights[q][c] values[c], for ROWS queries; VECTORS vectors of values at a time.
template <int ROWS, int VECTORS, class V>
inline void gather(const float* weights, int64_t stride, const V* values, int64_t item, int count, float* to,
                   int64_t to_stride) {
  f8 total[ROWS][VECTORS];
  for (int m = 0; m < ROWS; ++m) {
    for (int v = 0; v < VECTORS; ++v) {
      total[m][v] = load8(to + m * to_stride + v * LANES);
    }
  }
  for (int c = 0; c < count; ++c) {
    f8 own[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      own[v] = load8(values + c * item + v * LANES);
    }
    for (int m = 0; m < ROWS; ++m) {
      f8 weight = all(weights[m * stride + c]);
      for (int v = 0; v < VECTORS; ++v) {
        total[m][v] += weight * own[v];
      }
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    for (int v = 0; v < VECTORS; ++v) {
      store(to + m * to_stride + v * LANES, total[m][v]);
    }
  }
}

template <int ROWS, class V>
inline void gather(const float* weights, int64_t stride, const V* values, int64_t item, int count, int dim, float* to,
                   int64_t to_stride) {
  int d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) {
    gather<ROWS, 4>(weights, stride, values + d, item, count, to + d, to_stride);
  }
  for (; d < dim; d += LANES) {
    gather<ROWS, 1>(weights, stride, values + d, item, count, to + d, to_stride);
  }
}

// Queries [0, count) of a tile; their weights `stride` apart, their sums `to_stride`. V: floats, or bytes as they are.
template <class V>
void gather_all(int queries, const float* weights, int64_t stride, const V* values, int64_t item, int count, int dim,
                float* to, int64_t to_stride) {
  int q = 0;
  for (; q + TRIPLE <= queries; q += TRIPLE) {
    gather<TRIPLE>(weights + q * stride, stride, values, item, count, dim, to + q * to_stride, to_stride);
  }
  for (; q < queries; ++q) {
    gather<1>(weights + q * stride, stride, values, item, count, dim, to + q * to_stride, to_stride);
  }
}

// scores[q][c] for `queries` rows of scaled queries (`apart` from each other) over `count` keys of `dim` numbers.
template <class K>
void score(const float* asked, int queries, int64_t apart, int dim, const K* keys, int64_t item, int count,
           float* scores, int64_t stride) {
  for (int c = 0; c < count; c += QUAD) {
    // The last columns are computed with those before them, so that nothing beyond is read.
    int at = count < QUAD ? 0 : std::min(c, count - QUAD);
    int64_t step = count < QUAD ? 0 : item;
    for (int q = 0; q < queries; q += TRIPLE) {
      int some = std::min(TRIPLE, queries - q);
      f4 found[TRIPLE];
      if (count < QUAD) {
        for (int k = 0; k < count; ++k) {
          dots(some, asked + q * apart, apart, keys + k * item, step, dim, found);
          for (int i = 0; i < some; ++i) {
            scores[(q + i) * stride + k] = found[i][0];
          }
        }
        continue;
      }
      dots(some, asked + q * apart, apart, keys + at * item, step, dim, found);
      for (int i = 0; i < some; ++i) {
        store(scores + (q + i) * stride + at, found[i]);
      }
    }
  }
}

void scaled(const Group& g, int first, int count, float* to) {
  for (int q = 0; q < count; ++q) {
    const float* from = g.at(first + q);
    for (int d = 0; d < g.p.dim; ++d) {
      to[q * g.p.dim + d] = from[d] * g.p.scale;
    }
  }
}

// The numbers of one group of `count` rows from `column` on, and zeros up to `width`.
void widen(const HeadsAs<Brain>& from, int row, int head, int column, int group, int count, int width, float* to) {
  const Brain* at = from.at(row, head, column) + group;
  for (int c = 0; c < count; ++c) {
    to[c] = at[c * from.item].wide();
  }
  std::fill(to + count, to + width, 0.0f);
}

// Space for reading a part of packed columns: scales and biases of a group, and what each query makes of its columns.
struct Spare {
  float scales[PART], biases[PART];
  std::unique_ptr<float[]> own; // [queries, PART]
};

// As `score`, over packed keys: q . (s c + b) = s (q . c) + b sum(q) for each group.
void score_packed(const Group& g, const float* asked, int from, int count, int width, float* scores, Spare& spare) {
  const PackedHeads& keys = g.p.packed_keys;
  int size = g.size(), dim = g.p.dim;
  for (int first = 0; first < dim; first += keys.group) {
    widen(keys.scales, g.row, g.shared, from, first / keys.group, count, width, spare.scales);
    widen(keys.biases, g.row, g.shared, from, first / keys.group, count, width, spare.biases);
    const uint8_t* codes = keys.codes.at(g.row, g.shared, from) + first;
    score(asked + first, size, dim, keys.group, codes, keys.codes.item, count, spare.own.get(), PART);
    for (int q = 0; q < size; ++q) {
      f8 lanes = {};
      for (int d = first; d < first + keys.group; d += LANES) {
        lanes += load8(asked + q * dim + d);
      }
      f8 total = all(sum(lanes));
      const float* found = spare.own.get() + q * PART;
      float* to = scores + q * PART;
      for (int c = 0; c < width; c += LANES) {
        f8 score = load8(found + c) * load8(spare.scales + c) + total * load8(spare.biases + c);
        store(to + c, first == 0 ? score : load8(to + c) + score);
      }
    }
  }
}

// The sums of weighted values, of packed ones: sum(w (s c + b)) = sum((w s) c) + sum(w b) for each group.
void gather_packed(const Group& g, const float* weights, int from, int count, int width, float* sums, Spare& spare) {
  const PackedHeads& values = g.p.packed_values;
  int size = g.size(), dim = g.p.value_dim;
  for (int first = 0; first < dim; first += values.group) {
    widen(values.scales, g.row, g.shared, from, first / values.group, count, width, spare.scales);
    widen(values.biases, g.row, g.shared, from, first / values.group, count, width, spare.biases);
    for (int q = 0; q < size; ++q) {
      float* scaled = spare.own.get() + q * PART;
      f8 lanes = {};
      for (int c = 0; c < width; c += LANES) {
        f8 weight = load8(weights + q * PART + c);
        store(scaled + c, weight * load8(spare.scales + c));
        lanes += weight * load8(spare.biases + c);
      }
      std::fill_n(sums + q * dim + first, values.group, sum(lanes));
    }
    const uint8_t* codes = values.codes.at(g.row, g.shared, from) + first;
    gather_all(size, spare.own.get(), PART, codes, values.codes.item, count, values.group, sums + first, dim);
  }
}

// Packed rows from `from` on as floats, one after another.
void unpack(const PackedHeads& rows, int row, int head, int from, int count, int dim, float* to) {
  for (int c = from; c < from + count; ++c, to += dim) {
    const uint8_t* codes = rows.codes.at(row, head, c);
    const Brain *scales = rows.scales.at(row, head, c), *biases = rows.biases.at(row, head, c);
    for (int first = 0; first < dim; first += rows.group, ++scales, ++biases) {
      f8 scale = all(scales->wide()), bias = all(biases->wide());
      for (int d = first; d < first + rows.group; d += LANES) {
        store(to + d, load8(codes + d) * scale + bias);
      }
    }
  }
}

// Few queries: each chunk reads PART columns, packed ones or others, for all queries of a group and leaves, for each
// query, the sum of weighted values, the sum of weights and the largest score; these are joined afterwards in the order
// of the columns. So what a query gets does not depend on the queries beside it.
void few(const Attention& p, float* out) {
  Group any{p, 0, 0};
  int packed_parts = (p.packed + PART - 1) / PART, exact_parts = (p.columns - p.packed + PART - 1) / PART;
  int size = any.size(), parts = packed_parts + exact_parts, record = p.value_dim + 2;
  int groups = p.rows * p.shared;
  std::unique_ptr<float[]> found(new float[int64_t(groups) * parts * size * record]);
  Pool::shared().share(groups * parts, [&](int chunk) {
    Group g{p, chunk / parts / p.shared, chunk / parts % p.shared};
    int part = chunk % parts, behind = part - packed_parts;
    bool packed = behind < 0;
    int from = packed ? part * PART : p.packed + behind * PART;
    int count = std::min(PART, (packed ? p.packed : p.columns) - from), width = round_up(count, LANES);
    float* records = found.get() + int64_t(chunk) * size * record;
    std::unique_ptr<float[]> space(new float[int64_t(size) * (p.dim + PART + p.value_dim)]);
    float *asked = space.get(), *scores = asked + int64_t(size) * p.dim, *sums = scores + int64_t(size) * PART;
    scaled(g, 0, size, asked);
    Spare spare;
    if (packed) {
      spare.own.reset(new float[int64_t(size) * PART]);
      score_packed(g, asked, from, count, width, scores, spare);
    } else {
      const float* keys = p.keys.at(g.row, g.shared, from - p.packed);
      score(asked, size, p.dim, p.dim, keys, p.keys.item, count, scores, PART);
    }
    for (int q = 0; q < size; ++q) {
      float* own = scores + int64_t(q) * PART;
      apply_mask(g, q, from, count, width, own);
      float most = most_of(own, width);
      records[q * record + p.value_dim] = most == HIDDEN ? 0.0f : weigh(own, width, most);
      records[q * record + p.value_dim + 1] = most;
      if (most == HIDDEN) {
        std::fill_n(own, width, 0.0f);
      }
    }
    if (packed) {
      gather_packed(g, scores, from, count, width, sums, spare);
    } else {
      const float* values = p.values.at(g.row, g.shared, from - p.packed);
      std::fill_n(sums, int64_t(size) * p.value_dim, 0.0f);
      gather_all(size, scores, PART, values, p.values.item, count, p.value_dim, sums, p.value_dim);
    }
    for (int q = 0; q < size; ++q) {
      std::copy_n(sums + int64_t(q) * p.value_dim, p.value_dim, records + q * record);
    }
  });
  for (int i = 0; i < groups * size; ++i) {
    const float* records = found.get() + (int64_t(i / size) * parts * size + i % size) * record;
    int64_t step = int64_t(size) * record;
    float most = HIDDEN, total = 0.0f;
    for (int part = 0; part < parts; ++part) {
      most = std::max(most, records[part * step + p.value_dim + 1]);
    }
    Group g{p, i / size / p.shared, i / size % p.shared};
    float* to = g.in(out, i % size);
    std::fill_n(to, p.value_dim, 0.0f);
    for (int part = 0; part < parts && most != HIDDEN; ++part) {
      const float* own = records + part * step;
      float fade = exponential(all(own[p.value_dim + 1] - most))[0];
      total += fade * own[p.value_dim];
      for (int d = 0; d < p.value_dim; ++d) {
        to[d] += fade * own[d];
      }
    }
    for (int d = 0; d < p.value_dim && total > 0.0f; ++d) {
      to[d] /= total;
    }
  }
}

// Many queries: each chunk takes a tile of them over all columns that any of them sees, with a running maximum.
void many(const Attention& p, float* out) {
  Group any{p, 0, 0};
  int size = any.size(), tiles = (size + TILE - 1) / TILE;
  Pool::shared().share(p.rows * p.shared * tiles, [&](int chunk) {
    Group g{p, chunk / tiles / p.shared, chunk / tiles % p.shared};
    int first = chunk % tiles * TILE, count = std::min(TILE, size - first), end = 0;
    int unpacked = p.packed ? SPAN * std::max(p.dim, p.value_dim) : 0;
    std::unique_ptr<float[]> space(new float[int64_t(TILE) * (p.dim + SPAN + p.value_dim) + unpacked]);
    float *asked = space.get(), *scores = asked + int64_t(TILE) * p.dim, *sums = scores + TILE * SPAN;
    float* rows = sums + int64_t(TILE) * p.value_dim; // packed ones of a span as floats
    float most[TILE], total[TILE];
    scaled(g, first, count, asked);
    std::fill_n(sums, int64_t(TILE) * p.value_dim, 0.0f);
    std::fill_n(total, TILE, 0.0f);
    std::fill_n(most, TILE, HIDDEN);
    for (int q = 0; q < count; ++q) {
      end = std::max(end, g.sees(first + q));
    }
    for (int from = 0, span = 0; from < end; from += span) {
      bool packed = from < p.packed;
      span = std::min(SPAN, (packed ? std::min(p.packed, end) : end) - from);
      int width = round_up(span, LANES);
      if (!sees_any(g, first, count, from, span)) {
        continue;
      }
      if (packed) {
        unpack(p.packed_keys, g.row, g.shared, from, span, p.dim, rows);
        score(asked, count, p.dim, p.dim, rows, p.dim, span, scores, SPAN);
      } else {
        const float* keys = p.keys.at(g.row, g.shared, from - p.packed);
        score(asked, count, p.dim, p.dim, keys, p.keys.item, span, scores, SPAN);
      }
      for (int q = 0; q < count; ++q) {
        float* own = scores + q * SPAN;
        apply_mask(g, first + q, from, span, width, own);
        float larger = std::max(most[q], most_of(own, width));
        if (larger == HIDDEN) {
          std::fill_n(own, width, 0.0f);
          continue;
        }
        if (larger > most[q]) {
          float fade = exponential(all(most[q] - larger))[0];
          total[q] *= fade;
          for (int d = 0; d < p.value_dim; ++d) {
            sums[q * p.value_dim + d] *= fade;
          }
          most[q] = larger;
        }
        total[q] += weigh(own, width, larger);
      }
      if (packed) {
        unpack(p.packed_values, g.row, g.shared, from, span, p.value_dim, rows);
        gather_all(count, scores, SPAN, rows, p.value_dim, span, p.value_dim, sums, p.value_dim);
      } else {
        const float* values = p.values.at(g.row, g.shared, from - p.packed);
        gather_all(count, scores, SPAN, values, p.values.item, span, p.value_dim, sums, p.value_dim);
      }
    }
    for (int q = 0; q < count; ++q) {
      float* to = g.in(out, first + q);
      for (int d = 0; d < p.value_dim; ++d) {
        to[d] = total[q] > 0.0f ? sums[q * p.value_dim + d] / total[q] : 0.0f;
      }
    }
  });
}

} // namespace

void attend(const Attention& problem, float* out) {
  if (problem.heads / problem.shared * problem.num_queries <= FEW) {
    few(problem, out);
  } else {
    many(problem, out);
  }
}

} // namespace treadle
