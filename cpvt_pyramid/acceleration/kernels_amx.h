// How kernels.cpp multiplies bfloat16 on processors with AMX.

#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels_avx512.h"

namespace {

// By AMX, whose tiles are 16 rows of 64 bytes. All 32 rows are read and computed, whatever they
// are. The number of groups is a multiple of 16.
//
// g++ does not know that these instructions read memory.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define HAS_TILES
struct Tiles {
  using Factor = bfloat16;
  static constexpr int64_t ROWS = 32;

  static void in_memory(const void* x) { asm volatile("" : : "r"(x) : "memory"); }

  __attribute__((target("amx-tile,amx-bf16"))) static void begin() {
    alignas(64) std::uint8_t settings[64] = {1};  // the only palette
    for (int tile = 0; tile < 8; tile++) {
      settings[16 + 2 * tile] = 64;  // bytes of a row
      settings[48 + tile] = 16;      // rows
    }
    in_memory(settings);
    _tile_loadconfig(settings);
  }
  __attribute__((target("amx-tile,amx-bf16"))) static void end() { _tile_release(); }
  __attribute__((target("amx-tile,amx-bf16"))) static void multiply(
      int64_t, const bfloat16* left, int64_t stride, const bfloat16* panel, int64_t groups,
      vec out[][2]) {
    in_memory(left);
    in_memory(panel);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t left_bytes = stride * sizeof *left;
    constexpr int64_t panel_bytes = COLUMNS * sizeof(float);
    for (int64_t g = 0; g < groups; g += LANES) {
      _tile_loadd(4, left + g * 2, left_bytes);
      _tile_loadd(6, panel + g * COLUMNS * 2, panel_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, panel + (g * COLUMNS + LANES) * 2, panel_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, left + 16 * stride + g * 2, left_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    constexpr int64_t out_bytes = 2 * sizeof(vec);
    _tile_stored(0, &out[0][0], out_bytes);
    _tile_stored(1, &out[0][1], out_bytes);
    _tile_stored(2, &out[16][0], out_bytes);
    _tile_stored(3, &out[16][1], out_bytes);
  }
};

// Whether this processor has AMX, and Linux lets this process use it.
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  constexpr unsigned TILE = 1u << 24, BF16 = 1u << 22;  // as Intel's manual numbers them
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;       // ARCH_REQ_XCOMP_PERM
  return (d & TILE) && (d & BF16) && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#else
bool has_tiles() { return false; }
#endif

}  // namespace
