// What kernels.cpp is made of, on processors with AVX2 and FMA: vectors of 8 floats or words. A
// word is 32 bits. kernels_avx512.h has the same names.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using std::int64_t;

using vec = __m256;
using words = __m256i;
constexpr int LANES = 8;
constexpr int COLUMNS = 2 * LANES;  // of a panel, see the products
constexpr int ROWS = 6;             // that are multiplied with a panel: 12 sums stay in registers
constexpr int BLOCK_VECTORS = 1;    // that are convolved at a time: with 9 weights each
constexpr int ROWS_OF_NORM = 4;     // at a time: others are computed while a sum is awaited

words as_words(vec x) { return _mm256_castps_si256(x); }
vec as_vec(words x) { return _mm256_castsi256_ps(x); }

// All bits of the first `count` words, up to 8.
words first(int64_t count) {
  alignas(64) static constexpr std::int32_t BITS[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256((const words*)(BITS + LANES - count));
}

words no_words() { return _mm256_setzero_si256(); }

words load_words(const void* x) { return _mm256_loadu_si256((const words*)x); }
void store_words(void* to, words x) { _mm256_storeu_si256((words*)to, x); }

// The first `count` values, each in a word, then zeros; and back. Nothing is computed with them, so
// that every bit stays.
words load_words(const float* x, int64_t count) {
  return count == LANES ? load_words(x) : _mm256_maskload_epi32((const int*)x, first(count));
}
void store_words(float* to, words x, int64_t count) {
  if (count == LANES) {
    store_words(to, x);
  } else {
    _mm256_maskstore_epi32((int*)to, first(count), x);
  }
}

// The values of some groups, up to LANES, each in a word, then zeros; see the products.
words load_groups(const float* x, int64_t count, float) { return load_words(x, count); }

// The first `count` values of x, up to 8, then zeros.
vec load(const float* x, int64_t count) { return as_vec(load_words(x, count)); }

// Store the first `count` values.
void store(float* to, vec x, int64_t count) { store_words(to, as_words(x), count); }

// Store the values of two vectors, one after another.
void store_both(float* to, vec a, vec b) {
  store(to, a, LANES);
  store(to + LANES, b, LANES);
}

vec repeated(float x) { return _mm256_set1_ps(x); }

// a * b + sum
vec multiply_add(vec a, vec b, vec sum) { return _mm256_fmadd_ps(a, b, sum); }

// b if one of both is NaN.
vec smaller(vec a, vec b) { return _mm256_min_ps(a, b); }
vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }

// The first `count` values, then zeros.
vec first_of(vec x, int64_t count) {
  return count == LANES ? x : as_vec(_mm256_and_si256(as_words(x), first(count)));
}

// x, but 0 where another value is less than a limit.
vec zero_if_less(vec x, vec other, float limit) {
  return _mm256_andnot_ps(_mm256_cmp_ps(other, repeated(limit), _CMP_LT_OQ), x);
}

float sum_of(vec x) {
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
  return _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)));
}
float largest_of(vec x) {
  __m128 values = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  values = _mm_max_ps(values, _mm_movehl_ps(values, values));
  return _mm_cvtss_f32(_mm_max_ss(values, _mm_movehdup_ps(values)));
}

vec nearest_integer(vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// x * 2^power of whole powers up to 127; 0 if they are less than -126.
vec times_power_of_two(vec x, vec power) {
  const words exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return zero_if_less(x * as_vec(_mm256_slli_epi32(exponent, 23)), power, -126);
}

// Add the products of a float, given by its bits, and of others to a sum.
void add_products(vec& sum, std::int32_t left, words right, float) {
  sum = multiply_add(as_vec(_mm256_set1_epi32(left)), as_vec(right), sum);
}

// Exchange rows and columns of 8 x 8 words.
void transpose(words x[LANES]) {
  words y[LANES];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // The halves of x[4 i + j] are now columns j and 4 + j of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; j++) {
    y[j] = _mm256_permute2x128_si256(x[j], x[4 + j], 0x20);
    y[4 + j] = _mm256_permute2x128_si256(x[j], x[4 + j], 0x31);
  }
  for (int j = 0; j < 8; j++) x[j] = y[j];
}

// Exchange rows and columns of 4 x 8 words: word 4 i + j of the 32 becomes row j, column i.
void transpose_four(words x[4]) {
  const words a = _mm256_unpacklo_epi32(x[0], x[1]);
  const words b = _mm256_unpackhi_epi32(x[0], x[1]);
  const words c = _mm256_unpacklo_epi32(x[2], x[3]);
  const words d = _mm256_unpackhi_epi32(x[2], x[3]);
  // The halves are columns 0 and 4, 1 and 5, 2 and 6, 3 and 7.
  const words columns[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                            _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
  x[0] = _mm256_permute2x128_si256(columns[0], columns[1], 0x20);
  x[1] = _mm256_permute2x128_si256(columns[2], columns[3], 0x20);
  x[2] = _mm256_permute2x128_si256(columns[0], columns[1], 0x31);
  x[3] = _mm256_permute2x128_si256(columns[2], columns[3], 0x31);
}

bool fits_processor() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace
