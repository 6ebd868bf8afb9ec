// All kernels, compiled at run time for compute capability 8.0 or more, one instantiation for each dtype or pair of dtypes.
// No headers: NVRTC alone has none for half precision. Arithmetic on elements is PTX, since CuPy's options flush subnormals and
// the compiler may fuse operations.
//
// Multi-tensor kernels: block b processes chunk b. They get their tensors by value, so that a launch reads no table that the
// host would have to copy and to keep: a CUDA graph records all of it.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct e4m3 { u8 bits; };
constexpr int THREADS = 256;
constexpr int CHUNK_BYTES = 32768;  // of the wider side: 8 vectors of 16 bytes for each thread
constexpr int IN_FLIGHT = 4;        // vectors that a thread loads before it uses the first
constexpr int TENSORS = 128;        // of a launch: arguments of a kernel have at most 4 KiB on every GPU and driver
__device__ inline float mul(float a, float b) { float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
__device__ inline double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float add(float a, float b) { float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
__device__ inline float fused(float a, float b, float c) {
    float r; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c)); return r;
}
__device__ inline double fused(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ inline float divide(float a, float b) {
    float r; asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
__device__ inline float to_float(double a) { float r; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(a)); return r; }
__device__ inline double to_double(float a) { double r; asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(a)); return r; }
__device__ inline u16 to_f16(float a) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(a)); return r; }
__device__ inline u16 to_bf16(float a) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(a)); return r; }
__device__ inline float of_f16(u16 a) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(a)); return r; }

template <typename T> struct Widened { float value; };
template <> struct Widened<double> { double value; };
// The dtype in which a pair of dtypes is computed: float64 if one of them is, else float32.
template <typename A, typename B = A> using Wide = decltype(Widened<A>().value + Widened<B>().value);
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

template <typename T, int V> struct alignas(sizeof(T) * V) Vec { T at[V]; };
template <typename T, int V> __device__ inline bool aligned(const T *pointer) { return (u64)pointer % (sizeof(T) * V) == 0; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// One list of at most TENSORS tensors, or two whose i-th tensors have as many elements.
struct Lists {
    i64 addresses[2 * TENSORS];  // from TENSORS on, those of the second list
    i64 elements[TENSORS];
    u32 first[TENSORS];  // chunk of each tensor, ascending; 2^32 - 1 where there is no tensor
};

struct Chunk {
    i64 start, count;  // elements
    int tensor = 0;    // the last one whose first chunk is not after this one: a tensor without elements has no chunk
    __device__ Chunk(const Lists &lists, i64 size) {
#pragma unroll
        for (int step = TENSORS / 2; step > 0; step /= 2)
            if (lists.first[tensor + step] <= blockIdx.x) tensor += step;
        start = (blockIdx.x - lists.first[tensor]) * size;
        i64 left = lists.elements[tensor] - start;
        count = left < size ? left : size;
    }
};

// out[i] = f(in[i], out[i]); out is read only if READS. The alignment does not change which thread computes an element.
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

template <typename T> __global__ void __launch_bounds__(THREADS) copy(const __grid_constant__ Lists lists) {
    const Chunk chunk(lists, CHUNK_BYTES / sizeof(T));
    T *out = (T *)lists.addresses[chunk.tensor] + chunk.start;
    const T *in = (const T *)lists.addresses[TENSORS + chunk.tensor] + chunk.start;
    constexpr int V = 16 / sizeof(T);
    const i64 words = aligned<T, V>(out) && aligned<T, V>(in) ? chunk.count / V : 0;
    using Word = Vec<u64, 2>;
    transform<false>((Word *)out, (const Word *)in, words, [](Word x, Word) { return x; });
#pragma unroll 4
    for (i64 i = words * V + threadIdx.x; i < chunk.count; i += THREADS) out[i] = in[i];
}

template <typename Out, typename In, bool ADDS>
__global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ Lists lists, double scale) {
    typedef Wide<Out, In> W;
    const Chunk chunk(lists, CHUNK_BYTES / larger(sizeof(Out), sizeof(In)));
    Out *out = (Out *)lists.addresses[chunk.tensor] + chunk.start;
    const In *in = (const In *)lists.addresses[TENSORS + chunk.tensor] + chunk.start;
    const W factor = as<W>(scale);
    transform<ADDS>(out, in, chunk.count, [=](In x, Out y) {
        return as<Out>(ADDS ? fused(wide<W>(x), factor, wide<W>(y)) : mul(wide<W>(x), factor));
    });
}

