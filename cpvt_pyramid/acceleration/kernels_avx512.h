// What kernels.cpp is made of, on processors with AVX-512: vectors of 16 floats or words. A word is
// 32 bits: a float, an integer, or a pair of bfloat16. kernels_avx2.h has the same names, but for
// those of bfloat16.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using std::int64_t;

struct bfloat16 {
  std::uint16_t bits;
};

using vec = __m512;
using words = __m512i;
constexpr int LANES = 16;
constexpr int COLUMNS = 2 * LANES;  // of a panel, see the products
constexpr int ROWS = 12;            // that are multiplied with a panel: 24 sums stay in registers
constexpr int BLOCK_VECTORS = 2;    // that are convolved at a time: with 9 weights each
constexpr int ROWS_OF_NORM = 8;     // at a time: others are computed while a sum is awaited

words as_words(vec x) { return _mm512_castps_si512(x); }
vec as_vec(words x) { return _mm512_castsi512_ps(x); }

__mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

// The first `count` values of x, up to 16, then zeros.
vec load(const float* x, int64_t count) {
  return count == LANES ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(first(count), x);
}
vec load(const bfloat16* x, int64_t count) {
  const __m256i bits = count == LANES ? _mm256_loadu_si256((const __m256i*)x)
                                      : _mm256_maskz_loadu_epi16(first(count), x);
  return as_vec(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Store the first `count` values.
void store(float* to, vec x, int64_t count) {
  if (count == LANES) {
    _mm512_storeu_ps(to, x);
  } else {
    _mm512_mask_storeu_ps(to, first(count), x);
  }
}
void store(bfloat16* to, vec x, int64_t count) {
  const __m256i bits = (__m256i)_mm512_cvtneps_pbh(x);
  if (count == LANES) {
    _mm256_storeu_si256((__m256i*)to, bits);
  } else {
    _mm256_mask_storeu_epi16(to, first(count), bits);
  }
}

// Store the values of two vectors, one after another.
void store_both(float* to, vec a, vec b) {
  store(to, a, LANES);
  store(to + LANES, b, LANES);
}
void store_both(bfloat16* to, vec a, vec b) {
  _mm512_storeu_si512(to, (words)_mm512_cvtne2ps_pbh(b, a));
}

// The first `count` values, each in a word, then zeros; and back. Nothing is computed with them, so
// that every bit stays.
words load_words(const float* x, int64_t count) {
  return _mm512_maskz_loadu_epi32(first(count), x);
}
words load_words(const bfloat16* x, int64_t count) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), x));
}
void store_words(float* to, words x, int64_t count) {
  _mm512_mask_storeu_epi32(to, first(count), x);
}
void store_words(bfloat16* to, words x, int64_t count) {
  _mm512_mask_cvtepi32_storeu_epi16(to, first(count), x);
}

// The values of some groups, up to LANES, each in a word, then zeros; see the products.
words load_groups(const float* x, int64_t count, float) { return load_words(x, count); }
words load_groups(const bfloat16* x, int64_t count, bfloat16) {
  return _mm512_maskz_loadu_epi32(first(count), x);
}
words load_groups(const bfloat16* x, int64_t count, float) { return as_words(load(x, count)); }

words load_words(const void* x) { return _mm512_loadu_si512(x); }
void store_words(void* to, words x) { _mm512_storeu_si512(to, x); }

words no_words() { return _mm512_setzero_si512(); }

vec repeated(float x) { return _mm512_set1_ps(x); }

// a * b + sum
vec multiply_add(vec a, vec b, vec sum) { return _mm512_fmadd_ps(a, b, sum); }

// b if one of both is NaN.
vec smaller(vec a, vec b) { return _mm512_min_ps(a, b); }
vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }

vec absolute(vec x) { return _mm512_abs_ps(x); }

// The first `count` values, then zeros.
vec first_of(vec x, int64_t count) { return _mm512_maskz_mov_ps(first(count), x); }

float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
float largest_of(vec x) { return _mm512_reduce_max_ps(x); }

vec nearest_integer(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }

// x * 2^power of whole powers.
vec times_power_of_two(vec x, vec power) { return _mm512_scalef_ps(x, power); }

