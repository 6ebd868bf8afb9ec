// The CUDA runtime without a GPU: device memory is host memory, and work on a stream is complete when its call returns.
// So nothing runs too early here. Vector clocks (Mattern 1989) find what could run too early on a GPU: each stream and each
// thread of the host has a clock. An event copies its stream's to the streams and threads that wait for it, and a launch the
// thread's to the stream. Two accesses to the same bytes, one of them a write, are a race if the second one's clock does not
// include the first, unless both are the host's.
//
// Launched kernels do nothing: the code that replaces a kernel reports its accesses by fake_access(). The host's accesses to
// pinned memory come by fake_host_access(). The main thread and those that Python does not know, such as autograd's, are one
// thread here; others are those that call fake_thread().

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#undef cudaGetDeviceProperties  // a macro for the current version of it

namespace {
using Clock = std::vector<unsigned long long>;  // by actor: the number of its steps that are known to have run
constexpr size_t TOTAL = size_t(8) << 30;       // bytes of a device
constexpr double QUERY_S = 0.05;                // the age from which a query reports an event as complete

struct Actor { size_t index; std::string name; int device; int priority; Clock clock; };  // device: HOST for a thread
struct Event { int device; Clock clock; double at = 0; };
struct Access { size_t actor = 0; unsigned long long tick = 0; const char *by = ""; };
struct Segment { size_t end; Access writer; std::vector<Access> readers; };
struct Block { size_t nbytes; int device; };
constexpr int HOST = -1;

std::recursive_mutex mutex;
std::deque<Actor> actors{{0, "", HOST, 0, {}}, {1, "the host", HOST, 0, {}}};  // 0 is nobody
std::map<std::pair<void *, int>, Actor *> streams;  // by handle, and by device for 0, the legacy default stream
std::map<size_t, Clock> sent;                       // between threads of the host, by the object that they meet at
std::map<size_t, Segment> segments;                 // of memory, by address
std::map<std::string, long> races;
std::set<std::string> names;
std::map<size_t, Block> on_device, pinned;  // by address
size_t in_use = 0;
thread_local int device = 0;
thread_local Actor *host = &actors[1];

void join(Clock &into, const Clock &other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}
bool knows(const Clock &clock, const Access &access) {
    return access.actor < clock.size() && clock[access.actor] >= access.tick;
}
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Actor &add_actor(std::string name, int at) {
    const size_t index = actors.size();
    return actors.emplace_back(Actor{index, name + std::to_string(index), at, 0, {}});
}

Actor &find(void *handle) {
    Actor *&stream = streams[{handle, handle == nullptr ? device : 0}];
    if (stream == nullptr) stream = &add_actor("stream ", device);
    return *stream;
}

// The number of the actor's next step. What this thread of the host knows is ordered before it.
unsigned long long step(Actor &actor) {
    if (actor.device != HOST) join(actor.clock, host->clock);
    if (actor.clock.size() <= actor.index) actor.clock.resize(actor.index + 1);
    return ++actor.clock[actor.index];
}

void cut(size_t at) {
    auto it = segments.upper_bound(at);
    if (it == segments.begin() || (--it)->first == at || it->second.end <= at) return;
    Segment right = it->second;
    it->second.end = at;
    segments.emplace(at, right);
}

void compare(const Access &before, const Actor &actor, const char *kind, const char *by) {
    if (before.actor == 0 || before.actor == actor.index || knows(actor.clock, before)) return;
    const Actor &other = actors[before.actor];
    if (other.device == HOST && actor.device == HOST) return;  // the host's threads have locks, which nobody reports
    races[std::string(kind) + ": " + before.by + " on " + other.name + ", then " + by + " on " + actor.name]++;
}

void record(Actor &actor, size_t address, size_t nbytes, bool writes, const char *name) {
    if (nbytes == 0) return;
    const char *by = names.insert(name).first->c_str();
    const Access access{actor.index, step(actor), by};
    cut(address);
    cut(address + nbytes);
    for (size_t at = address; at < address + nbytes;) {
        auto it = segments.lower_bound(at);
        if (it == segments.end() || it->first > at) {
            const size_t end = it == segments.end() ? address + nbytes : std::min(it->first, address + nbytes);
            it = segments.emplace(at, Segment{end, {}, {}}).first;
        }
        Segment &segment = it->second;
        compare(segment.writer, actor, writes ? "write after write" : "read after write", by);
        if (writes) {
            for (const Access &reader : segment.readers) compare(reader, actor, "write after read", by);
            segment.writer = access;
            segment.readers.clear();
        } else {
            auto own = [&](const Access &reader) { return reader.actor == actor.index; };
            segment.readers.erase(std::remove_if(segment.readers.begin(), segment.readers.end(), own), segment.readers.end());
            segment.readers.push_back(access);
        }
        at = segment.end;
    }
}

// Removes the accesses to a freed block: the next owner of its memory has no part in them.
void forget(size_t address, size_t nbytes) {
    cut(address);
    cut(address + nbytes);
    segments.erase(segments.lower_bound(address), segments.lower_bound(address + nbytes));
}

// The block that holds this address; null if none does.
const Block *block_of(const std::map<size_t, Block> &blocks, size_t address) {
    auto it = blocks.upper_bound(address);
    return it != blocks.begin() && address < (--it)->first + it->second.nbytes ? &it->second : nullptr;
}

// An access by a copy engine, which reaches the memory of every device. The host's other memory is not watched.
void copied(Actor &stream, size_t address, size_t nbytes, bool writes, const char *name) {
    if (block_of(on_device, address) || block_of(pinned, address)) record(stream, address, nbytes, writes, name);
}
}  // namespace

