// Layer norm, attention, MLP, and depthwise convolution with GELU or a sum, for which neither
// PyTorch nor oneDNN has a fast function. `kernels.py` calls the functions at the end.
//
// They are compiled for processors with AVX-512, or for those with AVX2 and without bfloat16. The
// files that are included say what `vec`, `words` and LANES are, and the functions of them.
//
// T is the type of the values in memory, float or bfloat16. Sums are floats. Each value of a result
// is computed by the same operations in the same order, whatever the batch and the number of
// threads.
//
// OpenMP's library is not linked: its functions are found in the library that PyTorch has loaded,
// so that both use the same threads.

#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX512F__
#include "kernels_avx512.h"
#include "kernels_amx.h"
#else
#include "kernels_avx2.h"
#endif

namespace {

constexpr float LOG2_E = 1.44269504f;

// Call f(start, count) for each LANES of n values, or another number, and for the rest.
template <int size = LANES, typename Function>
inline void each_vector(int64_t n, Function f) {
  int64_t i = 0;
  for (; i + size <= n; i += size) f(i, size);
  if (i < n) f(i, n - i);
}

// Copy values to those of another type, or of the same.
template <typename T, typename F>
void copy_values(const T* x, F* to, int64_t n) {
  if constexpr (std::is_same_v<T, F>) {
    std::memcpy(to, x, n * sizeof *x);
  } else {
    each_vector(n, [=](int64_t i, int64_t count) { store(to + i, load(x + i, count), count); });
  }
}

// The same of up to LANES values.
template <typename T, typename F>
void copy_few(const T* x, F* to, int64_t n) {
  if constexpr (std::is_same_v<T, F>) {
    store_words(to, load_words(x, n), n);
  } else {
    store(to, load(x, n), n);
  }
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
  for (const float coefficient : {others...}) sum = multiply_add(sum, x, repeated(coefficient));
  return sum;
}

// 2^x of x <= 0; relative error 2e-7.
vec power_of_two(vec x) {
  x = larger(repeated(-200), x);  // 0 as for -infinity; NaN stays
  const vec whole = nearest_integer(x);
  const vec power = polynomial(x - whole, 1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f,
                               5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f);
  return times_power_of_two(power, whole);
}

// For each thread there are several parts of the work, which it takes one after another. When it
// has no more, it takes those of others: one whose core does something else, too, computes fewer.
constexpr int64_t PARTS = 4;
constexpr int64_t FEW_PARTS = 2;  // where each has something to prepare

int64_t all_parts(int64_t threads, int64_t parts) { return threads == 1 ? 1 : parts * threads; }

// Call f(start, stop, thread, continues) for equal parts of `count` items, `parts` for each thread.
// `continues`: the part before was the last one of this thread.
template <typename Function>
void in_order(int64_t count, int64_t threads, int64_t parts, Function f) {
  threads = std::max<int64_t>(std::min(threads, count), 1);
  const int64_t all = std::min(all_parts(threads, parts), count);
  std::vector<int64_t> next(threads);  // part of each thread
  for (int64_t i = 0; i < threads; i++) next[i] = all * i / threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = omp_get_thread_num();
    int64_t following = -1;  // the part after the last one of this thread
    for (int64_t turn = 0; turn < threads; turn++) {
      const int64_t owner = (thread + turn) % threads;
      const int64_t end = all * (owner + 1) / threads;
      while (true) {
        int64_t i;
#pragma omp atomic capture
        i = next[owner]++;
        if (i >= end) break;
        f(count * i / all, count * (i + 1) / all, thread, i == following);
        following = i + 1;
      }
    }
  }
}

// Call f(start, stop, thread) for equal parts of `count` items, `parts` for each thread.
template <typename Function>
void in_threads(int64_t count, int64_t threads, int64_t parts, Function f) {
  in_order(count, threads, parts, [&](int64_t start, int64_t stop, int64_t thread, bool) {
    f(start, stop, thread);
  });
}

// Layer norm

template <int rows, typename T, typename P, typename Result>
void normalize(const T* x, const P* weight, const P* bias, Result* out, int64_t n, float eps) {
  vec sums[rows], rests[rows], squares[rows];
  float mean[rows], scale[rows];
  each_row<rows>([&](int r) { sums[r] = rests[r] = squares[r] = repeated(0); });
  each_vector(n, [&](int64_t i, int64_t count) {
    each_row<rows>([&](int r) { sums[r] += load(x + r * n + i, count); });
  });
  each_row<rows>([&](int r) { mean[r] = sum_of(sums[r]) / n; });
  each_vector(n, [&](int64_t i, int64_t count) {
    each_row<rows>([&](int r) {
      const vec value = load(x + r * n + i, count);
      const vec centered = first_of(value - repeated(mean[r]), count);
      rests[r] += centered;
      squares[r] = multiply_add(centered, centered, squares[r]);
    });
  });
  each_row<rows>([&](int r) {
    // What rounding has left out of the mean: it counts where values are large and differ little.
    mean[r] += sum_of(rests[r]) / n;
    scale[r] = 1 / std::sqrt(sum_of(squares[r]) / n + eps);
  });
  each_vector(n, [&](int64_t i, int64_t count) {
    const vec factor = load(weight + i, count);
    const vec summand = load(bias + i, count);
    each_row<rows>([&](int r) {
      const vec centered = load(x + r * n + i, count) - repeated(mean[r]);
      const vec normal = centered * repeated(scale[r]);
      store(out + r * n + i, multiply_add(normal, factor, summand), count);
    });
  });
}

// Up to `most` rows at a time.
template <int most = ROWS_OF_NORM, typename T, typename P, typename Result>
void normalize_rows(const T* x, const P* weight, const P* bias, Result* out, int64_t rows,
                    int64_t n, float eps) {
  for (; rows >= most; rows -= most) {
    normalize<most>(x, weight, bias, out, n, eps);
    x += most * n;
    out += most * n;
  }
  if constexpr (most > 1) {
    if (rows > 0) normalize_rows<most - 1>(x, weight, bias, out, rows, n, eps);
  }
}

// A layer norm of tokens of n values T. Without a weight it is none: values are copied.
template <typename T>
struct Norm {
  const void* weight;  // n, of the type T or float
  const void* bias;
  float eps;
  std::int32_t in_float;  // whether both are floats

  template <typename Result>
  void apply(const T* x, Result* out, int64_t tokens, int64_t n) const {
    if (!weight) {
      copy_values(x, out, tokens * n);
    } else if (in_float) {
      normalize_rows(x, static_cast<const float*>(weight), static_cast<const float*>(bias), out,
                     tokens, n, eps);
    } else {
      normalize_rows(x, static_cast<const T*>(weight), static_cast<const T*>(bias), out, tokens, n,
                     eps);
    }
  }
};

template <typename T>
void layer_norm(const T* x, const Norm<T>& norm, T* out, int64_t rows, int64_t n,
                int64_t threads) {
  in_threads(rows, threads, PARTS, [=](int64_t start, int64_t stop, int64_t) {
    norm.apply(x + start * n, out + start * n, stop - start, n);
  });
}

// Products of some rows with panels of COLUMNS columns
//
// The right factor is packed: a panel has, for each group of rows, all columns, and for each column
// the values of the group. A group fills 32 bits: one float, or two bfloat16, which the processor
// multiplies and adds at once.
//
// F is the type of the factors. That of bfloat16 in memory may be float, see
// `multiplies_pairs_fast`.

template <typename F>
constexpr int GROUP = 4 / sizeof(F);

// `rows` rows of `groups` groups, `stride` values apart, times a panel. Call then(r, a, b) for both
// vectors of each product.
//
// Not inlined: among other values the compiler keeps some of the sums in memory. `then` is a copy,
// whose values the compiler can keep in registers while results are stored.
template <int rows, typename F, typename Then>
__attribute__((noinline)) void multiply_rows(const F* left, int64_t stride, const F* panel,
                                             int64_t groups, Then then) {
  vec sums[rows][2];
  each_row<rows>([&](int r) { sums[r][0] = sums[r][1] = repeated(0); });
  for (int64_t g = 0; g < groups; g++) {
    const words a = load_words(panel + g * COLUMNS * GROUP<F>);
    const words b = load_words(panel + (g * COLUMNS + LANES) * GROUP<F>);
    each_row<rows>([&](int r) {
      std::int32_t bits;
      std::memcpy(&bits, left + r * stride + g * GROUP<F>, sizeof bits);
      add_products(sums[r][0], bits, a, F());
      add_products(sums[r][1], bits, b, F());
    });
  }
  each_row<rows>([&](int r) { then(r, sums[r][0], sums[r][1]); });
}

// Store products, row by row.
struct ThenStore {
  vec (*out)[2];
  void operator()(int64_t r, vec a, vec b) const {
    out[r][0] = a;
    out[r][1] = b;
  }
};

// How many of `count` values are in a vector of several.
int64_t count_of_part(int64_t count, int part) {
  return std::clamp<int64_t>(count - part * LANES, 0, LANES);
}

int64_t ceil_div(int64_t n, int64_t k) { return (n + k - 1) / k; }

constexpr int64_t LINE = 64;  // bytes of a line of the cache

int64_t rounded_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

// Memory for several things of one size, such as what each thread needs. Each begins with a line of
// the cache. Functions whose result is a bool return whether they had the memory that they need.
class Memory {
 public:
  Memory(int64_t bytes, int64_t count)
      : bytes_(rounded_up(bytes, LINE)), data_(std::aligned_alloc(LINE, count * bytes_)) {}
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  bool is_missing() const { return !data_; }
  std::uintptr_t of(int64_t i) const { return reinterpret_cast<std::uintptr_t>(data_) + i * bytes_; }