// The values of a table that words point to; the table is two vectors.
vec looked_up(vec low, vec high, words at) { return _mm512_permutex2var_ps(low, at, high); }

// Add the products of two words, each a float or a pair of bfloat16, to a sum.
void add_products(vec& sum, std::int32_t left, words right, float) {
  sum = multiply_add(as_vec(_mm512_set1_epi32(left)), as_vec(right), sum);
}
void add_products(vec& sum, std::int32_t left, words right, bfloat16) {
  sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(left), (__m512bh)right);
}

void add_products(vec& sum, words left, words right) {
  sum = _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
}

// 32 bfloat16, or the first `count` and then zeros; and back.
words load_all(const bfloat16* x, int64_t count) {
  const __mmask32 lanes = static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
  return count == 2 * LANES ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16(lanes, x);
}
void store_all(bfloat16* to, words x, int64_t count) {
  const __mmask32 lanes = static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
  if (count == 2 * LANES) {
    _mm512_storeu_si512(to, x);
  } else {
    _mm512_mask_storeu_epi16(to, lanes, x);
  }
}

// Pairs of 32 bfloat16 each. Of every 8 of them the processor pairs the first four at once, and the
// last four: these are the two parts.
words pairs(words a, words b, int part) {
  return part == 0 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpackhi_epi16(a, b);
}
// Such a part as floats; and 32 bfloat16 of both parts.
vec floats(words x, int part) { return as_vec(pairs(no_words(), x, part)); }
words joined(vec first, vec last) {
  const words fours = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm512_permutexvar_epi64(fours, (words)_mm512_cvtne2ps_pbh(last, first));
}

// Values of two rows, in pairs; null: zeros.
words load_rows(const bfloat16* const rows[2], int64_t count, bfloat16) {
  const words low = rows[0] ? load_words(rows[0], count) : no_words();
  const words high = rows[1] ? load_words(rows[1], count) : no_words();
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Exchange rows and columns of 16 x 16 words.
void transpose(words x[LANES]) {
  words y[LANES];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // The quarters of x[4 i + j] are now columns j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3.
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; j++) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0x88);
      y[i + 4 + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0xdd);
    }
  }
  for (int j = 0; j < 4; j++) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
    x[4 + j] = _mm512_shuffle_i32x4(y[4 + j], y[12 + j], 0x88);
    x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd);
    x[12 + j] = _mm512_shuffle_i32x4(y[4 + j], y[12 + j], 0xdd);
  }
}

// Exchange rows and columns of 4 x 16 words: word 4 i + j of the 64 becomes row j, column i.
void transpose_four(words x[4]) {
  const words a = _mm512_unpacklo_epi32(x[0], x[1]);
  const words b = _mm512_unpackhi_epi32(x[0], x[1]);
  const words c = _mm512_unpacklo_epi32(x[2], x[3]);
  const words d = _mm512_unpackhi_epi32(x[2], x[3]);
  // The quarters of the first are columns 0, 4, 8 and 12, those of the second 1, 5, 9 and 13, ...
  const words columns[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                              _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
  words y[4];
  for (int i = 0; i < 2; i++) {
    y[i] = _mm512_shuffle_i32x4(columns[2 * i], columns[2 * i + 1], 0x88);
    y[2 + i] = _mm512_shuffle_i32x4(columns[2 * i], columns[2 * i + 1], 0xdd);
  }
  x[0] = _mm512_shuffle_i32x4(y[0], y[1], 0x88);
  x[1] = _mm512_shuffle_i32x4(y[2], y[3], 0x88);
  x[2] = _mm512_shuffle_i32x4(y[0], y[1], 0xdd);
  x[3] = _mm512_shuffle_i32x4(y[2], y[3], 0xdd);
}

bool fits_processor() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Whether the processor multiplies pairs of bfloat16 faster than as many floats, to which they are
// converted else. AMD's take as long for a pair as for a float, Intel's as long as for two.
//
// The maker decides, not a measurement: results would not be the same in each process.
bool multiplies_pairs_fast() { return __builtin_cpu_is("amd"); }

}  // namespace
