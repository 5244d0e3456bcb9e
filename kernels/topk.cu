// Selects each row's largest logits by (logit, later index): a total order, so that the answer is one set.
//
// A row's logits are read once. A small sample of the row gives a bound that surely lies below the wanted elements and not
// far below; while it is found, the row already travels into shared memory, in a ring of which each thread owns its own
// part; what may reach the bound is kept in a list. One histogram over the list's values finds the bin of the least wanted
// element, counting within the bin finds the element, and a map of bits puts the chosen into order. When the sample misled
// (too few or too many kept), the same selection runs over the whole row instead: slower, never wrong. A cluster of blocks
// shares one row and gathers in its first block's shared memory.
//
// A step that all warps take costs as many cycles as they have instructions together, so the block is small.

#include "common.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
// Keys that are kept of a row.
#define CAPACITY 4096
#define DIGIT 12
#define BINS (1 << DIGIT)
// Words of bins, or of a map of bits, that a thread sums, and indices that a map covers.
#define WORDS (BINS / THREADS)
#define WINDOW (BINS * 32)
// Vectors that a thread samples, samples that a warp puts forward, and keys that can be ranked by counting.
#define SAMPLES (32 / WARPS)
#define BEST 4
#define RANKED 128
#define HEADER 2
// Vectors that a thread waits for together, and how many times as many are on their way.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define GROUP 4
#define DEEP 2
#else
#define GROUP 2
#define DEEP 1
#endif

// Integers in the order of the floats, NaN beyond infinity by sign.
__device__ __forceinline__ u32 ordered(float value) {
  u32 bits = __float_as_uint(value);
  return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ u32 unordered(u32 order) { return order ^ ((order >> 31) ? 0x80000000u : 0xffffffffu); }

// A logit and its index as one integer whose order is the selection's.
__device__ __forceinline__ u64 composite(float value, u32 index) {
  return static_cast<u64>(ordered(value)) << 32 | index;
}

struct __align__(16) Scratch {
  u32 bins[BINS];
  u32 map[BINS];
  u32 warps[WARPS];
  u64 ranked[RANKED];
  u64 found;
  u32 kept, low, high, ties;
};

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_leave() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

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

__device__ __forceinline__ u64 load_remote_key(u32 address) {
  u64 value;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}

// A thread's share of the kept keys.
struct Held {
  u64 keys[CAPACITY / THREADS];
  u32 valid;  // a bit a key
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (u32 i = 0; i < CAPACITY / THREADS; ++i) {
      if (valid >> i == 0) break;
      if (valid >> i & 1) visit(keys[i]);
    }
  }
};

// All keys of a row.
struct Row {
  const float *values;
  u32 size;
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll 8
    for (u32 i = threadIdx.x; i < size; i += THREADS) visit(composite(__ldg(values + i), i));
  }
};

__device__ __forceinline__ u32 sum_to(u32 value) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    u32 other = __shfl_up_sync(FULL_WARP, value, step);
    if ((threadIdx.x & 31) >= step) value += other;
  }
  return value;
}

// What the words of a thread count: themselves, or their bits. Part 0 is the highest, so that sums over lower threads run
// downwards.
template <bool BITS>
__device__ __forceinline__ u32 sum_of(const u32 *words, u32 part) {
  const uint4 *own = reinterpret_cast<const uint4 *>(words + (THREADS - 1 - part) * WORDS);
  u32 sum = 0;
#pragma unroll
  for (u32 i = 0; i < WORDS / 4; ++i) {
    uint4 four = own[i];
    sum += BITS ? __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w) : four.x + four.y + four.z + four.w;
  }
  return sum;
}

// The word that holds the `rank`-th (from 1) of what the words count, from the highest word down; how many are in higher
// words, in it, and in all. Every thread gets the answer. Nothing is found where `rank` is more than all.
struct Place {
  u32 word, above, inside, all;
};

