/* Copies between the dtypes that numbers have in files and in batches: one loop per pair, so that each is vectorised.

   This is the one thing here that needs macros: C has no other way to write a function for every pair of types. */

#include "kernels.h"

typedef _Bool truth;
typedef int8_t int8;
typedef uint8_t uint8;
typedef int16_t int16;
typedef uint16_t uint16;
typedef int32_t int32;
typedef uint32_t uint32;
typedef int64_t int64;
typedef uint64_t uint64;
typedef float float32;
typedef double float64;

/* A source is read at any address, because files of others have headers of any length. */
#define COPY(to, from, stored, number) \
    static void from##_to_##to(void *restrict target, const void *restrict source, int64_t count, int64_t item_bytes) \
    { \
        typedef stored Unaligned __attribute__((aligned(1), may_alias)); \
        (void)item_bytes; \
        for (int64_t item = 0; item < count; item++) \
            ((to *)target)[item] = (to)(((const Unaligned *)source)[item] number); \
    }

#define COPIES_TO(to) \
    COPY(to, truth, uint8, != 0) /* any byte but 0, whatever wrote the file */ \
    COPY(to, int8, int8, ) \
    COPY(to, uint8, uint8, ) \
    COPY(to, int16, int16, ) \
    COPY(to, uint16, uint16, ) \
    COPY(to, int32, int32, ) \
    COPY(to, uint32, uint32, ) \
    COPY(to, int64, int64, ) \
    COPY(to, uint64, uint64, ) \
    COPY(to, float32, float32, ) \
    COPY(to, float64, float64, ) \
    static Copy *const to##_from[] = { \
        truth_to_##to, int8_to_##to, uint8_to_##to, int16_to_##to, uint16_to_##to, int32_to_##to, \
        uint32_to_##to, int64_to_##to, uint64_to_##to, float32_to_##to, float64_to_##to, \
    };

COPIES_TO(truth)
COPIES_TO(int8)
COPIES_TO(uint8)
COPIES_TO(int16)
COPIES_TO(uint16)
COPIES_TO(int32)
COPIES_TO(uint32)
COPIES_TO(int64)
COPIES_TO(uint64)
COPIES_TO(float32)
COPIES_TO(float64)

/* In the order of Kind. */
static Copy *const *const copies[] = {
    truth_from, int8_from, uint8_from, int16_from, uint16_from, int32_from,
    uint32_from, int64_from, uint64_from, float32_from, float64_from,
};

static void copy_bytes(void *restrict target, const void *restrict source, int64_t count, int64_t item_bytes)
{
    size_t num_bytes = (size_t)(count * item_bytes);
    if (num_bytes == 8) /* a number of its own, as a label is: a call of memcpy would take longer than the copy */
        memcpy(target, source, 8);
    else
        memcpy(target, source, num_bytes);
}

static Kind kind_of(const Dtype *dtype)
{
    int64_t bytes = dtype->item_bytes;
    if (dtype->byte_order == '>')
        return OTHER;
    switch (dtype->kind) {
    case 'b':
        return BOOL;
    case 'i':
        return bytes == 1 ? INT8 : bytes == 2 ? INT16 : bytes == 4 ? INT32 : INT64;
    case 'u':
        return bytes == 1 ? UINT8 : bytes == 2 ? UINT16 : bytes == 4 ? UINT32 : UINT64;
    case 'f':
        return bytes == 4 ? FLOAT32 : bytes == 8 ? FLOAT64 : OTHER;
    default:
        return OTHER;
    }
}

Copy *copy_between(const Object *target, const Object *source)
{
    const Dtype *wanted = dtype_of(target), *stored = dtype_of(source);
    Kind to = kind_of(wanted), from = kind_of(stored);
    bool is_same = wanted->number == stored->number && wanted->byte_order == stored->byte_order;
    if ((is_same && wanted->item_bytes == stored->item_bytes) || (to == from && to != OTHER && to != BOOL))
        return copy_bytes;
    return to == OTHER || from == OTHER ? NULL : copies[to][from];
}
