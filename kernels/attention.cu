// Sparse attention of one row a block: window heads gather codes, match heads attend to the selected entries with a sink.

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

__device__ __forceinline__ const u8 *entry_of(const Rows &entries, int index) {
  if (index < 0 || index / PAGE_ENTRIES >= entries.rows) return nullptr;
  return entries.at<u8>(index / PAGE_ENTRIES) + index % PAGE_ENTRIES * ENTRY;
}

extern "C" __global__ void __launch_bounds__(256) attention(Rows query, Rows window, Rows positions, Rows pages, Rows entries,
                                                            Rows indices, Rows target, float scale, int k) {
  __shared__ float queries[HEADS][256];
  __shared__ float scores[MOST][HEADS];
  __shared__ int chosen[MOST];
  u64 row = blockIdx.x;
  int position = *positions.at<int>(row), page = *pages.at<int>(row);
  u16 *out = target.at<u16>(row);
  bool stored = page >= 0 && page < window.rows;
  for (u32 dim = threadIdx.x; dim < target.len / 2; dim += blockDim.x) {
    u32 back = dim / CODE;
    if (dim < GATHER * CODE) {
      int token = position - static_cast<int>(back);
      bool there = stored && (token >= 0 || back == 0);
      out[dim] = there ? window.at<u16>(page)[(token & (PAGE_TOKENS - 1)) * SWA_DIM + dim % CODE] : 0;
    } else if (k == 0 || dim >= GATHER * CODE + ORDERS * CODE) {
      out[dim] = 0;
    }
  }
  if (k == 0) return;

  const u16 *from = query.at<u16>(row);
  for (u32 i = threadIdx.x; i < HEADS * 256; i += blockDim.x) {
    u32 head = i / 256, dim = i % 256;
    queries[head][dim] = dim < COMPARED ? bf16_to_float(from[head * HEAD_DIM + dim]) : 0.f;
  }
  int count = min(min(k, MOST), static_cast<int>(indices.len / 4));
  for (int i = threadIdx.x; i < count; i += blockDim.x) chosen[i] = indices.at<int>(row)[i];
  __syncthreads();

  // A thread an entry and head: sixteen partial sums, in the reference's order.
  for (int i = threadIdx.x; i < count * HEADS; i += blockDim.x) {
    int head = i % HEADS;
    const u8 *entry = entry_of(entries, chosen[i / HEADS]);
    float sum = -infinity();
    if (entry) {
      float lanes[LANES];
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) lanes[lane] = 0.f;
      const u16 *digits = reinterpret_cast<const u16 *>(entry + ENTRY_KEY) + RATIO * CODE;
#pragma unroll 1
      for (int start = 0; start < 256; start += LANES) {
        uint4 piece = *reinterpret_cast<const uint4 *>(entry + start);
        u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
          int dim = start + lane;
          float key = e4m3_to_float(words[lane / 4] >> (lane % 4 * 8) & 0xff);
          if (dim >= SPAN * CODE) key = dim < COMPARED ? bf16_to_float(digits[dim - SPAN * CODE]) : 0.f;
          lanes[lane] = multiply_add(lanes[lane], queries[head][dim], key);
        }
      }
      sum = 0.f;
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) sum = __fadd_rn(sum, lanes[lane]);
      sum = __fmul_rn(sum, scale);
    }
    scores[i / HEADS][head] = sum;
  }
  __syncthreads();

  // A warp an order: its four heads share one softmax whose sink scores 0.
  u32 order = threadIdx.x / 32, lane = threadIdx.x & 31;
  if (order >= ORDERS) return;
  float largest = 0.f;
  for (int i = lane; i < count * RATIO; i += 32) largest = fmaxf(largest, scores[i / RATIO][i % RATIO * ORDERS + order]);
  largest = warp_max(largest);
  float total = 0.f, sums[CODE] = {};
  for (int i = lane; i < count * RATIO; i += 32) {
    int alignment = i % RATIO;
    float below = scores[i / RATIO][alignment * ORDERS + order] - largest;
    // Also leaves out entries that do not exist, whose score is negative infinity.
    if (below < NEGLIGIBLE) continue;
    const u8 *entry = entry_of(entries, chosen[i / RATIO]);
    if (!entry) continue;
    float share = expf(below);
    total += share;
    const u16 *values = reinterpret_cast<const u16 *>(entry + ENTRY_KEY) + alignment * CODE;
    for (int bit = 0; bit < CODE; ++bit) sums[bit] += share * bf16_to_float(values[bit]);
  }
  total = warp_sum(total) + expf(-largest);
  for (int bit = 0; bit < CODE; ++bit) {
    float sum = warp_sum(sums[bit]);
    if (lane == 0) out[GATHER * CODE + order * CODE + bit] = float_to_bf16(__fdiv_rn(sum, total));
  }
}