template <bool BITS>
__device__ __forceinline__ Place find(Scratch &s, const u32 *words, u32 rank) {
  u32 lane = threadIdx.x & 31;
  u32 sum = __reduce_add_sync(FULL_WARP, sum_of<BITS>(words, threadIdx.x));
  if (lane == 0) s.warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = lane < WARPS ? s.warps[lane] : 0;
  u32 to = sum_to(sum);
  Place place;
  place.all = __shfl_sync(FULL_WARP, to, 31);
  u32 at = min(__ffs(__ballot_sync(FULL_WARP, to >= rank)) - 1u, WARPS - 1);
  place.above = __shfl_sync(FULL_WARP, to - sum, at);
  u32 part = at * 32;
  sum = sum_of<BITS>(words, part + lane);
  to = place.above + sum_to(sum);
  at = min(__ffs(__ballot_sync(FULL_WARP, to >= rank)) - 1u, 31);
  place.above = __shfl_sync(FULL_WARP, to - sum, at);
  place.word = (THREADS - part - at) * WORDS - 1;
  sum = lane < WORDS ? words[place.word - lane] : 0;
  if (BITS) sum = __popc(sum);
  to = place.above + sum_to(sum);
  at = min(__ffs(__ballot_sync(FULL_WARP, to >= rank)) - 1u, WORDS - 1);
  place.above = __shfl_sync(FULL_WARP, to - sum, at);
  place.inside = __shfl_sync(FULL_WARP, sum, at);
  place.word -= at;
  return place;
}

