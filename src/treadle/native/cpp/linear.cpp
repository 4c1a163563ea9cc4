#include "linear.h"

#include <algorithm>
#include <memory>

#include "dots.h"
#include "pool.h"

namespace treadle {
namespace {

constexpr int TILE = 8; // rows of weights that are unpacked together
constexpr int GAP = 16; // floats between them: rows a power of two apart would get into each other's way in the cache
constexpr int STRIP_BYTES = 160 << 10; // of x that stay in the second-level cache while weights pass by
constexpr int64_t CHUNK_WORK = 1 << 16; // multiplications: some five microseconds, so that nobody waits long for the last
constexpr int MOST_GROUPS = RUN / BLOCK;

// Unpacks BLOCK inputs of a quantised row. Lane i of part j is input 4 i + j: so a vector holds one nibble of each
// 16-bit word (or one byte of each 32-bit word), and needs a shift and a mask only. x is put into the same order.
template <Form FORM>
inline void codes_of(const uint8_t* at, f8 (&parts)[4]) {
  if constexpr (FORM == Form::Affine4) {
    u8 words = widened(load<h8>(at));
    parts[0] = to_float((i8)(words & 15));
    parts[1] = to_float((i8)(words >> 4 & 15));
    parts[2] = to_float((i8)(words >> 8 & 15));
    parts[3] = to_float((i8)(words >> 12));
  } else {
    u8 words = load8(reinterpret_cast<const uint32_t*>(at));
    parts[0] = to_float((i8)(words & 255));
    parts[1] = to_float((i8)(words >> 8 & 255));
    parts[2] = to_float((i8)(words >> 16 & 255));
    parts[3] = to_float((i8)(words >> 24));
  }
}

// The same without the shifts: part j is so many times its codes, a power of two, and x is made so much smaller.
template <Form FORM>
constexpr float TIMES[4] = {1, 16, 256, 4096};
template <>
constexpr float TIMES<Form::Affine8>[4] = {1, 256, 65536, 1};

template <Form FORM>
inline void large_codes_of(const uint8_t* at, f8 (&parts)[4]) {
  if constexpr (FORM == Form::Affine4) {
    u8 words = widened(load<h8>(at));
    parts[0] = to_float((i8)(words & 0xf));
    parts[1] = to_float((i8)(words & 0xf0));
    parts[2] = to_float((i8)(words & 0xf00));
    parts[3] = to_float((i8)(words & 0xf000));
  } else {
    u8 words = load8(reinterpret_cast<const uint32_t*>(at));
    parts[0] = to_float((i8)(words & 0xff));
    parts[1] = to_float((i8)(words & 0xff00));
    parts[2] = to_float((i8)(words & 0xff0000));
    parts[3] = to_float((i8)(words >> 24));
  }
}

inline void reorder(const float* from, float* to, int inputs) {
  for (int k = 0; k < inputs; k += BLOCK) {
    for (int i = 0; i < LANES; i += 4) { // four numbers of each part
      const float* at = from + k + 4 * i;
      f4 a = load<f4>(at), b = load<f4>(at + 4), c = load<f4>(at + 8), d = load<f4>(at + 12);
      f4 ab01 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab23 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      f4 cd01 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd23 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      store(to + k + i, __builtin_shufflevector(ab01, cd01, 0, 1, 4, 5));
      store(to + k + 8 + i, __builtin_shufflevector(ab01, cd01, 2, 3, 6, 7));
      store(to + k + 16 + i, __builtin_shufflevector(ab23, cd23, 0, 1, 4, 5));
      store(to + k + 24 + i, __builtin_shufflevector(ab23, cd23, 2, 3, 6, 7));
    }
  }
}

template <class T>
void widen(const void* from, int64_t at, int count, float* to) {
  const T* values = static_cast<const T*>(from) + at;
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    store(to + i, load8(values + i));
  }
  if (i < count) {
    T rest[LANES] = {};
    std::copy(values + i, values + count, rest);
    f8 wide = load8(rest);
    std::memcpy(to + i, &wide, (count - i) * sizeof(float));
  }
}

void widen(Kind kind, const void* from, int64_t at, int count, float* to) {
  switch (kind) {
    case Kind::Float32: return widen<float>(from, at, count, to);
    case Kind::Float16: return widen<Half>(from, at, count, to);
    case Kind::BFloat16: return widen<Brain>(from, at, count, to);
  }
}

template <Form FORM>
constexpr bool quantised = FORM == Form::Affine4 || FORM == Form::Affine8;

// Scale and bias of each block of one row's run, as floats: in place where they are held so, otherwise widened.
struct Groups {
  const float* scales;
  const float* biases;
  float own[2][MOST_GROUPS + LANES];