template <typename T>
__global__ void __launch_bounds__(THREADS) rescale(const __grid_constant__ Lists lists, const double *scale) {
    typedef Wide<T> W;
    const W factor = as<W>(*scale);
    if (factor == W(1)) return;
    const Chunk chunk(lists, CHUNK_BYTES / sizeof(T));
    T *out = (T *)lists.addresses[chunk.tensor] + chunk.start;
    transform<false>(out, out, chunk.count, [=](T x, T) { return as<T>(mul(wide<W>(x), factor)); });
}

__device__ inline double2 plus(double2 a, double2 b) { return {a.x + b.x, a.y + b.y}; }
// The sum over the block, in thread 0, in the fixed order of a tree. A barrier must separate two calls.
__device__ inline double2 block_sum(double2 x) {
    __shared__ double2 of_warp[THREADS / 32];
    for (int step = 16; step > 0; step /= 2)
        x = plus(x, {__shfl_down_sync(0xffffffffu, x.x, step), __shfl_down_sync(0xffffffffu, x.y, step)});
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = {0, 0};
    if (threadIdx.x == 0)
        for (int w = 0; w < THREADS / 32; w++) x = plus(x, of_warp[w]);
    return x;
}

// sums[b]: the sum of squares of chunk b, and NaN if an element is not finite, else 0. The block that finishes last adds all of
// them in a fixed order and writes `out`, or adds to it if `adds`. The second number of `out` is 1 if an element is not finite,
// else 0. arrived: 0 before and after.
template <typename T>
__global__ void __launch_bounds__(THREADS)
squares(const __grid_constant__ Lists lists, double2 *sums, u32 *arrived, double2 *out, i64 adds) {
    typedef Wide<T> W;
    constexpr int V = 16 / sizeof(T);
    const Chunk chunk(lists, CHUNK_BYTES / sizeof(T));
    const T *in = (const T *)lists.addresses[chunk.tensor] + chunk.start;
    const bool vectors = aligned<T, V>(in);
    W sum = 0, poison = 0;
    for (i64 base = threadIdx.x * V; base < chunk.count; base += IN_FLIGHT * THREADS * V) {
        Vec<T, V> x[IN_FLIGHT];
        if (vectors && base + (IN_FLIGHT - 1) * THREADS * V + V <= chunk.count) {  // without branches in between, all are in flight
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) x[k] = *(const Vec<T, V> *)(in + base + k * THREADS * V);
        } else {
            for (int k = 0; k < IN_FLIGHT; k++)
                for (int v = 0; v < V; v++) {
                    const i64 at = base + k * THREADS * V + v;
                    x[k].at[v] = at < chunk.count ? in[at] : T();
                }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
#pragma unroll
            for (int v = 0; v < V; v++) {
                const W value = wide<W>(x[k].at[v]);
                sum = fused(value, value, sum);
                poison = fused(value, W(0), poison);
            }
    }
    const double2 own = block_sum(double2{wide<double>(sum), wide<double>(poison)});
    __shared__ bool last;
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = own;
        __threadfence();
        last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    double2 all{0, 0};
#pragma unroll 8
    for (i64 i = threadIdx.x; i < gridDim.x; i += THREADS) all = plus(all, __ldcg(sums + i));
    all = block_sum(all);
    if (threadIdx.x == 0) {
        const double2 before = adds ? *out : double2{0, 0};
        *out = double2{before.x + all.x, before.y != 0 || all.y != 0 ? 1.0 : 0.0};
    }
}

