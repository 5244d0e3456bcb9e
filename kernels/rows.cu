// Kernels that treat each row of the batch by itself: one block a row. Rows and strides are multiples of 16 bytes where a
// kernel takes several elements at once.

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
  u32 begin = table.start[token], end = table.start[token + 1];
  uint4 *parts = target.at<uint4>(blockIdx.x);
  for (u32 i = threadIdx.x; i < target.len / 16; i += blockDim.x) parts[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  u16 *out = target.at<u16>(blockIdx.x);
  for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) out[table.column[i]] = float_to_bf16(table.value[i]);
}

// RMS norm of each group by itself: a thread to eight dims. Sixteen partial sums, added up in order: the reference's order,
// so that the two agree bit for bit whatever the data.
extern "C" __global__ void rms_norm(Rows source, Rows target, Weight gain, u32 group) {
  extern __shared__ __align__(16) float values[];
  __shared__ float inverse[64];
  u32 width = source.len / 2, lane = threadIdx.x & 31, mine = threadIdx.x * 8;
  float4 by[2];
  if (mine < width) {
    by[0] = reinterpret_cast<const float4 *>(gain.value + mine)[0];
    by[1] = reinterpret_cast<const float4 *>(gain.value + mine)[1];
  }
  float own[8];
  if (mine < width) {
    uint4 part = source.at<uint4>(blockIdx.x)[threadIdx.x];
    u32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      own[2 * i] = bf16_to_float(words[i] & 0xffff);
      own[2 * i + 1] = bf16_to_float(words[i] >> 16);
    }
    reinterpret_cast<float4 *>(values + mine)[0] = make_float4(own[0], own[1], own[2], own[3]);
    reinterpret_cast<float4 *>(values + mine)[1] = make_float4(own[4], own[5], own[6], own[7]);
  }
  __syncthreads();
  for (u32 start = threadIdx.x / 32 * group; start < width; start += blockDim.x / 32 * group) {
    float sum = 0.f;
#pragma unroll 16
    for (u32 i = 0; i < group / 16; ++i) {
      float value = values[start + i * 16 + (lane & 15)];
      sum = multiply_add(sum, value, value);
    }
    float parts[16], total = 0.f;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) parts[i] = __shfl_sync(FULL_WARP, sum, i);
#pragma unroll
    for (u32 i = 0; i < 16; ++i) total = __fadd_rn(total, parts[i]);
    float mean = __fdiv_rn(total, static_cast<float>(group));
    if (lane == 0) inverse[start / group] = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(mean, 1e-6f)));
  }
  __syncthreads();
  if (mine >= width) return;
  float scale = inverse[mine / group];
  const float gains[8] = {by[0].x, by[0].y, by[0].z, by[0].w, by[1].x, by[1].y, by[1].z, by[1].w};
  u32 words[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    words[i] = pack_bf16(__fmul_rn(__fmul_rn(own[2 * i], scale), gains[2 * i]),
                         __fmul_rn(__fmul_rn(own[2 * i + 1], scale), gains[2 * i + 1]));
  }
  target.at<uint4>(blockIdx.x)[threadIdx.x] = make_uint4(words[0], words[1], words[2], words[3]);
}

// Four bf16 at once.
__device__ __forceinline__ void load_four(const u16 *from, float *to) {
  uint2 part = *reinterpret_cast<const uint2 *>(from);
  to[0] = bf16_to_float(part.x & 0xffff);
  to[1] = bf16_to_float(part.x >> 16);
  to[2] = bf16_to_float(part.y & 0xffff);
  to[3] = bf16_to_float(part.y >> 16);
}

__device__ __forceinline__ u32 quantised(const float *value, float scale) {
  u32 low = pack_e4m3(__fdiv_rn(value[0], scale), __fdiv_rn(value[1], scale));
  u32 high = pack_e4m3(__fdiv_rn(value[2], scale), __fdiv_rn(value[3], scale));
  return low | high << 16;
}

__device__ __forceinline__ float largest_of(const float *value) {
  return fmaxf(fmaxf(fabsf(value[0]), fabsf(value[1])), fmaxf(fabsf(value[2]), fabsf(value[3])));
}

// e4m3 with one scale a group: a warp a group.
extern "C" __global__ void quantise(Rows source, Rows codes, Rows scales) {
  u32 lane = threadIdx.x & 31;
  for (u32 group = threadIdx.x / 32; group < scales.len / 4; group += blockDim.x / 32) {
    u32 at = group * QUANTISE_GROUP + lane * 4;
    float value[4];
    load_four(source.at<u16>(blockIdx.x) + at, value);
    float scale = quantisation_scale(warp_max(largest_of(value)));
    *reinterpret_cast<u32 *>(codes.at<u8>(blockIdx.x) + at) = quantised(value, scale);
    if (lane == 0) scales.at<float>(blockIdx.x)[group] = scale;
  }
}

