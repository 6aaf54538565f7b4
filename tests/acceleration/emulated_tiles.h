// Tiles (AMX) in plain C++, for processors without them, after Intel's Software Developer's Manual,
// volume 2, LDTILECFG to TDPBF16PS. Included before kernels.cpp, whose instructions become calls.

#include <cpuid.h>
#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace emulated {

struct Configuration {
  std::uint8_t palette;
  std::uint8_t start_row;
  std::uint8_t reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

thread_local Configuration configuration;
thread_local std::uint8_t tiles[8][16][64];

std::atomic<long> products{0};
std::atomic<long> faults{0};  // of which the processor would end the process
bool broken = false;

void check(bool holds) { faults += !holds; }

void load_configuration(const void* from) {
  std::memcpy(&configuration, from, 64);
  std::memset(tiles, 0, sizeof tiles);
  if (configuration.palette == 0) {
    configuration = {};
    return;
  }
  check(configuration.palette == 1 && configuration.start_row == 0);
  for (const std::uint8_t byte : configuration.reserved) check(byte == 0);
  for (int tile = 0; tile < 16; tile++) {
    check(configuration.row_bytes[tile] <= (tile < 8 ? 64 : 0));
    check(configuration.rows[tile] <= (tile < 8 ? 16 : 0));
    check((configuration.rows[tile] == 0) == (configuration.row_bytes[tile] == 0));
  }
}

void store_configuration(void* to) { std::memcpy(to, &configuration, 64); }

bool is_configured(int tile) {
  return configuration.palette == 1 && configuration.rows[tile] && configuration.row_bytes[tile];
}

void zero(int tile) {
  check(is_configured(tile));
  std::memset(tiles[tile], 0, sizeof tiles[tile]);
}

void load(int tile, const void* from, long stride) {
  check(is_configured(tile));
  std::memset(tiles[tile], 0, sizeof tiles[tile]);
  for (int row = 0; row < configuration.rows[tile]; row++) {
    const char* const source = static_cast<const char*>(from) + row * stride;
    std::memcpy(tiles[tile][row], source, configuration.row_bytes[tile]);
  }
}

void store(int tile, void* to, long stride) {
  check(is_configured(tile));
  for (int row = 0; row < configuration.rows[tile]; row++) {
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row],
                configuration.row_bytes[tile]);
  }
}

float as_float(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

void multiply(int sums, int left, int right) {
  products++;
  check(sums != left && sums != right && left != right);
  for (const int tile : {sums, left, right}) check(is_configured(tile));
  check(configuration.rows[left] == configuration.rows[sums]);
  check(configuration.row_bytes[right] == configuration.row_bytes[sums]);
  check(configuration.row_bytes[left] / 4 == configuration.rows[right]);
  for (int row = 0; row < configuration.rows[sums]; row++) {
    float total[16];
    std::memcpy(total, tiles[sums][row], sizeof total);
    for (int group = 0; group < configuration.rows[right]; group++) {
      std::uint16_t pair[2];
      std::memcpy(pair, tiles[left][row] + 4 * group, sizeof pair);
      for (int column = 0; column < configuration.row_bytes[right] / 4; column++) {
        std::uint16_t other[2];
        std::memcpy(other, tiles[right][group] + 4 * column, sizeof other);
        total[column] += as_float(pair[0]) * as_float(other[0]);
        total[column] += as_float(pair[1]) * as_float(other[1]);
      }
    }
    if (broken) total[0] = 1;
    std::memcpy(tiles[sums][row], total, sizeof total);
  }
}

// Leaf 7 of a processor that has AMX.
bool in_bfloat16 = true;

int cpuid(unsigned, unsigned, unsigned*, unsigned*, unsigned*, unsigned* d) {
  *d = 1u << 24 | unsigned{in_bfloat16} << 22;
  return 1;
}

const Configuration of_others = {1, 0, {}, {32, 16, 32}, {4, 2, 8}};

}  // namespace emulated

extern "C" {
long tile_products() { return emulated::products; }
long tile_faults() { return emulated::faults; }
int has_configuration() { return emulated::configuration.palette; }
void configure_as_others() { emulated::load_configuration(&emulated::of_others); }
int is_configured_as_others() {
  return std::memcmp(&emulated::configuration, &emulated::of_others, 64) == 0;
}
void release_tiles() { emulated::configuration = {}; }
void break_tiles(int broken) { emulated::broken = broken; }
void multiply_bfloat16(int possible) { emulated::in_bfloat16 = possible; }
}

#define __get_cpuid_count emulated::cpuid
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_configuration
#define _tile_storeconfig emulated::store_configuration
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
