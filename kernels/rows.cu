// Kernels that treat each row of the batch by itself: one block a row.

#include "common.cuh"

#define QUANTISE_GROUP 128
#define INDEX_DIM 128
#define HEAD_DIM 512
#define ROPE 64

// Copies row by row.
extern "C" __global__ void copy_rows(Rows source, Rows target) {
  u64 row = blockIdx.x;
  const u8 *from = source.at<u8>(row);
  u8 *to = target.at<u8>(row);
  u64 parts = target.len;
  if (((source.stride | target.stride | target.len | reinterpret_cast<u64>(source.base) |
        reinterpret_cast<u64>(target.base)) & 15) == 0) {
    for (u64 i = threadIdx.x; i < parts / 16; i += blockDim.x) {
      reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(from)[i];
    }
  } else {
    for (u64 i = threadIdx.x; i < parts; i += blockDim.x) to[i] = from[i];
  }
}

// A row of the table for each token.
extern "C" __global__ void embed(Rows tokens, Rows target, Weight table) {
  u32 token = min(*tokens.at<u32>(blockIdx.x), table.rows - 1);
  u16 *out = target.at<u16>(blockIdx.x);
  for (u32 i = threadIdx.x; i < target.len / 2; i += blockDim.x) out[i] = 0;
  __syncthreads();
  for (u32 i = table.start[token] + threadIdx.x; i < table.start[token + 1]; i += blockDim.x) {
    out[table.column[i]] = float_to_bf16(table.value[i]);
  }
}

// RMS norm of each group by itself. Sixteen partial sums, added up in order: the reference's order, so that the two agree
// bit for bit whatever the data.
extern "C" __global__ void rms_norm(Rows source, Rows target, Weight gain, u32 group) {
  extern __shared__ float values[];
  __shared__ float inverse[64];
  u32 width = source.len / 2, lane = threadIdx.x & 31;
  const u16 *from = source.at<u16>(blockIdx.x);
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) values[i] = bf16_to_float(from[i]);
  __syncthreads();
  for (u32 start = threadIdx.x / 32 * group; start < width; start += blockDim.x / 32 * group) {
    float sum = 0.f;
    if (lane < 16) {
      for (u32 i = lane; i < group; i += 16) sum = multiply_add(sum, values[start + i], values[start + i]);
    }
    float total = 0.f;
    for (u32 i = 0; i < 16; ++i) total = __fadd_rn(total, __shfl_sync(FULL_WARP, sum, i));
    float mean = __fdiv_rn(total, static_cast<float>(group));
    if (lane == 0) inverse[start / group] = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(mean, 1e-6f)));
  }
  __syncthreads();
  u16 *out = target.at<u16>(blockIdx.x);
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    out[i] = float_to_bf16(__fmul_rn(__fmul_rn(values[i], inverse[i / group]), gain.value[i]));
  }
}

// e4m3 with one scale a group: a warp a group.
extern "C" __global__ void quantise(Rows source, Rows codes, Rows scales) {
  u32 lane = threadIdx.x & 31;
  const u16 *from = source.at<u16>(blockIdx.x);
  for (u32 group = threadIdx.x / 32; group < scales.len / 4; group += blockDim.x / 32) {
    float value[4], largest = 0.f;
    for (int i = 0; i < 4; ++i) {
      value[i] = bf16_to_float(from[group * QUANTISE_GROUP + lane * 4 + i]);
      largest = fmaxf(largest, fabsf(value[i]));
    }
    float scale = quantisation_scale(warp_max(largest));
    for (int i = 0; i < 4; ++i) {
      codes.at<u8>(blockIdx.x)[group * QUANTISE_GROUP + lane * 4 + i] = float_to_e4m3(__fdiv_rn(value[i], scale));
    }
    if (lane == 0) scales.at<float>(blockIdx.x)[group] = scale;
  }
}

// Rotates the last dims of each head in place.
extern "C" __global__ void query_rope(Rows query, Rows positions, Rows target) {
  float position = static_cast<float>(*positions.at<int>(blockIdx.x));
  const u16 *from = query.at<u16>(blockIdx.x);
  u16 *to = target.at<u16>(blockIdx.x);
  for (u32 pair = threadIdx.x; pair < target.len / 4; pair += blockDim.x) {
    float a = bf16_to_float(from[2 * pair]), b = bf16_to_float(from[2 * pair + 1]);
    int dim = 2 * pair % HEAD_DIM - (HEAD_DIM - ROPE);
    if (dim >= 0) {
      float angle = position * powf(10000.f, -2.f * (dim / 2) / ROPE), sine, cosine;
      sincosf(angle, &sine, &cosine);
      float x = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
      float y = __fadd_rn(__fmul_rn(a, sine), __fmul_rn(b, cosine));
      a = x;
      b = y;
    }
    to[2 * pair] = float_to_bf16(a);
    to[2 * pair + 1] = float_to_bf16(b);
  }
}

// Finishes index queries in place: a warp a head. Everything is read before anything is written, as e4m3 rows overlap the
// bf16 rows of lower heads.
extern "C" __global__ void index_rope(Rows query, Rows weights, Rows positions, Rows query_out, Rows weights_out,
                                      u32 e4m3) {
  u32 head = threadIdx.x / 32, lane = threadIdx.x & 31;
  const u16 *from = query.at<u16>(blockIdx.x) + head * INDEX_DIM + lane * 4;
  u16 bits[4];
  float largest = 0.f;
  for (int i = 0; i < 4; ++i) {
    bits[i] = from[i];
    largest = fmaxf(largest, fabsf(bf16_to_float(bits[i])));
  }
  float weight = bf16_to_float(weights.at<u16>(blockIdx.x)[head]), scale = 1.f;
  __syncthreads();
  if (e4m3) {
    scale = quantisation_scale(warp_max(largest));
    u8 *out = query_out.at<u8>(blockIdx.x) + head * INDEX_DIM + lane * 4;
    for (int i = 0; i < 4; ++i) out[i] = float_to_e4m3(__fdiv_rn(bf16_to_float(bits[i]), scale));
  } else {
    u16 *out = query_out.at<u16>(blockIdx.x) + head * INDEX_DIM + lane * 4;
    for (int i = 0; i < 4; ++i) out[i] = bits[i];
  }
  if (lane == 0) weights_out.at<float>(blockIdx.x)[head] = __fmul_rn(weight, scale);
}

// Argmax over the vocabulary, the smallest token of equals: a thread a token.
extern "C" __global__ void head(Rows hidden, Rows tokens, Weight weight) {
  extern __shared__ float logits[];
  const u16 *from = hidden.at<u16>(blockIdx.x);
  read_ballast(weight, blockIdx.x, gridDim.x, tokens.at<u32>(blockIdx.x));
  for (u32 token = threadIdx.x; token < weight.rows; token += blockDim.x) {
    float sum = 0.f;
    for (u32 i = weight.start[token]; i < weight.start[token + 1]; ++i) {
      sum = multiply_add(sum, weight.value[i], bf16_to_float(from[weight.column[i]]));
    }
    logits[token] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 best = 0;
    for (u32 token = 1; token < weight.rows; ++token) {
      if (logits[token] > logits[best]) best = token;
    }
    *tokens.at<u32>(blockIdx.x) = best;
  }
}
