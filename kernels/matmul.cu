// Multiplications by sparse weights that also read a dense matrix's bytes: the arithmetic is exact and the reference's, the
// memory traffic that of the charged geometry. All blocks share the bytes; a warp takes 32 outputs of a few rows.

#include "common.cuh"

#define QUANTISE_GROUP 128
#define RING 8
#define LIVE 2048
#define WARP 32
// Rows that a warp takes at once.
#define TILE_ROWS 8
// Blocks that a multiprocessor has room for: two launches of two, as streams overlap.
#define RESIDENT 4

// One output's stored values, in ascending input order; the first, as most have no other, is at hand before the input is.
struct Stored {
  u32 begin, end, column;
  float value;

  __device__ __forceinline__ void find(const Weight &weight, u32 output) {
    begin = end = 0;
    if (output >= weight.rows) return;
    begin = weight.start[output];
    end = weight.start[output + 1];
  }

  __device__ __forceinline__ void fetch(const Weight &weight) {
    if (begin >= end) return;
    column = weight.column[begin];
    value = weight.value[begin];
  }

  // `sums[row]` of `rows` rows, from zero; `input(row, column)`.
  template <class Input>
  __device__ __forceinline__ void multiply(const Weight &weight, u32 rows, float *sums, Input input) const {
#pragma unroll
    for (u32 row = 0; row < TILE_ROWS; ++row) sums[row] = 0.f;
    if (begin >= end) return;
#pragma unroll
    for (u32 row = 0; row < TILE_ROWS; ++row) {
      if (row < rows) sums[row] = multiply_add(0.f, value, input(row, column));
    }
#pragma unroll 1
    for (u32 i = begin + 1; i < end; ++i) {
      u32 from = weight.column[i];
      float by = weight.value[i];
#pragma unroll
      for (u32 row = 0; row < TILE_ROWS; ++row) {
        if (row < rows) sums[row] = multiply_add(sums[row], by, input(row, from));
      }
    }
  }
};

// The bytes of an operand from `offset` of a row on; regions are far shorter than 4 GiB.
template <class T>
__device__ __forceinline__ T *at(const Rows &rows, u32 row, u32 element) {
  return reinterpret_cast<T *>(rows.base + (row * static_cast<u32>(rows.stride) + element * static_cast<u32>(sizeof(T))));
}

// Stores `value(old, sum)` at `place(row, output, old)`, unless that is null, for this warp's tiles: `old` is what
// `before(row, output)` loads, and `sum_up(stored, first, count, output, sums)` multiplies. What a tile waits for (where its
// stored values are, these, its inputs) comes while ballast streams. All of a tile's loads come before its first store, as
// the compiler must take them for the same bytes.
template <class Before, class Sum, class Place, class Value>
__device__ __forceinline__ void each_output(const Weight &weight, u32 outputs, u32 rows, u32 *never, Before before, Sum sum_up,
                                            Place place, Value value) {
  u32 lane = threadIdx.x % WARP, across = (outputs + WARP - 1) / WARP, warps = gridDim.x * (BALLAST_THREADS / WARP);
  u32 tiles = across * ((rows + TILE_ROWS - 1) / TILE_ROWS), tile = blockIdx.x + threadIdx.x / WARP * gridDim.x;
  u32 output = tile % across * WARP + lane;
  Stored stored;
  stored.find(weight, tile < tiles ? output : weight.rows);
  Ballast ballast;
  ballast.begin();
  ballast.tiles(weight, 1);
  stored.fetch(weight);
  ballast.tiles(weight, 1);
  while (tile < tiles) {
    u32 first = tile / across * TILE_ROWS, count = min(rows - first, TILE_ROWS);
    if (output < outputs) {
      u32 old[TILE_ROWS];
      float sums[TILE_ROWS];
#pragma unroll
      for (u32 row = 0; row < TILE_ROWS; ++row) {
        if (row < count) old[row] = before(first + row, output);
      }
      sum_up(stored, first, count, output, sums);
#pragma unroll
      for (u32 row = 0; row < TILE_ROWS; ++row) {
        auto *to = place(first + row, output, old[row]);
        if (row < count && to) *to = value(old[row], sums[row]);
      }
    }
    tile += warps;
    if (tile >= tiles) break;
    output = tile % across * WARP + lane;
    stored.find(weight, output);
    stored.fetch(weight);
  }
  ballast.rest(weight, never);
}

