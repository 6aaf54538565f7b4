// Layer norm, attention, and depthwise convolution with GELU for processors with AVX-512, for which
// neither PyTorch nor oneDNN has a fast function. `kernels.py` calls the functions at the end.
//
// Values are float or bfloat16, and are computed with in float. Each value of a result is computed
// by the same operations in the same order, whatever the batch and the number of threads.
//
// OpenMP's library is not linked: its functions are found in the library that PyTorch has loaded,
// so that both use the same threads.

#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

using std::int64_t;

struct bfloat16 {
  std::uint16_t bits;
};

using vec = __m512;  // 16 values
constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504f;

__mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

// The first `count` values of x, up to 16, then zeros.
vec load(const float* x, int64_t count) {
  return count == LANES ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(first(count), x);
}
vec load(const bfloat16* x, int64_t count) {
  const __mmask16 lanes = first(count);
  const __m256i bits = count == LANES ? _mm256_loadu_si256((const __m256i*)x)
                                      : _mm256_maskz_loadu_epi16(lanes, x);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
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

vec repeated(float x) { return _mm512_set1_ps(x); }

// Call f(start, count) for each 16 of n values, or another number, and for the rest.
template <int size = LANES, typename Function>
inline void each_vector(int64_t n, Function f) {
  int64_t i = 0;
  for (; i + size <= n; i += size) f(i, size);
  if (i < n) f(i, n - i);
}

// Call f(r) for each of some rows. The loop is unrolled: else the compiler keeps sums in memory.
template <int rows, typename Function>
inline __attribute__((always_inline)) void each_row(Function f) {
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++) f(r);
}

// A polynomial; the coefficients begin with that of the highest power.
template <typename... Coefficients>
vec polynomial(vec x, float highest, Coefficients... others) {
  vec sum = repeated(highest);
  for (const float coefficient : {others...}) sum = _mm512_fmadd_ps(sum, x, repeated(coefficient));
  return sum;
}

// 2^x of x <= 0; relative error 2e-7.
vec power_of_two(vec x) {
  x = _mm512_max_ps(repeated(-200), x);  // 0 as for -infinity; NaN stays
  const vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT);
  const vec power = polynomial(x - whole, 1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f,
                               5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f);
  return _mm512_scalef_ps(power, whole);
}

// Call f(start, stop, thread) for equal parts of `count` items.
template <typename Function>
void in_threads(int64_t count, int64_t threads, Function f) {
  threads = std::max<int64_t>(std::min(threads, count), 1);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < threads; i++) f(count * i / threads, count * (i + 1) / threads, i);
}

// Layer norm

constexpr int ROWS_OF_NORM = 8;  // at a time: while the sum of one is awaited, others are computed

template <int rows, typename T>
void normalize(const T* x, const float* weight, const float* bias, T* out, int64_t n, float eps) {
  vec sums[rows], rests[rows], squares[rows];
  float mean[rows], scale[rows];
  each_row<rows>([&](int r) { sums[r] = rests[r] = squares[r] = repeated(0); });
  each_vector(n, [&](int64_t i, int64_t count) {
    each_row<rows>([&](int r) { sums[r] += load(x + r * n + i, count); });
  });
  each_row<rows>([&](int r) { mean[r] = _mm512_reduce_add_ps(sums[r]) / n; });
  each_vector(n, [&](int64_t i, int64_t count) {
    each_row<rows>([&](int r) {
      const vec value = load(x + r * n + i, count);
      const vec centered = _mm512_maskz_sub_ps(first(count), value, repeated(mean[r]));
      rests[r] += centered;
      squares[r] = _mm512_fmadd_ps(centered, centered, squares[r]);
    });
  });
  each_row<rows>([&](int r) {
    // What rounding has left out of the mean: it counts where values are large and differ little.
    mean[r] += _mm512_reduce_add_ps(rests[r]) / n;
    scale[r] = 1 / std::sqrt(_mm512_reduce_add_ps(squares[r]) / n + eps);
  });
  each_vector(n, [&](int64_t i, int64_t count) {
    const vec factor = load(weight + i, count);
    const vec summand = load(bias + i, count);
    each_row<rows>([&](int r) {
      const vec centered = load(x + r * n + i, count) - repeated(mean[r]);
      const vec normal = centered * repeated(scale[r]);
      store(out + r * n + i, _mm512_fmadd_ps(normal, factor, summand), count);
    });
  });
}

