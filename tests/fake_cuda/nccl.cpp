// NCCL between processes without a GPU: ranks synchronise in shared memory and read each other's buffers (process_vm_readv), at
// the call or at the end of its group. Reductions add rank by rank, each step rounded to the dtype. If a collective differs
// between ranks, the job ends with a message that names both calls; so it does if some ranks pass registered memory and others do
// not. Ranks that call in different orders hang, as under NCCL.
// FAKE_NCCL_ERROR=RANK:NUMBER: the process's collective launch of this number, from 0, on this rank of its communicator meets an
// asynchronous error, and never ends. FAKE_NCCL_LOG=1: each rank writes a line for each communicator that is made.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <cerrno>
#include <csignal>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

extern "C" void fake_access(void *stream, size_t address, size_t nbytes, int writes, const char *name);
extern "C" int cudaMalloc(void **, size_t);
extern "C" int cudaFree(void *);

namespace {
enum Kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, REDUCE, BROADCAST, ALL_TO_ALL, SEND, RECV };
const char *const NAMES[] = {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce", "ncclReduce",
                             "ncclBroadcast", "ncclAlltoAll",      "ncclSend",      "ncclRecv"};
constexpr int SUM = 0, PROD = 1, MAX = 2, MIN = 3, AVG = 4;  // ncclRedOp_t; greater values are pre-multiplied sums
constexpr int MOST_RANKS = 8, MOST_CALLS = 4096;             // of a group
struct Call {
    Kind kind; const void *inp; void *out; size_t count; int dtype, op, peer; void *stream;
    bool inp_known = false, out_known = false;  // registered with the communicator
};
struct Shared {
    std::atomic<int> arrived, round;
    pid_t pids[MOST_RANKS];
    Call calls[MOST_RANKS][MOST_CALLS];
    std::atomic<int> sent[MOST_RANKS][MOST_RANKS], received[MOST_RANKS][MOST_RANKS];
    Call sends[MOST_RANKS][MOST_RANKS][64];  // a ring for each pair
};
struct Comm {
    int rank, size;
    Shared *shared;
    std::vector<Call> queue;
    std::map<int, double> factors;
    std::map<size_t, size_t> registered;  // start -> end, in bytes
    std::string id;
    int children = 0;
    std::atomic<int> error{0};  // ncclResult_t
    bool gone = false;          // the process of a rank has ended
};
struct Gone {};
struct Config {  // ncclConfig_t of NCCL 2.27
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
};
thread_local int depth = 0;  // of open groups
thread_local std::vector<Comm *> grouped;

size_t width(int dtype) { return (const size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[dtype]; }  // by ncclDataType_t

[[noreturn]] void refuse(const Call &one, const Call &other) {
    fprintf(stderr, "the ranks differ: %s of %zu, %s of %zu\n", NAMES[one.kind], one.count, NAMES[other.kind], other.count);
    abort();
}

void compare_memory(bool one, bool other, const Call &call) {
    if (one == other) return;
    fprintf(stderr, "%s of %zu: memory is registered on some ranks only\n", NAMES[call.kind], call.count);
    abort();
}

bool is_registered(const Comm *comm, const void *address) {
    const auto after = comm->registered.upper_bound((size_t)address);
    return after != comm->registered.begin() && (size_t)address < std::prev(after)->second;
}

// Wait for another rank. If one has ended, the call ends, as after ncclCommAbort, and what it was to write is not written.
void wait(Comm *comm) {
    static thread_local int looks = 0;
    sched_yield();
    if (++looks % 256) return;
    for (int rank = 0; rank < comm->size; rank++)
        if (comm->shared->pids[rank] && kill(comm->shared->pids[rank], 0) != 0) {
            comm->gone = true;
            throw Gone{};
        }
}

void meet(Comm *comm) {
    const int round = comm->shared->round;
    if (++comm->shared->arrived == comm->size) {
        comm->shared->arrived = 0;
        comm->shared->round++;
    } else
        while (comm->shared->round == round) wait(comm);
}

void read(Comm *comm, int peer, const void *from, void *to, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
        iovec own{(char *)to + done, nbytes - done}, other{(char *)from + done, nbytes - done};
        const ssize_t got = process_vm_readv(comm->shared->pids[peer], &own, 1, &other, 1, 0);
        if (got <= 0) {
            if (errno == ESRCH) throw Gone{};
            perror("process_vm_readv");
            abort();
        }
        done += got;
    }
}