extern "C" {
// ---------------------------------------------------------------------- for replaced kernels, and for reading the races

void fake_access(void *handle, size_t address, size_t nbytes, int writes, const char *name) {
    std::lock_guard guard(mutex);
    Actor &stream = find(handle);
    const Block *block = block_of(on_device, address);
    if (nbytes > 0 && block != nullptr && block->device != stream.device)
        races[std::string("wrong device: ") + name + " on " + stream.name + " of device " + std::to_string(stream.device) +
              " accesses memory of device " + std::to_string(block->device)]++;
    record(stream, address, nbytes, writes, name);
}

void fake_host_access(size_t address, size_t nbytes, int writes, const char *name) {
    std::lock_guard guard(mutex);
    if (block_of(pinned, address)) record(*host, address, nbytes, writes, name);
}

// The calling thread of the host gets a clock of its own.
void fake_thread() {
    std::lock_guard guard(mutex);
    host = &add_actor("the host's thread ", HOST);
}

// What the calling thread has done, and knows, comes before what those do that receive at the same object.
void fake_send(size_t object) {
    std::lock_guard guard(mutex);
    join(sent[object], host->clock);
}
void fake_receive(size_t object) {
    std::lock_guard guard(mutex);
    join(host->clock, sent[object]);
}

// Writes the races since the last call, one per line.
void fake_races(char *text, size_t size) {
    std::lock_guard guard(mutex);
    std::string all;
    for (const auto &race : races) all += std::to_string(race.second) + " x " + race.first + "\n";
    snprintf(text, size, "%s", all.c_str());
    races.clear();
}

// ---------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void **address, size_t nbytes) {
    std::lock_guard guard(mutex);
    *address = nullptr;
    if (in_use + nbytes > TOTAL || posix_memalign(address, 512, nbytes) != 0) return cudaErrorMemoryAllocation;
    memset(*address, 0xab, nbytes);  // memory must not be zero by accident
    on_device[(size_t)*address] = {nbytes, device};
    in_use += nbytes;
    return cudaSuccess;
}
cudaError_t cudaFree(void *address) {
    std::lock_guard guard(mutex);
    auto it = on_device.find((size_t)address);
    if (it == on_device.end()) return address == nullptr ? cudaSuccess : cudaErrorInvalidValue;
    forget(it->first, it->second.nbytes);
    in_use -= it->second.nbytes;
    on_device.erase(it);
    free(address);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **address, size_t nbytes, cudaStream_t) { return cudaMalloc(address, nbytes); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t) { return cudaFree(address); }