extern "C" __global__ void __launch_bounds__(BALLAST_THREADS, RESIDENT) matmul(Rows source, Rows target, Weight weight) {
  each_output(
      weight, target.len / 2, target.rows, target.at<u32>(0), [&](u32, u32) { return 0u; },
      [&](const Stored &stored, u32 first, u32 count, u32, float *sums) {
        stored.multiply(weight, count, sums, [&](u32 row, u32 i) { return bf16_to_float(*at<u16>(source, first + row, i)); });
      },
      [&](u32 row, u32 output, u32) { return at<u16>(target, row, output); },
      [&](u32, float sum) { return float_to_bf16(sum); });
}

extern "C" __global__ void __launch_bounds__(BALLAST_THREADS, RESIDENT) query_matmul(Rows codes, Rows scales, Rows target,
                                                                                    Weight weight) {
  each_output(
      weight, target.len / 2, target.rows, target.at<u32>(0), [&](u32, u32) { return 0u; },
      [&](const Stored &stored, u32 first, u32 count, u32, float *sums) {
        stored.multiply(weight, count, sums, [&](u32 row, u32 i) {
          return __fmul_rn(e4m3_to_float(*at<u8>(codes, first + row, i)), *at<float>(scales, first + row, i / QUANTISE_GROUP));
        });
      },
      [&](u32 row, u32 output, u32) { return at<u16>(target, row, output); },
      [&](u32, float sum) { return float_to_bf16(sum); });
}

// A compressor's ring slot, f32; rings are pages of slots.
extern "C" __global__ void __launch_bounds__(BALLAST_THREADS, RESIDENT) compress(Rows hidden, Rows positions, Rows pages,
                                                                                Rows ring, Weight weight) {
  u32 slot_bytes = ring.len / RING;
  const u32 none = 0xffffffff;
  each_output(
      weight, slot_bytes / 4, hidden.rows, ring.at<u32>(0),
      [&](u32 row, u32) {
        int position = *at<int>(positions, row, 0), page = *at<int>(pages, row, 0);
        u32 slot = page * static_cast<u32>(ring.stride) + (position & (RING - 1)) * slot_bytes;
        return page >= 0 && page < ring.rows ? slot : none;
      },
      [&](const Stored &stored, u32 first, u32 count, u32, float *sums) {
        stored.multiply(weight, count, sums, [&](u32 row, u32 i) { return bf16_to_float(*at<u16>(hidden, first + row, i)); });
      },
      [&](u32, u32 output, u32 slot) { return slot == none ? nullptr : reinterpret_cast<float *>(ring.base + slot) + output; },
      [&](u32, float sum) { return sum; });
}

// x + W attention, and x + y in the ballast group.
extern "C" __global__ void __launch_bounds__(BALLAST_THREADS, RESIDENT) output_project(Rows attention, Rows ballast,
                                                                                      Rows residual, Rows target, Weight weight) {
  each_output(
      weight, target.len / 2, target.rows, target.at<u32>(0),
      [&](u32 row, u32 output) { return static_cast<u32>(*at<u16>(residual, row, output)); },
      [&](const Stored &stored, u32 first, u32 count, u32 output, float *sums) {
        if (output < LIVE) {
          stored.multiply(weight, count, sums,
                          [&](u32 row, u32 i) { return bf16_to_float(*at<u16>(attention, first + row, i)); });
          return;
        }
#pragma unroll
        for (u32 row = 0; row < TILE_ROWS; ++row) {
          if (row < count) sums[row] = bf16_to_float(*at<u16>(ballast, first + row, output - LIVE));
        }
      },
      [&](u32 row, u32 output, u32) { return at<u16>(target, row, output); },
      [&](u32 old, float sum) { return float_to_bf16(__fadd_rn(bf16_to_float(old), sum)); });
}
