/* A stand-in for libnvinfer: objects the real bindings accept, whose every virtual call ends in one Python callback.

   An object of TensorRT is a virtual table and a pointer to an implementation with a virtual table of its own; inline
   methods of the headers call the implementation. Both tables here are the same 256 numbered trampolines. A trampoline
   saves the argument registers, the callback learns which object was called at which slot, and its answer is returned.
   Without a callback every entry point answers null, which is what importing and reading signatures needs.

   x86-64, System V calling convention. Contains no code of TensorRT. */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define SLOTS 256
#define OBJECTS 16384
#ifndef PUPPET_VERSION
#define PUPPET_VERSION 0
#endif

typedef struct {
    uint64_t di, si, dx, cx, r8, r9;
    double x0, x1;
    uint64_t slot, back;
    uint64_t stack[6]; /* arguments that did not fit the registers: structs of more than 16 bytes by value */
} Frame;

typedef struct {
    void **table;
    void *impl;
    int64_t kind, id;
} Object;

enum { OUTER, IMPL, ENTRY };

typedef struct {
    int64_t kind, id, level, slot;
    uint64_t args[5];
    double floats[2];
    uint64_t *stack;
    void *by_value;      /* where a returned struct goes; null for an answer in a register */
    double float_answer; /* what a method that returns a float or double answers */
} Call;

typedef uint64_t (*Callback)(Call *);

static Callback callback;
static void *words[SLOTS + 2]; /* a table's offset and type information stand before its first slot: none here */
static void **const table = words + 2;
static Object arena[2 * OBJECTS];
static int64_t used;
extern char puppet_trampolines[];

__asm__(
    ".text\n.balign 16\n.globl puppet_trampolines\n.hidden puppet_trampolines\n"
    "puppet_trampolines:\n.set at,0\n.rept 256\n"
    "  pushq $at\n  jmp puppet_enter\n  .balign 16\n.set at,at+1\n.endr\n"
    "puppet_enter:\n"
    "  subq $64,%rsp\n"
    "  movq %rdi,0(%rsp)\n  movq %rsi,8(%rsp)\n  movq %rdx,16(%rsp)\n"
    "  movq %rcx,24(%rsp)\n  movq %r8,32(%rsp)\n  movq %r9,40(%rsp)\n"
    "  movsd %xmm0,48(%rsp)\n  movsd %xmm1,56(%rsp)\n"
    "  movq %rsp,%rdi\n"
    "  call puppet_dispatch\n" /* entered with 8 + 8 + 64 bytes on the stack: aligned to 16, as a call needs */
    "  movsd 48(%rsp),%xmm0\n"
    "  addq $72,%rsp\n  ret\n");

static int ours(uint64_t address) {
    return address >= (uint64_t)arena && address < (uint64_t)(arena + 2 * OBJECTS);
}

__attribute__((used, visibility("hidden"))) uint64_t puppet_dispatch(Frame *frame) {
    /* A struct returned by value moves every argument one register on: its address comes first. */
    int by_value = !ours(frame->di) && ours(frame->si);
    Object *self = (Object *)(by_value ? frame->si : frame->di);
    uint64_t *first = by_value ? &frame->dx : &frame->si;
    Call call = {.kind = self->kind, .id = self->id, .level = self->impl ? OUTER : IMPL,
                 .slot = (int64_t)frame->slot, .floats = {frame->x0, frame->x1}, .stack = frame->stack,
                 .by_value = by_value ? (void *)frame->di : 0};
    for (int i = 0; i < (by_value ? 4 : 5); i++) call.args[i] = first[i];
    uint64_t answer = callback ? callback(&call) : 0;
    frame->x0 = call.float_answer;
    return by_value ? frame->di : answer;
}

static void *enter(int64_t which, uint64_t a, uint64_t b, uint64_t c) {
    Call call = {.level = ENTRY, .slot = which, .args = {a, b, c}};
    return callback ? (void *)callback(&call) : 0;
}

EXPORT void puppet_listen(Callback to) { callback = to; }

EXPORT void *puppet_new(int64_t kind, int64_t id) {
    if (used == OBJECTS) return 0;
    for (int i = 0; !table[SLOTS - 1] && i < SLOTS; i++) table[i] = puppet_trampolines + 16 * i;
    Object *outer = &arena[2 * used++], *impl = outer + 1;
    *impl = (Object){table, 0, kind, id};
    *outer = (Object){table, impl, kind, id};
    return outer;
}

/* The entry points the bindings link against, in the order of `ENTRIES` in puppet.py. */
EXPORT void *createInferBuilder_INTERNAL(void *logger, int version) { return enter(0, (uint64_t)logger, version, 0); }
EXPORT void *createInferRuntime_INTERNAL(void *logger, int version) { return enter(1, (uint64_t)logger, version, 0); }
EXPORT void *createInferRefitter_INTERNAL(void *engine, void *logger, int version) {
    return enter(2, (uint64_t)engine, (uint64_t)logger, version);
}
EXPORT void *createNvOnnxParser_INTERNAL(void *network, void *logger, int version) {
    return enter(3, (uint64_t)network, (uint64_t)logger, version);
}
EXPORT void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *logger, int version) {
    return enter(4, (uint64_t)refitter, (uint64_t)logger, version);
}
EXPORT void *getBuilderPluginRegistry(int capability) { return enter(5, capability, 0, 0); }
EXPORT void *getPluginRegistry(void) { return enter(6, 0, 0, 0); }
EXPORT int getNvOnnxParserVersion(void) { return PUPPET_VERSION; }
EXPORT int getInferLibVersion(void) { return PUPPET_VERSION; }
EXPORT _Bool initLibNvInferPlugins(void *logger, const char *prefix) {
    return callback ? enter(7, (uint64_t)logger, (uint64_t)prefix, 0) != 0 : 1;
}