template <typename T>
void layer_norm(const T* x, const float* weight, const float* bias, T* out, int64_t rows, int64_t n,
                float eps, int64_t threads) {
  in_threads(rows, threads, [=](int64_t start, int64_t stop, int64_t) {
    int64_t i = start;
    for (; i + ROWS_OF_NORM <= stop; i += ROWS_OF_NORM) {
      normalize<ROWS_OF_NORM>(x + i * n, weight, bias, out + i * n, n, eps);
    }
    for (; i < stop; i++) normalize<1>(x + i * n, weight, bias, out + i * n, n, eps);
  });
}

// Products of some rows with panels of 32 columns
//
// The right factor is packed: a panel has, for each group of rows, all columns, and for each column
// the values of the group. A group fills 32 bits: one float, or two bfloat16, which the processor
// multiplies and adds at once.

constexpr int COLUMNS = 2 * LANES;
constexpr int ROWS = 12;  // with these, 24 sums of 16 values stay in registers

template <typename T>
constexpr int GROUP = 4 / sizeof(T);

void multiply_add(vec& sum, std::int32_t left, __m512i right, float) {
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(left)), _mm512_castsi512_ps(right),
                        sum);
}
void multiply_add(vec& sum, std::int32_t left, __m512i right, bfloat16) {
  sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(left), (__m512bh)right);
}

using Products = vec[ROWS][2];

// `rows` rows of `groups` groups, `stride` values apart, times a panel.
template <int rows, typename T>
inline __attribute__((always_inline)) void multiply_rows(const T* left, int64_t stride,
                                                         const T* panel, int64_t groups,
                                                         Products out) {
  vec sums[rows][2];
  each_row<rows>([&](int r) { sums[r][0] = sums[r][1] = repeated(0); });
  for (int64_t g = 0; g < groups; g++) {
    const __m512i a = _mm512_loadu_si512(panel + g * COLUMNS * GROUP<T>);
    const __m512i b = _mm512_loadu_si512(panel + (g * COLUMNS + LANES) * GROUP<T>);
    each_row<rows>([&](int r) {
      std::int32_t bits;
      std::memcpy(&bits, left + r * stride + g * GROUP<T>, sizeof bits);
      multiply_add(sums[r][0], bits, a, T());
      multiply_add(sums[r][1], bits, b, T());
    });
  }
  each_row<rows>([&](int r) {
    out[r][0] = sums[r][0];
    out[r][1] = sums[r][1];
  });
}

template <typename T>
void multiply(int64_t rows, const T* left, int64_t stride, const T* panel, int64_t groups,
              Products out) {
  switch (rows) {
    case 1: return multiply_rows<1>(left, stride, panel, groups, out);
    case 2: return multiply_rows<2>(left, stride, panel, groups, out);
    case 3: return multiply_rows<3>(left, stride, panel, groups, out);
    case 4: return multiply_rows<4>(left, stride, panel, groups, out);
    case 5: return multiply_rows<5>(left, stride, panel, groups, out);
    case 6: return multiply_rows<6>(left, stride, panel, groups, out);
    case 7: return multiply_rows<7>(left, stride, panel, groups, out);
    case 8: return multiply_rows<8>(left, stride, panel, groups, out);
    case 9: return multiply_rows<9>(left, stride, panel, groups, out);
    case 10: return multiply_rows<10>(left, stride, panel, groups, out);
    case 11: return multiply_rows<11>(left, stride, panel, groups, out);
    case 12: return multiply_rows<12>(left, stride, panel, groups, out);
  }
}

// Attention

// Part of a map.
struct Area {
  int64_t top, left, height, width;

  int64_t size() const { return height * width; }
};