 private:
  int64_t bytes_;
  void* data_;
};

// Take room for some values out of memory, which then begins after it.
template <typename T>
T* take(std::uintptr_t& memory, int64_t count) {
  T* const taken = reinterpret_cast<T*>(memory);
  memory += rounded_up(count * sizeof(T), LINE);
  return taken;
}

// How factors F are multiplied: up to ROWS rows with a panel, between `begin` and `end`.
template <typename F>
struct Vectors {
  using Factor = F;
  static constexpr int64_t ROWS = ::ROWS;

  static void begin() {}
  static void end() {}
  template <int rows = ROWS>
  static void multiply(int64_t count, const F* left, int64_t stride, const F* panel,
                       int64_t groups, vec out[][2]) {
    if constexpr (rows > 0) {
      if (count == rows) {
        return multiply_rows<rows>(left, stride, panel, groups, ThenStore{out});
      }
      multiply<rows - 1>(count, left, stride, panel, groups, out);
    }
  }
};

// Multiply, and call then(r, a, b) for both vectors of each of `rows` products.
template <typename Kind, typename F, typename Then>
void multiply_then(int64_t rows, const F* left, int64_t stride, const F* panel, int64_t groups,
                   const Then& then) {
  if constexpr (std::is_same_v<Kind, Vectors<F>>) {
    // They stay in registers.
    if (rows == ROWS) return multiply_rows<ROWS>(left, stride, panel, groups, then);
  }
  vec products[Kind::ROWS][2];
  Kind::multiply(rows, left, stride, panel, groups, products);
  for (int64_t r = 0; r < rows; r++) then(r, products[r][0], products[r][1]);
}

// LANES columns of a panel, and up to LANES groups of their rows. `at(i)` is where those of column
// i begin; columns from number `count` on are zeros.
template <typename F, typename At>
void pack_block(At at, int64_t count, int64_t groups, F* to) {
  words block[LANES];
  for (int64_t i = 0; i < LANES; i++) {
    block[i] = i < count ? load_groups(at(i), groups, F()) : no_words();
  }
  transpose(block);
  for (int64_t g = 0; g < groups; g++) store_words(to + g * COLUMNS * GROUP<F>, block[g]);
}

// Linear layers

constexpr int64_t MOST_ROWS = 32;  // that are multiplied, and read, at a time

// The weight of a linear layer, (out, in), and its bias.
template <typename T>
struct Linear {
  const T* weight;
  const T* bias;
  int64_t in, out;
};

// Panels of the transposed weight of a linear layer: columns are its rows.
template <typename F>
struct Panels {
  Panels(int64_t in, int64_t out, std::uintptr_t memory)
      : in(in), data(take<F>(memory, rounded_up(out, COLUMNS) * in)), end(memory) {}

  template <typename T>
  void pack(const Linear<T>& layer, int64_t threads) const {
    const int64_t groups = in / GROUP<F>;
    const int64_t blocks = ceil_div(groups, LANES);  // of a column
    const int64_t count = rounded_up(layer.out, COLUMNS) / LANES * blocks;
    in_threads(count, threads, PARTS, [=](int64_t first_block, int64_t stop, int64_t) {
      for (int64_t i = first_block; i < stop; i++) {
        prefetch(layer, i + BLOCKS_AHEAD, blocks);
        const int64_t column = i / blocks * LANES;
        const int64_t group = i % blocks * LANES;
        const auto at = [=](int64_t c) {
          return layer.weight + (column + c) * layer.in + group * GROUP<F>;
        };
        F* const panel = data + column / COLUMNS * COLUMNS * in;
        pack_block(at, layer.out - column, std::min<int64_t>(groups - group, LANES),
                   panel + (column % COLUMNS + group * COLUMNS) * GROUP<F>);
      }
    });
  }

  int64_t in;
  F* data;
  std::uintptr_t end;

 private:
  static constexpr int64_t BLOCKS_AHEAD = 8;

  // Bring block number i, of which each column has some, to the cache: the processor foresees what
  // will be read of a few columns, but not of this many. A block that does not exist does no harm.
  template <typename T>
  static void prefetch(const Linear<T>& layer, int64_t i, int64_t blocks) {
    const T* const first = layer.weight + i / blocks * LANES * layer.in;
    for (int64_t c = 0; c < LANES; c++) {
      __builtin_prefetch(first + c * layer.in + i % blocks * LANES * GROUP<F>);
    }
  }
};

// The packed weights of two linear layers.
template <typename F>
class PackedLayers {
 public:
  template <typename T>
  PackedLayers(const Linear<T>& one, const Linear<T>& other)
      : memory_(Panels<F>(other.in, other.out, Panels<F>(one.in, one.out, 0).end).end, 1),
        first(one.in, one.out, memory_.of(0)),
        second(other.in, other.out, first.end) {}

  bool is_missing() const { return memory_.is_missing(); }

  template <typename T>
  void pack(const Linear<T>& one, const Linear<T>& other, int64_t threads) const {
    first.pack(one, threads);
    second.pack(other, threads);
  }

 private:
  Memory memory_;

 public:
  const Panels<F> first, second;
};

// Multiply tokens, `stride` values apart, with the panels of the columns `begin` to `end`. Of each
// column the rows `start` to `start + count` are multiplied. `then_of(token, column)` returns the
// function that is called with the products of some tokens from that one on, see `multiply_then`.
template <typename Kind, typename F, typename ThenOf>
void multiply_tokens(const F* x, int64_t stride, int64_t tokens, const Panels<F>& panels,
                     int64_t begin, int64_t end, int64_t start, int64_t count,
                     const ThenOf& then_of) {
  for (int64_t column = begin; column < end; column += COLUMNS) {
    const F* const panel = panels.data + column * panels.in + start * COLUMNS;
    for (int64_t token = 0; token < tokens; token += Kind::ROWS) {
      const int64_t rows = std::min<int64_t>(tokens - token, Kind::ROWS);
      multiply_then<Kind>(rows, x + token * stride, stride, panel, count / GROUP<F>,
                          then_of(token, column));
    }
  }
}

// A linear layer of tokens without space between them. `at(token)` is where its results go.
template <typename Kind, typename T, typename F, typename At>
void apply(const Linear<T>& layer, const Panels<F>& panels, const F* x, int64_t tokens, At at) {
  multiply_tokens<Kind>(
      x, layer.in, tokens, panels, 0, layer.out, 0, layer.in,
      [=](int64_t token, int64_t column) {
        const int64_t first = count_of_part(layer.out - column, 0);
        const int64_t second = count_of_part(layer.out - column, 1);
        const vec bias[] = {load(layer.bias + column, first),
                            load(layer.bias + column + LANES, second)};
        return [=](int64_t r, vec a, vec b) {
          auto* const to = at(token + r) + column;
          store(to, a + bias[0], first);
          store(to + LANES, b + bias[1], second);
        };
      });
}

// Attention

// Tokens of a head: where they begin, and how many values are from one to the next.
template <typename T>
struct Tokens {
  T* data;
  int64_t stride;

  T* at(int64_t number) const { return data + number * stride; }
  Tokens from(int64_t number) const { return {at(number), stride}; }
};

// The values of some rows, up to LANES, each group of rows in a word.
template <typename T>
words load_rows(const T* const rows[1], int64_t count, float) {
  return rows[0] ? as_words(load(rows[0], count)) : no_words();
}

// Keys and values of a head, packed in memory of the caller's.
template <typename Kind>
struct Keys {
  using F = typename Kind::Factor;

  Keys(int64_t most, int64_t channels, std::uintptr_t memory)
      : size(rounded_up(most, COLUMNS)),
        channels(channels),
        key_panels(take<F>(memory, size * channels)),
        value_panels(take<F>(memory, size * rounded_up(channels, COLUMNS))),
        bias(take<float>(memory, size)),
        end(memory) {}

  // Up to `most` keys; `bias_at(key)` is added to the scores of each.
  template <typename T, typename BiasAt>
  void pack(const Tokens<const T>& keys, const Tokens<const T>& values, int64_t count,
            BiasAt bias_at) {
    size = rounded_up(count, COLUMNS);
    pack_keys(keys, count);
    pack_values(values, count);
    for (int64_t key = 0; key < count; key++) bias[key] = in_log2(bias_at(key));
    std::fill(bias + count, bias + size, -INFINITY);
  }

  int64_t size;  // the number of keys, with those that fill the last panel
  int64_t channels;
  F* key_panels;    // panel, group of channels, key, channel
  F* value_panels;  // panel, group of keys, channel, key
  float* bias;      // size; in units of log(2)
  std::uintptr_t end;

 private:
  // A finite value stays finite: -FLT_MAX is a usual mask.
  static float in_log2(float bias) {
    return std::isinf(bias) ? bias : std::clamp(bias * LOG2_E, -FLT_MAX, FLT_MAX);
  }

  // Columns are keys, rows are channels.
  template <typename T>
  void pack_keys(const Tokens<const T>& keys, int64_t count) {
    const int64_t groups = channels / GROUP<F>;
    for (int64_t start = 0; start < size; start += LANES) {
      const int64_t panel = start / COLUMNS * groups * COLUMNS + start % COLUMNS;
      for (int64_t g = 0; g < groups; g += LANES) {
        const auto at = [&](int64_t i) { return keys.at(start + i) + g * GROUP<F>; };
        pack_block(at, count - start, std::min<int64_t>(groups - g, LANES),
                   key_panels + (panel + g * COLUMNS) * GROUP<F>);
      }
    }
  }

