/* A CUDA driver of host memory that keeps the rules: what is freed or was never allocated is an illegal address, a launch
   reads its arguments when it is made, work is done when it is enqueued. Its rates and failures come from the environment. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef int CUresult;
enum { OUT_OF_MEMORY = 2, INVALID_VALUE = 1, NOT_READY = 600, ILLEGAL_ADDRESS = 700, INVALID_CONTEXT = 201 };
enum { ROOM = 64 };

static struct { uint64_t at; size_t size; int host; } held[ROOM];
static uint64_t used, launches, graph_nodes, capturing, pushed, retained, events, lost, streams, modules, graphs;
static double clock_s; /* the device's own time: each thing takes what the planted rates say */

static double setting(const char *name, double otherwise) {
  const char *text = getenv(name);
  return text ? atof(text) : otherwise;
}
static uint64_t inside(uint64_t at, size_t size) {
  for (int i = 0; i < ROOM; i++)
    if (held[i].size && at >= held[i].at && at + size <= held[i].at + held[i].size) return 1;
  return 0;
}
static CUresult fail(CUresult status) { if (status == ILLEGAL_ADDRESS) lost = 1; return status; }
static CUresult ready(void) { return lost ? ILLEGAL_ADDRESS : pushed ? 0 : INVALID_CONTEXT; }
#define READY do { CUresult status_ = ready(); if (status_) return status_; } while (0)