// Tokens of a map, by head: where they begin, and how many values are from one to the next.
template <typename T>
struct Tokens {
  T* data;
  int64_t image, head, row, column;

  // Those of a head of an image.
  Tokens of(int64_t i, int64_t h) const { return {data + i * image + h * head, 0, 0, row, column}; }

  // Channels of the token with a number in an area, counted row by row.
  T* at(const Area& area, int64_t number) const {
    return data + (area.top + number / area.width) * row +
           (area.left + number % area.width) * column;
  }
};

// Sizes of maps with tokens: those of queries and results, and those of keys and values.
struct Sizes {
  int64_t images, heads, channels;  // channels of a head
  int64_t height, width;
  int64_t key_height, key_width;
  int64_t window;  // side of the windows of both maps; 0: each query attends to all keys
};

// Exchange rows and columns of 16 x 16 words.
void transpose(__m512i x[LANES]) {
  __m512i y[LANES];
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

int64_t ceil_div(int64_t n, int64_t k) { return (n + k - 1) / k; }

int64_t rounded_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

template <typename T>
T* take(std::uintptr_t& memory, int64_t count) {
  T* const taken = reinterpret_cast<T*>(memory);
  memory += rounded_up(count * sizeof(T), 64);  // each begins with a line of the cache
  return taken;
}

// What a thread computes on the way to the attention of a head, in memory of the caller's.
template <typename T>
struct Workspace {
  Workspace(int64_t key_count, int64_t channels, std::uintptr_t memory)
      : keys(rounded_up(key_count, COLUMNS)),
        key_panels(take<T>(memory, keys * channels)),
        value_panels(take<T>(memory, keys * rounded_up(channels, COLUMNS))),
        queries(take<T>(memory, ROWS * channels)),
        scores(take<float>(memory, ROWS * keys)),
        bias(take<float>(memory, keys)),
        end(memory) {}

  int64_t keys;        // with those that fill the last panel
  T* key_panels;       // panel, group of channels, key, channel
  T* value_panels;     // panel, group of keys, channel, key
  T* queries;          // ROWS, channels
  float* scores;       // ROWS, keys; then weights, in the first half of a row if T is bfloat16
  float* bias;         // keys; in units of log(2)
  std::uintptr_t end;
};

// Panels of the keys of an area: columns are keys, rows are channels.
template <typename T>
void pack_keys(const Tokens<const T>& keys, const Area& area, int64_t channels,
               Workspace<T>& work) {
  const int64_t groups = channels / GROUP<T>;
  __m512i block[LANES];
  for (int64_t start = 0; start < work.keys; start += LANES) {
    for (int64_t g = 0; g < groups; g += LANES) {
      const __mmask16 lanes = first(std::min<int64_t>(groups - g, LANES));
      for (int64_t i = 0; i < LANES; i++) {
        block[i] = _mm512_setzero_si512();
        if (start + i < area.size()) {
          block[i] = _mm512_maskz_loadu_epi32(lanes, keys.at(area, start + i) + g * GROUP<T>);
        }
      }
      transpose(block);
      const int64_t panel = start / COLUMNS * groups * COLUMNS + start % COLUMNS;
      for (int64_t i = 0; i < std::min<int64_t>(groups - g, LANES); i++) {
        _mm512_store_si512(work.key_panels + (panel + (g + i) * COLUMNS) * GROUP<T>, block[i]);
      }
    }
  }
}

// Sixteen channels of a group of keys; those of keys that are not there are zeros.
__m512i value_group(const Tokens<const float>& values, const Area& area, int64_t key,
                    int64_t channel, int64_t count) {
  if (key >= area.size()) return _mm512_setzero_si512();
  return _mm512_castps_si512(load(values.at(area, key) + channel, count));
}
__m512i value_group(const Tokens<const bfloat16>& values, const Area& area, int64_t key,
                    int64_t channel, int64_t count) {
  const __mmask16 lanes = first(count);
  __m256i pair[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int i = 0; i < 2; i++) {
    if (key + i < area.size()) {
      pair[i] = _mm256_maskz_loadu_epi16(lanes, values.at(area, key + i) + channel);
    }
  }
  const __m512i low = _mm512_cvtepu16_epi32(pair[0]);
  return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(pair[1]), 16));
}