  // Columns are channels, rows are keys.
  template <typename T>
  void pack_values(const Tokens<const T>& values, int64_t count) {
    F* to = value_panels;
    for (int64_t panel = 0; panel < channels; panel += COLUMNS) {
      for (int64_t key = 0; key < size; key += GROUP<F>) {
        const T* rows[GROUP<F>];
        for (int64_t channel = panel; channel < panel + COLUMNS; channel += LANES) {
          for (int i = 0; i < GROUP<F>; i++) {
            rows[i] = key + i < count ? values.at(key + i) + channel : nullptr;
          }
          const int64_t there = std::clamp<int64_t>(channels - channel, 0, LANES);
          store_words(to, load_rows(rows, there, F()));
          to += LANES * GROUP<F>;
        }
      }
    }
  }
};

// What a thread computes on the way to the attention of a head.
template <typename Kind>
struct Workspace {
  using F = typename Kind::Factor;

  Workspace(int64_t most_keys, int64_t channels, std::uintptr_t memory)
      : queries(take<F>(memory, Kind::ROWS * channels)),
        scores(take<float>(memory, Kind::ROWS * rounded_up(most_keys, COLUMNS))),
        end(memory) {}

  F* queries;     // ROWS, channels
  float* scores;  // ROWS, keys; then weights, in the first half of a row if F is bfloat16
  std::uintptr_t end;
};

// Attention of up to ROWS queries to packed keys and values.
template <typename Kind, typename T>
void attend_rows(const Tokens<const T>& queries, const Tokens<T>& out, int64_t rows, float scale,
                 const Keys<Kind>& keys, const Workspace<Kind>& work) {
  using F = typename Kind::Factor;
  const int64_t channels = keys.channels;
  for (int64_t r = 0; r < rows; r++) {
    copy_values(queries.at(r), work.queries + r * channels, channels);
  }
  vec products[Kind::ROWS][2];
  vec largest[Kind::ROWS];
  std::fill(largest, largest + Kind::ROWS, repeated(-INFINITY));
  const vec factor = repeated(scale * LOG2_E);
  for (int64_t panel = 0; panel < keys.size; panel += COLUMNS) {
    Kind::multiply(rows, work.queries, channels, keys.key_panels + panel * channels,
                   channels / GROUP<F>, products);
    for (int half = 0; half < 2; half++) {
      const int64_t key = panel + half * LANES;
      const vec bias = load(keys.bias + key, LANES);
      for (int64_t r = 0; r < rows; r++) {
        const vec scores = multiply_add(products[r][half], factor, bias);
        largest[r] = larger(scores, largest[r]);
        store(work.scores + r * keys.size + key, scores, LANES);
      }
    }
  }
  vec scales[Kind::ROWS];
  for (int64_t r = 0; r < rows; r++) {
    float* const scores = work.scores + r * keys.size;
    F* const weights = reinterpret_cast<F*>(scores);
    // Finite, so that weights are 0 where all scores are -infinity, and not NaN.
    const vec top = repeated(std::max(largest_of(largest[r]), -FLT_MAX));
    vec sum = repeated(0);
    for (int64_t key = 0; key < keys.size; key += COLUMNS) {
      const vec a = power_of_two(load(scores + key, LANES) - top);
      const vec b = power_of_two(load(scores + key + LANES, LANES) - top);
      sum += a + b;
      store(weights + key, a, LANES);
      store(weights + key + LANES, b, LANES);
    }
    const float total = sum_of(sum);
    scales[r] = repeated(total == 0 ? 0 : 1 / total);
  }
  const F* const weights = reinterpret_cast<const F*>(work.scores);
  for (int64_t panel = 0; panel < channels; panel += COLUMNS) {
    Kind::multiply(rows, weights, keys.size * GROUP<F>, keys.value_panels + panel * keys.size,
                   keys.size / GROUP<F>, products);
    for (int64_t r = 0; r < rows; r++) {
      T* const to = out.at(r) + panel;
      each_vector(std::min<int64_t>(channels - panel, COLUMNS), [&](int64_t i, int64_t count) {
        store(to + i, products[r][i / LANES] * scales[r], count);
      });
    }
  }
}

// Attention of any number of queries, in equal parts.
template <typename Kind, typename T>
void attend(const Tokens<const T>& queries, const Tokens<T>& out, int64_t count, float scale,
            const Keys<Kind>& keys, const Workspace<Kind>& work) {
  const int64_t parts = ceil_div(count, Kind::ROWS);
  for (int64_t i = 0; i < parts; i++) {
    const int64_t start = count * i / parts;
    const int64_t stop = count * (i + 1) / parts;
    attend_rows<Kind>(queries.from(start), out.from(start), stop - start, scale, keys, work);
  }
}

// Tokens by head: where they begin, and how many values are from one to the next.
template <typename T>
struct Heads {
  T* data;
  int64_t image, head, token;

  Tokens<T> of(int64_t i, int64_t h) const { return {data + i * image + h * head, token}; }
};

// Of queries and results, and of keys and values.
struct Sizes {
  int64_t images, heads, channels;  // channels of a head
  int64_t queries, keys;
};

// What a thread needs for some queries of a head.
template <typename Kind>
struct HeadPart {
  HeadPart(int64_t most_keys, int64_t channels, std::uintptr_t memory)
      : keys(most_keys, channels, memory), work(most_keys, channels, keys.end), end(work.end) {}

  Keys<Kind> keys;
  Workspace<Kind> work;
  std::uintptr_t end;
};

template <typename Kind, typename T>
bool attention(const Heads<const T>& queries, const Heads<const T>& keys,
               const Heads<const T>& values, const Heads<T>& out, const float* bias,
               const Sizes& sizes, float scale, int64_t threads) {
  const int64_t parts = ceil_div(sizes.queries, Kind::ROWS);  // of the queries of a head
  const Memory memory(HeadPart<Kind>(sizes.keys, sizes.channels, 0).end, threads);
  if (memory.is_missing()) return false;
  const int64_t items = sizes.images * sizes.heads * parts;
  in_threads(items, threads, FEW_PARTS, [&](int64_t first_item, int64_t end, int64_t thread) {
    HeadPart<Kind> own(sizes.keys, sizes.channels, memory.of(thread));
    Kind::begin();
    int64_t last = -1;  // the head whose keys are packed
    for (int64_t item = first_item; item < end; item++) {
      const int64_t part = item % parts;
      const int64_t head = item / parts % sizes.heads;
      const int64_t image = item / parts / sizes.heads;
      if (item / parts != last) {
        const float* const of_image = bias ? bias + image * sizes.keys : nullptr;
        own.keys.pack(keys.of(image, head), values.of(image, head), sizes.keys,
                      [=](int64_t key) { return of_image ? of_image[key] : 0; });
        last = item / parts;
      }
      const int64_t start = sizes.queries * part / parts;
      const int64_t stop = sizes.queries * (part + 1) / parts;
      attend_rows<Kind>(queries.of(image, head).from(start), out.of(image, head).from(start),
                        stop - start, scale, own.keys, own.work);
    }
    Kind::end();
  });
  return true;
}

// Attention with its linear layers
//
// A thread computes all of it for some tokens at a time: queries, their attention and its linear
// layer, which stay in its cache.

constexpr int64_t ATTENTION_BYTES = 256 << 10;  // of the tokens that are computed at a time

// Of tokens (images, height, width, channels).
struct AttentionSizes {
  int64_t images, height, width, channels;
  int64_t heads;
  int64_t keys;    // of an image; only of global attention
  int64_t window;  // side of the windows, whose tokens are their keys; only of window attention

  int64_t of_head() const { return channels / heads; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(of_head())); }
};

// What a thread computes for some tokens.
template <typename Kind>
struct AttentionPart {
  using F = typename Kind::Factor;

  // `channels`: of a token; `projected`: of what the first layer makes of it.
  AttentionPart(int64_t most_tokens, int64_t channels, int64_t projected, std::uintptr_t memory)
      : tokens(take<F>(memory, rounded_up(most_tokens, MOST_ROWS) * channels)),
        projected(take<F>(memory, most_tokens * projected)),
        end(memory) {}

  F* tokens;     // tokens, channels; then the attention of each
  F* projected;  // tokens, channels of queries, or of queries, keys and values
  std::uintptr_t end;
};

// The windows of a batch of maps. Those at the border may be smaller.
struct Windows {
  explicit Windows(const AttentionSizes& sizes)
      : sizes(sizes),
        across(ceil_div(sizes.width, sizes.window)),
        of_image(ceil_div(sizes.height, sizes.window) * across) {}

  int64_t top(int64_t window) const { return window % of_image / across * sizes.window; }
  int64_t left(int64_t window) const { return window % of_image % across * sizes.window; }
  int64_t bottom(int64_t window) const {
    return std::min(top(window) + sizes.window, sizes.height);
  }
  int64_t right(int64_t window) const { return std::min(left(window) + sizes.window, sizes.width); }

  int64_t tokens(int64_t window) const {
    return (bottom(window) - top(window)) * (right(window) - left(window));
  }

  int64_t all_tokens() const { return sizes.images * sizes.height * sizes.width; }

  // The first window that has at least some number of tokens in the windows before it.
  int64_t first_after(int64_t tokens) const {
    const int64_t of_band = sizes.window * sizes.width;  // a row of windows
    const int64_t of_map = sizes.height * sizes.width;
    const int64_t band = tokens % of_map / of_band;
    const int64_t in_band = tokens % of_map % of_band;
    const int64_t rows = std::min(sizes.window, sizes.height - band * sizes.window);
    return tokens / of_map * of_image + band * across + ceil_div(in_band, rows * sizes.window);
  }

  // Call f(place, count) for each row of a window, which has `count` tokens from a place in the
  // batch on.
  template <typename Function>
  void each_row(int64_t window, Function f) const {
    const int64_t first_row = window / of_image * sizes.height;  // of the image
    const int64_t from = left(window);
    for (int64_t y = top(window); y < bottom(window); y++) {
      f((first_row + y) * sizes.width + from, right(window) - from);
    }
  }