// Blockwise codes for collectives: BLOCK elements share one float32 scale. A warp handles a block, a thread PER_LANE elements.
constexpr int BLOCK = 256;
constexpr int PER_LANE = BLOCK / 32;
constexpr float SMALLEST = 0x1p-100f;  // the smallest magnitude for a block's scale, whose inverse is finite

__device__ inline float largest(i8) { return 127.0f; }
__device__ inline float largest(e4m3) { return 448.0f; }
__device__ inline void quantize(i8 &code, float x) { code = (i8)__float2int_rn(x); }
__device__ inline void quantize(e4m3 &code, float x) {  // |x| <= 448, up to rounding
    const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    u32 rounded;
    if (magnitude < 0x3c800000u) rounded = __float_as_uint(add(__uint_as_float(magnitude), 16384.0f)) - 0x46800000u;  // < 2^-6
    else rounded = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
    code.bits = (u8)(rounded | (bits >> 24 & 0x80));
}
__device__ inline float dequantize(i8 code) { return (float)code; }
__device__ inline float dequantize(e4m3 code) {  // as a float32 with the same fields, whose exponent is 120 too small
    const u32 bits = (u32)(code.bits & 0x7f) << 20 | (u32)(code.bits & 0x80) << 24;
    return mul(__uint_as_float(bits), 0x1p120f);
}

template <typename T> __device__ inline Vec<T, PER_LANE> load(const T *in, i64 left) {
    Vec<T, PER_LANE> x;
    if (left >= PER_LANE && aligned<T, PER_LANE>(in)) return *(const Vec<T, PER_LANE> *)in;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x.at[k] = k < left ? in[k] : T();
    return x;
}
template <typename T> __device__ inline void store(T *out, const Vec<T, PER_LANE> &x, i64 left) {
    if (left >= PER_LANE && aligned<T, PER_LANE>(out)) *(Vec<T, PER_LANE> *)out = x;
    else
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (k < left) out[k] = x.at[k];
}

template <typename Code, typename In>
__global__ void __launch_bounds__(THREADS) encode(Code *codes, float *scales, const In *in, i64 count) {
    const i64 block = (blockIdx.x * (i64)THREADS + threadIdx.x) / 32;
    if (block * BLOCK >= count) return;
    const i64 start = block * BLOCK + threadIdx.x % 32 * PER_LANE;
    const Vec<In, PER_LANE> x = load(in + start, count - start);
    u32 peak = 0;  // bits of magnitudes have the magnitudes' order; NaN is above infinity
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) peak = max(peak, __float_as_uint(wide<float>(x.at[k])) & 0x7fffffffu);
    peak = __reduce_max_sync(0xffffffffu, peak);
    const bool finite = peak < 0x7f800000u;
    const float scale = divide(fmaxf(__uint_as_float(peak), SMALLEST), largest(Code()));
    const float inverse = divide(1.0f, scale);
    Vec<Code, PER_LANE> code;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) quantize(code.at[k], finite ? mul(wide<float>(x.at[k]), inverse) : 0.0f);
    store(codes + start, code, count - start);
    if (threadIdx.x % 32 == 0) scales[block] = finite ? scale : __uint_as_float(0x7fc00000u);
}

template <typename Out, typename Code>
__global__ void __launch_bounds__(THREADS) decode_sum(Out *out, const Code *codes, const float *scales, i64 rows, i64 count) {
    const i64 block = (blockIdx.x * (i64)THREADS + threadIdx.x) / 32, blocks = (count + BLOCK - 1) / BLOCK;
    if (block >= blocks) return;
    const i64 start = block * BLOCK + threadIdx.x % 32 * PER_LANE;
    float sum[PER_LANE] = {};
#pragma unroll 4
    for (i64 row = 0; row < rows; row++) {
        const Vec<Code, PER_LANE> code = load(codes + row * count + start, count - start);
        const float scale = scales[row * blocks + block];
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) sum[k] = add(sum[k], mul(dequantize(code.at[k]), scale));
    }
    Vec<Out, PER_LANE> x;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x.at[k] = as<Out>(sum[k]);
    store(out + start, x, count - start);
}
