// The CUDA runtime without a GPU: device memory is host memory, and work on a stream is complete when its call returns.
// So nothing runs too early here. Vector clocks (Mattern 1989) find what could run too early on a GPU: each stream has a clock,
// and an event copies it to the streams and the host that wait for the event. Two accesses to the same bytes, one of them a
// write, are a race if they are on two streams and the second stream's clock does not include the first access.
//
// Launched kernels do nothing: the code that replaces a kernel reports its accesses by fake_access().

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#undef cudaGetDeviceProperties  // a macro for the current version of it

namespace {
using Clock = std::vector<unsigned long long>;  // by stream: the number of its steps that are known to have run
constexpr size_t TOTAL = size_t(8) << 30;       // bytes of a device
constexpr double QUERY_S = 0.05;                // the age from which a query reports an event as complete

std::recursive_mutex mutex;
thread_local int device = 0;
thread_local bool observes = false;  // event queries of this thread do not order accesses

void join(Clock &into, const Clock &other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}
bool knows(const Clock &clock, size_t stream, unsigned long long tick) {
    return stream < clock.size() && clock[stream] >= tick;
}
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Stream { size_t index; int priority; Clock clock; };
struct Event { Clock clock; double at = 0; };
struct Access { size_t stream = 0; unsigned long long tick = 0; const char *by = ""; };
struct Segment { size_t end; Access writer; std::vector<Access> readers; };

std::map<void *, Stream> streams;  // by handle; 0 is the legacy default stream
Clock host;                        // the steps that synchronising calls have ordered before all later launches
std::map<size_t, Segment> segments;  // of memory, by address
std::map<std::string, long> races;
std::set<std::string> names;
std::map<size_t, size_t> on_device, pinned;  // bytes, by address
size_t in_use = 0;

Stream &find(void *handle) { return streams.try_emplace(handle, Stream{streams.size() + 1, 0, {}}).first->second; }

unsigned long long step(Stream &stream) {
    join(stream.clock, host);
    if (stream.clock.size() <= stream.index) stream.clock.resize(stream.index + 1);
    return ++stream.clock[stream.index];
}

void cut(size_t at) {
    auto it = segments.upper_bound(at);
    if (it == segments.begin() || (--it)->first == at || it->second.end <= at) return;
    Segment right = it->second;
    it->second.end = at;
    segments.emplace(at, right);
}

void compare(const Access &before, const Stream &stream, const char *kind, const char *by) {
    if (before.stream == 0 || before.stream == stream.index || knows(stream.clock, before.stream, before.tick)) return;
    races[std::string(kind) + ": " + before.by + " on stream " + std::to_string(before.stream) + ", then " + by +
          " on stream " + std::to_string(stream.index)]++;
}

// Removes the accesses to a freed block: the next owner of its memory has no part in them.
void forget(size_t address, size_t nbytes) {
    cut(address);
    cut(address + nbytes);
    segments.erase(segments.lower_bound(address), segments.lower_bound(address + nbytes));
}

bool contains(const std::map<size_t, size_t> &blocks, size_t address) {
    auto it = blocks.upper_bound(address);
    return it != blocks.begin() && address < (--it)->first + it->second;
}
}  // namespace