struct BFloat16 {
    uint16_t bits;
    BFloat16() = default;
    BFloat16(float x) {
        uint32_t wide;
        memcpy(&wide, &x, 4);
        bits = x != x ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    }
    operator float() const {
        const uint32_t wide = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &wide, 4);
        return x;
    }
};

template <typename T> void add(void *into, const void *from, size_t count, int op, double factor, bool first) {
    T *sums = (T *)into;
    for (size_t i = 0; i < count; i++) {
        T x = ((const T *)from)[i];
        if constexpr (!std::is_integral_v<T>)
            if (op >= AVG) x = T(x * T(factor));
        if (first) sums[i] = x;
        else if (op == PROD) sums[i] = T(sums[i] * x);
        else if (op == MAX) sums[i] = sums[i] < x ? x : sums[i];
        else if (op == MIN) sums[i] = x < sums[i] ? x : sums[i];
        else sums[i] = T(sums[i] + x);
    }
}
using Add = void (*)(void *, const void *, size_t, int, double, bool);
const Add ADDS[] = {add<int8_t>, add<uint8_t>, add<int32_t>, add<uint32_t>, add<int64_t>, add<uint64_t>,
                    add<_Float16>, add<float>, add<double>, add<BFloat16>};

void run_sends(Comm *comm, const std::vector<Call> &calls) {
    const int rank = comm->rank;
    for (const Call &call : calls)
        if (call.kind == SEND) {
            auto &sent = comm->shared->sent[rank][call.peer];
            fake_access(call.stream, (size_t)call.inp, call.count * width(call.dtype), 0, NAMES[SEND]);
            while (sent - comm->shared->received[rank][call.peer] >= 64) wait(comm);
            comm->shared->sends[rank][call.peer][sent % 64] = call;
            sent++;
        }
    for (const Call &call : calls)
        if (call.kind == RECV) {
            auto &received = comm->shared->received[call.peer][rank];
            while (comm->shared->sent[call.peer][rank] == received) wait(comm);
            const Call &send = comm->shared->sends[call.peer][rank][received % 64];
            if (send.count != call.count) refuse(send, call);
            compare_memory(send.inp_known, call.out_known, call);
            fake_access(call.stream, (size_t)call.out, call.count * width(call.dtype), 1, NAMES[RECV]);
            read(comm, call.peer, send.inp, call.out, call.count * width(call.dtype));
            received++;
        }
    for (const Call &call : calls)
        if (call.kind == SEND)
            while (comm->shared->sent[rank][call.peer] != comm->shared->received[rank][call.peer]) wait(comm);
}

// This rank's result of the i-th call of the group, which all ranks have published; empty if it receives none.
std::vector<char> result(Comm *comm, size_t i) {
    const Call &own = comm->shared->calls[comm->rank][i];
    const size_t nbytes = own.count * width(own.dtype);
    const bool reduces = own.kind == REDUCE_SCATTER || own.kind == ALL_REDUCE || own.kind == REDUCE;
    if (own.kind == REDUCE && own.peer != comm->rank) return {};
    std::vector<char> out(own.kind == ALL_GATHER || own.kind == ALL_TO_ALL ? nbytes * comm->size : nbytes), block(nbytes);
    for (int peer = 0; peer < comm->size; peer++) {
        const Call &call = comm->shared->calls[peer][i];
        if (call.kind != own.kind || call.count != own.count) refuse(own, call);
        compare_memory(call.inp_known, own.inp_known, own);
        if (call.out && own.out) compare_memory(call.out_known, own.out_known, own);
        const size_t first = own.kind == REDUCE_SCATTER || own.kind == ALL_TO_ALL ? comm->rank * nbytes : 0;
        if (own.kind == BROADCAST && peer != own.peer) continue;
        read(comm, peer, (const char *)call.inp + first, block.data(), nbytes);
        const double factor = own.op == AVG ? 1.0 / comm->size : own.op > AVG ? comm->factors[own.op] : 1.0;
        if (reduces) ADDS[own.dtype](out.data(), block.data(), own.count, own.op, factor, peer == 0);
        else memcpy(out.data() + (own.kind == BROADCAST ? 0 : peer * nbytes), block.data(), nbytes);
    }
    return out;
}

