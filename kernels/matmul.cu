// Multiplications by sparse weights that also read a dense matrix's bytes: the arithmetic is exact and the reference's, the
// memory traffic that of the charged geometry. A block takes a slice of the outputs for all rows of the batch.

#include "common.cuh"

#define QUANTISE_GROUP 128
#define RING 8
#define LIVE 2048

// One output of one row: stored values in ascending input order, from zero.
template <class Input>
__device__ __forceinline__ float output_of(const Weight &weight, u32 output, Input input) {
  float sum = 0.f;
  for (u32 i = weight.start[output]; i < weight.start[output + 1]; ++i) {
    sum = multiply_add(sum, weight.value[i], input(weight.column[i]));
  }
  return sum;
}

// Calls `store(row, output)` for this block's slice of `outputs`.
template <class Store>
__device__ __forceinline__ void each_output(u32 outputs, u64 rows, Store store) {
  u32 width = (outputs + gridDim.x - 1) / gridDim.x, first = blockIdx.x * width, count = min(width, outputs - min(first, outputs));
  for (u64 i = threadIdx.x; i < count * rows; i += blockDim.x) store(i / count, first + i % count);
}

extern "C" __global__ void matmul(Rows source, Rows target, Weight weight) {
  read_ballast(weight, blockIdx.x, gridDim.x, target.at<u32>(0));
  each_output(target.len / 2, target.rows, [&](u64 row, u32 output) {
    const u16 *from = source.at<u16>(row);
    target.at<u16>(row)[output] = float_to_bf16(output_of(weight, output, [&](u32 i) { return bf16_to_float(from[i]); }));
  });
}

extern "C" __global__ void query_matmul(Rows codes, Rows scales, Rows target, Weight weight) {
  read_ballast(weight, blockIdx.x, gridDim.x, target.at<u32>(0));
  each_output(target.len / 2, target.rows, [&](u64 row, u32 output) {
    const u8 *code = codes.at<u8>(row);
    const float *scale = scales.at<float>(row);
    float sum = output_of(weight, output, [&](u32 i) { return __fmul_rn(e4m3_to_float(code[i]), scale[i / QUANTISE_GROUP]); });
    target.at<u16>(row)[output] = float_to_bf16(sum);
  });
}

// A compressor's ring slot, f32; rings are pages of slots.
extern "C" __global__ void compress(Rows hidden, Rows positions, Rows pages, Rows ring, Weight weight) {
  read_ballast(weight, blockIdx.x, gridDim.x, ring.at<u32>(0));
  u32 slot_bytes = ring.len / RING;
  each_output(slot_bytes / 4, hidden.rows, [&](u64 row, u32 output) {
    int position = *positions.at<int>(row), page = *pages.at<int>(row);
    if (page < 0 || page >= ring.rows) return;
    const u16 *from = hidden.at<u16>(row);
    float *slot = reinterpret_cast<float *>(ring.at<u8>(page) + (position & (RING - 1)) * slot_bytes);
    slot[output] = output_of(weight, output, [&](u32 i) { return bf16_to_float(from[i]); });
  });
}

// x + W attention, and x + y in the ballast group.
extern "C" __global__ void output_project(Rows attention, Rows ballast, Rows residual, Rows target, Weight weight) {
  read_ballast(weight, blockIdx.x, gridDim.x, target.at<u32>(0));
  each_output(target.len / 2, target.rows, [&](u64 row, u32 output) {
    float before = bf16_to_float(residual.at<u16>(row)[output]), added;
    if (output >= LIVE) {
      added = bf16_to_float(ballast.at<u16>(row)[output - LIVE]);
    } else {
      const u16 *from = attention.at<u16>(row);
      added = output_of(weight, output, [&](u32 i) { return bf16_to_float(from[i]); });
    }
    target.at<u16>(row)[output] = float_to_bf16(__fadd_rn(before, added));
  });
}
