// Vectors of eight lanes in registers of AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace treadle {

typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint8_t b8 __attribute__((vector_size(8)));

inline f8 load8(const float* at) {
  f8 x;
  std::memcpy(&x, at, sizeof(x));
  return x;
}

inline f8 all(float x) {
  return f8{x, x, x, x, x, x, x, x};
}

inline f4 lower(f8 x) {
  return __builtin_shufflevector(x, x, 0, 1, 2, 3);
}

inline f4 upper(f8 x) {
  return __builtin_shufflevector(x, x, 4, 5, 6, 7);
}

inline f8 larger(f8 a, f8 b) {
  return a > b ? a : b;
}

inline f8 smaller(f8 a, f8 b) {
  return a < b ? a : b;
}

inline f8 to_float(i8 x) {
  return __builtin_convertvector(x, f8);
}

inline i8 to_int(f8 x) {
  return __builtin_convertvector(x, i8);
}

// GCC 12 makes four instructions of the general forms of these.
inline u8 widened(h8 x) {
  return (u8)_mm256_cvtepu16_epi32((__m128i)x);
}

inline u8 widened(b8 x) {
  return (u8)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)x));
}

} // namespace treadle