void log(const std::string &made) {
    const std::string line = "fake NCCL: " + made + "\n";
    if (getenv("FAKE_NCCL_LOG") && write(2, line.data(), line.size()) < 0) abort();
}

int init(Comm **comm, int size, const std::string &id, int rank) {
    const int file = shm_open(id.c_str(), O_CREAT | O_RDWR, 0600);
    if (size > MOST_RANKS || file < 0 || ftruncate(file, sizeof(Shared)) != 0) return 2;  // ncclSystemError
    void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    *comm = new Comm{rank, size, (Shared *)memory, {}, {}, {}, id};
    (*comm)->shared->pids[rank] = getpid();
    try {
        meet(*comm);
    } catch (Gone) {
        return 6;  // ncclRemoteError
    }
    shm_unlink(id.c_str());
    return 0;
}

void fail_if_asked(Comm *comm) {
    static std::atomic<int> launches{0};
    static const char *const asked = getenv("FAKE_NCCL_ERROR");
    int rank, number;
    const int launch = launches++;
    if (!asked || sscanf(asked, "%d:%d", &rank, &number) != 2 || rank != comm->rank || number != launch) return;
    comm->error = 6;  // ncclRemoteError
    while (true) usleep(1000);
}

void run_calls(Comm *comm) {
    std::vector<Call> collectives, sends;
    for (const Call &call : comm->queue) (call.kind == SEND || call.kind == RECV ? sends : collectives).push_back(call);
    comm->queue.clear();
    if (!sends.empty()) run_sends(comm, sends);
    if (collectives.empty()) return;
    if (collectives.size() > MOST_CALLS) abort();
    fail_if_asked(comm);
    std::copy(collectives.begin(), collectives.end(), comm->shared->calls[comm->rank]);
    meet(comm);
    std::vector<std::vector<char>> results;
    for (size_t i = 0; i < collectives.size(); i++) {
        const Call &call = collectives[i];
        const bool whole = call.kind == REDUCE_SCATTER || call.kind == ALL_TO_ALL;
        const bool silent = call.kind == BROADCAST && call.peer != comm->rank;
        const size_t nbytes = silent ? 0 : call.count * width(call.dtype) * (whole ? comm->size : 1);
        fake_access(call.stream, (size_t)call.inp, nbytes, 0, NAMES[call.kind]);
        results.push_back(result(comm, i));
    }
    meet(comm);  // no rank writes before all ranks have read
    for (size_t i = 0; i < collectives.size(); i++) {
        fake_access(collectives[i].stream, (size_t)collectives[i].out, results[i].size(), 1, NAMES[collectives[i].kind]);
        if (!results[i].empty()) memcpy(collectives[i].out, results[i].data(), results[i].size());
    }
    meet(comm);
}

void run(Comm *comm) {
    if (comm->gone) return comm->queue.clear();
    try {
        run_calls(comm);
    } catch (Gone) {
        comm->gone = true;
    }
}

int enqueue(Comm *comm, Call call) {
    call.inp_known = is_registered(comm, call.inp), call.out_known = is_registered(comm, call.out);
    comm->queue.push_back(call);
    if (depth == 0) run(comm);
    else grouped.push_back(comm);
    return 0;
}
}  // namespace

