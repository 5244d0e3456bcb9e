// Selects each row's largest logits by (logit, later index): a total order, so that the answer is one set.
//
// A row's logits are read once. A sample of the row gives a bound that surely lies below the wanted elements and not far
// below; one streaming pass keeps what is above the bound; a radix selection over these few finishes exactly. When the
// sample misled (too few or too many kept), the same selection runs over the whole row instead: slower, never wrong.
// A cluster of blocks shares one row and gathers in its first block's shared memory.

#include "common.cuh"

#define THREADS 1024
#define SAMPLE 4096
#define CAPACITY 8192
#define DIGIT 12
#define BINS (1 << DIGIT)
#define MAP_WORDS 4096
#define HEADER 2
#define DEPTH 8
#define TILE (THREADS * DEPTH)

// Integers in the order of the floats, NaN beyond infinity by sign.
__device__ __forceinline__ u32 ordered(float value) {
  u32 bits = __float_as_uint(value);
  return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float unordered(u32 bits) {
  return __uint_as_float(bits ^ ((bits >> 31) ? 0x80000000u : 0xffffffffu));
}

// A logit and its index as one integer whose order is the selection's.
__device__ __forceinline__ u64 composite(float value, u32 index) {
  return static_cast<u64>(ordered(value)) << 32 | index;
}

struct Scratch {
  union {
    u32 bins[BINS];
    u32 map[MAP_WORDS];
  };
  u32 warps[THREADS / 32];
  u32 digit, above, inside;
  u32 kept, highest;
};

// The sum of `own` over all lower threads, and over the block.
__device__ __forceinline__ u32 sum_before(Scratch &s, u32 own, u32 &all) {
  u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, sum = own;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    u32 other = __shfl_up_sync(FULL_WARP, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) s.warps[warp] = sum;
  __syncthreads();
  u32 total = lane < THREADS / 32 ? s.warps[lane] : 0, running = total;
#pragma unroll
  for (int step = 1; step < THREADS / 32; step <<= 1) {
    u32 other = __shfl_up_sync(FULL_WARP, running, step);
    if (lane >= step) running += other;
  }
  all = __shfl_sync(FULL_WARP, running, THREADS / 32 - 1);
  return __shfl_sync(FULL_WARP, running - total, warp) + sum - own;
}

// Finds the bin of the `rank`-th largest (from 1), how many are in higher bins and how many in it.
__device__ void find_bin(Scratch &s, u32 rank) {
  // Thread 0 holds the highest bins, so that sums run downwards.
  uint4 bins = reinterpret_cast<uint4 *>(s.bins)[BINS / 4 - 1 - threadIdx.x];
  u32 own = bins.x + bins.y + bins.z + bins.w, all;
  u32 above = sum_before(s, own, all);
  if (above < rank && rank <= above + own) {
    u32 counts[4] = {bins.w, bins.z, bins.y, bins.x};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      if (above < rank && rank <= above + counts[i]) {
        s.digit = BINS - 1 - (4 * threadIdx.x + i);
        s.above = above;
        s.inside = counts[i];
      }
      above += counts[i];
    }
  }
  __syncthreads();
}

// One update where a whole warp agrees, as it does when most logits are zero.
__device__ __forceinline__ void count(Scratch &s, u32 digit) {
  u32 active = __activemask();
  u32 leader = __ffs(active) - 1;
  if (__all_sync(active, digit == __shfl_sync(active, digit, leader))) {
    if ((threadIdx.x & 31) == leader) atomicAdd(&s.bins[digit], __popc(active));
  } else {
    atomicAdd(&s.bins[digit], 1);
  }
}