// Panels of the values of an area: columns are channels, rows are keys.
template <typename T>
void pack_values(const Tokens<const T>& values, const Area& area, int64_t channels,
                 Workspace<T>& work) {
  __m512i* to = reinterpret_cast<__m512i*>(work.value_panels);
  for (int64_t panel = 0; panel < channels; panel += COLUMNS) {
    for (int64_t key = 0; key < work.keys; key += GROUP<T>) {
      for (int64_t channel = panel; channel < panel + COLUMNS; channel += LANES) {
        const int64_t count = std::clamp<int64_t>(channels - channel, 0, LANES);
        _mm512_store_si512(to++, value_group(values, area, key, channel, count));
      }
    }
  }
}

// In units of log(2). A finite value stays finite: -FLT_MAX is a usual mask.
float in_log2(float bias) {
  return std::isinf(bias) ? bias : std::clamp(bias * LOG2_E, -FLT_MAX, FLT_MAX);
}

// What is added to the scores: that of the caller's, (rows, columns of the map) or null, and
// -infinity for the keys that fill the last panel.
template <typename T>
void pack_bias(const float* bias, int64_t columns, const Area& area, Workspace<T>& work) {
  for (int64_t key = 0; key < area.size(); key++) {
    const int64_t y = area.top + key / area.width;
    const int64_t x = area.left + key % area.width;
    work.bias[key] = bias ? in_log2(bias[y * columns + x]) : 0;
  }
  std::fill(work.bias + area.size(), work.bias + work.keys, -INFINITY);
}

// Attention of some queries of an area, from number `start` on, to the packed keys and values.
template <typename T>
void attend(const Tokens<const T>& queries, const Tokens<T>& out, const Area& area, int64_t start,
            int64_t rows, int64_t channels, float scale, Workspace<T>& work) {
  for (int64_t r = 0; r < rows; r++) {
    std::memcpy(work.queries + r * channels, queries.at(area, start + r), channels * sizeof(T));
  }
  Products products;
  vec largest[ROWS];
  std::fill(largest, largest + ROWS, repeated(-INFINITY));
  const vec factor = repeated(scale * LOG2_E);
  for (int64_t panel = 0; panel < work.keys; panel += COLUMNS) {
    multiply(rows, work.queries, channels, work.key_panels + panel * channels,
             channels / GROUP<T>, products);
    for (int half = 0; half < 2; half++) {
      const int64_t key = panel + half * LANES;
      const vec bias = _mm512_load_ps(work.bias + key);
      for (int64_t r = 0; r < rows; r++) {
        const vec scores = _mm512_fmadd_ps(products[r][half], factor, bias);
        largest[r] = _mm512_max_ps(scores, largest[r]);
        _mm512_store_ps(work.scores + r * work.keys + key, scores);
      }
    }
  }
  vec scales[ROWS];
  for (int64_t r = 0; r < rows; r++) {
    float* const scores = work.scores + r * work.keys;
    T* const weights = reinterpret_cast<T*>(scores);
    // Finite, so that weights are 0 where all scores are -infinity, and not NaN.
    const vec top = repeated(std::max(_mm512_reduce_max_ps(largest[r]), -FLT_MAX));
    vec sum = repeated(0);
    for (int64_t key = 0; key < work.keys; key += COLUMNS) {
      const vec a = power_of_two(_mm512_load_ps(scores + key) - top);
      const vec b = power_of_two(_mm512_load_ps(scores + key + LANES) - top);
      sum += a + b;
      store(weights + key, a, LANES);
      store(weights + key + LANES, b, LANES);
    }
    const float total = _mm512_reduce_add_ps(sum);
    scales[r] = repeated(total == 0 ? 0 : 1 / total);
  }
  const T* const weights = reinterpret_cast<const T*>(work.scores);
  for (int64_t panel = 0; panel < channels; panel += COLUMNS) {
    multiply(rows, weights, work.keys * GROUP<T>, work.value_panels + panel * work.keys,
             work.keys / GROUP<T>, products);
    for (int64_t r = 0; r < rows; r++) {
      T* const to = out.at(area, start + r) + panel;
      each_vector(std::min<int64_t>(channels - panel, COLUMNS), [&](int64_t i, int64_t count) {
        store(to + i, products[r][i / LANES] * scales[r], count);
      });
    }
  }
}

