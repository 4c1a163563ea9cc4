// Eight floats at a time, in GCC's vector extensions: one source for AVX2, AVX-512 and NEON, but for the few operations
// of avx.h and pair.h. What the compiler may use is said by -march=native.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include "avx.h"
#else
#include "pair.h"
#endif

#ifdef __aarch64__
#include <arm_neon.h>
#endif

namespace treadle {

constexpr int LANES = 8;
constexpr int BLOCK = 32; // inputs that are unpacked together: the smallest group of quantised weights

template <class V, class T>
inline V load(const T* at) {
  V value;
  std::memcpy(&value, at, sizeof(V));
  return value;
}

template <class V, class T>
inline void store(T* at, V value) {
  std::memcpy(at, &value, sizeof(V));
}

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;

  float wide() const {
    uint32_t whole = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &whole, sizeof(value));
    return value;
  }
};

inline u8 load8(const uint32_t* at) {
  return (u8)load8(reinterpret_cast<const float*>(at));
}

inline f8 load8(const Brain* at) {
  return (f8)(widened(load<h8>(at)) << 16);
}

inline f8 load8(const uint8_t* at) {
  return to_float((i8)widened(load<b8>(at)));
}

inline f8 load8(const Half* at) {
#ifdef __F16C__
  return (f8)_mm256_cvtph_ps((__m128i)load<h8>(at));
#elif defined(__aarch64__)
  auto half = (float16x8_t)load<h8>(at);
  return {vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
#else
  // Moves exponent and mantissa into place and multiplies by 2^112, which is right for subnormal numbers too. What is
  // too large for that are infinities, which weights do not have.
  u8 wide = widened(load<h8>(at));
  f8 size = (f8)((wide & 0x7fff) << 13) * all(0x1p112f);
  return (f8)((u8)size | ((wide & 0x8000) << 16));
#endif
}

// The sum of eight lanes, always in the same order: first halves, then pairs.
inline float sum(f8 x) {
  f4 y = lower(x) + upper(x);
  return (y[0] + y[2]) + (y[1] + y[3]);
}

// The sums of four vectors, each in the order of `sum`.
inline f4 sums(f8 a, f8 b, f8 c, f8 d) {
  f4 a4 = lower(a) + upper(a), b4 = lower(b) + upper(b), c4 = lower(c) + upper(c), d4 = lower(d) + upper(d);
  f4 ab = __builtin_shufflevector(a4, b4, 0, 4, 1, 5) + __builtin_shufflevector(a4, b4, 2, 6, 3, 7);
  f4 cd = __builtin_shufflevector(c4, d4, 0, 4, 1, 5) + __builtin_shufflevector(c4, d4, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

inline float largest(f8 x) {
  float most = x[0];
  for (int i = 1; i < LANES; ++i) {
    most = x[i] > most ? x[i] : most;
  }
  return most;
}

// e^x, within 2 units in the last place; 0 below -87.3, the largest finite power above 88.
inline f8 exponential(f8 x) {
  f8 most = all(88.0f), least = all(-87.3f);
  i8 vanishes = x < least;
  x = larger(least, smaller(most, x));
  f8 scaled = x * all(1.44269504f);
  // The nearest whole number, by adding and taking away 1.5 * 2^23.
  f8 shift = all(12582912.0f);
  f8 whole = (scaled + shift) - shift;
  // ln 2 in two parts, so that the remainder is exact.
  f8 rest = x - whole * all(0.693359375f);
  rest = rest + whole * all(2.12194440e-4f);
  f8 value = all(1.9875691500e-4f);
  value = value * rest + all(1.3981999507e-3f);
  value = value * rest + all(8.3334519073e-3f);
  value = value * rest + all(4.1665795894e-2f);
  value = value * rest + all(1.6666665459e-1f);
  value = value * rest + all(5.0000001201e-1f);
  value = value * (rest * rest) + rest + all(1.0f);
  i8 power = (to_int(whole) + 127) << 23;
  value = value * (f8)power;
  return (f8)((i8)value & ~vanishes);
}

} // namespace treadle