// A bound that at least `rank` of `size` keys reach, and at most `slack` more. No key is below `base` or at least
// `base + 2^top`. The code is kept small: a launch that finds it nowhere near pays for every line of it.
template <class Keys>
__device__ __noinline__ u64 bound_of(Scratch &s, Keys keys, u32 size, u32 rank, u32 slack, u64 base, int top) {
  u64 prefix = 0;
  int shift = top;
  while (shift > 0) {
    int width = min(DIGIT, shift);
    reinterpret_cast<uint4 *>(s.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < size; i += THREADS) {
      u64 key = keys.at(i) - base;
      if (shift == top || (key >> shift) == (prefix >> shift)) {
        count(s, static_cast<u32>(key >> (shift - width)) & ((1u << width) - 1));
      }
    }
    __syncthreads();
    find_bin(s, rank);
    shift -= width;
    prefix |= static_cast<u64>(s.digit) << shift;
    rank -= s.above;
    if (s.inside - rank <= slack) break;
  }
  return base + prefix;
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 remote(u32 address, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ u32 load_remote(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_remote(u32 address, u64 value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

// Keys gathered in shared memory, and keys of a whole row.
struct Gathered {
  const u64 *keys;
  __device__ __forceinline__ u64 at(u32 i) const { return keys[i]; }
};

struct Row {
  const float *values;
  __device__ __forceinline__ u64 at(u32 i) const { return composite(values[i], i); }
};

// Writes those of `keys` that reach the bound, in ascending order of index, by their bits in a map of the row.
template <class Keys>
__device__ __noinline__ void write_ordered(Scratch &s, Keys keys, u32 available, u64 least, const float *values, u32 size,
                                           int *out) {
  u32 written = 0;
#pragma unroll 1
  for (u32 window = 0; window < size; window += MAP_WORDS * 32) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < MAP_WORDS; i += THREADS) s.map[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < available; i += THREADS) {
      u64 key = keys.at(i);
      u32 index = static_cast<u32>(key) - window;
      if (key >= least && index < MAP_WORDS * 32) atomicOr(&s.map[index / 32], 1u << (index & 31));
    }
    __syncthreads();
    const u32 *own = s.map + threadIdx.x * (MAP_WORDS / THREADS);
    u32 all, count = 0;
#pragma unroll
    for (u32 i = 0; i < MAP_WORDS / THREADS; ++i) count += __popc(own[i]);
    u32 slot = written + sum_before(s, count, all);
#pragma unroll 1
    for (u32 i = 0; i < MAP_WORDS / THREADS; ++i) {
      for (u32 word = own[i]; word; word &= word - 1, ++slot) {
        u32 index = window + (threadIdx.x * (MAP_WORDS / THREADS) + i) * 32 + __ffs(word) - 1;
        *reinterpret_cast<int2 *>(out + HEADER + 2 * slot) = make_int2(index, __float_as_int(values[index]));
      }
    }
    written += all;
  }
}

// A bound below the `k` wanted and near them, from a sample in vectors spread over the row. Every block of a cluster takes
// the same sample and finds the same bound.
__device__ __forceinline__ u64 sampled_bound(Scratch &s, const float4 *vectors, u64 *kept, u32 size, u32 k) {
  u32 spacing = size / SAMPLE;
  float4 sampled[SAMPLE / 4 / THREADS];
  u32 at[SAMPLE / 4 / THREADS];
#pragma unroll
  for (u32 i = 0; i < SAMPLE / 4 / THREADS; ++i) {
    u32 vector = i * THREADS + threadIdx.x;
    at[i] = vector * spacing + (vector * 2654435761u >> 16) % spacing;
    sampled[i] = vectors[at[i]];
  }
#pragma unroll
  for (u32 i = 0; i < SAMPLE / 4 / THREADS; ++i) {
    u64 *target = kept + 4 * (i * THREADS + threadIdx.x);
    target[0] = composite(sampled[i].x, 4 * at[i]);
    target[1] = composite(sampled[i].y, 4 * at[i] + 1);
    target[2] = composite(sampled[i].z, 4 * at[i] + 2);
    target[3] = composite(sampled[i].w, 4 * at[i] + 3);
  }
  __syncthreads();
  u32 expected = static_cast<u32>(static_cast<u64>(k) * SAMPLE / size) + 1;
  u32 target = min(expected + 8 + 6 * static_cast<u32>(sqrtf(static_cast<float>(expected))), static_cast<u32>(SAMPLE));
  return bound_of(s, Gathered{kept}, SAMPLE, target, target + 16, 0, 64);
}

// Keeps what of four values a lane reaches the bound: one counter update a warp.
__device__ __forceinline__ void keep(Scratch &s, u64 *kept, float4 vector, u32 index, u32 size, u64 bound, u32 &highest) {
  float values[4] = {vector.x, vector.y, vector.z, vector.w};
  u32 least = static_cast<u32>(bound >> 32), votes[4], all = 0;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u32 order = ordered(values[i]);
    bool reaches = index + i < size && (order > least || (order == least && index + i >= static_cast<u32>(bound)));
    if (reaches) highest = max(highest, order);
    votes[i] = __ballot_sync(FULL_WARP, reaches);
    all += __popc(votes[i]);
  }
  if (all == 0) return;
  u32 lane = threadIdx.x & 31, start = 0;
  if (lane == 0) start = atomicAdd(&s.kept, all);
  start = __shfl_sync(FULL_WARP, start, 0);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u32 slot = start + __popc(votes[i] & ((1u << lane) - 1));
    if ((votes[i] >> lane & 1) && slot < CAPACITY) kept[slot] = composite(values[i], index + i);
    start += __popc(votes[i]);
  }
}

