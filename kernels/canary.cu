// Checksums of index keys, for the canary: a block a page, a thread a key. Pages out of range are skipped.

#include "common.cuh"

#define PAGE_ENTRIES 64
#define INDEX_DIM 128

__device__ __forceinline__ u64 mix(u64 sum, u64 word) {
  u64 product = (sum ^ word) * 0x9E3779B97F4A7C15ull;
  return product << 29 | product >> 35;
}

extern "C" __global__ void checksum(Rows keys, Rows pages, Rows sums, u32 e4m3) {
  int page = *pages.at<int>(blockIdx.x);
  if (page < 0 || page >= keys.rows) return;
  u32 slot = threadIdx.x, vectors = (e4m3 ? INDEX_DIM : 2 * INDEX_DIM) / 16;
  u64 sum = 1;
  if (e4m3) sum = mix(sum, keys.at<u32>(page)[PAGE_ENTRIES * INDEX_DIM / 4 + slot]);
  const ulonglong2 *key = keys.at<const ulonglong2>(page) + slot * vectors;
#pragma unroll 8
  for (u32 i = 0; i < vectors; ++i) {
    ulonglong2 words = key[i];
    sum = mix(mix(sum, words.x), words.y);
  }
  sums.at<u64>(blockIdx.x)[slot] = sum;
}