extern "C" {
// ---------------------------------------------------------------------- for replaced kernels, and for reading the races

void fake_access(void *handle, size_t address, size_t nbytes, int writes, const char *name) {
    std::lock_guard guard(mutex);
    if (nbytes == 0) return;
    const char *by = names.insert(name).first->c_str();
    Stream &stream = find(handle);
    const Access access{stream.index, step(stream), by};
    cut(address);
    cut(address + nbytes);
    for (size_t at = address; at < address + nbytes;) {
        auto it = segments.lower_bound(at);
        if (it == segments.end() || it->first > at) {
            const size_t end = it == segments.end() ? address + nbytes : std::min(it->first, address + nbytes);
            it = segments.emplace(at, Segment{end, {}, {}}).first;
        }
        Segment &segment = it->second;
        compare(segment.writer, stream, writes ? "write after write" : "read after write", by);
        if (writes) {
            for (const Access &reader : segment.readers) compare(reader, stream, "write after read", by);
            segment.writer = access;
            segment.readers.clear();
        } else {
            auto own = [&](const Access &reader) { return reader.stream == stream.index; };
            segment.readers.erase(std::remove_if(segment.readers.begin(), segment.readers.end(), own), segment.readers.end());
            segment.readers.push_back(access);
        }
        at = segment.end;
    }
}

// Writes the races since the last call, one per line.
void fake_races(char *text, size_t size) {
    std::lock_guard guard(mutex);
    std::string all;
    for (const auto &race : races) all += std::to_string(race.second) + " x " + race.first + "\n";
    snprintf(text, size, "%s", all.c_str());
    races.clear();
}

void fake_observer() { observes = true; }

// ---------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void **address, size_t nbytes) {
    std::lock_guard guard(mutex);
    *address = nullptr;
    if (in_use + nbytes > TOTAL || posix_memalign(address, 512, nbytes) != 0) return cudaErrorMemoryAllocation;
    memset(*address, 0xab, nbytes);  // memory must not be zero by accident
    on_device[(size_t)*address] = nbytes;
    in_use += nbytes;
    return cudaSuccess;
}
cudaError_t cudaFree(void *address) {
    std::lock_guard guard(mutex);
    auto it = on_device.find((size_t)address);
    if (it == on_device.end()) return address == nullptr ? cudaSuccess : cudaErrorInvalidValue;
    forget(it->first, it->second);
    in_use -= it->second;
    on_device.erase(it);
    free(address);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **address, size_t nbytes, cudaStream_t) { return cudaMalloc(address, nbytes); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t) { return cudaFree(address); }
cudaError_t cudaHostAlloc(void **address, size_t nbytes, unsigned) {
    std::lock_guard guard(mutex);
    if (posix_memalign(address, 4096, nbytes) != 0) return cudaErrorMemoryAllocation;
    pinned[(size_t)*address] = nbytes;
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
    std::lock_guard guard(mutex);
    forget((size_t)address, pinned[(size_t)address]);
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
    pinned[(size_t)address] = nbytes;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *left = TOTAL - in_use;
    *total = TOTAL;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *address) {
    std::lock_guard guard(mutex);
    *found = {};
    found->device = device;
    found->type = contains(on_device, (size_t)address) ? cudaMemoryTypeDevice
                  : contains(pinned, (size_t)address)  ? cudaMemoryTypeHost
                                                       : cudaMemoryTypeUnregistered;
    if (found->type != cudaMemoryTypeUnregistered) found->devicePointer = found->hostPointer = (void *)address;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    std::lock_guard guard(mutex);
    join(host, find(stream).clock);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *out, const void *inp, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
    fake_access(stream, (size_t)inp, nbytes, 0, "memcpy");
    fake_access(stream, (size_t)out, nbytes, 1, "memcpy");
    memcpy(out, inp, nbytes);
    return cudaSuccess;
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
    for (const auto &stream : streams) join(host, stream.second.clock);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = (cudaEvent_t) new Event;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete (Event *)event;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
    std::lock_guard guard(mutex);
    Stream &stream = find(handle);
    step(stream);
    *(Event *)event = {stream.clock, now()};
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    std::lock_guard guard(mutex);
    Stream &stream = find(handle);
    step(stream);
    join(stream.clock, ((Event *)event)->clock);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    std::lock_guard guard(mutex);
    const Event &event = *(Event *)handle;
    Clock known = host;
    join(known, event.clock);
    if (known == host) return cudaSuccess;
    if (now() - event.at < QUERY_S) return cudaErrorNotReady;
    if (!observes) host = known;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    std::lock_guard guard(mutex);
    join(host, ((Event *)event)->clock);
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
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "?";
}
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    *found = nullptr;
    if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaErrorInvalidValue;
}

// ---------------------------------------------------------------------- the driver: calls of torch's NVRTC stub

int cuThreadExchangeStreamCaptureMode(int *) {  // only threads that do nothing but query events call it
    fake_observer();
    return 0;
}
int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
    if (flags != nullptr) *flags = 0;
    *active = 1;
    return 0;
}
}