  // Write the places of the tokens of a window.
  void find(int64_t window, int64_t* places) const {
    each_row(window, [&](int64_t place, int64_t count) {
      for (int64_t i = 0; i < count; i++) *places++ = place + i;
    });
  }

  int64_t most_tokens() const {  // of a window
    return std::min(sizes.window, sizes.height) * std::min(sizes.window, sizes.width);
  }

  AttentionSizes sizes;
  int64_t across, of_image;
};

// Windows that a thread computes at a time. Fewer tokens would use the packed weights less often.
template <typename Kind>
int64_t windows_of_part(const Windows& windows) {
  constexpr int64_t FEWEST_TOKENS = 96;
  const int64_t bytes = 4 * windows.sizes.channels * sizeof(typename Kind::Factor);  // of a token
  return std::max<int64_t>(ATTENTION_BYTES / bytes, FEWEST_TOKENS) / windows.most_tokens() + 1;
}

// What a thread needs for its windows.
template <typename Kind>
struct WindowPart {
  WindowPart(const Windows& windows, std::uintptr_t memory)
      : most_windows(windows_of_part<Kind>(windows)),
        places(take<int64_t>(memory, most_windows * windows.most_tokens())),
        tokens(most_windows * windows.most_tokens(), windows.sizes.channels,
               3 * windows.sizes.channels, memory),
        head(windows.most_tokens(), windows.sizes.of_head(), tokens.end),
        end(head.end) {}

  int64_t most_windows;
  int64_t* places;  // of the tokens in the batch
  AttentionPart<Kind> tokens;
  HeadPart<Kind> head;
  std::uintptr_t end;
};

// Attention inside windows of tokens (images, height, width, channels) after a layer norm. `bias`,
// (images, height, width) or null, is added to the scores of each key.
template <typename Kind, typename T>
bool window_attention(const T* x, const Norm<T>& norm, const float* bias, const Linear<T>& qkv,
                      const Linear<T>& proj, T* out, const AttentionSizes& sizes,
                      int64_t threads) {
  using F = typename Kind::Factor;
  const Windows windows(sizes);
  const PackedLayers<F> packed(qkv, proj);
  const Memory memory(WindowPart<Kind>(windows, 0).end, threads);
  if (packed.is_missing() || memory.is_missing()) return false;
  packed.pack(qkv, proj, threads);
  const int64_t n = sizes.channels;
  const auto compute = [&](int64_t first_token, int64_t end_token, int64_t thread) {
    WindowPart<Kind> own(windows, memory.of(thread));
    const AttentionPart<Kind>& part = own.tokens;
    int64_t* const places = own.places;
    const int64_t first = windows.first_after(first_token);
    const int64_t end = windows.first_after(end_token);
    Kind::begin();
    for (int64_t start = first; start < end; start += own.most_windows) {
      const int64_t stop = std::min(start + own.most_windows, end);
      int64_t tokens = 0;
      for (int64_t i = start; i < stop; i++) {
        windows.find(i, places + tokens);
        windows.each_row(i, [&](int64_t place, int64_t count) {
          norm.apply(x + place * n, part.tokens + tokens * n, count, n);
          tokens += count;
        });
      }
      apply<Kind>(qkv, packed.first, part.tokens, tokens,
                  [=](int64_t token) { return part.projected + token * 3 * n; });
      int64_t token = 0;
      for (int64_t i = start; i < stop; i++) {
        const int64_t* const here = places + token;
        const int64_t count = windows.tokens(i);
        for (int64_t head = 0; head < sizes.heads; head++) {
          const int64_t channel = head * sizes.of_head();
          const F* const queries = part.projected + token * 3 * n + channel;
          own.head.keys.template pack<F>({queries + n, 3 * n}, {queries + 2 * n, 3 * n}, count,
                                         [=](int64_t key) { return bias ? bias[here[key]] : 0; });
          attend<Kind, F>({queries, 3 * n}, {part.tokens + token * n + channel, n}, count,
                          sizes.scale(), own.head.keys, own.head.work);
        }
        token += count;
      }
      apply<Kind>(proj, packed.second, part.tokens, tokens,
                  [=](int64_t token) { return out + places[token] * n; });
    }
    Kind::end();
  };
  in_threads(windows.all_tokens(), threads, PARTS, compute);  // windows may be of several sizes
  return true;
}

// Tokens of an image that a thread computes at a time, a multiple of ROWS.
template <typename Kind>
int64_t queries_of_part(const AttentionSizes& sizes) {
  const int64_t bytes = 2 * sizes.channels * sizeof(typename Kind::Factor);  // of a token
  const int64_t fitting = ATTENTION_BYTES / bytes;
  return std::max(fitting / Kind::ROWS * Kind::ROWS, Kind::ROWS);
}

// What a thread needs for its queries.
template <typename Kind>
struct GlobalPart {
  GlobalPart(const AttentionSizes& sizes, std::uintptr_t memory)
      : most(queries_of_part<Kind>(sizes)),
        tokens(most, sizes.channels, sizes.channels, memory),
        work(sizes.keys, sizes.of_head(), tokens.end),
        end(work.end) {}

  int64_t most;  // tokens
  AttentionPart<Kind> tokens;
  Workspace<Kind> work;
  std::uintptr_t end;
};

// Attention of all tokens, after a layer norm, to the keys and values of their image, (images, keys,
// 2 * channels). `bias`, (images, keys) or null, is added to the scores of each key.
template <typename Kind, typename T>
bool global_attention(const T* x, const Norm<T>& norm, const T* kv, const float* bias,
                      const Linear<T>& q, const Linear<T>& proj, T* out,
                      const AttentionSizes& sizes, int64_t threads) {
  using F = typename Kind::Factor;
  const int64_t all_heads = sizes.images * sizes.heads;
  const PackedLayers<F> packed(q, proj);
  const Memory memory_of_keys(Keys<Kind>(sizes.keys, sizes.of_head(), 0).end, all_heads);
  const Memory memory(GlobalPart<Kind>(sizes, 0).end, threads);
  if (packed.is_missing() || memory_of_keys.is_missing() || memory.is_missing()) return false;
  packed.pack(q, proj, threads);
  const auto keys_of = [&](int64_t head) {  // of all images
    return Keys<Kind>(sizes.keys, sizes.of_head(), memory_of_keys.of(head));
  };
  const int64_t n = sizes.channels;
  in_threads(all_heads, threads, PARTS, [&](int64_t first, int64_t end, int64_t) {
    for (int64_t i = first; i < end; i++) {
      const int64_t image = i / sizes.heads;
      const T* const keys = kv + image * sizes.keys * 2 * n + i % sizes.heads * sizes.of_head();
      const float* const of_image = bias ? bias + image * sizes.keys : nullptr;
      keys_of(i).template pack<T>({keys, 2 * n}, {keys + n, 2 * n}, sizes.keys,
                                  [=](int64_t key) { return of_image ? of_image[key] : 0; });
    }
  });
  const int64_t tokens = sizes.height * sizes.width;  // of an image
  const int64_t parts = ceil_div(tokens, Kind::ROWS);
  const auto compute = [&](int64_t first, int64_t end, int64_t thread) {
    const GlobalPart<Kind> own(sizes, memory.of(thread));
    const AttentionPart<Kind>& part = own.tokens;
    Kind::begin();
    int64_t item = first;
    while (item < end) {
      const int64_t image = item / parts;
      const int64_t start = item % parts * Kind::ROWS;
      const int64_t count =
          std::min({own.most, tokens - start, (end - item) * int64_t{Kind::ROWS}});
      const int64_t here = (image * tokens + start) * n;
      norm.apply(x + here, part.tokens, count, n);
      apply<Kind>(q, packed.first, part.tokens, count,
                  [=](int64_t token) { return part.projected + token * n; });
      for (int64_t head = 0; head < sizes.heads; head++) {
        const int64_t channel = head * sizes.of_head();
        attend<Kind, F>({part.projected + channel, n}, {part.tokens + channel, n}, count,
                        sizes.scale(), keys_of(image * sizes.heads + head), own.work);
      }
      apply<Kind>(proj, packed.second, part.tokens, count,
                  [=](int64_t token) { return out + here + token * n; });
      item += ceil_div(count, Kind::ROWS);
    }
    Kind::end();
  };
  in_threads(sizes.images * parts, threads, PARTS, compute);
  return true;
}

// Patches

