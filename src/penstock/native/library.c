/* What the loader asks the library: whether it reads numpy's arrays correctly, and what this processor can do. */

#include "kernels.h"

/* The digest of all sources, as `_build.py` computes it; it looks for this text in the file. */
KERNEL const char kernels_source[] = "penstock kernels " SOURCE_DIGEST;

int64_t object_header_bytes = 16;

/* The size of a Python object's header, before any other call. */
KERNEL void set_object_header(int64_t num_bytes)
{
    object_header_bytes = num_bytes;
}

/* Address, size and item size of an array, as kernels see them. */
KERNEL void describe(const Object *array, int64_t *description)
{
    description[0] = (int64_t)(intptr_t)data_of(array);
    description[1] = size_of(array);
    description[2] = dtype_of(array)->item_bytes;
    description[3] = dtype_of(array)->kind;
    description[4] = is_writeable(array);
}

#ifdef __x86_64__

#include <cpuid.h>

static bool has_bits(unsigned word, unsigned bits) { return (word & bits) == bits; }

/* Whether the processor and the system support x86-64-v3: AVX2, BMI, FMA and the rest of that level. */
KERNEL int64_t has_v3(void)
{
    unsigned eax, ebx, ecx, edx, basic, ymm;
    if (!__get_cpuid(1, &eax, &ebx, &basic, &edx))
        return false;
    if (!has_bits(basic, bit_SSE3 | bit_SSSE3 | bit_FMA | bit_SSE4_1 | bit_SSE4_2 | bit_MOVBE | bit_POPCNT | bit_OSXSAVE |
                             bit_AVX | bit_F16C))
        return false;
    __asm__("xgetbv" : "=a"(ymm), "=d"(edx) : "c"(0)); /* the system keeps vector registers when it switches threads */
    if (!has_bits(ymm, 6))
        return false;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !has_bits(ebx, bit_BMI | bit_AVX2 | bit_BMI2))
        return false;
    return __get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) && has_bits(ecx, bit_LZCNT);
}

#else

KERNEL int64_t has_v3(void) { return false; }

#endif
