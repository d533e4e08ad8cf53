/* A libcuda that holds graphs and runs nothing: kernel nodes, captures, executables, memory.
 *
 * What an executable's node holds can be read back (`stub_exec_bytes`), which CUDA cannot: tests
 * compare it with what the library believes.  Every other symbol returns 0.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PARAMS = 4, BYTES = 32, ATTRIBUTES = 16, INVALID_VALUE = 1, NOT_FOUND = 500 };

static const size_t offsets[PARAMS] = {0, 8, 16, 24}, sizes[PARAMS] = {8, 8, 8, 4};

/* CUDA_KERNEL_NODE_PARAMS_v2 */
typedef struct {
    void *func;
    unsigned grid[3], block[3], shared;
    void **params;
    void **extra;
    void *kern, *context;
} Kernel;

typedef struct Graph Graph;

typedef struct Node {
    Graph *graph;
    size_t index;
    Kernel kernel;
    void *pointers[PARAMS];
    unsigned char bytes[BYTES];
    size_t packed; /* bytes of a buffer with the arguments */
    void *extra[5];
    unsigned char attributes[ATTRIBUTES][64]; /* by CUlaunchAttributeID */
    struct Node *before; /* the one dependency, or NULL */
} Node;

struct Graph {
    Node **nodes;
    size_t count, room;
};

typedef struct {
    Node *copies;
    size_t count;
} Exec;

int stub_refused;      /* the status of the next calls that change a node of an executable */
int stub_refused_after; /* how many of them go well before */
int stub_refused_node = -1; /* if it is not -1: those of this node, and no others */
int stub_newest_first; /* whether graphs list the node that was added last as their first */

static struct {
    Graph *graph;
    Node *last;
} capture;
static uint64_t next_address = 0x7f0000000000ull;
static struct {
    uint64_t start, size;
} allocations[4096];
static int allocated;

static void copy_kernel(Node *node, const Kernel *from) {
    node->kernel = *from;
    if (from->extra) {
        const void *buffer = NULL;
        for (void **word = from->extra; *word; word += 2) {
            if ((uintptr_t)*word == 1) buffer = word[1];
            if ((uintptr_t)*word == 2) node->packed = *(size_t *)word[1];
        }
        void *extra[5] = {(void *)1, node->bytes, (void *)2, &node->packed, NULL};
        memcpy(node->bytes, buffer, node->packed);
        memcpy(node->extra, extra, sizeof extra);
        node->kernel.extra = node->extra;
        return;
    }
    for (int i = 0; i < PARAMS; i++) {
        node->pointers[i] = node->bytes + offsets[i];
        if (from->params) memcpy(node->bytes + offsets[i], from->params[i], sizes[i]);
    }
    node->kernel.params = node->pointers;
}

static Node *add(Graph *graph, const Kernel *kernel, Node *before) {
    if (graph->count == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 16;
        graph->nodes = realloc(graph->nodes, graph->room * sizeof(Node *));
    }
    Node *node = calloc(1, sizeof(Node));
    node->graph = graph;
    node->index = graph->count;
    node->before = before;
    copy_kernel(node, kernel);
    return graph->nodes[graph->count++] = node;
}

int cuCtxGetCurrent(void **context) { *context = (void *)0x1234; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = 1ull << 36; return 0; }

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    if (allocated == 4096) return 2;
    *address = next_address;
    allocations[allocated].start = next_address;
    allocations[allocated++].size = size;
    next_address += (size + 511) / 512 * 512;
    return 0;
}

int cuMemFree_v2(uint64_t address) {
    for (int i = 0; i < allocated; i++)
        if (allocations[i].start == address) {
            allocations[i] = allocations[--allocated];
            return 0;
        }
    return INVALID_VALUE;
}

int cuPointerGetAttributes(unsigned count, int *which, void **data, uint64_t address) {
    if (count != 2) { *(unsigned *)data[0] = 2; return 0; }
    *(uint64_t *)data[0] = *(uint64_t *)data[1] = 0;
    for (int i = 0; i < allocated; i++)
        if (address - allocations[i].start < allocations[i].size) {
            *(uint64_t *)data[0] = allocations[i].start;
            *(uint64_t *)data[1] = allocations[i].size;
        }
    return 0;
}

int cuStreamCreateWithPriority(void **stream) { *stream = malloc(1); return 0; }
int cuEventCreate(void **event) { *event = malloc(1); return 0; }
int cuModuleLoadDataEx(void **module) { *module = malloc(1); return 0; }
int cuModuleGetFunction(void **function) { *function = (void *)0x77; return 0; }
int cuFuncGetName(const char **name) { *name = "blend"; return 0; }

int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    if (index >= PARAMS) return INVALID_VALUE;
    *offset = offsets[index], *size = sizes[index];
    return 0;
}

int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) {
    if (capture.graph == NULL) return 0;
    Kernel kernel = {.func = function, .params = params};
    memcpy(kernel.grid, config, 28);
    capture.last = add(capture.graph, &kernel, capture.last);
    const char *attribute = *(const char *const *)((const char *)config + 40);
    for (unsigned left = *(const unsigned *)((const char *)config + 48); left > 0; left--) {
        unsigned which = *(const unsigned *)attribute;
        if (which < ATTRIBUTES) memcpy(capture.last->attributes[which], attribute + 8, 64);
        attribute += 72;
    }
    return 0;
}