int64_t largest_key_count(const Sizes& sizes) {
  if (sizes.window == 0) return sizes.key_height * sizes.key_width;
  return std::min(sizes.window, sizes.height) * std::min(sizes.window, sizes.width);
}

// Bytes of the memory of a thread.
template <typename T>
int64_t workspace_size(const Sizes& sizes) {
  return Workspace<T>(largest_key_count(sizes), sizes.channels, 0).end;
}

template <typename T>
void attention(const Tokens<const T>& queries, const Tokens<const T>& keys,
               const Tokens<const T>& values, const Tokens<T>& out, const float* bias,
               const Sizes& sizes, float scale, std::uintptr_t memory, int64_t threads) {
  const int64_t height = sizes.window ? sizes.window : sizes.height;
  const int64_t width = sizes.window ? sizes.window : sizes.width;
  const int64_t across = ceil_div(sizes.width, width);
  const int64_t windows = ceil_div(sizes.height, height) * across;
  // Of the queries of an area.
  const int64_t parts =
      ceil_div(std::min(height, sizes.height) * std::min(width, sizes.width), ROWS);
  const int64_t bytes = workspace_size<T>(sizes);
  const int64_t items = sizes.images * windows * sizes.heads * parts;
  in_threads(items, threads, [&](int64_t first_item, int64_t end, int64_t thread) {
    Workspace<T> work(largest_key_count(sizes), sizes.channels, memory + thread * bytes);
    int64_t packed = -1;
    for (int64_t item = first_item; item < end; item++) {
      const int64_t part = item % parts;
      const int64_t head = item / parts % sizes.heads;
      const int64_t window = item / parts / sizes.heads % windows;
      const int64_t image = item / parts / sizes.heads / windows;
      Area area;
      area.top = window / across * height;
      area.left = window % across * width;
      area.height = std::min(height, sizes.height - area.top);
      area.width = std::min(width, sizes.width - area.left);
      if (item / parts != packed) {
        Area key_area = area;
        if (sizes.window == 0) key_area = {0, 0, sizes.key_height, sizes.key_width};
        const int64_t key_map = sizes.key_height * sizes.key_width;
        pack_keys(keys.of(image, head), key_area, sizes.channels, work);
        pack_values(values.of(image, head), key_area, sizes.channels, work);
        pack_bias(bias ? bias + image * key_map : nullptr, sizes.key_width, key_area, work);
        packed = item / parts;
      }
      const int64_t start = area.size() * part / parts;
      const int64_t stop = area.size() * (part + 1) / parts;
      attend(queries.of(image, head), out.of(image, head), area, start, stop - start,
             sizes.channels, scale, work);
    }
  });
}

// Patches

// Sixteen values, of which the first `count` are copied, each in a word: not computed with, so that
// every bit stays.
__m512i load_words(const float* x, int64_t count) {
  return _mm512_maskz_loadu_epi32(first(count), x);
}
__m512i load_words(const bfloat16* x, int64_t count) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), x));
}

void store_words(float* to, __m512i words, int64_t count) {
  _mm512_mask_storeu_epi32(to, first(count), words);
}
void store_words(bfloat16* to, __m512i words, int64_t count) {
  _mm512_mask_cvtepi32_storeu_epi16(to, first(count), words);
}

