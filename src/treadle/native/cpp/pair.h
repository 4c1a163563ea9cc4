// Vectors of eight lanes where registers have four: as NEON has them, and x86 before AVX2. GCC would split vectors by
// itself, but then keeps sums in memory from one round of a loop to the next and converts their lanes one by one.
#pragma once

#include <cstdint>
#include <cstring>

namespace treadle {

// As much of one of GCC's vectors as is needed here.
template <class V>
struct Pair {
  V low, high;

  template <class W>
  explicit operator Pair<W>() const { // the same bits
    return {(W)low, (W)high};
  }
  auto operator[](int i) const { return i < 4 ? low[i] : high[i - 4]; }
  Pair operator-() const { return {-low, -high}; }
  Pair operator~() const { return {~low, ~high}; }
  Pair operator+(Pair b) const { return {low + b.low, high + b.high}; }
  Pair operator-(Pair b) const { return {low - b.low, high - b.high}; }
  Pair operator*(Pair b) const { return {low * b.low, high * b.high}; }
  Pair operator/(Pair b) const { return {low / b.low, high / b.high}; }
  Pair operator&(Pair b) const { return {low & b.low, high & b.high}; }
  Pair operator|(Pair b) const { return {low | b.low, high | b.high}; }
  Pair operator+(int b) const { return {low + b, high + b}; }
  Pair operator&(int b) const { return {low & b, high & b}; }
  Pair operator<<(int bits) const { return {low << bits, high << bits}; }
  Pair operator>>(int bits) const { return {low >> bits, high >> bits}; }
  Pair& operator+=(Pair b) { // half by half, as loads and stores are: GCC leaves in memory what is copied as a whole
    low += b.low;
    high += b.high;
    return *this;
  }
};

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint8_t b8 __attribute__((vector_size(8)));
using f8 = Pair<f4>;
using i8 = Pair<i4>;
using u8 = Pair<u4>;

inline f8 load8(const float* at) {
  f8 x;
  std::memcpy(&x.low, at, sizeof(x.low));
  std::memcpy(&x.high, at + 4, sizeof(x.high));
  return x;
}

inline void store(float* at, f8 x) {
  std::memcpy(at, &x.low, sizeof(x.low));
  std::memcpy(at + 4, &x.high, sizeof(x.high));
}

inline f8 all(float x) {
  f4 half{x, x, x, x};
  return {half, half};
}

inline f4 lower(f8 x) {
  return x.low;
}

inline f4 upper(f8 x) {
  return x.high;
}

inline i8 operator<(f8 a, f8 b) {
  return {a.low < b.low, a.high < b.high};
}

inline f8 larger(f8 a, f8 b) {
  return {a.low > b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

inline f8 smaller(f8 a, f8 b) {
  return {a.low < b.low ? a.low : b.low, a.high < b.high ? a.high : b.high};
}

inline f8 to_float(i8 x) {
  return {__builtin_convertvector(x.low, f4), __builtin_convertvector(x.high, f4)};
}

inline i8 to_int(f8 x) {
  return {__builtin_convertvector(x.low, i4), __builtin_convertvector(x.high, i4)};
}

// Zeros between the numbers make wider ones of them; GCC 12 converts these one by one.
inline u8 widened(h8 x) {
  h8 none = {};
  return {(u4)__builtin_shufflevector(x, none, 0, 8, 1, 9, 2, 10, 3, 11),
          (u4)__builtin_shufflevector(x, none, 4, 12, 5, 13, 6, 14, 7, 15)};
}

inline u8 widened(b8 x) {
  b8 none = {};
  return widened((h8)__builtin_shufflevector(x, none, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
}

} // namespace treadle
