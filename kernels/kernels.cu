// Every kernel, compiled at run time, one instantiation for each dtype or pair of dtypes. No headers: NVRTC alone has none
// for half precision. Arithmetic on elements is PTX: CuPy has the compiler flush subnormals, and left alone it fuses what it likes.
//
// Multi-tensor kernels: block b does chunk b. `geometry` is one table of 64-bit integers for n tensors:
//   [0, n) elements of each   [n, 2n) the first chunk of each   [2n, 2n + gridDim.x) the tensor of each chunk
// `addresses` has the n tensors of the first list, then those of the second.

typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

constexpr int THREADS = 256;
constexpr int CHUNK_BYTES = 32768;  // of the wider side: 8 vectors of 16 bytes for each thread
constexpr int IN_FLIGHT = 4;        // vectors that a thread loads before it uses the first

__device__ inline float mul(float a, float b) { float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
__device__ inline double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float add(float a, float b) { float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline float fma(float a, float b, float c) {
    float r; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c)); return r;
}
__device__ inline double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ inline float to_float(double a) { float r; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(a)); return r; }
__device__ inline double to_double(float a) { double r; asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(a)); return r; }
__device__ inline u16 to_f16(float a) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(a)); return r; }
__device__ inline u16 to_bf16(float a) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(a)); return r; }
__device__ inline float of_f16(u16 a) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(a)); return r; }

template <bool> struct Choose { typedef float type; };
template <> struct Choose<true> { typedef double type; };
template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <typename A> struct Same<A, A> { static constexpr bool value = true; };
// What a pair of dtypes is worked out in: float64 if one of them is, else float32.
template <typename A, typename B = A> using Wide = typename Choose<Same<A, double>::value || Same<B, double>::value>::type;

__device__ inline void widen(float &out, float x) { out = x; }
__device__ inline void widen(float &out, f16 x) { out = of_f16(x.bits); }
__device__ inline void widen(float &out, bf16 x) { out = __uint_as_float((u32)x.bits << 16); }
__device__ inline void widen(double &out, double x) { out = x; }
template <typename T> __device__ inline void widen(double &out, T x) { float f; widen(f, x); out = to_double(f); }
template <typename W, typename T> __device__ inline W wide(T x) { W out; widen(out, x); return out; }

__device__ inline void narrow(float &out, float x) { out = x; }
__device__ inline void narrow(double &out, double x) { out = x; }
__device__ inline void narrow(f16 &out, float x) { out.bits = to_f16(x); }
__device__ inline void narrow(bf16 &out, float x) { out.bits = to_bf16(x); }
template <typename T> __device__ inline void narrow(T &out, double x) { narrow(out, to_float(x)); }
template <typename T, typename W> __device__ inline T as(W x) { T out; narrow(out, x); return out; }

struct alignas(16) Word { u64 low, high; };
template <typename T, int V> struct alignas(sizeof(T) * V) Vec { T at[V]; };
template <typename T, int V> __device__ inline bool aligned(const T *pointer) { return (u64)pointer % (sizeof(T) * V) == 0; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

struct Chunk {
    i64 tensor, start, count;  // elements
    __device__ Chunk(const i64 *geometry, i64 n, i64 size) {
        tensor = geometry[2 * n + blockIdx.x];
        start = (blockIdx.x - geometry[n + tensor]) * size;
        i64 left = geometry[tensor] - start;
        count = left < size ? left : size;
    }
};

// out[i] = f(in[i], out[i]); out is read only if READS. Elements go to the same threads however the memory is aligned.
template <bool READS, typename Out, typename In, typename F>
__device__ inline void transform(Out *out, const In *in, i64 count, F f) {
    constexpr int V = 16 / larger(sizeof(Out), sizeof(In));
    i64 done = 0;
    if (aligned<Out, V>(out) && aligned<In, V>(in)) {
        const i64 vectors = count / V;
        auto *outs = (Vec<Out, V> *)out;
        auto *ins = (const Vec<In, V> *)in;
        for (i64 base = threadIdx.x; base < vectors; base += IN_FLIGHT * THREADS) {
            Vec<In, V> x[IN_FLIGHT];
            Vec<Out, V> y[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++)
                if (base + k * THREADS < vectors) {
                    x[k] = ins[base + k * THREADS];
                    if (READS) y[k] = outs[base + k * THREADS];
                }
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++)
                if (base + k * THREADS < vectors) {
#pragma unroll
                    for (int v = 0; v < V; v++) y[k].at[v] = f(x[k].at[v], y[k].at[v]);
                    outs[base + k * THREADS] = y[k];
                }
        }
        done = vectors * V;
    }
#pragma unroll 4
    for (i64 i = done + threadIdx.x; i < count; i += THREADS) out[i] = f(in[i], READS ? out[i] : Out());
}