  void read(const Linear& w, int row, int first, int count) {
    if (w.group == BLOCK && w.kind == Kind::Float32) {
      int64_t at = int64_t(row) * (w.inputs / BLOCK) + first / BLOCK;
      scales = static_cast<const float*>(w.scales) + at;
      biases = static_cast<const float*>(w.biases) + at;
    } else {
      widened(w, row, first, count);
    }
  }

 private:
  [[gnu::noinline]] void widened(const Linear& w, int row, int first, int count) {
    int from = first / w.group, groups = (first + count - 1) / w.group - from + 1;
    int64_t at = int64_t(row) * (w.inputs / w.group) + from;
    spread(w, w.scales, at, groups, first, count, own[0]);
    spread(w, w.biases, at, groups, first, count, own[1]);
    scales = own[0];
    biases = own[1];
  }

  static void spread(const Linear& w, const void* from, int64_t at, int groups, int first, int count, float* to) {
    widen(w.kind, from, at, groups, to);
    int per_group = w.group / BLOCK, skip = first % w.group / BLOCK;
    for (int b = count / BLOCK - 1; per_group > 1 && b >= 0; --b) { // from the end, because it is done in place
      to[b] = to[(b + skip) / per_group];
    }
  }
};

template <Form FORM>
inline const uint8_t* row_of(const Linear& w, int row, int input) {
  constexpr int EIGHTHS = FORM == Form::Affine4 ? 4 : FORM == Form::Affine8 ? 8 : FORM == Form::Float32 ? 32 : 16;
  return static_cast<const uint8_t*>(w.weight) + (int64_t(row) * w.inputs + input) * EIGHTHS / 8;
}

template <Form FORM>
inline f8 dense8(const uint8_t* row, int input) {
  if constexpr (FORM == Form::Float32) {
    return load8(reinterpret_cast<const float*>(row) + input);
  } else if constexpr (FORM == Form::Float16) {
    return load8(reinterpret_cast<const Half*>(row) + input);
  } else {
    return load8(reinterpret_cast<const Brain*>(row) + input);
  }
}

// Inputs beyond the last whole vector of a dense row, with zeros behind them.
template <Form FORM>
inline f8 rest8(const uint8_t* row, int input, int count) {
  constexpr int SIZE = FORM == Form::Float32 ? 4 : 2;
  uint8_t rest[LANES * 4] = {};
  std::memcpy(rest, row + int64_t(input) * SIZE, count * SIZE);
  return dense8<FORM>(rest, 0);
}

// Asks for `bytes` of memory that will be read soon: rows are too short for the processor to foresee the next ones.
inline void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(from + line);
  }
}

// Four rows of weights from `row` on, at input `first`; those beyond the last are the last. The next four are asked for.
template <Form FORM>
struct Quad {
  const uint8_t* at[QUAD];

  Quad(const Linear& w, int row, int first) {
    int64_t bytes = row_of<FORM>(w, 1, 0) - row_of<FORM>(w, 0, 0);
    for (int r = 0; r < QUAD; ++r) {
      at[r] = row_of<FORM>(w, std::min(row + r, w.outputs - 1), first);
    }
    if (first == 0) {
      prefetch(at[0] + QUAD * bytes, QUAD * bytes);
    }
  }
};

// A run of one row of x against four rows of weights from `row` on, without unpacking to memory.
template <Form FORM>
inline f4 one_row(const Linear& w, int row, const float* x, int first, int count) {
  Quad<FORM> quad(w, row, first);
  f8 sum4[QUAD] = {};
  int k = 0;
  for (; k + LANES <= count; k += LANES) {
    f8 own = load8(x + k);
    for (int r = 0; r < QUAD; ++r) {
      sum4[r] += dense8<FORM>(quad.at[r], k) * own;
    }
  }
  if (k < count) {
    f8 own = rest8<Form::Float32>(reinterpret_cast<const uint8_t*>(x), k, count - k);
    for (int r = 0; r < QUAD; ++r) {
      sum4[r] += rest8<FORM>(quad.at[r], k, count - k) * own;
    }
  }
  return sums(sum4[0], sum4[1], sum4[2], sum4[3]);
}

