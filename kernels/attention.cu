// Sparse attention: window heads gather codes, match heads attend to the selected entries with a sink.

#include "common.cuh"

#define CODE 8
#define SPAN 31
#define GATHER 29
#define RATIO 4
#define HEADS 8
#define ORDERS 2
#define HEAD_DIM 512
#define PAGE_TOKENS 256
#define PAGE_ENTRIES 64
#define SWA_DIM 64
#define ENTRY_KEY 256
#define ENTRY 384
#define COMPARED (SPAN * CODE + 4)
#define LANES 16
#define MOST 512
#define NEGLIGIBLE -104.f

#define THREADS 256
// Entries whose keys are in shared memory at once.
#define CHUNK 64
// Bytes of a key there, so that four entries' words meet no bank twice; bytes of what follows the key.
#define KEY_STRIDE (ENTRY_KEY + 16)
#define TAIL 80
// An entry's vectors, and how many of a chunk's a thread brings.
#define PARTS ((ENTRY_KEY + TAIL) / 16)
#define BROUGHT ((CHUNK * PARTS + THREADS - 1) / THREADS)
// Floats of a head's partial sums, and of an entry's.
#define HEAD_STRIDE 20
#define ENTRY_STRIDE (RATIO * HEAD_STRIDE)

// Shared memory of a block; behind it come each head's scores and each entry's tail.
struct Scratch {
  float queries[RATIO][ENTRY_KEY];
  float partial[CHUNK * ENTRY_STRIDE];
  u8 keys[CHUNK * KEY_STRIDE];
  float largest[THREADS / 32], total[THREADS / 32], sums[THREADS / 32][CODE];
};

__device__ __forceinline__ const u8 *entry_of(const Rows &entries, int index) {
  u32 at = static_cast<u32>(index), page = at / PAGE_ENTRIES;
  return index >= 0 && page < entries.rows ? entries.at<u8>(page) + at % PAGE_ENTRIES * ENTRY : nullptr;
}

// Eight dims of the output that no match head has: the code of a newest token, or zeros.
__device__ __forceinline__ uint4 gathered(const Rows &window, int position, int page, u32 back) {
  int token = position - static_cast<int>(back);
  bool there = page >= 0 && page < window.rows && back < GATHER && (token >= 0 || back == 0);
  if (!there) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4 *>(window.at<u16>(page) + (token & (PAGE_TOKENS - 1)) * SWA_DIM);
}

// Sixteen partial sums for each entry and head: a thread has two of the sixteen for all heads of two entries. Products of
// bf16 and e4m3 are exact, so that a fused sum is rounded as one of products.
__device__ __forceinline__ void partial_sums(Scratch &scratch, const u8 *tails) {
  u32 lanes = threadIdx.x % (LANES / 2) * 2, first = threadIdx.x / (LANES / 2);
  float sums[2][RATIO][2] = {};
#pragma unroll 4
  for (u32 start = 0; start < ENTRY_KEY; start += LANES) {
    float2 key[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      u32 at = first + i * (CHUNK / 2);
      key[i] = unpack_e4m3(*reinterpret_cast<const u16 *>(scratch.keys + at * KEY_STRIDE + start + lanes));
      if (start + LANES > SPAN * CODE && start + lanes >= SPAN * CODE) {
        u32 digits = *reinterpret_cast<const u32 *>(tails + at * TAIL + (RATIO * CODE + (start + lanes - SPAN * CODE)) * 2);
        key[i] = start + lanes < COMPARED ? make_float2(bf16_to_float(digits & 0xffff), bf16_to_float(digits >> 16))
                                          : make_float2(0.f, 0.f);
      }
    }
#pragma unroll
    for (u32 head = 0; head < RATIO; ++head) {
      float2 query = *reinterpret_cast<const float2 *>(&scratch.queries[head][start + lanes]);
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        sums[i][head][0] = __fmaf_rn(query.x, key[i].x, sums[i][head][0]);
        sums[i][head][1] = __fmaf_rn(query.y, key[i].y, sums[i][head][1]);
      }
    }
  }
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    float *to = scratch.partial + (first + i * (CHUNK / 2)) * ENTRY_STRIDE + lanes;
#pragma unroll
    for (u32 head = 0; head < RATIO; ++head) {
      *reinterpret_cast<float2 *>(to + head * HEAD_STRIDE) = make_float2(sums[i][head][0], sums[i][head][1]);
    }
  }
}