CUresult cuInit(unsigned flags) { return setting("STUB_NO_DEVICE", 0) ? 100 : 0; }
CUresult cuDeviceGet(int *device, int number) { *device = number; return number ? 101 : 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x1234; retained++; return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { retained--; return 0; }
CUresult cuCtxPushCurrent_v2(void *context) { if (context != (void *)0x1234) return INVALID_CONTEXT; pushed++; return 0; }
CUresult cuCtxPopCurrent_v2(void **context) { pushed--; return 0; }
CUresult cuGetErrorName(int status, const char **text) {
  *text = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : status == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
        : status == 100 ? "CUDA_ERROR_NO_DEVICE" : status == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
static CUresult take(uint64_t *made, size_t size, int host) {
  if (!host && used + size > (uint64_t)setting("STUB_MEMORY_MIB", 1024) << 20) return OUT_OF_MEMORY;
  for (int i = 0; i < ROOM; i++)
    if (!held[i].size) { /* pages are there once they are touched */
      void *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) return OUT_OF_MEMORY;
      held[i].at = (uint64_t)at, held[i].size = size, held[i].host = host;
      if (!host) used += size;
      *made = held[i].at;
      return 0;
    }
  return OUT_OF_MEMORY;
}
static CUresult give(uint64_t at, int host) {
  for (int i = 0; i < ROOM; i++)
    if (held[i].size && held[i].at == at && held[i].host == host) {
      munmap((void *)at, held[i].size);
      if (!host) used -= held[i].size;
      held[i].size = 0;
      return 0;
    }
  return INVALID_VALUE;
}
CUresult cuMemAlloc_v2(uint64_t *made, size_t size) { READY; return take(made, size, 0); }
CUresult cuMemFree_v2(uint64_t at) { READY; return give(at, 0); }
CUresult cuMemHostAlloc(void **made, size_t size, unsigned flags) { READY; return take((uint64_t *)made, size, 1); }
CUresult cuMemFreeHost(void *at) { READY; return give((uint64_t)at, 1); }
CUresult cuMemsetD8_v2(uint64_t at, unsigned char value, size_t size) {
  READY; return inside(at, size) ? 0 : fail(ILLEGAL_ADDRESS);
}
CUresult cuStreamCreate(void **stream, unsigned flags) { READY; *stream = (void *)0x77; streams++; return 0; }
CUresult cuStreamDestroy_v2(void *stream) { streams--; return 0; }
static void nap(double seconds) {
  struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  nanosleep(&t, 0);
}
static double host_s; /* host's clock still to be spent by the next wait */
CUresult cuStreamSynchronize(void *stream) { READY; if (stream != (void *)0x77) return INVALID_VALUE; nap(host_s); host_s = 0; return 0; }
CUresult cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
  READY; if (!inside(to, size) || !inside(from, size)) return fail(ILLEGAL_ADDRESS);
  clock_s += 2.0 * size / (setting("STUB_COPY_GBS", 4000) * 1e9);
  return 0;
}
static CUresult move(uint64_t device, void *host, size_t size) {
  READY; if (!inside(device, size)) return fail(ILLEGAL_ADDRESS);
  volatile char *at = host; /* the last byte too: memory that is gone ends the process here */
  (void)at[0]; (void)at[size - 1];
  int pinned = inside((uint64_t)host, size) != 0;
  double rate = setting(pinned ? "STUB_PINNED_GBS" : "STUB_PAGEABLE_GBS", pinned ? 50 : 10) * 1e9;
  clock_s += size / rate;
  host_s += size / rate;
  return 0;
}
CUresult cuMemcpyHtoDAsync_v2(uint64_t to, void *from, size_t size, void *stream) { return move(to, from, size); }
CUresult cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) { return move(from, to, size); }
CUresult cuEventCreate(void **event, unsigned flags) { READY; *event = calloc(1, sizeof(double)); events++; return 0; }
CUresult cuEventDestroy_v2(void *event) { free(event); events--; return 0; }
CUresult cuEventRecord(void *event, void *stream) { READY; *(double *)event = clock_s; return 0; }
CUresult cuEventSynchronize(void *event) { READY; return 0; }
CUresult cuEventElapsedTime(float *ms, void *first, void *then) { *ms = (float)((*(double *)then - *(double *)first) * 1e3); return 0; }
CUresult cuModuleLoadData(void **module, const char *text) {
  READY; if (!strstr(text, ".visible .entry empty()") || !strstr(text, ".visible .entry read(")) return INVALID_VALUE;
  *module = (void *)0x99; modules++; return 0;
}
CUresult cuModuleUnload(void *module) { modules--; return 0; }
CUresult cuModuleGetFunction(void **kernel, void *module, const char *name) {
  READY; *kernel = (void *)(strcmp(name, "read") ? 1L : 2L); return 0;
}
CUresult cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **arguments, void **extra) {
  READY; if (stream != (void *)0x77) return INVALID_VALUE;
  launches++;
  if (kernel == (void *)2L) {
    uint64_t source = *(uint64_t *)arguments[0], vectors = *(uint64_t *)arguments[1], target = *(uint64_t *)arguments[2];
    if (vectors % (4ull * gx * bx) || !inside(source, vectors * 16) || !inside(target, 4)) return fail(ILLEGAL_ADDRESS);
    clock_s += vectors * 16 / (setting("STUB_READ_GBS", 4400) * 1e9);
  } else if (capturing) graph_nodes++;
  else host_s += setting("STUB_LAUNCH_US", 50) / 1e6;
  return 0;
}
struct config { unsigned grid[3], block[3], shared; void *stream; void *attributes; unsigned count; };
CUresult cuLaunchKernelEx(const struct config *told, void *kernel, void **arguments, void **extra) {
  if (told->count) return INVALID_VALUE;
  return cuLaunchKernel(kernel, told->grid[0], told->grid[1], told->grid[2], told->block[0], told->block[1], told->block[2],
                        told->shared, told->stream, arguments, extra);
}
CUresult cuStreamBeginCapture_v2(void *stream, int mode) { READY; capturing = 1; graph_nodes = 0; return 0; }
CUresult cuStreamEndCapture(void *stream, void **graph) { READY; capturing = 0; *graph = (void *)graph_nodes; graphs++; return 0; }
CUresult cuGraphInstantiateWithFlags(void **ready_, void *graph, unsigned long long flags) { READY; *ready_ = graph; graphs++; return 0; }
CUresult cuGraphLaunch(void *ready_, void *stream) { READY; host_s += (uint64_t)ready_ * setting("STUB_NODE_US", 20) / 1e6; return 0; }
CUresult cuGraphExecDestroy(void *ready_) { graphs--; return 0; }
CUresult cuGraphDestroy(void *graph) { graphs--; return 0; }

/* what is still held: memory, streams, modules, graphs, events, contexts */
int stub_open(void) {
  int found = 0;
  for (int i = 0; i < ROOM; i++) found += held[i].size != 0;
  return found + (int)(streams + modules + graphs + events + retained + pushed);
}