// The sum of what blocks' biases bring to four rows of weights: bias by the sum of the block's x.
inline f4 bias_parts(const Groups (&groups)[QUAD], const float* x_sums, int blocks) {
  f8 sum4[QUAD] = {};
  f4 rest = {};
  int b = 0;
  for (; b + LANES <= blocks; b += LANES) {
    f8 own = load8(x_sums + b);
    for (int r = 0; r < QUAD; ++r) {
      sum4[r] += load8(groups[r].biases + b) * own;
    }
  }
  for (; b < blocks; ++b) {
    rest += f4{groups[0].biases[b], groups[1].biases[b], groups[2].biases[b], groups[3].biases[b]} * x_sums[b];
  }
  return sums(sum4[0], sum4[1], sum4[2], sum4[3]) + rest;
}

// x in the order of codes where weights are quantised, with zeros behind the last input. For few rows it is smaller by
// `TIMES`, and `sums` are those of its blocks.
struct Rows {
  const float* x;
  int64_t stride;
  int count;
  const float* sums = nullptr;
  int64_t sums_stride = 0;
};

// A run of a few rows of x against four rows of quantised weights, added to `found`: codes by x first, and the sums of
// blocks by their scales. ROWS: just so many, or FEW for up to so many.
template <Form FORM, int ROWS>
inline void few_rows(const Linear& w, int row, const Rows& rows, int first, int count, f4* found) {
  constexpr int BYTES = FORM == Form::Affine4 ? BLOCK / 2 : BLOCK;
  Quad<FORM> quad(w, row, first);
  Groups groups[QUAD];
  for (int r = 0; r < QUAD; ++r) {
    groups[r].read(w, std::min(row + r, w.outputs - 1), first, count);
  }
  int present = ROWS < FEW ? ROWS : rows.count;
  f8 total[ROWS][QUAD];
  for (int m = 0; m < present; ++m) {
    for (int r = 0; r < QUAD; ++r) {
      total[m][r] = f8{};
    }
  }
  for (int b = 0; b < count / BLOCK; ++b) {
    const float* x = rows.x + first + b * BLOCK;
    for (int r = 0; r < QUAD; ++r) {
      f8 scale = all(groups[r].scales[b]), parts[4];
      large_codes_of<FORM>(quad.at[r] + b * BYTES, parts);
      for (int m = 0; m < present; ++m) {
        f8 some = {}; // so that each of the four is multiplied and added at once, in any form of this loop
        for (int j = 0; j < 4; ++j) {
          some += parts[j] * load8(x + m * rows.stride + j * LANES);
        }
        total[m][r] += some * scale;
      }
    }
  }
  for (int m = 0; m < present; ++m) {
    found[m] += sums(total[m][0], total[m][1], total[m][2], total[m][3]) +
                bias_parts(groups, rows.sums + m * rows.sums_stride + first / BLOCK, count / BLOCK);
  }
}

// A run of one row of weights as floats, with zeros behind the last input.
template <Form FORM>
void unpack(const Linear& w, int row, int first, int count, float* to) {
  const uint8_t* from = row_of<FORM>(w, row, first);
  if constexpr (quantised<FORM>) {
    constexpr int BYTES = FORM == Form::Affine4 ? BLOCK / 2 : BLOCK;
    Groups groups;
    groups.read(w, row, first, count);
    for (int b = 0; b < count / BLOCK; ++b) {
      f8 scale = all(groups.scales[b]), bias = all(groups.biases[b]), parts[4];
      codes_of<FORM>(from + b * BYTES, parts);
      for (int j = 0; j < 4; ++j) {
        store(to + b * BLOCK + j * LANES, parts[j] * scale + bias);
      }
    }
  } else {
    int k = 0;
    for (; k + LANES <= count; k += LANES) {
      store(to + k, dense8<FORM>(from, k));
    }
    if (k < count) {
      store(to + k, rest8<FORM>(from, k, count - k));
    }
  }
}

// Up to four results of a run for one row of y, from output `at` on.
struct Sums {
  const Product& product;
  int row, at, count;

  void put(f4 found, bool opening, bool closing) const {
    int64_t place = int64_t(row) * product.layer.outputs + at;
    if (!opening) {
      found += some(product.y + place);
    }
    if (closing && product.layer.bias) {
      found += some(product.layer.bias + at);
    }
    if (closing && product.residual) {
      found += some(product.residual + place);
    }
    if (count == QUAD) {
      store(product.y + place, found);
    } else {
      std::memcpy(product.y + place, &found, count * sizeof(float));
    }
  }