// A block a row and order where there are entries: an order's four heads, one an alignment, share one softmax whose sink
// scores 0. Without entries, a block a row.
extern "C" __global__ void __launch_bounds__(THREADS) attention(Rows query, Rows window, Rows positions, Rows pages,
                                                                Rows entries, Rows indices, Rows target, float scale, int k) {
  extern __shared__ __align__(16) u8 shared[];
  u64 row = k ? blockIdx.x / ORDERS : blockIdx.x;
  u32 order = k ? blockIdx.x % ORDERS : 0, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  u32 back = threadIdx.x;
  bool gathers = order == 0 && back < target.len / (2 * CODE) && !(k && back >= GATHER && back < GATHER + ORDERS);
  int position = 0, page = -1;
  if (gathers) {
    position = *positions.at<int>(row);
    page = *pages.at<int>(row);
  }
  if (k == 0) {
    if (gathers) target.at<uint4>(row)[back] = gathered(window, position, page, back);
    return;
  }

  Scratch &scratch = *reinterpret_cast<Scratch *>(shared);
  u32 count = min(min(k, MOST), static_cast<int>(indices.len / 4));
  float *scores = reinterpret_cast<float *>(shared + sizeof(Scratch));
  u8 *tails = shared + sizeof(Scratch) + (count + CHUNK - 1) / CHUNK * CHUNK * RATIO * 4;
  const int *chosen = indices.at<int>(row);
  u32 quad = threadIdx.x % (ENTRY_KEY / 4) * 4, head = threadIdx.x / (ENTRY_KEY / 4);
  uint2 asked = make_uint2(0, 0);
  if (quad < COMPARED) asked = *reinterpret_cast<const uint2 *>(query.at<u16>(row) + (head * ORDERS + order) * HEAD_DIM + quad);

  for (u32 first = 0; first < count; first += CHUNK) {
    u32 here = min(count - first, CHUNK), mine = threadIdx.x / RATIO;
    // All loads, then all stores: the entries' hang on the indices only.
    int own = -1, index[BROUGHT];
    if (mine < here) own = chosen[first + mine];
#pragma unroll
    for (u32 i = 0; i < BROUGHT; ++i) {
      u32 at = (threadIdx.x + i * THREADS) / PARTS;
      index[i] = -1;
      if (at < here) index[i] = chosen[first + at];
    }
    uint4 bytes[BROUGHT];
#pragma unroll
    for (u32 i = 0; i < BROUGHT; ++i) {
      const u8 *from = entry_of(entries, index[i]);
      bytes[i] = make_uint4(0, 0, 0, 0);
      if (from) bytes[i] = reinterpret_cast<const uint4 *>(from)[(threadIdx.x + i * THREADS) % PARTS];
    }
    if (first == 0) {
      uint4 code = gathers ? gathered(window, position, page, back) : make_uint4(0, 0, 0, 0);
      *reinterpret_cast<float4 *>(&scratch.queries[head][quad]) =
          make_float4(bf16_to_float(asked.x & 0xffff), bf16_to_float(asked.x >> 16), bf16_to_float(asked.y & 0xffff),
                      bf16_to_float(asked.y >> 16));
      if (gathers) target.at<uint4>(row)[back] = code;
    }
#pragma unroll
    for (u32 i = 0; i < BROUGHT; ++i) {
      u32 at = (threadIdx.x + i * THREADS) / PARTS, part = (threadIdx.x + i * THREADS) % PARTS;
      u8 *to = part < ENTRY_KEY / 16 ? scratch.keys + at * KEY_STRIDE + part * 16
                                     : tails + (first + at) * TAIL + (part - ENTRY_KEY / 16) * 16;
      if (at < CHUNK) *reinterpret_cast<uint4 *>(to) = bytes[i];
    }
    __syncthreads();
    partial_sums(scratch, tails + first * TAIL);
    __syncthreads();
    // Added up in the reference's order, an entry and head a thread.
    const float4 *parts =
        reinterpret_cast<const float4 *>(scratch.partial + mine * ENTRY_STRIDE + threadIdx.x % RATIO * HEAD_STRIDE);
    float sum = 0.f;
#pragma unroll
    for (u32 part = 0; part < LANES / 4; ++part) {
      float4 four = parts[part];
      sum = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(sum, four.x), four.y), four.z), four.w);
    }
    if (mine < here) scores[threadIdx.x % RATIO * count + first + mine] = entry_of(entries, own) ? __fmul_rn(sum, scale) : -infinity();
  }
  __syncthreads();

  // Two warps an alignment.
  u32 alignment = warp % RATIO, start = warp / RATIO * 32 + lane;
  const float *scored = scores + alignment * count;
  float largest = 0.f;
  for (u32 i = start; i < count; i += 64) largest = fmaxf(largest, scored[i]);
  largest = warp_max(largest);
  if (lane == 0) scratch.largest[warp] = largest;
  __syncthreads();
#pragma unroll
  for (u32 other = 0; other < THREADS / 32; ++other) largest = fmaxf(largest, scratch.largest[other]);
  float total = 0.f, sums[CODE] = {};
  for (u32 i = start; i < count; i += 64) {
    float below = scored[i] - largest;
    // Also leaves out entries that do not exist, whose score is negative infinity.
    if (below < NEGLIGIBLE) continue;
    float share = expf(below);
    total += share;
    uint4 value = *reinterpret_cast<const uint4 *>(tails + i * TAIL + alignment * CODE * 2);
    const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (u32 bit = 0; bit < CODE; ++bit) sums[bit] += share * bf16_to_float(words[bit / 2] >> (bit % 2 * 16) & 0xffff);
  }
  total = warp_sum(total);
#pragma unroll
  for (u32 bit = 0; bit < CODE; ++bit) sums[bit] = warp_sum(sums[bit]);
  if (lane == 0) {
    scratch.total[warp] = total;
#pragma unroll
    for (u32 bit = 0; bit < CODE; ++bit) scratch.sums[warp][bit] = sums[bit];
  }
  __syncthreads();
  if (threadIdx.x >= CODE) return;
  float sum = 0.f;
  total = expf(-largest);
#pragma unroll
  for (u32 other = 0; other < THREADS / 32; ++other) {
    total += scratch.total[other];
    sum += scratch.sums[other][threadIdx.x];
  }
  target.at<u16>(row)[(GATHER + order) * CODE + threadIdx.x] = float_to_bf16(__fdiv_rn(sum, total));
}