// Exchange rows and columns of 4 x 16 words: word 4 i + j of the 64 becomes row j, column i.
void transpose_four(__m512i x[4]) {
  const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]);
  const __m512i b = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]);
  const __m512i d = _mm512_unpackhi_epi32(x[2], x[3]);
  // The quarters of the first are columns 0, 4, 8 and 12, those of the second 1, 5, 9 and 13, ...
  const __m512i columns[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                              _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
  __m512i y[4];
  for (int i = 0; i < 2; i++) {
    y[i] = _mm512_shuffle_i32x4(columns[2 * i], columns[2 * i + 1], 0x88);
    y[2 + i] = _mm512_shuffle_i32x4(columns[2 * i], columns[2 * i + 1], 0xdd);
  }
  x[0] = _mm512_shuffle_i32x4(y[0], y[1], 0x88);
  x[1] = _mm512_shuffle_i32x4(y[2], y[3], 0x88);
  x[2] = _mm512_shuffle_i32x4(y[0], y[1], 0xdd);
  x[3] = _mm512_shuffle_i32x4(y[2], y[3], 0xdd);
}

// Copy maps (images, height * side, width * side, n) to patches (images, height, width, n, side,
// side), or back.
template <bool back, typename T>
void copy_patches(T* map, T* patches, int64_t images, int64_t height, int64_t width, int64_t n,
                  int64_t side, int64_t threads) {
  const int64_t of_row = width * side * n;  // values of a row of the map
  const int64_t pixels = side * side;       // of a patch
  in_threads(images * height * width, threads, [=](int64_t first_patch, int64_t end, int64_t) {
    __m512i block[LANES];
    for (int64_t i = first_patch; i < end; i++) {
      T* const corner = map + i / width * side * of_row + i % width * side * n;
      T* const patch = patches + i * n * pixels;
      for (int64_t pixel = 0; pixel < pixels; pixel += LANES) {
        const int64_t pixel_count = std::min<int64_t>(pixels - pixel, LANES);
        T* at[LANES];  // the first channel of each pixel
        for (int64_t j = 0; j < pixel_count; j++) {
          at[j] = corner + (pixel + j) / side * of_row + (pixel + j) % side * n;
        }
        for (int64_t channel = 0; channel < n; channel += LANES) {
          const int64_t count = std::min<int64_t>(n - channel, LANES);
          T* const values = patch + channel * pixels + pixel;  // those of the first channel
          if (back) {
            for (int64_t j = 0; j < count; j++) {
              block[j] = load_words(values + j * pixels, pixel_count);
            }
            transpose(block);
            for (int64_t j = 0; j < pixel_count; j++) store_words(at[j] + channel, block[j], count);
          } else {
            for (int64_t j = 0; j < pixel_count; j++) block[j] = load_words(at[j] + channel, count);
            if (pixels == 4) {
              transpose_four(block);
              for (int64_t j = 0; 4 * count > LANES * j; j++) {
                store_words(values + LANES * j, block[j],
                            std::min<int64_t>(4 * count - LANES * j, LANES));
              }
              continue;
            }
            transpose(block);
            for (int64_t j = 0; j < count; j++) {
              store_words(values + j * pixels, block[j], pixel_count);
            }
          }
        }
      }
    }
  });
}

// GELU

// x times the share of a normal distribution that is below x. That share is a polynomial in each of
// 32 pieces of an axis, of which the processor holds the coefficients in registers. Left of the
// pieces it is 0, and right of them 1. Its absolute error is 2e-7.
class Gelu {
 public:
  Gelu() {
    for (int piece = 0; piece < PIECES; piece++) interpolate(piece);
  }

  vec operator()(vec x) const {
    // NaN stays: it is the second argument.
    vec position = _mm512_min_ps(repeated(REACH), x);
    position = _mm512_max_ps(repeated(-REACH), position);
    position = _mm512_fmadd_ps(position, repeated(PER_UNIT), repeated(MIDDLE));
    const vec rounded = position + repeated(ROUNDING);  // its lowest bits are the number of a piece
    const __m512i piece = _mm512_castps_si512(rounded);
    const vec offset = position - (rounded - repeated(ROUNDING));
    vec share = coefficient(ORDER, piece);
#pragma GCC unroll 4
    for (int power = ORDER - 1; power >= 0; power--) {
      share = _mm512_fmadd_ps(share, offset, coefficient(power, piece));
    }
    return x * share;
  }