 private:
  f4 some(const float* from) const {
    if (count == QUAD) {
      return load<f4>(from);
    }
    f4 found = {};
    std::memcpy(&found, from, count * sizeof(float));
    return found;
  }
};

template <Form FORM>
void stream(const Product& product, const Rows& rows, int from, int to) {
  const Linear& w = product.layer;
  int run = run_length(w.inputs);
  for (int row = from; row < to; row += QUAD) {
    f4 total = {};
    for (int first = 0; first < w.inputs; first += run) {
      total += one_row<FORM>(w, row, rows.x + first, first, std::min(run, w.inputs - first));
    }
    Sums{product, 0, row, std::min(QUAD, to - row)}.put(total, true, true);
  }
}

template <Form FORM, int ROWS>
void stream_few(const Product& product, const Rows& rows, int from, int to) {
  const Linear& w = product.layer;
  int run = run_length(w.inputs);
  for (int row = from; row < to; row += QUAD) {
    f4 total[ROWS] = {};
    for (int first = 0; first < w.inputs; first += run) {
      few_rows<FORM, ROWS>(w, row, rows, first, std::min(run, w.inputs - first), total);
    }
    for (int m = 0; m < rows.count; ++m) {
      Sums{product, m, row, std::min(QUAD, to - row)}.put(total[m], true, true);
    }
  }
}

// Rows [top, end) of x against weights [from, to).
template <Form FORM>
void tiles(const Product& product, const Rows& rows, int top, int end, int from, int to) {
  const Linear& w = product.layer;
  int run = run_length(w.inputs);
  alignas(64) static thread_local float tile[TILE * (RUN + GAP)];
  for (int first = 0; first < w.inputs; first += run) {
    int count = std::min(run, w.inputs - first), width = (count + LANES - 1) / LANES * LANES;
    bool closing = first + count == w.inputs;
    for (int row = from; row < to; row += TILE) {
      int present = std::min(TILE, to - row);
      for (int r = 0; r < TILE; ++r) {
        unpack<FORM>(w, std::min(row + r, to - 1), first, count, tile + r * (width + GAP));
      }
      for (int m = top; m < end; m += TRIPLE) {
        int some = std::min(TRIPLE, end - m);
        for (int r = 0; r < present; r += QUAD) {
          f4 found[TRIPLE];
          dots(some, rows.x + m * rows.stride + first, rows.stride, tile + r * (width + GAP), width + GAP, width, found);
          for (int i = 0; i < some; ++i) {
            Sums{product, m + i, row + r, std::min(QUAD, present - r)}.put(found[i], first == 0, closing);
          }
        }
      }
    }
  }
}

template <Form FORM>
void compute_as(const Product& product, const Rows& rows, int top, int end, int from, int to) {
  if constexpr (quantised<FORM>) {
    switch (rows.count) {
      case 1: return stream_few<FORM, 1>(product, rows, from, to);
      case 2: return stream_few<FORM, 2>(product, rows, from, to);
      case 3: return stream_few<FORM, 3>(product, rows, from, to);
      case 4: return stream_few<FORM, 4>(product, rows, from, to);
    }
    if (rows.count <= FEW) {
      return stream_few<FORM, FEW>(product, rows, from, to);
    }
  } else if (rows.count == 1) {
    return stream<FORM>(product, rows, from, to);
  }
  tiles<FORM>(product, rows, top, end, from, to);
}

void compute(const Product& product, const Rows& rows, int top, int end, int from, int to) {
  switch (product.layer.form) {
    case Form::Affine4: return compute_as<Form::Affine4>(product, rows, top, end, from, to);
    case Form::Affine8: return compute_as<Form::Affine8>(product, rows, top, end, from, to);
    case Form::Float32: return compute_as<Form::Float32>(product, rows, top, end, from, to);
    case Form::Float16: return compute_as<Form::Float16>(product, rows, top, end, from, to);
    case Form::BFloat16: return compute_as<Form::BFloat16>(product, rows, top, end, from, to);
  }
}

bool has_codes(const Linear& w) {
  return w.form == Form::Affine4 || w.form == Form::Affine8;
}

// One row of x for few rows; see `Rows`.
template <Form FORM>
void arrange_few(const float* x, int inputs, float* to, float* to_sums) {
  reorder(x, to, inputs);
  for (int k = 0; k < inputs; k += BLOCK) {
    f8 lanes = {};
    for (int j = 0; j < 4; ++j) {
      f8 part = load8(to + k + j * LANES);
      lanes += part;
      store(to + k + j * LANES, part * all(1 / TIMES<FORM>[j]));
    }
    to_sums[k / BLOCK] = sum(lanes);
  }
}