int cuStreamBeginCapture_v2(void *stream) {
    capture.graph = calloc(1, sizeof(Graph)), capture.last = NULL;
    return 0;
}

int cuStreamEndCapture(void *stream, Graph **graph) {
    *graph = capture.graph, capture.graph = NULL;
    return 0;
}

int cuStreamIsCapturing(void *stream, int *state) { *state = capture.graph != NULL; return 0; }

int cuStreamGetCaptureInfo_v3(void *stream, int *state, uint64_t *id, Graph **graph, Node ***nodes,
                              void **edges, size_t *count) {
    *state = capture.graph != NULL;
    *id = 1, *graph = capture.graph, *nodes = &capture.last, *count = capture.last != NULL;
    return 0;
}

int cuGraphCreate(Graph **graph) { *graph = calloc(1, sizeof(Graph)); return 0; }

int cuGraphDestroy(Graph *graph) {
    for (size_t i = 0; i < graph->count; i++) free(graph->nodes[i]);
    free(graph->nodes), free(graph);
    return 0;
}

int cuGraphAddNode_v2(Node **node, Graph *graph, Node *const *before, const void *data,
                      size_t count, const char *params) {
    static const Kernel nothing; /* of a node of another kind: a fill */
    const Kernel *kernel = *(const int *)params == 0 ? (const Kernel *)(params + 16) : &nothing;
    *node = add(graph, kernel, count ? before[0] : NULL);
    return 0;
}

int cuGraphAddKernelNode_v2(Node **node, Graph *graph, Node *const *before, size_t count,
                            const Kernel *params) {
    *node = add(graph, params, count ? before[0] : NULL);
    return 0;
}

int cuGraphGetNodes(const Graph *graph, Node **nodes, size_t *count) {
    if (nodes) {
        if (*count > graph->count) *count = graph->count;
        for (size_t i = 0; i < *count; i++)
            nodes[i] = graph->nodes[stub_newest_first ? graph->count - 1 - i : i];
    }
    else
        *count = graph->count;
    return 0;
}

int cuGraphGetEdges_v2(const Graph *graph, Node **from, Node **to, uint64_t *data, size_t *count) {
    size_t found = 0;
    for (size_t i = 0; i < graph->count; i++)
        if (graph->nodes[i]->before) {
            if (from) from[found] = graph->nodes[i]->before, to[found] = graph->nodes[i];
            if (data) data[found] = 0;
            found++;
        }
    *count = found;
    return 0;
}

int cuGraphNodeGetDependencies_v2(const Node *node, Node **before, uint64_t *data, size_t *count) {
    *count = node->before != NULL;
    if (before && node->before) before[0] = node->before, data[0] = 0;
    return 0;
}

int cuGraphNodeGetType(const Node *node, int *type) { *type = 0; return 0; }

int cuGraphKernelNodeGetParams_v2(const Node *node, Kernel *params) {
    *params = node->kernel;
    return 0;
}

int cuGraphKernelNodeSetParams_v2(Node *node, const Kernel *params) {
    copy_kernel(node, params);
    return 0;
}

int cuGraphKernelNodeGetAttribute(const Node *node, unsigned which, void *value) {
    if (which >= ATTRIBUTES) return INVALID_VALUE;
    memcpy(value, node->attributes[which], 64);
    return 0;
}

int cuGraphKernelNodeSetAttribute(Node *node, unsigned which, const void *value) {
    if (which >= ATTRIBUTES) return INVALID_VALUE;
    memcpy(node->attributes[which], value, 64);
    return 0;
}

int cuGraphInstantiateWithParams(Exec **exec, const Graph *graph, void *params) {
    *exec = malloc(sizeof(Exec));
    (*exec)->count = graph->count;
    (*exec)->copies = calloc(graph->count + 1, sizeof(Node));
    for (size_t i = 0; i < graph->count; i++)
        copy_kernel(&(*exec)->copies[i], &graph->nodes[i]->kernel);
    for (size_t i = 0; i < graph->count; i++)
        memcpy((*exec)->copies[i].attributes, graph->nodes[i]->attributes, 64 * ATTRIBUTES);
    return 0;
}

int cuGraphExecDestroy(Exec *exec) { free(exec->copies), free(exec); return 0; }

int cuGraphExecKernelNodeSetParams_v2(Exec *exec, const Node *node, const Kernel *params) {
    int meant = stub_refused_node < 0 || (size_t)stub_refused_node == node->index;
    if (stub_refused && meant && stub_refused_after-- <= 0) return stub_refused;
    copy_kernel(&exec->copies[node->index], params);
    return 0;
}

int cuGraphExecUpdate_v2(Exec *exec, const Graph *graph, int *result) {
    if (exec->count != graph->count) { result[0] = 2; return 910; }
    for (size_t i = 0; i < graph->count; i++)
        copy_kernel(&exec->copies[i], &graph->nodes[i]->kernel);
    return 0;
}

/* What the executable would run: the argument bytes of one node. */
void stub_exec_bytes(const Exec *exec, size_t index, unsigned char *bytes, unsigned *launch) {
    memcpy(bytes, exec->copies[index].bytes, BYTES);
    memcpy(launch, exec->copies[index].kernel.grid, 28);
}