 private:
  static constexpr int PIECES = 2 * LANES;
  static constexpr int ORDER = 4;
  static constexpr float REACH = 5.5f;  // the centers of the first and last piece
  static constexpr float MIDDLE = (PIECES - 1) / 2.0f;
  static constexpr float PER_UNIT = MIDDLE / REACH;
  static constexpr float ROUNDING = 12582912;  // 1.5 * 2^23: floats near it are integers

  alignas(64) float coefficients_[ORDER + 1][PIECES];

  vec coefficient(int power, __m512i piece) const {
    const float* const table = coefficients_[power];
    return _mm512_permutex2var_ps(_mm512_load_ps(table), piece, _mm512_load_ps(table + LANES));
  }

  // The polynomial of a piece, by Newton's interpolation in Chebyshev's nodes.
  void interpolate(int piece) {
    double node[ORDER + 1];
    double difference[ORDER + 1];
    for (int i = 0; i <= ORDER; i++) {
      node[i] = std::cos(M_PI * (i + 0.5) / (ORDER + 1)) / 2;
      const double x = (piece + node[i] - MIDDLE) / PER_UNIT;
      difference[i] = std::erfc(-x * M_SQRT1_2) / 2;
      if (piece == 0) difference[i] = 0;
      if (piece == PIECES - 1) difference[i] = 1;
    }
    for (int step = 1; step <= ORDER; step++) {
      for (int i = ORDER; i >= step; i--) {
        difference[i] = (difference[i] - difference[i - 1]) / (node[i] - node[i - step]);
      }
    }
    double sum[ORDER + 1] = {};  // by powers of the offset
    for (int i = ORDER; i >= 0; i--) {
      for (int power = ORDER; power > 0; power--) {
        sum[power] = sum[power - 1] - node[i] * sum[power];
      }
      sum[0] = difference[i] - node[i] * sum[0];
    }
    for (int power = 0; power <= ORDER; power++) coefficients_[power][piece] = sum[power];
  }
};

const Gelu gelu;

// Depthwise convolution

constexpr int BLOCK = 2 * LANES;  // channels that are computed at a time
constexpr int64_t SPAN = 32;      // columns, whose rows stay in the cache

// The values of a block in float: in the order of the channels, or the even and the odd ones.
struct Block {
  vec low;
  vec high;
};

__mmask32 first_of_block(int64_t count) {
  return static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
}

Block load_block(const float* x, int64_t count) {
  const vec high = count > LANES ? load(x + LANES, count - LANES) : repeated(0);
  return {load(x, std::min<int64_t>(count, LANES)), high};
}
Block load_block(const bfloat16* x, int64_t count) {
  const __m512i bits = count == BLOCK ? _mm512_loadu_si512(x)
                                      : _mm512_maskz_loadu_epi16(first_of_block(count), x);
  const __m512i odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), _mm512_castsi512_ps(odd)};
}

void store_block(float* to, Block x, int64_t count) {
  store(to, x.low, std::min<int64_t>(count, LANES));
  if (count > LANES) store(to + LANES, x.high, count - LANES);
}
void store_block(bfloat16* to, Block x, int64_t count) {
  const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.low));
  const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.high));
  const __m512i bits = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
  if (count == BLOCK) {
    _mm512_storeu_si512(to, bits);
  } else {
    _mm512_mask_storeu_epi16(to, first_of_block(count), bits);
  }
}

void multiply_add(Block& sum, Block x, Block factor) {
  sum.low = _mm512_fmadd_ps(x.low, factor.low, sum.low);
  sum.high = _mm512_fmadd_ps(x.high, factor.high, sum.high);
}

