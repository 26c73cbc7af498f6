/* What the kernels of all rooms share: numpy's arrays, copies between dtypes, and SplitMix64.

   Calls     Python calls a kernel through ctypes, without the GIL. Arrays are passed as they are and read through the
             public head of numpy's struct, so that a call of eight arguments takes 0.6 us; passing addresses took 4.
   Memory    belongs to numpy. Nothing here is allocated, freed, or kept after a call; scratch arrays are arguments. The
             caller's references keep arrays alive during the call, and so the memory maps behind them.
   Checks    A kernel first tests that its arrays have the dtype it works on and lie in one piece, and returns REFUSED if
             they do not, which Python raises as a TypeError: it is our mistake. Sizes and indices inside arrays come
             from our own arithmetic and are trusted, unless they may come from a file or a user: those are tested each
             time they are used, as the comment of the kernel says.
   Errors    are results: -1 is success, a place from 0 on is where the kernel stopped, and REFUSED is as above.
   Numbers   are integers; what wraps around is unsigned. The same arguments give the same result on every processor. */

#ifndef PENSTOCK_KERNELS_H
#define PENSTOCK_KERNELS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* A function that Python calls. */
#define KERNEL __attribute__((visibility("default")))

enum { DONE = -1 };
#define REFUSED INT64_MIN

/* --- numpy's arrays -------------------------------------------------------------------------------------------- */

/* An array as Python passes it. Its struct begins with a Python object's header, whose size the loader says. */
typedef struct Object Object;

/* numpy's PyArrayObject after that header. */
typedef struct {
    void *data;
    int num_dimensions;
    const int64_t *shape;
    const int64_t *strides;
    const Object *base;
    const Object *dtype;
    int flags;
} Array;

/* numpy's PyArray_Descr after that header. */
typedef struct {
    const Object *type;
    char kind, letter, byte_order, former_flags;
    int number;
    uint64_t flags;
    int64_t item_bytes;
} Dtype;

/* What can be copied from one to another; anything else only to the same. */
typedef enum { BOOL, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64, FLOAT32, FLOAT64, OTHER } Kind;

extern int64_t object_header_bytes;

static inline const Array *array_of(const Object *object)
{
    return (const Array *)((const char *)object + object_header_bytes);
}

static inline const Dtype *dtype_of(const Object *object)
{
    return (const Dtype *)((const char *)array_of(object)->dtype + object_header_bytes);
}

/* Whether an array lies in one piece, at addresses that suit its dtype. */
static inline bool is_whole(const Object *object)
{
    enum { CONTIGUOUS = 0x1, ALIGNED = 0x100 };
    return (array_of(object)->flags & (CONTIGUOUS | ALIGNED)) == (CONTIGUOUS | ALIGNED);
}

static inline bool is_writeable(const Object *object)
{
    enum { WRITEABLE = 0x400 };
    return is_whole(object) && array_of(object)->flags & WRITEABLE;
}

static inline bool is_of(const Object *object, char kind, int64_t item_bytes)
{
    const Dtype *dtype = dtype_of(object);
    return is_whole(object) && dtype->kind == kind && dtype->item_bytes == item_bytes && dtype->byte_order != '>';
}

static inline bool is_int64(const Object *object) { return is_of(object, 'i', 8); }
static inline bool is_int32(const Object *object) { return is_of(object, 'i', 4); }
static inline bool is_uint8(const Object *object) { return is_of(object, 'u', 1); }
static inline bool is_uint64(const Object *object) { return is_of(object, 'u', 8); }

/* The elements of an array whose dtype was tested. */
static inline void *data_of(const Object *object) { return array_of(object)->data; }

static inline int64_t size_of(const Object *object)
{
    const Array *array = array_of(object);
    int64_t size = 1;
    for (int axis = 0; axis < array->num_dimensions; axis++)
        size *= array->shape[axis];
    return size;
}

/* --- copies between dtypes (convert.c) ------------------------------------------------------------------------- */

/* Copies `count` items; the source may have any address. */
typedef void Copy(void *restrict target, const void *restrict source, int64_t count, int64_t item_bytes);

/* How to copy items of one array's dtype to another's, as C converts them; NULL if that is not possible. */
Copy *copy_between(const Object *target, const Object *source);

/* --- SplitMix64: penstock.splitmix is the same ----------------------------------------------------------------- */

static const uint64_t GAMMA = 0x9E3779B97F4A7C15;
static const uint64_t FACTOR_1 = 0xBF58476D1CE4E5B9, FACTOR_2 = 0x94D049BB133111EB;

static inline uint64_t mix(uint64_t word)
{
    word = (word ^ (word >> 30)) * FACTOR_1;
    word = (word ^ (word >> 27)) * FACTOR_2;
    return word ^ (word >> 31);
}

/* --- small arithmetic ------------------------------------------------------------------------------------------ */

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }
static inline int64_t greatest(int64_t one, int64_t other) { return one > other ? one : other; }

/* The last i from `low` to `high - 1` with starts[i] <= value; `low` always qualifies.

   Without a branch, which for random values the processor would mispredict half of the time. */
static inline int64_t last_at_most(const int64_t *starts, int64_t low, int64_t high, int64_t value)
{
    for (int64_t count = high - low; count > 1;) {
        int64_t half = count >> 1;
        low += starts[low + half] <= value ? half : 0;
        count -= half;
    }
    return low;
}

#endif