// Copy the values of a patch of a map to (n, side, side), or back. `of_row` values are from one row
// of the map to the next.
template <bool back, typename T>
void copy_patch(T* corner, int64_t of_row, T* patch, int64_t n, int64_t side) {
  const int64_t pixels = side * side;
  words block[LANES];
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

// Copy maps (images, height * side, width * side, n) to patches (images, height, width, n, side,
// side), or back.
template <bool back, typename T>
void copy_patches(T* map, T* patches, int64_t images, int64_t height, int64_t width, int64_t n,
                  int64_t side, int64_t threads) {
  const int64_t of_row = width * side * n;  // values of a row of the map
  const int64_t of_patch = n * side * side;
  const int64_t patch_count = images * height * width;
  in_threads(patch_count, threads, PARTS, [=](int64_t first_patch, int64_t end, int64_t) {
    for (int64_t i = first_patch; i < end; i++) {
      T* const corner = map + i / width * side * of_row + i % width * side * n;
      copy_patch<back>(corner, of_row, patches + i * of_patch, n, side);
    }
  });
}

// Linear layers of patches
//
// A thread computes those of some patches at a time, from the tokens to what follows the layer.

constexpr int64_t PATCH_BYTES = 512 << 10;  // of the patches that are computed at a time

// Patches of a map (images, height, width, channels). Beyond the map they are zeros, and where it is
// `outside`, (images, height, width) or null.
struct Patches {
  int64_t images, height, width, channels;
  int64_t side;           // of a patch
  int64_t step;           // from one patch to the next
  int64_t border;         // how far the first patch begins before the map
  int64_t rows, columns;  // of the patches of an image
  int64_t room;           // for the values of a patch, of which the last may be none: they are zeros
  const bool* outside;
  std::int32_t has_planes;  // whether the map is (images, channels, height, width) in memory

  int64_t count() const { return images * rows * columns; }
  int64_t values() const { return channels * side * side; }  // of a patch

  // Copy a patch of the map after a layer norm to (channels, side, side). `normal` has room for as
  // many values. Planes have no layer norm, and nothing is outside.
  template <typename T, typename F>
  void copy(int64_t patch, const T* x, const Norm<T>& norm, F* normal, F* to) const {
    const Place place = place_of(patch);
    if (has_planes) {
      copy_planes(place, x, to);
    } else {
      copy_tokens(place, x, norm, normal, to);
    }
    clear(to + values(), room - values());
  }

 private:
  // Where a patch begins in the map, and which of its columns are inside.
  struct Place {
    int64_t image, top, left;
    int64_t begin, end;
  };

  Place place_of(int64_t patch) const {
    const int64_t top = patch / columns % rows * step - border;
    const int64_t left = patch % columns * step - border;
    const int64_t begin = std::clamp<int64_t>(-left, 0, side);
    const int64_t end = std::clamp<int64_t>(width - left, begin, side);
    return {patch / (rows * columns), top, left, begin, end};
  }

  bool has_row(int64_t y) const { return 0 <= y && y < height; }
  bool is_inside(const Place& place) const {
    return place.begin == 0 && place.end == side && has_row(place.top) &&
           has_row(place.top + side - 1);
  }

  template <typename F>
  static void clear(F* values, int64_t count) {
    each_vector(count, [=](int64_t i, int64_t n) { store_words(values + i, no_words(), n); });
  }

  template <typename T, typename F>
  void copy_planes(const Place& place, const T* x, F* to) const {
    const T* plane = x + place.image * channels * height * width;
    if (is_inside(place) && side <= LANES) {
      for (int64_t channel = 0; channel < channels; channel++, plane += height * width) {
        const T* row = plane + place.top * width + place.left;
        for (int64_t i = 0; i < side; i++, row += width, to += side) copy_few(row, to, side);
      }
      return;
    }
    for (int64_t channel = 0; channel < channels; channel++, plane += height * width) {
      for (int64_t y = place.top; y < place.top + side; y++, to += side) {
        const int64_t end = has_row(y) ? place.end : place.begin;
        const int64_t count = end - place.begin;
        clear(to, place.begin);
        each_vector(count, [&](int64_t i, int64_t n) {
          copy_few(plane + y * width + place.left + place.begin + i, to + place.begin + i, n);
        });
        clear(to + end, side - end);
      }
    }
  }

  template <typename T, typename F>
  void copy_tokens(const Place& place, const T* x, const Norm<T>& norm, F* normal, F* to) const {
    if constexpr (std::is_same_v<T, F>) {
      if (!norm.weight && !outside && is_inside(place)) {  // as they are
        const int64_t first = (place.image * height + place.top) * width + place.left;
        copy_patch<false>(const_cast<T*>(x) + first * channels, width * channels, to, channels, side);
        return;
      }
    }
    const int64_t of_row = side * channels;
    for (int64_t i = 0; i < side; i++) {
      F* const row = normal + i * of_row;
      const int64_t y = place.top + i;
      const int64_t end = has_row(y) ? place.end : place.begin;
      const int64_t first = (place.image * height + y) * width + place.left;  // of the row
      clear(row, place.begin * channels);
      norm.apply(x + (first + place.begin) * channels, row + place.begin * channels,
                 end - place.begin, channels);
      clear(row + end * channels, (side - end) * channels);
      for (int64_t token = place.begin; outside && token < end; token++) {
        if (outside[first + token]) clear(row + token * channels, channels);
      }
    }
    copy_patch<false>(normal, of_row, to, channels, side);
  }
};

// What a thread needs for its patches, each of which becomes a token of n channels.
template <typename Kind, typename T>
struct PatchPart {
  using F = typename Kind::Factor;

  PatchPart(const Patches& patches, int64_t n, std::uintptr_t memory)
      : most(std::max<int64_t>(
            PATCH_BYTES / (patches.room * sizeof(F)) / Kind::ROWS * Kind::ROWS, Kind::ROWS)),
        normal(take<F>(memory, patches.values())),
        values(take<F>(memory, rounded_up(most, MOST_ROWS) * patches.room)),
        reduced(take<T>(memory, most * n)),
        tokens(take<F>(memory, rounded_up(most, MOST_ROWS) * n)),
        end(memory) {}

  int64_t most;  // patches
  F* normal;     // the values of a patch, by token
  F* values;     // patches, values
  T* reduced;    // patches, n
  F* tokens;     // the same after a layer norm
  std::uintptr_t end;
};

// Compute a linear layer of the patches of a map after a layer norm. `then(part, first, count)` is
// called with the tokens that some patches from number `first` on have become.
template <typename Kind, typename T, typename Then>
void reduce_patches(const T* x, const Norm<T>& norm, const Patches& patches, const Linear<T>& layer,
                    const Panels<typename Kind::Factor>& panels, const Memory& memory,
                    int64_t threads, const Then& then) {
  const int64_t items = ceil_div(patches.count(), Kind::ROWS);
  in_threads(items, threads, FEW_PARTS, [&](int64_t first_item, int64_t end, int64_t thread) {
    const PatchPart<Kind, T> part(patches, layer.out, memory.of(thread));
    const int64_t stop = std::min(end * Kind::ROWS, patches.count());
    Kind::begin();
    for (int64_t first = first_item * Kind::ROWS; first < stop; first += part.most) {
      const int64_t count = std::min(part.most, stop - first);
      for (int64_t i = 0; i < count; i++) {
        patches.copy(first + i, x, norm, part.normal, part.values + i * patches.room);
      }
      apply<Kind>(layer, panels, part.values, count,
                  [=](int64_t patch) { return part.reduced + patch * layer.out; });
      then(part, first, count);
    }
    Kind::end();
  });
}

// Keys and values, (patches, 2 * channels): a linear layer of patches, a layer norm and a linear
// layer.
template <typename Kind, typename T>
bool keys_of_patches(const T* x, const Norm<T>& norm, const Patches& patches, const Linear<T>& sr,
                     const Norm<T>& norm_of_patches, const Linear<T>& kv, T* out,
                     int64_t threads) {
  using F = typename Kind::Factor;
  const PackedLayers<F> packed(sr, kv);
  const Memory memory(PatchPart<Kind, T>(patches, sr.out, 0).end, threads);
  if (packed.is_missing() || memory.is_missing()) return false;
  packed.pack(sr, kv, threads);
  const auto then = [&](const PatchPart<Kind, T>& part, int64_t first, int64_t count) {
    norm_of_patches.apply(part.reduced, part.tokens, count, sr.out);
    apply<Kind>(kv, packed.second, part.tokens, count,
                [=](int64_t patch) { return out + (first + patch) * kv.out; });
  };
  reduce_patches<Kind>(x, norm, patches, sr, packed.first, memory, threads, then);
  return true;
}

// Tokens, (patches, channels of the layer): a linear layer of patches and a layer norm.
template <typename Kind, typename T>
bool embed_patches(const T* x, const Patches& patches, const Linear<T>& layer, const Norm<T>& norm,
                   T* out, int64_t threads) {
  using F = typename Kind::Factor;
  const Memory memory_of_panels(Panels<F>(layer.in, layer.out, 0).end, 1);
  const Memory memory(PatchPart<Kind, T>(patches, layer.out, 0).end, threads);
  if (memory_of_panels.is_missing() || memory.is_missing()) return false;
  const Panels<F> panels(layer.in, layer.out, memory_of_panels.of(0));
  panels.pack(layer, threads);
  const auto then = [&](const PatchPart<Kind, T>& part, int64_t first, int64_t count) {
    norm.apply(part.reduced, out + first * layer.out, count, layer.out);
  };
  reduce_patches<Kind>(x, Norm<T>{}, patches, layer, panels, memory, threads, then);
  return true;
}

// GELU

// x times the share of a normal distribution that is below x. T is the type that results are stored
// in: the absolute error of the share is 2e-7 for float, and 1e-5 for bfloat16.
#ifdef __AVX512F__

// The share between 0 and |x| is a polynomial in each of 32 pieces of an axis. Right of the pieces
// it is 1/2.
template <typename T>
class Gelu {
 public:
  Gelu() {
    for (int piece = 0; piece < PIECES; piece++) interpolate(piece);
  }

  vec operator()(vec x) const {
    const vec size = absolute(x);
    const vec near = smaller(repeated(REACH), size);
    // The lowest bits are the number of the piece whose center is nearest.
    const words piece = as_words(multiply_add(near, repeated(PER_UNIT), repeated(ROUNDING)));
    vec share = coefficient(ORDER, piece);
#pragma GCC unroll 3
    for (int power = ORDER - 1; power >= 0; power--) {
      share = multiply_add(share, near, coefficient(power, piece));
    }
    // x (1/2 + share) if x > 0, else x (1/2 - share): both are x / 2 + |x| share.
    return multiply_add(size, share, x * repeated(0.5f));
  }

 private:
  static constexpr int PIECES = 2 * LANES;
  static constexpr int ORDER = std::is_same_v<T, float> ? 3 : 2;
  static constexpr float REACH = 5.4f;  // the center of the last piece; that of the first is 0
  static constexpr float PER_UNIT = (PIECES - 1) / REACH;
  static constexpr float ROUNDING = 12582912;  // 1.5 * 2^23: floats near it are integers

  alignas(64) float coefficients_[ORDER + 1][PIECES];

  vec coefficient(int power, words piece) const {
    const float* const table = coefficients_[power];
    return looked_up(load(table, LANES), load(table + LANES, LANES), piece);
  }

  // The polynomial of a piece, by Newton's interpolation in Chebyshev's nodes.
  void interpolate(int piece) {
    double node[ORDER + 1];
    double difference[ORDER + 1];
    for (int i = 0; i <= ORDER; i++) {
      node[i] = (piece + std::cos(M_PI * (i + 0.5) / (ORDER + 1)) / 2) / PER_UNIT;
      difference[i] = piece == PIECES - 1 ? 0.5 : std::erf(node[i] * M_SQRT1_2) / 2;
    }
    for (int step = 1; step <= ORDER; step++) {
      for (int i = ORDER; i >= step; i--) {
        difference[i] = (difference[i] - difference[i - 1]) / (node[i] - node[i - step]);
      }
    }
    double sum[ORDER + 1] = {};  // by powers of |x|
    for (int i = ORDER; i >= 0; i--) {
      for (int power = ORDER; power > 0; power--) {
        sum[power] = sum[power - 1] - node[i] * sum[power];
      }
      sum[0] = difference[i] - node[i] * sum[0];
    }
    for (int power = 0; power <= ORDER; power++) coefficients_[power][piece] = sum[power];
  }
};

#else

// That share is 1/2 and x times a rational function of its square, fitted for |x| <= REACH. Left
// of that it is 0.
template <typename T>
class Gelu {
 public:
  vec operator()(vec x) const {
    // NaN stays: it is the second argument.
    const vec near = larger(repeated(-REACH), smaller(repeated(REACH), x));
    const vec square = near * near;
    const vec above = polynomial(square, 2.3386783e-8f, 6.3600207e-6f, 1.6432137e-4f,
                                 4.6508492e-3f, 3.3372194e-2f, 3.9894225e-1f);
    const vec below = polynomial(square, 1.2165924e-6f, 7.2400097e-5f, 1.8589796e-3f,
                                 2.8378668e-2f, 2.5031777e-1f, 1.0f);
    const vec share = multiply_add(near, above / below, repeated(0.5f));
    return x * zero_if_less(share, x, -REACH);
  }

 private:
  static constexpr float REACH = 5.4f;
};

#endif

template <typename T>
const Gelu<T> gelu;

// Depthwise convolution

constexpr int BLOCK = BLOCK_VECTORS * LANES;  // channels that are computed at a time
constexpr int64_t SPAN = 128;                 // columns, whose rows stay in the cache

// The values of a block in float: in the order of the channels, or, of bfloat16, in that of `pairs`.
struct Block {
  vec part[BLOCK_VECTORS];

  template <typename Function>
  static Block of(Function f) {
    Block block;
    for (int i = 0; i < BLOCK_VECTORS; i++) block.part[i] = f(i);
    return block;
  }
  static Block zeros() {
    return of([](int) { return repeated(0); });
  }
};

Block load_block(const float* x, int64_t count) {
  return Block::of([=](int i) { return load(x + i * LANES, count_of_part(count, i)); });
}
void store_block(float* to, Block x, int64_t count) {
  for (int i = 0; i < BLOCK_VECTORS; i++) {
    store(to + i * LANES, x.part[i], count_of_part(count, i));
  }
}

#ifdef __AVX512BF16__
Block load_block(const bfloat16* x, int64_t count) {
  const words values = load_all(x, count);
  return Block::of([=](int i) { return floats(values, i); });
}
void store_block(bfloat16* to, Block x, int64_t count) {
  store_all(to, joined(x.part[0], x.part[1]), count);
}
#endif

// The values of a block in three rows, of which the first and the last may be null: zeros. Finite
// weights of these add nothing.
template <typename T>
struct Column {
  Block row[3];

  static Column of(const T* const rows[3], int64_t place, int64_t count) {
    Column column;
    for (int i = 0; i < 3; i++) {
      column.row[i] = rows[i] ? load_block(rows[i] + place, count) : Block::zeros();
    }
    return column;
  }

  void multiply_add(Block& sum, const Column& factor) const {
    for (int i = 0; i < 3; i++) {
      sum = Block::of([&](int part) {
        return ::multiply_add(row[i].part[part], factor.row[i].part[part], sum.part[part]);
      });
    }
  }
};

#ifdef __AVX512BF16__
// The first two rows are paired.
template <>
struct Column<bfloat16> {
  words pair[BLOCK_VECTORS];
  Block last;

  static Column of(const bfloat16* const rows[3], int64_t place, int64_t count) {
    const words first = rows[0] ? load_all(rows[0] + place, count) : no_words();
    const words second = load_all(rows[1] + place, count);
    Column column;
    for (int i = 0; i < BLOCK_VECTORS; i++) column.pair[i] = pairs(first, second, i);
    column.last = rows[2] ? load_block(rows[2] + place, count) : Block::zeros();
    return column;
  }

  void multiply_add(Block& sum, const Column& factor) const {
    for (int i = 0; i < BLOCK_VECTORS; i++) {
      add_products(sum.part[i], pair[i], factor.pair[i]);
      sum.part[i] = ::multiply_add(last.part[i], factor.last.part[i], sum.part[i]);
    }
  }
};
#endif

// What becomes of the sums of a convolution: their GELU,
template <typename T>
struct ThenGelu {
  Block operator()(Block sum, int64_t, int64_t) const {
    return Block::of([&](int i) { return gelu<T>(sum.part[i]); });
  }
  ThenGelu from(int64_t) const { return *this; }
};

// or their sum with the values of another map, of which `row` is the same row.
template <typename T>
struct ThenAdd {
  const T* row;
  Block operator()(Block sum, int64_t place, int64_t count) const {
    const Block x = load_block(row + place, count);
    return Block::of([&](int i) { return sum.part[i] + x.part[i]; });
  }
  ThenAdd from(int64_t channel) const { return {row + channel}; }
};

// `count` channels of the columns `start` to `stop` of a row. `rows` are those above, here and
// below, or null; n channels are between columns, and `of_weights` between the 9 weights of one.
template <typename T, typename Then>
inline __attribute__((always_inline)) void convolve_columns(
    const T* const rows[3], const T* weights, const T* bias, T* out, int64_t start, int64_t stop,
    int64_t width, int64_t n, int64_t of_weights, int64_t count, const Then& then) {
  Column<T> kernel[3];
  for (int i = 0; i < 3; i++) {
    const T* const column = weights + i * of_weights;
    const T* const kernel_rows[3] = {column, column + 3 * of_weights, column + 6 * of_weights};
    kernel[i] = Column<T>::of(kernel_rows, 0, count);
  }
  const Block first_sum = load_block(bias, count);
  // A column is part of three results: the one to the left, which it completes, its own, and the
  // one to the right.
  Block left = first_sum;
  Block here = first_sum;
  for (int64_t column = std::max<int64_t>(start - 1, 0); column <= stop; column++) {
    Block right = first_sum;
    if (column < width) {
      const auto x = Column<T>::of(rows, column * n, count);
      x.multiply_add(left, kernel[2]);
      x.multiply_add(here, kernel[1]);
      x.multiply_add(right, kernel[0]);
    }
    if (column > start) {
      const int64_t place = (column - 1) * n;
      store_block(out + place, then(left, place, count), count);
    }
    left = here;
    here = right;
  }
}

// `channels` of a row; see above.
//
// Not inlined: among other values the compiler keeps some of the weights in memory.
template <typename T, typename Then>
__attribute__((noinline)) void convolve_row(const T* above, const T* row, const T* below,
                                            const T* weights, const T* bias, T* out, int64_t width,
                                            int64_t n, int64_t of_weights, int64_t channels,
                                            const Then& then) {
  for (int64_t start = 0; start < width; start += SPAN) {
    const int64_t stop = std::min(start + SPAN, width);
    each_vector<BLOCK>(channels, [&](int64_t channel, int64_t count) {
      const T* const rows[3] = {
          above ? above + channel : nullptr,
          row + channel,
          below ? below + channel : nullptr,
      };
      convolve_columns(rows, weights + channel, bias + channel, out + channel, start, stop, width,
                       n, of_weights, count, then.from(channel));
    });
  }
}

// The rows `top` to `bottom` of maps (images, height, width, n). `then(i)` is what becomes of row i
// of the results.
template <typename T, typename Then>
void convolve(const T* x, const T* weights, const T* bias, T* out, int64_t images, int64_t height,
              int64_t width, int64_t n, int64_t top, int64_t bottom, int64_t threads, Then then) {
  const int64_t of_row = width * n;
  const int64_t results = bottom - top;  // rows of an image
  in_threads(images * results, threads, PARTS, [=](int64_t first_row, int64_t end, int64_t) {
    for (int64_t i = first_row; i < end; i++) {
      const int64_t y = top + i % results;
      const T* const row = x + (i / results * height + y) * of_row;
      convolve_row(y > 0 ? row - of_row : nullptr, row, y + 1 < height ? row + of_row : nullptr,
                   weights, bias, out + i * of_row, width, n, n, n, then(i));
    }
  });
}

// MLP
//
// Of the wide map between its layers a thread computes some rows, and of these some channels at a
// time, so that they stay in its cache.

constexpr int64_t PART_BYTES = 512 << 10;  // of the tokens that are computed at a time
constexpr int64_t WIDE = 128;              // channels of the wide map that are computed at a time
constexpr int64_t WIDE_CONV = 64;          // with a convolution, which needs more tokens

// A layer norm and two linear layers.
template <typename T>
struct NormMLP {
  Norm<T> norm;
  Linear<T> fc1, fc2;

  int64_t channels() const { return fc1.in; }
  int64_t width() const { return fc1.out; }  // of the wide map
};

// The sums of two branches, rounded as in memory.
template <typename T>
void add_branches(const T* x, const T* branch, T* out, int64_t values) {
  each_vector(values, [=](int64_t i, int64_t count) {
    store(out + i, load(x + i, count) + load(branch + i, count), count);
  });
}

// Begin the sums (tokens, channels up to a whole panel) with the tokens and the last bias.
template <typename T>
void start_sums(const NormMLP<T>& layers, const T* x, float* sums, int64_t tokens) {
  const int64_t n = layers.channels();
  for (int64_t token = 0; token < tokens; token++) {
    each_vector(n, [&](int64_t i, int64_t count) {
      const vec sum = load(x + token * n + i, count) + load(layers.fc2.bias + i, count);
      store(sums + token * rounded_up(n, COLUMNS) + i, sum, count);
    });
  }
}

template <typename T>
void store_sums(const NormMLP<T>& layers, const float* sums, T* out, int64_t tokens) {
  const int64_t n = layers.channels();
  for (int64_t token = 0; token < tokens; token++) {
    each_vector(n, [&](int64_t i, int64_t count) {
      const vec sum = load(sums + token * rounded_up(n, COLUMNS) + i, count);
      store(out + token * n + i, sum, count);
    });
  }
}

// Channels `start` to `start + count` of the wide map of normalized tokens, after an activation;
// `stride` channels are between tokens.
template <typename Kind, typename T, typename F, typename Activation>
void expand(const NormMLP<T>& layers, const Panels<F>& panels, const F* x, int64_t tokens,
            int64_t start, int64_t count, F* wide, int64_t stride, const Activation& activation) {
  const int64_t n = layers.channels();
  multiply_tokens<Kind>(
      x, n, tokens, panels, start, start + count, 0, n, [=](int64_t token, int64_t column) {
        const T* const bias = layers.fc1.bias + column;
        const int64_t there = start + count - column;
        const vec bias_a = load(bias, count_of_part(there, 0));
        const vec bias_b = load(bias + LANES, count_of_part(there, 1));
        F* const to = wide + token * stride + column - start;
        return [=](int64_t r, vec a, vec b) {
          store_both(to + r * stride, activation(a + bias_a), activation(b + bias_b));
        };
      });
}

// Add the products of channels `start` to `start + count` of the wide map to the sums.
template <typename Kind, typename F>
void contract(const Panels<F>& panels, const F* wide, int64_t stride, int64_t tokens,
              int64_t start, int64_t count, int64_t channels, float* sums) {
  const int64_t columns = rounded_up(channels, COLUMNS);
  multiply_tokens<Kind>(
      wide, stride, tokens, panels, 0, channels, start, count,
      [=](int64_t token, int64_t column) {
        float* const first = sums + token * columns + column;
        return [=](int64_t r, vec a, vec b) {
          float* const to = first + r * columns;
          store_both(to, a + load(to, LANES), b + load(to + LANES, LANES));
        };
      });
}

// What a thread computes for some tokens.
template <typename F>
struct Part {
  Part(int64_t tokens, int64_t channels, std::uintptr_t memory)
      : normal(take<F>(memory, tokens * channels)),
        wide(take<F>(memory, tokens * WIDE)),
        sums(take<float>(memory, tokens * rounded_up(channels, COLUMNS))),
        end(memory) {}

  F* normal;    // tokens, channels
  F* wide;      // tokens, WIDE
  float* sums;  // tokens, channels up to a whole panel
  std::uintptr_t end;
};

// Of a part, a multiple of ROWS.
template <typename Kind>
int64_t tokens_of_part(int64_t tokens, int64_t channels, int64_t threads) {
  const int64_t of_part = rounded_up(ceil_div(tokens, all_parts(threads, PARTS)), Kind::ROWS);
  const int64_t fitting = PART_BYTES / Part<typename Kind::Factor>(1, channels, 0).end;
  return std::clamp<int64_t>(fitting / Kind::ROWS * Kind::ROWS, Kind::ROWS, of_part);
}

// The sum of x and another branch, plus the MLP of the normalized sum, (tokens, channels).
template <typename Kind, typename T>
bool mlp(const T* x, const T* branch, const NormMLP<T>& layers, T* out, int64_t tokens,
         int64_t threads) {
  using F = typename Kind::Factor;
  const int64_t n = layers.channels();
  const int64_t most = tokens_of_part<Kind>(tokens, n, threads);
  const PackedLayers<F> packed(layers.fc1, layers.fc2);
  const Memory memory(Part<F>(most, n, 0).end, threads);
  if (packed.is_missing() || memory.is_missing()) return false;
  packed.pack(layers.fc1, layers.fc2, threads);
  const auto activation = [](vec sum) { return gelu<F>(sum); };
  const auto compute = [&](int64_t first_item, int64_t end, int64_t thread) {
    const Part<F> part(most, n, memory.of(thread));
    const int64_t stop = std::min(end * Kind::ROWS, tokens);
    Kind::begin();
    for (int64_t token = first_item * Kind::ROWS; token < stop; token += most) {
      const int64_t count = std::min(most, stop - token);
      T* const here = out + token * n;
      add_branches(x + token * n, branch + token * n, here, count * n);
      layers.norm.apply(here, part.normal, count, n);
      start_sums(layers, here, part.sums, count);
      for (int64_t start = 0; start < layers.width(); start += WIDE) {
        const int64_t channels = std::min(WIDE, layers.width() - start);
        expand<Kind>(layers, packed.first, part.normal, count, start, channels, part.wide, WIDE,
                     activation);
        contract<Kind>(packed.second, part.wide, WIDE, count, start, channels, n, part.sums);
      }
      store_sums(layers, part.sums, here, count);
    }
    Kind::end();
  };
  in_threads(ceil_div(tokens, Kind::ROWS), threads, PARTS, compute);
  return true;
}

// MLP with a depthwise convolution
//
// A thread goes down the rows of a map, some at a time. Their results need the rows of the wide map
// around them: the two that the next rows need, too, are kept.

// The convolution, and the maps of tokens that it sees.
template <typename T>
struct MapConvolution {
  const T* weights;  // 9, channels of the wide map; the caller's are channels, 9
  const T* bias;
  const bool* outside;  // images, height, width: whether the wide map is 0 there; or null
  std::int32_t relu;    // whether there is one before the convolution
  int64_t images, height, width;
};

// What a thread computes for some rows of `width` tokens.
template <typename T, typename F>
struct RowsPart {
  RowsPart(int64_t rows, int64_t width, int64_t channels, int64_t wide_channels,
           std::uintptr_t memory)
      : tokens(take<T>(memory, width * channels)),
        normal(take<F>(memory, ((rows + 2) * width + MOST_ROWS) * channels)),
        wide(take<F>(memory, (rows + 2) * width * WIDE_CONV)),
        kept(take<F>(memory, 2 * width * rounded_up(wide_channels, WIDE_CONV))),
        convolved(take<F>(memory, (rows * width + MOST_ROWS) * WIDE_CONV)),
        sums(take<float>(memory, rows * width * rounded_up(channels, COLUMNS))),
        end(memory) {}

  T* tokens;     // tokens of the last row that was read, channels
  F* normal;     // tokens, channels
  F* wide;       // tokens, WIDE_CONV
  F* kept;       // some wide channels, tokens of two rows, WIDE_CONV
  F* convolved;  // tokens, WIDE_CONV
  float* sums;   // tokens, channels up to a whole panel
  std::uintptr_t end;
};

// The rows `top` to `bottom` of a map (height, width, channels), at most `most` at a time; see
// `conv_mlp`. `continues`: the rows before were computed with the same part.
template <typename Kind, typename T, typename F>
void conv_mlp_of_rows(const T* x, const T* branch, const NormMLP<T>& layers,
                      const PackedLayers<F>& packed, const MapConvolution<F>& conv, T* out,
                      int64_t top, int64_t bottom, int64_t most, const RowsPart<T, F>& part,
                      bool continues) {
  const int64_t of_row = conv.width * layers.channels();
  const int64_t of_sums_row = conv.width * rounded_up(layers.channels(), COLUMNS);
  const int64_t of_wide_row = conv.width * WIDE_CONV;
  const bool has_relu = conv.relu;
  const auto activation = [=](vec sum) {
    return has_relu ? larger(repeated(0), sum) : sum;  // NaN stays
  };
  const int64_t turns = ceil_div(bottom - top, most);
  for (int64_t turn = 0; turn < turns; turn++) {
    const int64_t start = top + (bottom - top) * turn / turns;
    const int64_t stop = top + (bottom - top) * (turn + 1) / turns;
    const int64_t near = std::max<int64_t>(start - 1, 0);  // the first row of the wide map
    const int64_t end = std::min(stop + 1, conv.height);
    const bool has_kept = start > 0 && (turn > 0 || continues);
    const int64_t fresh = has_kept ? start + 1 : near;  // the first that is not kept
    const int64_t fresh_tokens = (end - fresh) * conv.width;
    const int64_t tokens = (stop - start) * conv.width;
    if (has_kept) start_sums(layers, part.tokens, part.sums, conv.width);
    for (int64_t y = fresh; y < end; y++) {
      add_branches(x + y * of_row, branch + y * of_row, part.tokens, of_row);
      layers.norm.apply(part.tokens, part.normal + (y - fresh) * of_row, conv.width,
                        layers.channels());
      if (start <= y && y < stop) {
        start_sums(layers, part.tokens, part.sums + (y - start) * of_sums_row, conv.width);
      }
    }
    for (int64_t channel = 0; channel < layers.width(); channel += WIDE_CONV) {
      const int64_t count = std::min(WIDE_CONV, layers.width() - channel);
      F* const kept = part.kept + 2 * conv.width * channel;
      const auto row_at = [=](int64_t y) {
        return y < fresh ? kept + (y - near) * of_wide_row : part.wide + (y - fresh) * of_wide_row;
      };
      expand<Kind>(layers, packed.first, part.normal, fresh_tokens, channel, count, part.wide,
                   WIDE_CONV, activation);
      if (conv.outside) {
        const bool* const outside = conv.outside + fresh * conv.width;
        for (int64_t i = 0; i < fresh_tokens; i++) {
          if (outside[i]) std::memset(part.wide + i * WIDE_CONV, 0, WIDE_CONV * sizeof(F));
        }
      }
      for (int64_t y = start; y < stop; y++) {
        convolve_row(y > 0 ? row_at(y - 1) : nullptr, row_at(y),
                     y + 1 < conv.height ? row_at(y + 1) : nullptr, conv.weights + channel,
                     conv.bias + channel, part.convolved + (y - start) * of_wide_row, conv.width,
                     WIDE_CONV, layers.width(), count, ThenGelu<F>());
      }
      if (stop < conv.height) {
        for (int i = 0; i < 2; i++) {
          std::memcpy(kept + i * of_wide_row, row_at(stop - 1 + i), of_wide_row * sizeof(F));
        }
      }
      contract<Kind>(packed.second, part.convolved, WIDE_CONV, tokens, channel, count,
                     layers.channels(), part.sums);
    }
    store_sums(layers, part.sums, out + start * of_row, tokens);
  }
}

// Rows of a map that a thread computes at a time.
template <typename T, typename F>
int64_t rows_of_part(const NormMLP<T>& layers, const MapConvolution<T>& conv, int64_t threads) {
  const int64_t of_part = ceil_div(conv.images * conv.height, all_parts(threads, PARTS));
  const int64_t of_token = (layers.channels() + 2 * WIDE_CONV) * sizeof(F) +
                           rounded_up(layers.channels(), COLUMNS) * sizeof(float);
  return std::clamp<int64_t>(PART_BYTES / (of_token * conv.width), 1, of_part);
}

// The sum of x and another branch, plus the MLP of the normalized sum, (images, height, width,
// channels).
template <typename Kind, typename T>
bool conv_mlp(const T* x, const T* branch, const NormMLP<T>& layers, const MapConvolution<T>& conv,
              T* out, int64_t threads) {
  using F = typename Kind::Factor;
  const int64_t rows = conv.images * conv.height;
  const int64_t most = rows_of_part<T, F>(layers, conv, threads);
  const auto part_at = [&](std::uintptr_t memory) {
    return RowsPart<T, F>(most, conv.width, layers.channels(), layers.width(), memory);
  };
  const PackedLayers<F> packed(layers.fc1, layers.fc2);
  const Memory memory_of_convolution(10 * layers.width() * sizeof(F), 1);
  const Memory memory(part_at(0).end, threads);
  if (packed.is_missing() || memory_of_convolution.is_missing() || memory.is_missing()) {
    return false;
  }
  packed.pack(layers.fc1, layers.fc2, threads);
  F* const weights = reinterpret_cast<F*>(memory_of_convolution.of(0));
  F* const bias = weights + 9 * layers.width();
  for (int64_t channel = 0; channel < layers.width(); channel++) {
    for (int64_t k = 0; k < 9; k++) {
      copy_values(conv.weights + channel * 9 + k, weights + k * layers.width() + channel, 1);
    }
  }
  copy_values(conv.bias, bias, layers.width());
  const auto compute = [&](int64_t first_row, int64_t end_row, int64_t thread, bool continues) {
    const RowsPart<T, F> part = part_at(memory.of(thread));
    Kind::begin();
    int64_t row = first_row;
    while (row < end_row) {
      const int64_t image = row / conv.height;
      const int64_t top = row % conv.height;
      const int64_t bottom = std::min(conv.height, top + end_row - row);
      const int64_t before = image * conv.height * conv.width;  // tokens of earlier images
      const int64_t values = before * layers.channels();
      const bool* const outside = conv.outside ? conv.outside + before : nullptr;
      const MapConvolution<F> here = {weights,   bias, outside,     conv.relu,
                                      conv.images, conv.height, conv.width};
      conv_mlp_of_rows<Kind>(x + values, branch + values, layers, packed, here, out + values, top,
                             bottom, most, part, continues);
      row += bottom - top;
    }
    Kind::end();
  };
  in_order(rows, threads, PARTS, compute);
  return true;
}

}  // namespace