// `count` channels of the columns `start` to `stop` of a row. `rows` are those above, here and
// below, or null; n channels are between columns, and between the 9 weights of a channel.
template <typename T>
inline __attribute__((always_inline)) void convolve_columns(const T* const rows[3],
                                                            const T* weights, const T* bias, T* out,
                                                            int64_t start, int64_t stop,
                                                            int64_t width, int64_t n,
                                                            int64_t count) {
  Block kernel[3][3];
  for (int k = 0; k < 9; k++) kernel[k / 3][k % 3] = load_block(weights + k * n, count);
  const Block first_sum = load_block(bias, count);
  // A column is part of three results: the one to the left, which it completes, its own, and the
  // one to the right.
  Block left = first_sum;
  Block here = first_sum;
  for (int64_t column = std::max<int64_t>(start - 1, 0); column <= stop; column++) {
    Block right = first_sum;
    if (column < width) {
      for (int row = 0; row < 3; row++) {
        if (!rows[row]) continue;
        const Block x = load_block(rows[row] + column * n, count);
        multiply_add(left, x, kernel[row][2]);
        multiply_add(here, x, kernel[row][1]);
        multiply_add(right, x, kernel[row][0]);
      }
    }
    if (column > start) {
      store_block(out + (column - 1) * n, {gelu(left.low), gelu(left.high)}, count);
    }
    left = here;
    here = right;
  }
}

// The rows `top` to `bottom` of maps (images, height, width, n).
template <typename T>
void convolve_gelu(const T* x, const T* weights, const T* bias, T* out, int64_t images,
                   int64_t height, int64_t width, int64_t n, int64_t top, int64_t bottom,
                   int64_t threads) {
  const int64_t of_row = width * n;
  const int64_t results = bottom - top;  // rows of an image
  in_threads(images * results, threads, [=](int64_t first_row, int64_t end, int64_t) {
    for (int64_t i = first_row; i < end; i++) {
      const int64_t y = top + i % results;
      const T* const row = x + (i / results * height + y) * of_row;
      const T* const above = y > 0 ? row - of_row : nullptr;
      const T* const below = y + 1 < height ? row + of_row : nullptr;
      for (int64_t start = 0; start < width; start += SPAN) {
        const int64_t stop = std::min(start + SPAN, width);
        each_vector<BLOCK>(n, [&](int64_t channel, int64_t count) {
          const T* const rows[3] = {
              above ? above + channel : nullptr,
              row + channel,
              below ? below + channel : nullptr,
          };
          convolve_columns(rows, weights + channel, bias + channel, out + i * of_row + channel,
                           start, stop, width, n, count);
        });
      }
    }
  });
}

}  // namespace

extern "C" {

int kernels_have_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
int kernels_have_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }

#define DEFINE(T, name)                                                                          \
  void layer_norm_##name(const T* x, const float* weight, const float* bias, T* out,             \
                         int64_t rows, int64_t n, float eps, int64_t threads) {                  \
    layer_norm(x, weight, bias, out, rows, n, eps, threads);                                     \
  }                                                                                              \
  int64_t attention_memory_##name(const Sizes* sizes) { return workspace_size<T>(*sizes); }      \
  void attention_##name(const Tokens<const T>* queries, const Tokens<const T>* keys,             \
                        const Tokens<const T>* values, const Tokens<T>* out, const float* bias,  \
                        const Sizes* sizes, float scale, void* memory, int64_t threads) {        \
    attention(*queries, *keys, *values, *out, bias, *sizes, scale,                               \
              reinterpret_cast<std::uintptr_t>(memory), threads);                                \
  }                                                                                              \
  void convolve_gelu_##name(const T* x, const T* weights, const T* bias, T* out, int64_t images, \
                            int64_t height, int64_t width, int64_t n, int64_t top,               \
                            int64_t bottom, int64_t threads) {                                   \
    convolve_gelu(x, weights, bias, out, images, height, width, n, top, bottom, threads);        \
  }                                                                                              \
  void split_patches_##name(T* map, T* patches, int64_t images, int64_t height, int64_t width,   \
                            int64_t n, int64_t side, int64_t threads) {                          \
    copy_patches<false>(map, patches, images, height, width, n, side, threads);                  \
  }                                                                                              \
  void join_patches_##name(T* map, T* patches, int64_t images, int64_t height, int64_t width,    \
                           int64_t n, int64_t side, int64_t threads) {                           \
    copy_patches<true>(map, patches, images, height, width, n, side, threads);                   \
  }

DEFINE(float, float32)
DEFINE(bfloat16, bfloat16)
}