template <typename T> __global__ void __launch_bounds__(THREADS) copy(const i64 *addresses, const i64 *geometry, i64 n) {
    const Chunk chunk(geometry, n, CHUNK_BYTES / sizeof(T));
    T *out = (T *)addresses[chunk.tensor] + chunk.start;
    const T *in = (const T *)addresses[n + chunk.tensor] + chunk.start;
    constexpr int V = 16 / sizeof(T);
    const i64 words = aligned<T, V>(out) && aligned<T, V>(in) ? chunk.count / V : 0;
    transform<false>((Word *)out, (const Word *)in, words, [](Word x, Word) { return x; });
#pragma unroll 4
    for (i64 i = words * V + threadIdx.x; i < chunk.count; i += THREADS) out[i] = in[i];
}

template <typename Out, typename In, bool ADDS>
__global__ void __launch_bounds__(THREADS) pack(const i64 *addresses, const i64 *geometry, i64 n, double scale) {
    typedef Wide<Out, In> W;
    const Chunk chunk(geometry, n, CHUNK_BYTES / larger(sizeof(Out), sizeof(In)));
    Out *out = (Out *)addresses[chunk.tensor] + chunk.start;
    const In *in = (const In *)addresses[n + chunk.tensor] + chunk.start;
    const W factor = as<W>(scale);
    transform<ADDS>(out, in, chunk.count, [=](In x, Out y) {
        return as<Out>(ADDS ? fma(wide<W>(x), factor, wide<W>(y)) : mul(wide<W>(x), factor));
    });
}

template <typename T>
__global__ void __launch_bounds__(THREADS) rescale(const i64 *addresses, const i64 *geometry, i64 n, const double *scale) {
    typedef Wide<T> W;
    const W factor = as<W>(*scale);
    if (factor == W(1)) return;
    const Chunk chunk(geometry, n, CHUNK_BYTES / sizeof(T));
    T *out = (T *)addresses[chunk.tensor] + chunk.start;
    transform<false>(out, out, chunk.count, [=](T x, T) { return as<T>(mul(wide<W>(x), factor)); });
}

// The sum over the block, in thread 0: a tree, so always in the same order. BLOCK: threads, a multiple of 32.
template <int BLOCK> __device__ inline double block_sum(double x) {
    __shared__ double of_warp[BLOCK / 32];
    for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    if (threadIdx.x == 0)
        for (int w = 0; w < BLOCK / 32; w++) x += of_warp[w];
    __syncthreads();
    return x;
}

// sums[2 * (first + b)]: the sum of squares of chunk b. The next one: NaN if an element is not finite, else 0.
template <typename T>
__global__ void __launch_bounds__(THREADS) squares(const i64 *addresses, const i64 *geometry, i64 n, double *sums, i64 first) {
    typedef Wide<T> W;
    constexpr int V = 16 / sizeof(T);
    const Chunk chunk(geometry, n, CHUNK_BYTES / sizeof(T));
    const T *in = (const T *)addresses[chunk.tensor] + chunk.start;
    const bool vectors = aligned<T, V>(in);
    W sum[IN_FLIGHT] = {}, poison[IN_FLIGHT] = {};
    for (i64 base = threadIdx.x * V; base < chunk.count; base += IN_FLIGHT * THREADS * V) {
        Vec<T, V> x[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            const i64 at = base + k * THREADS * V;
            if (vectors && at + V <= chunk.count) x[k] = *(const Vec<T, V> *)(in + at);
            else
                for (int v = 0; v < V; v++) x[k].at[v] = at + v < chunk.count ? in[at + v] : T();
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
#pragma unroll
            for (int v = 0; v < V; v++) {
                const W value = wide<W>(x[k].at[v]);
                sum[k] = fma(value, value, sum[k]);
                poison[k] = fma(value, W(0), poison[k]);
            }
    }
    double total = 0, poisoned = 0;
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++) {
        total += wide<double>(sum[k]);
        poisoned += wide<double>(poison[k]);
    }
    total = block_sum<THREADS>(total);
    poisoned = block_sum<THREADS>(poisoned);
    if (threadIdx.x == 0) {
        sums[2 * (first + blockIdx.x)] = total;
        sums[2 * (first + blockIdx.x) + 1] = poisoned;
    }
}

constexpr int FINISH_THREADS = 1024;  // in one block

// out: the sum of the `count` sums, and 1 if an element was not finite, else 0.
__global__ void __launch_bounds__(FINISH_THREADS) finish(double *out, const double *sums, i64 count) {
    double total = 0, poisoned = 0;
    for (i64 i = threadIdx.x; i < count; i += FINISH_THREADS) {
        total += sums[2 * i];
        poisoned += sums[2 * i + 1];
    }
    total = block_sum<FINISH_THREADS>(total);
    poisoned = block_sum<FINISH_THREADS>(poisoned);
    if (threadIdx.x == 0) {
        out[0] = total;
        out[1] = poisoned == 0 ? 0 : 1;
    }
}