cudaError_t cudaHostAlloc(void **address, size_t nbytes, unsigned) {
    std::lock_guard guard(mutex);
    if (posix_memalign(address, 4096, nbytes) != 0) return cudaErrorMemoryAllocation;
    pinned[(size_t)*address] = {nbytes, HOST};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
    std::lock_guard guard(mutex);
    forget((size_t)address, pinned[(size_t)address].nbytes);
    pinned.erase((size_t)address);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *address) {
    cudaHostUnregister(address);
    free(address);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *address, size_t nbytes, unsigned) {
    std::lock_guard guard(mutex);
    pinned[(size_t)address] = {nbytes, HOST};
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *left = TOTAL - in_use;
    *total = TOTAL;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *address) {
    std::lock_guard guard(mutex);
    const Block *block = block_of(on_device, (size_t)address);
    *found = {};
    found->device = block != nullptr ? block->device : device;
    found->type = block != nullptr                       ? cudaMemoryTypeDevice
                  : block_of(pinned, (size_t)address) ? cudaMemoryTypeHost
                                                      : cudaMemoryTypeUnregistered;
    if (found->type != cudaMemoryTypeUnregistered) found->devicePointer = found->hostPointer = (void *)address;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    std::lock_guard guard(mutex);
    join(host->clock, find(stream).clock);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *out, const void *inp, size_t nbytes, cudaMemcpyKind, cudaStream_t handle) {
    std::lock_guard guard(mutex);
    Actor &stream = find(handle);
    copied(stream, (size_t)inp, nbytes, false, "memcpy");
    copied(stream, (size_t)out, nbytes, true, "memcpy");
    memcpy(out, inp, nbytes);
    const bool is_pageable = !block_of(on_device, (size_t)out) && !block_of(pinned, (size_t)out);
    return is_pageable ? cudaStreamSynchronize(handle) : cudaSuccess;  // as CUDA does
}
cudaError_t cudaMemcpy(void *out, const void *inp, size_t nbytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(out, inp, nbytes, kind, nullptr);
    return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void *out, int, const void *inp, int, size_t nbytes, cudaStream_t stream) {
    return cudaMemcpyAsync(out, inp, nbytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void *out, int value, size_t nbytes, cudaStream_t stream) {
    fake_access(stream, (size_t)out, nbytes, 1, "memset");
    memset(out, value, nbytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *out, int value, size_t nbytes) { return cudaMemsetAsync(out, value, nbytes, nullptr); }

// ---------------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
    std::lock_guard guard(mutex);
    *stream = (cudaStream_t)malloc(1);
    find(*stream).priority = priority;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    std::lock_guard guard(mutex);
    *priority = find(stream).priority;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *,
                                     const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
    *status = cudaStreamCaptureStatusNone;
    if (id != nullptr) *id = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    std::lock_guard guard(mutex);
    for (const Actor &actor : actors)
        if (actor.device == device) join(host->clock, actor.clock);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = (cudaEvent_t) new Event{device, {}};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete (Event *)event;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t recorded, unsigned) {
    std::lock_guard guard(mutex);
    Actor &stream = find(recorded);
    Event &event = *(Event *)handle;
    if (event.device != stream.device) return cudaErrorInvalidResourceHandle;
    step(stream);
    event.clock = stream.clock;
    event.at = now();
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    std::lock_guard guard(mutex);
    Actor &stream = find(handle);
    step(stream);
    join(stream.clock, ((Event *)event)->clock);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    std::lock_guard guard(mutex);
    const Event &event = *(Event *)handle;
    Clock known = host->clock;
    join(known, event.clock);
    if (known != host->clock && now() - event.at < QUERY_S) return cudaErrorNotReady;
    host->clock = known;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    std::lock_guard guard(mutex);
    join(host->clock, ((Event *)event)->clock);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
    *milliseconds = (float)((((Event *)last)->at - ((Event *)first)->at) * 1e3);
    return cudaSuccess;
}

// ---------------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int *count) {
    const char *gpus = getenv("FAKE_GPUS");
    *count = gpus == nullptr ? 1 : atoi(gpus);
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *found) {
    *found = device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int chosen) {
    int count;
    cudaGetDeviceCount(&count);
    if (chosen < 0 || chosen >= count) return cudaErrorInvalidDevice;
    device = chosen;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int index) {
    *found = {};
    strcpy(found->name, "no GPU");
    found->uuid.bytes[15] = (char)index;
    found->totalGlobalMem = TOTAL;
    found->major = 9;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = found->sharedMemPerMultiprocessor = 232448;
    found->l2CacheSize = 60 << 20;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *found, cudaDeviceAttr attribute, int) {
    *found = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132 : 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation        ? "cudaErrorMemoryAllocation"
           : error == cudaErrorInvalidDevice         ? "cudaErrorInvalidDevice"
           : error == cudaErrorInvalidResourceHandle ? "cudaErrorInvalidResourceHandle"
                                                     : "?";
}
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation        ? "out of memory"
           : error == cudaErrorInvalidDevice         ? "invalid device ordinal"
           : error == cudaErrorInvalidResourceHandle ? "invalid resource handle"
                                                     : "an error";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    *found = nullptr;
    if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaErrorInvalidValue;
}

// ---------------------------------------------------------------------- the driver: calls of torch's NVRTC stub, and of CuPy

int cuThreadExchangeStreamCaptureMode(int *) { return 0; }
int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
    if (flags != nullptr) *flags = 0;
    *active = 1;
    return 0;
}
int cuModuleLoadData(void **module, const void *name) {  // the name of a kernel, as sitecustomize.py has it
    std::lock_guard guard(mutex);
    *module = (void *)names.insert((const char *)name).first->c_str();
    return 0;
}
int cuModuleUnload(void *) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *) {
    *function = module;
    return 0;
}

// Replaces a launch: name, blocks, threads of each, stream, and the addresses of the arguments.
static void (*launched)(const char *, unsigned, unsigned, void *, void **);
void fake_launcher(void (*replacement)(const char *, unsigned, unsigned, void *, void **)) { launched = replacement; }

int cuLaunchKernel(void *function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                   void *stream, void **arguments, void **) {
    if (find(stream).device != device) return cudaErrorInvalidResourceHandle;
    launched((const char *)function, blocks, threads, stream, arguments);
    return 0;
}
int cuGetErrorName(int error, const char **name) {
    *name = cudaGetErrorName((cudaError_t)error);
    return 0;
}
int cuGetErrorString(int error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return 0;
}
}
