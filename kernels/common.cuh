// What every kernel shares: number formats by their bits, warp reductions, and Hopper's asynchronous copies.
//
// Compiled by NVRTC with no header but this one, so that a driver and the compiler library are all a machine needs.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FULL_WARP 0xffffffffu

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// Rounds to nearest even; NaN stays NaN.
__device__ __forceinline__ u16 float_to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  return static_cast<u32>(float_to_bf16(low)) | static_cast<u32>(float_to_bf16(high)) << 16;
}

// E4M3, round to nearest even, saturating at 448.
__device__ __forceinline__ u16 pack_e4m3(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  auto one = [](float value) -> u16 {
    u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7f;
    float absolute = __uint_as_float(magnitude);
    if (absolute < 1.f / 64.f) return sign | static_cast<u32>(rintf(absolute * 512.f));
    u32 rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    return sign | min(rounded - (120u << 3), 0x7eu);
  };
  return one(low) | one(high) << 8;
#else
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

__device__ __forceinline__ float2 unpack_e4m3(u16 pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  auto one = [](u32 code) {
    u32 exponent = code >> 3 & 15, mantissa = code & 7;
    float magnitude = exponent == 0 ? mantissa / 512.f : __uint_as_float((exponent + 120) << 23 | mantissa << 20);
    if ((code & 0x7f) == 0x7f) magnitude = __uint_as_float(0x7fc00000);
    return code & 0x80 ? -magnitude : magnitude;
  };
  return make_float2(one(pair & 0xff), one(pair >> 8));
#else
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  float2 value;
  asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.f32.f16 %0, lo;\n cvt.f32.f16 %1, hi;}"
      : "=f"(value.x), "=f"(value.y)
      : "r"(halves));
  return value;
#endif
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
  for (int step = 16; step; step >>= 1) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
  return value;
}

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// One operand of an op: strided rows of bytes in the arena.
struct Rows {
  u8 *base;
  u64 stride, len, rows;
  template <class T>
  __device__ __forceinline__ T *at(u64 row) const {
    return reinterpret_cast<T *>(base + row * stride);
  }
};

// An immutable sparse matrix: row = output, column = input. `ballast` are as many bytes as the charged matrix has
// elements; a multiplication reads its share of them, as a real one reads its weights.
struct Weight {
  const u32 *start, *column;
  const float *value;
  const uint4 *ballast;
  u64 ballast_bytes;
  u32 rows, columns;
};

// Threads of a block that reads ballast, and the sixteen-byte loads that each has in flight: a tile.
#define BALLAST_THREADS 256
#define BALLAST_LOADS 8

// This block's tiles of the ballast. No weight has no rows, so that the sum is stored never; the compiler cannot know.
struct Ballast {
  u32 at, sum;

  __device__ __forceinline__ void add(uint4 part) { sum ^= part.x ^ part.y ^ part.z ^ part.w; }

  // Reads up to `most` of the tiles left.
  __device__ __forceinline__ void tiles(const Weight &weight, u32 most) {
    const u32 tile = BALLAST_THREADS * BALLAST_LOADS, whole = weight.ballast_bytes / (16 * tile);
#pragma unroll 1
    for (u32 left = most; left && at < whole; --left, at += gridDim.x) {
      const uint4 *from = weight.ballast + at * tile + threadIdx.x;
      uint4 part[BALLAST_LOADS];
#pragma unroll
      for (u32 i = 0; i < BALLAST_LOADS; ++i) part[i] = __ldcs(from + i * BALLAST_THREADS);
#pragma unroll
      for (u32 i = 0; i < BALLAST_LOADS; ++i) add(part[i]);
    }
  }

  __device__ __forceinline__ void begin() {
    at = blockIdx.x;
    sum = 0;
  }

  __device__ __forceinline__ void rest(const Weight &weight, u32 *never) {
    tiles(weight, 0xffffffff);
    const u32 tile = BALLAST_THREADS * BALLAST_LOADS, vectors = weight.ballast_bytes / 16;
    if (blockIdx.x == gridDim.x - 1) {
#pragma unroll 1
      for (u32 i = vectors / tile * tile + threadIdx.x; i < vectors; i += BALLAST_THREADS) add(__ldcs(weight.ballast + i));
    }
    if (weight.rows == 0) *never = sum;
  }
};

// Sum and product rounded one by one, as the reference rounds them.
__device__ __forceinline__ float multiply_add(float sum, float a, float b) { return __fadd_rn(sum, __fmul_rn(a, b)); }

__device__ __forceinline__ float quantisation_scale(float largest) { return __fdiv_rn(fmaxf(largest, 1e-4f), 448.f); }

__device__ __forceinline__ u8 float_to_e4m3(float value) { return static_cast<u8>(pack_e4m3(value, 0.f)); }

__device__ __forceinline__ float e4m3_to_float(u8 code) { return unpack_e4m3(code).x; }

// A CUtensorMap, passed by value as a __grid_constant__ parameter.
struct __align__(64) TensorMap {
  u64 words[16];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A loop that the compiler sees, so that the lanes of a warp leave it together, as matrix instructions demand.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// Keys stream through once: evict them first, so that the logits stay in L2 for the selection that reads them next.
#define EVICT_FIRST 0x12F0000000000000ull
#define EVICT_LAST 0x14F0000000000000ull

__device__ __forceinline__ void copy_tile(u32 target, const TensorMap &map, u32 barrier, int x, int y, int z, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copy_bytes(u32 target, const void *source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

#endif