extern "C" {
struct UniqueId { char name[128]; };

int ncclGetVersion(int *version) { return *version = 22809, 0; }
const char *ncclGetErrorString(int code) { return code == 6 ? "remote process exited or there was a network error" : "an error"; }
const char *ncclGetLastError(Comm *) { return getenv("FAKE_NCCL_ERROR") ? "\nnet.cc:1 NCCL WARN Connection closed" : ""; }
int ncclCommGetAsyncError(Comm *comm, int *error) { return *error = comm->error, 0; }
int ncclGetUniqueId(UniqueId *id) {
    static int count = 0;
    *id = {};
    snprintf(id->name, sizeof id->name, "/fake-nccl-%d-%d", getpid(), count++);
    return 0;
}
int ncclCommInitRank(Comm **comm, int size, UniqueId id, int rank) {
    log("init");
    return init(comm, size, id.name, rank);
}
int ncclCommInitRankConfig(Comm **comm, int size, UniqueId id, int rank, Config *config) {
    if (!config) return ncclCommInitRank(comm, size, id, rank);
    if (config->magic != 0xcafebeef) return 4;  // ncclInvalidArgument
    const int values[] = {config->splitShare, config->minCTAs, config->maxCTAs, config->CTAPolicy};
    std::string made = "init";
    for (int value : values) made += " " + std::to_string(value);
    log(made);
    return init(comm, size, id.name, rank);
}
int ncclCommSplit(Comm *comm, int color, int key, Comm **child, Config *) {
    if (color != 0 || key != comm->rank) return 4;  // all ranks, in their order, is what is needed here
    log("split");
    return init(child, comm->size, comm->id + "-" + std::to_string(comm->children++), comm->rank);
}
int ncclCommDestroy(Comm *comm) {
    munmap(comm->shared, sizeof(Shared));
    delete comm;
    return 0;
}
int ncclGroupStart() { return depth++, 0; }
int ncclGroupEnd() {
    if (--depth > 0) return 0;
    std::vector<Comm *> comms;
    comms.swap(grouped);
    for (Comm *comm : comms) run(comm);  // a communicator that occurs twice runs all its calls at the first
    return 0;
}
int ncclAllGather(const void *inp, void *out, size_t count, int dtype, Comm *comm, void *stream) {
    return enqueue(comm, {ALL_GATHER, inp, out, count, dtype, SUM, 0, stream});
}
int ncclReduceScatter(const void *inp, void *out, size_t count, int dtype, int op, Comm *comm, void *stream) {
    return enqueue(comm, {REDUCE_SCATTER, inp, out, count, dtype, op, 0, stream});
}
int ncclAllReduce(const void *inp, void *out, size_t count, int dtype, int op, Comm *comm, void *stream) {
    return enqueue(comm, {ALL_REDUCE, inp, out, count, dtype, op, 0, stream});
}
int ncclReduce(const void *inp, void *out, size_t count, int dtype, int op, int root, Comm *comm, void *stream) {
    return enqueue(comm, {REDUCE, inp, out, count, dtype, op, root, stream});
}
int ncclBroadcast(const void *inp, void *out, size_t count, int dtype, int root, Comm *comm, void *stream) {
    return enqueue(comm, {BROADCAST, inp, out, count, dtype, SUM, root, stream});
}
int ncclAlltoAll(const void *inp, void *out, size_t count, int dtype, Comm *comm, void *stream) {
    return enqueue(comm, {ALL_TO_ALL, inp, out, count, dtype, SUM, 0, stream});
}
int ncclSend(const void *inp, size_t count, int dtype, int peer, Comm *comm, void *stream) {
    return enqueue(comm, {SEND, inp, nullptr, count, dtype, SUM, peer, stream});
}
int ncclRecv(void *out, size_t count, int dtype, int peer, Comm *comm, void *stream) {
    return enqueue(comm, {RECV, nullptr, out, count, dtype, SUM, peer, stream});
}
int ncclRedOpCreatePreMulSum(int *op, void *factor, int dtype, int, Comm *comm) {
    double one = 0;
    if (dtype == 6) one = *(_Float16 *)factor;
    else if (dtype == 7) one = *(float *)factor;
    else if (dtype == 8) one = *(double *)factor;
    else one = *(BFloat16 *)factor;
    *op = AVG + 1 + (int)comm->factors.size();
    comm->factors[*op] = one;
    return 0;
}
int ncclRedOpDestroy(int, Comm *) { return 0; }  // a call of its group may still be queued
int ncclMemAlloc(void **address, size_t nbytes) { return cudaMalloc(address, nbytes) == 0 ? 0 : 1; }
int ncclMemFree(void *address) { return cudaFree(address) == 0 ? 0 : 1; }
int ncclCommRegister(Comm *comm, void *address, size_t nbytes, void **handle) {
    comm->registered[(size_t)address] = (size_t)address + nbytes;
    return *handle = address, 0;
}
int ncclCommDeregister(Comm *comm, void *handle) { return comm->registered.erase((size_t)handle), 0; }
int ncclCommWindowRegister(Comm *comm, void *address, size_t nbytes, void **window, int) {
    return ncclCommRegister(comm, address, nbytes, window);
}
int ncclCommWindowDeregister(Comm *comm, void *window) { return ncclCommDeregister(comm, window); }
}