Rows arranged_few(const Linear& w, const float* x, int64_t stride, int rows, std::unique_ptr<float[]>& copy) {
  int width = w.inputs + w.inputs / BLOCK;
  copy.reset(new float[int64_t(rows) * width]);
  for (int m = 0; m < rows; ++m) {
    float* to = copy.get() + int64_t(m) * width;
    (w.form == Form::Affine4 ? arrange_few<Form::Affine4> : arrange_few<Form::Affine8>)(
        x + m * stride, w.inputs, to, to + w.inputs);
  }
  return {copy.get(), width, rows, copy.get() + w.inputs, width};
}

// x as the kernels read it: a copy where codes have another order or vectors would reach beyond the row.
Rows arranged(const Linear& w, const float* x, int64_t stride, int rows, std::unique_ptr<float[]>& copy) {
  bool codes = has_codes(w);
  if (codes && rows <= FEW) {
    return arranged_few(w, x, stride, rows, copy);
  }
  if (!codes && (rows == 1 || w.inputs % LANES == 0)) {
    return {x, stride, rows};
  }
  int width = (w.inputs + LANES - 1) / LANES * LANES;
  copy.reset(new float[int64_t(rows) * width]);
  float* to = copy.get();
  constexpr int PART = 16;
  Pool::shared().share((rows + PART - 1) / PART, [&](int chunk) {
    for (int m = chunk * PART; m < std::min(rows, (chunk + 1) * PART); ++m) {
      if (codes) {
        reorder(x + m * stride, to + int64_t(m) * width, w.inputs);
      } else {
        std::copy_n(x + m * stride, w.inputs, to + int64_t(m) * width);
        std::fill_n(to + int64_t(m) * width + w.inputs, width - w.inputs, 0.0f);
      }
    }
  });
  return {to, width, rows};
}

// Rows of x that go over a band of weights together.
int strip_length(int inputs, int rows) {
  int most = std::max<int>(TRIPLE, STRIP_BYTES / (run_length(inputs) * sizeof(float)) / TRIPLE * TRIPLE);
  int strips = (rows + most - 1) / most;
  return ((rows + strips - 1) / strips + TRIPLE - 1) / TRIPLE * TRIPLE;
}

// Whether two layers read x arranged in the same way.
bool read_alike(const Linear& a, const Linear& b, int rows) {
  return has_codes(a) == has_codes(b) && (rows > FEW || !has_codes(a) || a.form == b.form);
}

void multiply_alike(const Product* products, int count, const Rows& rows) {
  Pool& pool = Pool::shared();
  int inputs = products[0].layer.inputs;
  int strip = strip_length(inputs, rows.count), strips = (rows.count + strip - 1) / strip;
  int64_t outputs = 0;
  for (int i = 0; i < count; ++i) {
    outputs += products[i].layer.outputs;
  }
  int64_t chunks = std::clamp<int64_t>(outputs * inputs * rows.count / CHUNK_WORK, 1, 16 * pool.num_threads());
  int64_t bands = (chunks + strips - 1) / strips;
  int band = ((outputs + bands - 1) / bands + TILE - 1) / TILE * TILE;
  int pieces = 0; // bands of all products
  for (int i = 0; i < count; ++i) {
    pieces += (products[i].layer.outputs + band - 1) / band;
  }
  pool.share(strips * pieces, [&](int chunk) {
    int top = chunk / pieces * strip, piece = chunk % pieces;
    const Product* own = products;
    for (int parts; piece >= (parts = (own->layer.outputs + band - 1) / band); ++own) {
      piece -= parts;
    }
    int from = piece * band;
    compute(*own, rows, top, std::min(top + strip, rows.count), from, std::min(from + band, own->layer.outputs));
  });
}

} // namespace

void multiply(const Product* products, int count, const float* x, int64_t stride, int rows) {
  for (int first = 0; first < count;) {
    int next = first + 1;
    while (next < count && read_alike(products[next].layer, products[first].layer, rows)) {
      ++next;
    }
    std::unique_ptr<float[]> copy;
    multiply_alike(products + first, next - first, arranged(products[first].layer, x, stride, rows, copy));
    first = next;
  }
}

} // namespace treadle