// Rotates the last dims of each head in place: a thread a pair.
extern "C" __global__ void query_rope(Rows query, Rows positions, Rows target) {
  u32 pair = threadIdx.x % (ROPE / 2);
  float frequency = powf(10000.f, -2.f * static_cast<int>(pair) / ROPE);
  float position = static_cast<float>(*positions.at<int>(blockIdx.x));
  const u32 *from = query.at<u32>(blockIdx.x);
  u32 *to = target.at<u32>(blockIdx.x);
  if (from != to) {
    for (u32 i = threadIdx.x; i < target.len / 4; i += blockDim.x) to[i] = from[i];
    __syncthreads();
  }
  for (u32 head = threadIdx.x / (ROPE / 2); head < target.len / (2 * HEAD_DIM); head += blockDim.x / (ROPE / 2)) {
    u32 at = head * (HEAD_DIM / 2) + (HEAD_DIM - ROPE) / 2 + pair, both = from[at];
    float a = bf16_to_float(both & 0xffff), b = bf16_to_float(both >> 16), sine, cosine;
    sincosf(position * frequency, &sine, &cosine);
    float x = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    float y = __fadd_rn(__fmul_rn(a, sine), __fmul_rn(b, cosine));
    to[at] = pack_bf16(x, y);
  }
}

// Finishes index queries in place: a warp a head. Everything is read before anything is written, as e4m3 rows overlap the
// bf16 rows of lower heads.
extern "C" __global__ void index_rope(Rows query, Rows weights, Rows positions, Rows query_out, Rows weights_out,
                                      u32 e4m3) {
  u32 head = threadIdx.x / 32, lane = threadIdx.x & 31, at = head * INDEX_DIM + lane * 4;
  uint2 bits = *reinterpret_cast<const uint2 *>(query.at<u16>(blockIdx.x) + at);
  float weight = bf16_to_float(weights.at<u16>(blockIdx.x)[head]), scale = 1.f, value[4];
  load_four(reinterpret_cast<const u16 *>(&bits), value);
  __syncthreads();
  if (e4m3) {
    scale = quantisation_scale(warp_max(largest_of(value)));
    *reinterpret_cast<u32 *>(query_out.at<u8>(blockIdx.x) + at) = quantised(value, scale);
  } else {
    *reinterpret_cast<uint2 *>(query_out.at<u16>(blockIdx.x) + at) = bits;
  }
  if (lane == 0) weights_out.at<float>(blockIdx.x)[head] = __fmul_rn(weight, scale);
}

// A candidate for the largest logit; the smaller token of equals wins.
struct Best {
  float logit;
  u32 token;

  __device__ __forceinline__ void take(float other, u32 at) {
    if (other > logit || (other == logit && at < token)) {
      logit = other;
      token = at;
    }
  }
};

// Stored values of a token that are at hand before the hidden state is there.
#define KEPT 9

// Argmax over the vocabulary, the smallest token of equals: a thread a token, in one block a row. All blocks share the
// matrix's bytes. A logit that is no number never wins, unless it is the first token's: then nothing beats it, as no
// comparison with it holds.
extern "C" __global__ void __launch_bounds__(256) head(Rows hidden, Rows tokens, Weight weight) {
  __shared__ Best best[8];
  __shared__ bool first_wins;
  u32 token = threadIdx.x, begin = 0, end = 0, column[KEPT];
  float value[KEPT];
  bool chooses = blockIdx.x < hidden.rows;
  if (chooses && token < weight.rows) {
    begin = weight.start[token];
    end = weight.start[token + 1];
  }
  Ballast ballast;
  ballast.begin();
  ballast.rest(weight, tokens.at<u32>(0));
  if (!chooses) return;
#pragma unroll
  for (u32 i = 0; i < KEPT; ++i) {
    if (begin + i < end) {
      column[i] = weight.column[begin + i];
      value[i] = weight.value[begin + i];
    }
  }
  const u16 *from = hidden.at<u16>(blockIdx.x);
  Best own = {-infinity(), 0xffffffffu};
  while (token < weight.rows) {
    float sum = 0.f;
#pragma unroll
    for (u32 i = 0; i < KEPT; ++i) {
      if (begin + i < end) sum = multiply_add(sum, value[i], bf16_to_float(from[column[i]]));
    }
    for (u32 i = begin + KEPT; i < end; ++i) sum = multiply_add(sum, weight.value[i], bf16_to_float(from[weight.column[i]]));
    if (token == 0) first_wins = sum != sum;
    own.take(sum == sum ? sum : -infinity(), token);
    token += blockDim.x;
    if (token >= weight.rows) break;
    begin = weight.start[token];
    end = weight.start[token + 1];
#pragma unroll
    for (u32 i = 0; i < KEPT; ++i) {
      if (begin + i < end) {
        column[i] = weight.column[begin + i];
        value[i] = weight.value[begin + i];
      }
    }
  }
  for (u32 step = 16; step; step >>= 1) {
    own.take(__shfl_xor_sync(FULL_WARP, own.logit, step), __shfl_xor_sync(FULL_WARP, own.token, step));
  }
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 warp = 1; warp < blockDim.x / 32; ++warp) own.take(best[warp].logit, best[warp].token);
  *tokens.at<u32>(blockIdx.x) = first_wins ? 0 : own.token;
}