// Keeps what of one block's share of the row reaches the bound, and returns the highest order met.
__device__ __forceinline__ u32 stream(Scratch &s, const float4 *vectors, u64 *kept, u32 size, u64 bound, u32 rank,
                                      u32 step) {
  u32 highest = 0, end = (size + 3) / 4;
#pragma unroll 1
  for (u32 start = rank * TILE; start < end; start += step * TILE) {
    float4 tile[DEPTH];
#pragma unroll
    for (u32 i = 0; i < DEPTH; ++i) {
      u32 at = start + i * THREADS + threadIdx.x;
      tile[i] = at < end ? vectors[at] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (u32 i = 0; i < DEPTH; ++i) {
      keep(s, kept, tile[i], 4 * (start + i * THREADS + threadIdx.x), size, bound, highest);
    }
  }
  return highest;
}

template <u32 CLUSTER>
__device__ __forceinline__ void select(const float *logits, int stride, const int *positions, int shift, int wanted,
                                       int *workspace, int workspace_stride) {
  extern __shared__ u64 kept[];
  __shared__ Scratch s;
  u32 rank = CLUSTER > 1 ? cluster_rank() : 0, row = blockIdx.x / CLUSTER, thread = threadIdx.x;
  const float *values = logits + static_cast<u64>(row) * stride;
  const float4 *vectors = reinterpret_cast<const float4 *>(values);
  u32 size = max(positions[row] + 1, 0) >> shift, k = min(static_cast<u32>(wanted), size);
  int *out = workspace + static_cast<u64>(row) * workspace_stride;
  bool few = size <= CAPACITY;
  if (few && rank != 0) return;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The whole share of the row travels to L2 while the sample is taken.
  for (u32 start = rank * TILE; 4 * start < size; start += CLUSTER * TILE) {
    u32 from = start + thread * 256, to = min(from + 256, size / 4);
    if (thread < TILE / 256 && from < to) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(vectors + from), "r"((to - from) * 16) : "memory");
    }
  }
#endif
  if (rank == 0) {
    for (u32 i = thread; i < workspace_stride; i += THREADS) {
      if (i == 0) out[i] = k;
      else if (i == 1) out[i] = wanted;
      else if (i >= HEADER + 2 * k) out[i] = -1;
    }
  }
  if (thread == 0) {
    s.kept = 0;
    s.highest = 0;
  }
  u64 bound = 0;
  u32 highest = 0;
  if (few) {
    for (u32 i = thread; i < size; i += THREADS) {
      u64 key = composite(values[i], i);
      kept[i] = key;
      highest = max(highest, static_cast<u32>(key >> 32));
    }
  } else {
    bound = sampled_bound(s, vectors, kept, size, k);
    __syncthreads();
    highest = stream(s, vectors, kept, size, bound, rank, CLUSTER);
  }
  __syncthreads();
  highest = __reduce_max_sync(FULL_WARP, highest);
  if ((thread & 31) == 0) atomicMax(&s.highest, highest);
  __syncthreads();

  u32 total = few ? size : s.kept;
  highest = s.highest;
  if (CLUSTER > 1 && !few) {
    cluster_wait();
    u32 offset = 0;
    total = 0;
#pragma unroll 1
    for (u32 i = 0; i < CLUSTER; ++i) {
      u32 other = load_remote(remote(shared_address(&s.kept), i));
      highest = max(highest, load_remote(remote(shared_address(&s.highest), i)));
      if (i < rank) offset += other;
      total += other;
    }
    if (rank != 0 && total <= CAPACITY) {
      u32 target = remote(shared_address(kept), 0);
      for (u32 i = thread; i < s.kept; i += THREADS) store_remote(target + 8 * (offset + i), kept[i]);
    }
    cluster_wait();
    if (rank != 0) return;
  }
  if (k == 0) return;

  if (total > CAPACITY || total < k) {
    u64 least = bound_of(s, Row{values}, size, k, 0, 0, 64);
    write_ordered(s, Row{values}, size, least, values, size, out);
    return;
  }
  u64 least = 0;
  if (total > k) {
    int top = 32 + 32 - __clz(highest - static_cast<u32>(bound >> 32));
    least = bound_of(s, Gathered{kept}, total, k, 0, bound >> 32 << 32, top);
  }
  write_ordered(s, Gathered{kept}, total, least, values, size, out);
}

#define SELECT(cluster, dims)                                                                                           \
  extern "C" __global__ void dims __launch_bounds__(THREADS) topk_select_##cluster(                                     \
      const float *logits, int stride, const int *positions, int shift, int wanted, int *workspace,                     \
      int workspace_stride) {                                                                                           \
    select<cluster>(logits, stride, positions, shift, wanted, workspace, workspace_stride);                             \
  }

SELECT(1, )
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
SELECT(2, __cluster_dims__(2, 1, 1))
SELECT(4, __cluster_dims__(4, 1, 1))
SELECT(8, __cluster_dims__(8, 1, 1))
#endif

// Page indices of the candidates below the row's length; -1 for all others. A block a row.
extern "C" __global__ void topk_finalise(Rows workspace, Rows table, Rows positions, Rows target, int k) {
  u64 row = blockIdx.x;
  const int *candidates = workspace.at<int>(row);
  u32 length = max(*positions.at<int>(row) + 1, 0) / 4;
  u32 count = min(static_cast<u32>(candidates[0]), static_cast<u32>(k));
  for (u32 i = threadIdx.x; i < target.len / 4; i += blockDim.x) {
    int word = -1;
    if (i < count && 2 * i + 2 < workspace.len / 4) {
      u32 index = candidates[2 + 2 * i];
      if (index < length && index / 64 < table.len / 4) word = table.at<int>(row)[index / 64] * 64 + index % 64;
    }
    target.at<int>(row)[i] = word;
  }
}