__device__ __forceinline__ void clear(u32 *words) {
#pragma unroll
  for (u32 i = 0; i < WORDS / 4; ++i) reinterpret_cast<uint4 *>(words)[i * THREADS + threadIdx.x] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void mark(u32 *words, u32 index) { atomicOr(words + index / 32, 1u << (index & 31)); }

// The `rank`-th largest (from 1) of the ranked keys: eight threads a key count what reaches it.
__device__ __noinline__ u64 nth_of(Scratch &s, u32 count, u32 rank) {
  __syncthreads();
  u32 part = threadIdx.x & 7;
#pragma unroll 1
  for (u32 at = threadIdx.x / 8; (at & ~3u) < count; at += THREADS / 8) {
    u64 own = s.ranked[at];
    u32 reaching = 0;
#pragma unroll 4
    for (u32 i = part; i < count; i += 8) reaching += s.ranked[i] >= own;
#pragma unroll
    for (u32 i = 1; i < 8; i <<= 1) reaching += __shfl_xor_sync(FULL_WARP, reaching, i);
    if (reaching == rank && part == 0 && at < count) s.found = own;
  }
  __syncthreads();
  return s.found;
}

// The `rank`-th latest of the keys of one value. The bins are clear before.
template <class Keys>
__device__ __forceinline__ u64 latest_of(Scratch &s, const Keys &keys, u32 size, u32 value, u32 rank) {
  u32 window = (size - 1) / WINDOW * WINDOW;
  for (;; window -= WINDOW) {
    keys.each([&](u64 key) {
      u32 index = static_cast<u32>(key) - window;
      if (key >> 32 == value && index < WINDOW) mark(s.bins, index);
    });
    __syncthreads();
    Place place = find<true>(s, s.bins, rank);
    if (place.all >= rank || window == 0) {
      u32 word = s.bins[place.word];
      for (u32 i = place.above + 1; i < rank && word; ++i) word ^= 0x80000000u >> __clz(word);
      return static_cast<u64>(value) << 32 | (window + place.word * 32 + 31 - __clz(word | 1));
    }
    rank -= place.all;
    __syncthreads();
    clear(s.bins);
    __syncthreads();
  }
}

// The `k`-th largest key (from 1), or a lower bound that no further key reaches. No key that counts has a value below
// `low`; bins are `1 << shift` values wide and the highest one is open. The bins are clear before.
template <class Keys>
__device__ __forceinline__ u64 least_of(Scratch &s, const Keys &keys, u32 size, u32 k, u32 low, u32 shift) {
  u32 high = ~0u, rank = k;
  for (;;) {
    keys.each([&](u64 key) {
      u32 order = key >> 32;
      if (order >= low && order <= high) atomicAdd(s.bins + min((order - low) >> shift, BINS - 1), 1);
    });
    __syncthreads();
    Place place = find<false>(s, s.bins, rank);
    rank -= place.above;
    low += place.word << shift;
    if (place.word < BINS - 1) high = min(high - low, (1u << shift) - 1) + low;
    if (place.inside == rank) return static_cast<u64>(low) << 32;
    if (place.inside <= RANKED) {
      keys.each([&](u64 key) {
        u32 order = key >> 32;
        if (order >= low && order <= high) s.ranked[atomicAdd(&s.ties, 1) & (RANKED - 1)] = key;
      });
      return nth_of(s, place.inside, rank);
    }
    // Only values that occur deserve bins.
    u32 least = ~0u, most = 0;
    keys.each([&](u64 key) {
      u32 order = key >> 32;
      if (order >= low && order <= high) {
        least = min(least, order);
        most = max(most, order);
      }
    });
    least = __reduce_min_sync(FULL_WARP, least);
    most = __reduce_max_sync(FULL_WARP, most);
    if ((threadIdx.x & 31) == 0) {
      atomicMin(&s.low, least);
      atomicMax(&s.high, most);
    }
    __syncthreads();
    clear(s.bins);
    low = s.low;
    high = s.high;
    __syncthreads();
    if (low >= high) return latest_of(s, keys, size, low, rank);
    if (threadIdx.x == 0) {
      s.low = ~0u;
      s.high = 0;
    }
    shift = max(0, 32 - DIGIT - __clz(high - low));
  }
}

// Writes those of `keys` that reach the bound, at most `k`, latest index first. The map is clear before; the bins are lost.
template <class Keys>
__device__ __forceinline__ void write_ordered(Scratch &s, const Keys &keys, u32 size, u64 least, u32 k, int2 *out) {
  u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, written = 0;
  for (u32 window = (size - 1) / WINDOW * WINDOW;; window -= WINDOW) {
    keys.each([&](u64 key) {
      u32 index = static_cast<u32>(key) - window;
      if (key >= least && index < WINDOW) mark(s.map, index);
    });
    __syncthreads();
    u32 first = (THREADS - 1 - threadIdx.x) * WORDS, sum = sum_of<true>(s.map, threadIdx.x), to = sum_to(sum);
    if (lane == 31) s.warps[warp] = to;
    __syncthreads();
    u32 others = lane < WARPS ? s.warps[lane] : 0;
    u32 above = written + __reduce_add_sync(FULL_WARP, lane < warp ? others : 0) + to - sum;
    written += __reduce_add_sync(FULL_WARP, others);
    // How many are above each word.
#pragma unroll
    for (int i = WORDS / 4 - 1; i >= 0; --i) {
      uint4 words = reinterpret_cast<const uint4 *>(s.map + first)[i], before;
      before.w = above;
      before.z = before.w + __popc(words.w);
      before.y = before.z + __popc(words.z);
      before.x = before.y + __popc(words.y);
      above = before.x + __popc(words.x);
      reinterpret_cast<uint4 *>(s.bins + first)[i] = before;
    }
    __syncthreads();
    keys.each([&](u64 key) {
      u32 index = static_cast<u32>(key) - window;
      if (key >= least && index < WINDOW) {
        u32 slot = s.bins[index / 32] + __popc(s.map[index / 32] & ~1u << (index & 31));
        if (slot < k) out[slot] = make_int2(index + window, unordered(key >> 32));
      }
    });
    if (window == 0) return;
    __syncthreads();
    clear(s.map);
    __syncthreads();
  }
}

__device__ __forceinline__ void exchange(u64 &a, u64 &b) {
  u64 larger = max(a, b);
  b = min(a, b);
  a = larger;
}

// A bound below the `k` wanted and near them, from a sample in vectors spread over the row, each in its own section. Every
// block of a cluster takes the same sample and finds the same bound.
struct Sample {
  u32 lanes, vectors[SAMPLES];
  float4 values[SAMPLES];
  __device__ __forceinline__ Sample(const float4 *row, u32 size, u32 k) {
    // About 16 of the wanted ones are met. Lanes of a warp are far apart, so that every warp meets its share of them.
    lanes = min(max(size / (8 * k), 1u), 32u);
    u32 lane = threadIdx.x & 31, sections = lanes * (SAMPLES * WARPS), length = size / 4 / sections;
    u32 longer = size / 4 - length * sections;  // the first sections by one
    if (lane >= lanes) return;
#pragma unroll
    for (u32 i = 0; i < SAMPLES; ++i) {
      u32 section = (lane * SAMPLES + i) * WARPS + threadIdx.x / 32;
      vectors[i] = section * length + min(section, longer) + __umulhi(section * 2654435761u, length + (section < longer));
      values[i] = __ldg(row + vectors[i]);
    }
  }
  __device__ __forceinline__ u64 bound(Scratch &s, u32 size, u32 k) {
    u32 lane = threadIdx.x & 31;
    u64 best[4] = {0, 0, 0, 0};
    if (lane < lanes) {
#pragma unroll
      for (u32 i = 0; i < SAMPLES; ++i) {
        float four[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
        u64 keys[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) keys[j] = composite(four[j], 4 * vectors[i] + j);
        exchange(keys[0], keys[1]);
        exchange(keys[2], keys[3]);
        exchange(keys[0], keys[2]);
        exchange(keys[1], keys[3]);
        exchange(keys[1], keys[2]);
        // The four largest of two descending lists, in order again.
#pragma unroll
        for (u32 j = 0; j < 4; ++j) best[j] = i == 0 ? keys[j] : max(best[j], keys[3 - j]);
        if (i == 0) continue;
        exchange(best[0], best[2]);
        exchange(best[1], best[3]);
        exchange(best[0], best[1]);
        exchange(best[2], best[3]);
      }
    }
#pragma unroll
    for (u32 i = 0; i < BEST; ++i) {
      u32 value = best[0] >> 32;
      u32 holders = __ballot_sync(FULL_WARP, value == __reduce_max_sync(FULL_WARP, value));
      // Higher lanes are later in the row.
      if (lane == 31 - __clz(holders)) {
        s.ranked[threadIdx.x / 32 * BEST + i] = best[0];
        best[0] = best[1];
        best[1] = best[2];
        best[2] = best[3];
        best[3] = 0;
      }
    }
    float met = static_cast<float>(k) * (4 * SAMPLES * WARPS) * lanes / size;
    return nth_of(s, WARPS * BEST, min(static_cast<u32>(met + 4.f * sqrtf(met)) + 5, WARPS * BEST));
  }
};

__device__ __forceinline__ void copy_async(u32 target, const float4 *source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// A block's share of a row on its way through the ring, one vector in `CLUSTER * THREADS` a thread.
template <u32 CLUSTER>
struct Stream {
  static constexpr int STEP = CLUSTER * THREADS;
  const float4 *source;
  u32 ring, at;
  int left;  // vectors from the thread's next one to the row's end
  __device__ __forceinline__ Stream(const float4 *row, const float4 *ring, u32 size, u32 rank)
      : ring(shared_address(ring + threadIdx.x)), at(rank * THREADS + threadIdx.x), left((size + 3) / 4 - at) {
    source = row + at;
#pragma unroll
    for (u32 i = 0; i < DEEP; ++i) fetch(i, i * GROUP);
  }
  __device__ __forceinline__ void fetch(u32 slot, int from) const {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      if (left > (from + i) * STEP) copy_async(ring + (slot * GROUP + i) * (THREADS * 16), source + (from + i) * STEP);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Keeps what may reach the bound: some keys below it are kept too.
  __device__ __forceinline__ void keep(Scratch &s, u64 *kept, const float4 *tiles, u64 bound, u32 size) {
    // Vectors before the bound's index need more than its value: no key of at least these has a float below them.
    u32 order = bound >> 32, slot = 0;
    int after = at + left - static_cast<u32>(bound) / 128 * 32;
    float reached = __uint_as_float(unordered(order)), passed = __uint_as_float(unordered(min(order, ~1u) + 1));
#pragma unroll 1
    while (left > 0) {
      asm volatile("cp.async.wait_group %0;" ::"n"(DEEP - 1) : "memory");
      const float4 *tile = tiles + slot * (GROUP * THREADS) + threadIdx.x;
      u32 mask = 0;
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        float4 vector = tile[i * THREADS];
        float least = left - i * STEP > after ? passed : reached;
        if (!(vector.x < least)) mask |= 1 << 4 * i;
        if (!(vector.y < least)) mask |= 2 << 4 * i;
        if (!(vector.z < least)) mask |= 4 << 4 * i;
        if (!(vector.w < least)) mask |= 8 << 4 * i;
      }
      if (left <= (GROUP - 1) * STEP + 1) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
          int valid = max(static_cast<int>(size - 4 * (at + i * STEP)), 0);
          if (valid < 4) mask &= ~((15u << valid & 15u) << 4 * i);
        }
      }
      if (mask) {
        u32 count = __popc(mask), to = atomicAdd(&s.kept, count);
        if (to + count <= CAPACITY) {
          do {
            u32 bit = __ffs(mask) - 1;
            float value = reinterpret_cast<const float *>(tile + bit / 4 * THREADS)[bit & 3];
            kept[to++] = composite(value, 4 * at + bit / 4 * (4 * STEP) + (bit & 3));
            mask &= mask - 1;
          } while (mask);
        }
      }
      fetch(slot, DEEP * GROUP);
      slot = slot + 1 == DEEP ? 0 : slot + 1;
      at += GROUP * STEP;
      left -= GROUP * STEP;
      source += GROUP * STEP;
    }
  }
};

// Copies what the other blocks of the cluster kept behind what the first one kept, and returns how much it is together.
template <u32 CLUSTER>
__device__ __forceinline__ u32 gather(Scratch &s, u64 *kept) {
  u32 total = s.kept, counts[CLUSTER];
#pragma unroll
  for (u32 i = 1; i < CLUSTER; ++i) counts[i] = load_remote(remote(shared_address(&s.kept), i));
#pragma unroll
  for (u32 i = 1; i < CLUSTER; ++i) {
    u32 source = remote(shared_address(kept), i), first = total;
    total += counts[i];
#pragma unroll 1
    for (u32 j = threadIdx.x; first + j < min(total, CAPACITY); j += THREADS) kept[first + j] = load_remote_key(source + 8 * j);
  }
  return total;
}

template <u32 CLUSTER>
__device__ __forceinline__ void select(const float *logits, int stride, const int *positions, int shift, int wanted,
                                       int *workspace, int workspace_stride) {
  extern __shared__ __align__(128) u8 dynamic[];
  __shared__ Scratch s;
  u64 *kept = reinterpret_cast<u64 *>(dynamic);
  const float4 *ring = reinterpret_cast<const float4 *>(dynamic + CAPACITY * 8);
  u32 rank = CLUSTER > 1 ? cluster_rank() : 0, row = blockIdx.x / CLUSTER, thread = threadIdx.x;
  const float *values = logits + static_cast<u64>(row) * stride;
  const float4 *vectors = reinterpret_cast<const float4 *>(values);
  u32 size = max(positions[row] + 1, 0) >> shift, k = min(static_cast<u32>(wanted), size);
  int *out = workspace + static_cast<u64>(row) * workspace_stride;
  bool few = size <= CAPACITY;
  if (few && rank != 0) return;

  if (thread == 0) {
    s.kept = 0;
    s.low = ~0u;
    s.high = s.ties = 0;
  }
  auto fill = [&]() {
    if (thread < HEADER) out[thread] = thread == 0 ? k : wanted;
    for (u32 i = HEADER + 2 * k + thread; i < workspace_stride; i += THREADS) out[i] = -1;
  };
  u64 bound = 0;
  u32 total = size;
  Held held;
  held.valid = 0;
  if (few) {
    float4 tiles[CAPACITY / 4 / THREADS];
#pragma unroll
    for (u32 i = 0; i < CAPACITY / 4 / THREADS; ++i) {
      if (4 * (i * THREADS + thread) < size) tiles[i] = vectors[i * THREADS + thread];
    }
    clear(s.bins);
    clear(s.map);
    fill();
#pragma unroll
    for (u32 i = 0; i < CAPACITY / 4 / THREADS; ++i) {
      float four[4] = {tiles[i].x, tiles[i].y, tiles[i].z, tiles[i].w};
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        u32 index = 4 * (i * THREADS + thread) + j;
        held.keys[4 * i + j] = composite(four[j], index);
        if (index < size) held.valid |= 1 << (4 * i + j);
      }
    }
    __syncthreads();
  } else {
    Sample sample(vectors, size, k);
    Stream<CLUSTER> stream(vectors, ring, size, rank);
    if (rank == 0) {
      clear(s.bins);
      clear(s.map);
    }
    if (CLUSTER == 1) fill();
    bound = sample.bound(s, size, k);
    stream.keep(s, kept, ring, bound, size);
    if (CLUSTER > 1) {
      cluster_arrive();
      if (rank == CLUSTER - 1) fill();
      cluster_wait();
      if (rank == 0) total = gather<CLUSTER>(s, kept);
      // The others stay until their keys are read.
      cluster_leave();
      if (rank != 0) {
        cluster_wait();
        return;
      }
    }
    __syncthreads();
    if (CLUSTER == 1) total = s.kept;
#pragma unroll
    for (u32 i = 0; i < CAPACITY / THREADS; ++i) {
      if (i * THREADS + thread >= min(total, CAPACITY)) break;
      held.keys[i] = kept[i * THREADS + thread];
      held.valid |= 1 << i;
    }
  }
  if (k == 0) return;

  int2 *pairs = reinterpret_cast<int2 *>(out + HEADER);
  if (few || (total > k && total <= CAPACITY)) {
    u64 least = 0;
    if (total > k) least = least_of(s, held, size, k, bound >> 32, few ? 32 - DIGIT : 25 - DIGIT);
    if (least >= bound) {
      write_ordered(s, held, size, least, k, pairs);
      return;
    }
    __syncthreads();
    clear(s.bins);
    if (thread == 0) s.ties = 0;
    __syncthreads();
  }
  Row all{values, size};
  u64 least = least_of(s, all, size, k, 0, 32 - DIGIT);
  write_ordered(s, all, size, least, k, pairs);
}

#define SELECT(name, cluster, dims)                                                                                     \
  extern "C" __global__ void dims __launch_bounds__(THREADS, 1) name(                                              \
      const float *logits, int stride, const int *positions, int shift, int wanted, int *workspace,                     \
      int workspace_stride) {                                                                                           \
    select<cluster>(logits, stride, positions, shift, wanted, workspace, workspace_stride);                             \
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
SELECT(topk_select_1, 1, )
SELECT(topk_select_2, 2, __cluster_dims__(2, 1, 1))
SELECT(topk_select_4, 4, __cluster_dims__(4, 1, 1))
SELECT(topk_select_8, 8, __cluster_dims__(8, 1, 1))
#else
// No cluster, and no more shared memory than every device has.
SELECT(topk_select, 1, )
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
