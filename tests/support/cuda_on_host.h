// The subset of CUDA C++ that kernels.cu uses, on the host: a block's threads are fibres, and blocks run one after another.
// Every second launch runs threads and blocks in reverse order, to find code that depends on an order.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
#define __grid_constant__

struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim;
struct alignas(16) double2 { double x, y; };
using std::max;

namespace host {
constexpr unsigned MOST_THREADS = 1024, WARP = 32, STACK_BYTES = 1 << 16;
struct Barrier { unsigned arrived = 0, round = 0; };
struct Fibre { ucontext_t context; bool done; };
Fibre fibres[MOST_THREADS];
Barrier of_block, of_warp[MOST_THREADS / WARP];
unsigned long long shared_values[MOST_THREADS];  // by thread: the value it shares with its warp
ucontext_t scheduler;
unsigned threads;
bool progress, backwards;
std::function<void()> body;

void wait(Barrier &barrier, unsigned size) {
    const unsigned round = barrier.round, self = threadIdx.x;
    if (++barrier.arrived == size) {
        barrier.arrived = 0;
        barrier.round++;
        progress = true;
    } else
        while (barrier.round == round) swapcontext(&fibres[self].context, &scheduler);
}

void enter() {
    body();
    fibres[threadIdx.x].done = progress = true;
}

// Returns false if threads wait at a barrier that others never reach.
bool run_block() {
    static std::vector<char> stacks(std::size_t(MOST_THREADS) * STACK_BYTES);
    of_block = Barrier();
    std::fill(of_warp, of_warp + MOST_THREADS / WARP, Barrier());
    for (unsigned i = 0; i < threads; i++) {
        fibres[i].done = false;
        getcontext(&fibres[i].context);
        fibres[i].context.uc_stack.ss_sp = &stacks[std::size_t(i) * STACK_BYTES];
        fibres[i].context.uc_stack.ss_size = STACK_BYTES;
        fibres[i].context.uc_link = &scheduler;
        makecontext(&fibres[i].context, enter, 0);
    }
    for (progress = true; progress;) {
        progress = false;
        for (unsigned i = 0; i < threads; i++) {
            threadIdx.x = backwards ? threads - 1 - i : i;
            if (!fibres[threadIdx.x].done) swapcontext(&scheduler, &fibres[threadIdx.x].context);
        }
    }
    return std::all_of(fibres, fibres + threads, [](const Fibre &fibre) { return fibre.done; });
}

bool launch(unsigned blocks, unsigned block_threads, std::function<void()> kernel) {
    body = std::move(kernel);
    threads = block_threads;
    gridDim.x = blocks;
    backwards = !backwards;
    bool good = true;
    for (unsigned b = 0; b < blocks && good; b++) {
        blockIdx.x = backwards ? blocks - 1 - b : b;
        good = run_block();
    }
    return good;
}

// Arguments come as the driver takes them: the address of each, here with its bytes.
struct Argument { const void *value; unsigned long long nbytes; };
template <typename T> T read(const Argument &argument) {
    T value;
    std::memcpy(&value, argument.value, sizeof value);
    return value;
}
template <typename... P, std::size_t... I>
std::function<void()> with_args(void (*kernel)(P...), const Argument *args, std::index_sequence<I...>) {
    return [kernel, values = std::make_tuple(read<P>(args[I])...)] { kernel(std::get<I>(values)...); };
}
template <typename... P, std::size_t... I> bool fit(void (*)(P...), const Argument *args, std::index_sequence<I...>) {
    return ((args[I].nbytes == sizeof(P)) && ...);
}
template <typename... P>
bool call(void (*kernel)(P...), unsigned blocks, unsigned threads, const Argument *args, unsigned count) {
    constexpr auto all = std::index_sequence_for<P...>();
    return count == sizeof...(P) && fit(kernel, args, all) && threads <= MOST_THREADS && threads % WARP == 0 &&
           launch(blocks, threads, with_args(kernel, args, all));
}

template <typename T, typename F> auto in_warp(T x, F f) {
    static_assert(sizeof(T) <= sizeof shared_values[0]);
    Barrier &warp = of_warp[threadIdx.x / WARP];
    std::memcpy(&shared_values[threadIdx.x], &x, sizeof x);
    wait(warp, WARP);
    const T found = f([](unsigned lane) {
        T value;
        std::memcpy(&value, &shared_values[threadIdx.x / WARP * WARP + lane], sizeof value);
        return value;
    });
    wait(warp, WARP);
    return found;
}
}  // namespace host

static void __syncthreads() { host::wait(host::of_block, host::threads); }
static void __threadfence() {}
template <typename T> T __shfl_down_sync(unsigned, T x, unsigned step) {
    const unsigned from = threadIdx.x % host::WARP + step;
    return host::in_warp(x, [=](auto of) { return from < host::WARP ? of(from) : x; });
}
static unsigned __reduce_max_sync(unsigned, unsigned x) {
    return host::in_warp(x, [=](auto of) {
        unsigned most = x;
        for (unsigned lane = 0; lane < host::WARP; lane++) most = max(most, of(lane));
        return most;
    });
}
static unsigned atomicInc(unsigned *address, unsigned last) {
    const unsigned found = *address;
    *address = found >= last ? 0 : found + 1;
    return found;
}
template <typename T> T __ldcg(const T *address) { return *address; }

static float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static int __float2int_rn(float x) { return (int)std::nearbyint(x); }
static double __dmul_rn(double a, double b) { return a * b; }
static double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

// PTX instructions, as functions of the same names.
static float mul_rn_f32(float a, float b) { return a * b; }
static float add_rn_f32(float a, float b) { return a + b; }
static float fma_rn_f32(float a, float b, float c) { return std::fma(a, b, c); }
static float div_rn_f32(float a, float b) { return a / b; }
static float cvt_rn_f32_f64(double a) { return (float)a; }
static double cvt_f64_f32(float a) { return a; }
static unsigned short cvt_rn_f16_f32(float a) { _Float16 h = a; unsigned short bits; std::memcpy(&bits, &h, 2); return bits; }
static float cvt_f32_f16(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return h; }
static unsigned short cvt_rn_bf16_f32(float a) {
    const unsigned bits = __float_as_uint(a);
    return std::isnan(a) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