extern "C" {

int kernels_fit_processor() { return fits_processor(); }

#define DEFINE(T, name)                                                                          \
  void layer_norm_##name(const T* x, const Norm<T>* norm, T* out, int64_t rows, int64_t n,       \
                         int64_t threads) {                                                      \
    layer_norm(x, *norm, out, rows, n, threads);                                                 \
  }                                                                                              \
  void convolve_gelu_##name(const T* x, const T* weights, const T* bias, T* out, int64_t images, \
                            int64_t height, int64_t width, int64_t n, int64_t top,               \
                            int64_t bottom, int64_t threads) {                                   \
    convolve(x, weights, bias, out, images, height, width, n, top, bottom, threads,              \
             [](int64_t) { return ThenGelu<T>(); });                                          \
  }                                                                                              \
  void convolve_add_##name(const T* x, const T* weights, const T* bias, const T* others, T* out, \
                           int64_t images, int64_t height, int64_t width, int64_t n,             \
                           int64_t threads) {                                                    \
    convolve(x, weights, bias, out, images, height, width, n, 0, height, threads,                \
             [=](int64_t row) { return ThenAdd<T>{others + row * width * n}; });                 \
  }                                                                                              \
  void split_patches_##name(T* map, T* patches, int64_t images, int64_t height, int64_t width,   \
                            int64_t n, int64_t side, int64_t threads) {                          \
    copy_patches<false>(map, patches, images, height, width, n, side, threads);                  \
  }                                                                                              \
  void join_patches_##name(T* map, T* patches, int64_t images, int64_t height, int64_t width,    \
                           int64_t n, int64_t side, int64_t threads) {                           \
    copy_patches<true>(map, patches, images, height, width, n, side, threads);                   \
  }

