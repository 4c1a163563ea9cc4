#include "small.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "pool.h"
#include "vec.h"

namespace treadle {
namespace {

constexpr int64_t ENOUGH = 1 << 14; // numbers that are worth another thread

template <class F>
void share_rows(int64_t rows, int64_t width, const F& work) {
  int64_t chunks = std::clamp<int64_t>(rows * width / ENOUGH, 1, std::min<int64_t>(rows, 1024));
  Pool::shared().share(int(chunks), [&](int chunk) {
    work(rows * chunk / chunks, rows * (chunk + 1) / chunks);
  });
}

} // namespace

void normalise(const float* x, const float* weight, float eps, int64_t rows, int width, float* y) {
  share_rows(rows, width, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      const float* in = x + row * width;
      float* out = y + row * width;
      f8 squares = {};
      int k = 0;
      for (; k + LANES <= width; k += LANES) {
        f8 own = load8(in + k);
        squares += own * own;
      }
      float total = sum(squares);
      for (; k < width; ++k) {
        total += in[k] * in[k];
      }
      float factor = 1.0f / std::sqrt(total / width + eps);
      for (k = 0; k < width; ++k) {
        out[k] = weight ? weight[k] * (in[k] * factor) : in[k] * factor;
      }
    }
  });
}

void gate(const float* gates, const float* ups, int64_t count, float* y) {
  constexpr int64_t STRIDE = 1024;
  share_rows((count + STRIDE - 1) / STRIDE, STRIDE, [&](int64_t from, int64_t to) {
    int64_t i = from * STRIDE, end = std::min(to * STRIDE, count);
    for (; i + LANES <= end; i += LANES) {
      f8 g = load8(gates + i);
      store(y + i, g / (all(1.0f) + exponential(-g)) * load8(ups + i));
    }
    if (i < end) {
      float g[LANES] = {}, u[LANES] = {};
      std::copy(gates + i, gates + end, g);
      std::copy(ups + i, ups + end, u);
      f8 own = load8(g);
      f8 made = own / (all(1.0f) + exponential(-own)) * load8(u);
      std::memcpy(y + i, &made, (end - i) * sizeof(float));
    }
  });
}

void rotate(const Rotation& r, HeadsOut y) {
  int pairs = r.turn.pairs, turning = 2 * pairs;
  share_rows(int64_t(r.rows) * r.length, int64_t(r.heads) * r.dim, [&](int64_t from, int64_t to) {
    std::unique_ptr<float[]> turns(new float[turning]);
    float *cosines = turns.get(), *sines = cosines + pairs;
    for (int64_t at = from; at < to; ++at) {
      int64_t row = at / r.length, item = at % r.length;
      float position = r.positions.at(row, item, r.length);
      for (int i = 0; i < pairs; ++i) {
        float angle = position * r.turn.frequencies[i];
        cosines[i] = std::cos(angle);
        sines[i] = std::sin(angle);
      }
      int step = r.turn.traditional ? 2 : 1, other = r.turn.traditional ? 1 : pairs;
      for (int h = 0; h < r.heads; ++h) {
        const float* in = r.x.at(row, h, item);
        float* out = y.at(row, h, item);
        for (int i = 0; i < pairs; ++i) {
          float a = in[i * step], b = in[i * step + other];
          out[i * step] = a * cosines[i] - b * sines[i];
          out[i * step + other] = a * sines[i] + b * cosines[i];
        }
        if (out != in) {
          std::copy(in + turning, in + r.dim, out + turning);
        }
      }
    }
  });
}

} // namespace treadle