#define DEFINE_PRODUCTS(T, Kind, name)                                                           \
  bool attention_##name(const Heads<const T>* queries, const Heads<const T>* keys,               \
                        const Heads<const T>* values, const Heads<T>* out, const float* bias,    \
                        const Sizes* sizes, float scale, int64_t threads) {                      \
    return attention<Kind>(*queries, *keys, *values, *out, bias, *sizes, scale, threads);        \
  }                                                                                              \
  bool window_attention_##name(const T* x, const Norm<T>* norm, const float* bias,               \
                               const Linear<T>* qkv, const Linear<T>* proj, T* out,              \
                               const AttentionSizes* sizes, int64_t threads) {                   \
    return window_attention<Kind>(x, *norm, bias, *qkv, *proj, out, *sizes, threads);            \
  }                                                                                              \
  bool global_attention_##name(const T* x, const Norm<T>* norm, const T* kv, const float* bias,  \
                               const Linear<T>* q, const Linear<T>* proj, T* out,                \
                               const AttentionSizes* sizes, int64_t threads) {                   \
    return global_attention<Kind>(x, *norm, kv, bias, *q, *proj, out, *sizes, threads);          \
  }                                                                                              \
  bool keys_of_patches_##name(const T* x, const Norm<T>* norm, const Patches* patches,           \
                              const Linear<T>* sr, const Norm<T>* norm_of_patches,               \
                              const Linear<T>* kv, T* out, int64_t threads) {                    \
    return keys_of_patches<Kind>(x, *norm, *patches, *sr, *norm_of_patches, *kv, out, threads);  \
  }                                                                                              \
  bool embed_patches_##name(const T* x, const Patches* patches, const Linear<T>* layer,          \
                            const Norm<T>* norm, T* out, int64_t threads) {                      \
    return embed_patches<Kind>(x, *patches, *layer, *norm, out, threads);                        \
  }                                                                                              \
  bool mlp_##name(const T* x, const T* branch, const NormMLP<T>* layers, T* out, int64_t tokens, \
                  int64_t threads) {                                                             \
    return mlp<Kind>(x, branch, *layers, out, tokens, threads);                                  \
  }                                                                                              \
  bool conv_mlp_##name(const T* x, const T* branch, const NormMLP<T>* layers,                    \
                       const MapConvolution<T>* conv, T* out, int64_t threads) {                 \
    return conv_mlp<Kind>(x, branch, *layers, *conv, out, threads);                              \
  }

DEFINE(float, float32)
DEFINE_PRODUCTS(float, Vectors<float>, float32)

#ifdef __AVX512BF16__
int kernels_have_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }
int kernels_have_fast_pairs() { return multiplies_pairs_fast(); }
int kernels_have_tiles() { return has_tiles(); }

DEFINE(bfloat16, bfloat16)
DEFINE_PRODUCTS(bfloat16, Vectors<float>, bfloat16)
DEFINE_PRODUCTS(bfloat16, Vectors<bfloat16>, bfloat16_pairs)
#ifdef HAS_TILES
DEFINE_PRODUCTS(bfloat16, Tiles, bfloat16_tiles)
#endif
#else
int kernels_have_bfloat16() { return 0; }
#endif
}
