/* XXH64 of many byte strings in one call: the published function (github.com/Cyan4973/xxHash), seed 0.

   Any implementation of it gives the same numbers, so stored hashes can be checked, and made, without Penstock. */

#include "../native/kernels.h"

static const uint64_t PRIME_1 = 0x9E3779B185EBCA87, PRIME_2 = 0xC2B2AE3D27D4EB4F, PRIME_3 = 0x165667B19E3779F9;
static const uint64_t PRIME_4 = 0x85EBCA77C2B2AE63, PRIME_5 = 0x27D4EB2F165667C5;

static uint64_t rotate(uint64_t word, int count) { return word << count | word >> (64 - count); }

static uint64_t read_word(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

static uint32_t read_half(const uint8_t *data)
{
    uint32_t half;
    memcpy(&half, data, sizeof half);
    return half;
}

static uint64_t add_word(uint64_t lane, uint64_t word) { return rotate(lane + word * PRIME_2, 31) * PRIME_1; }

static uint64_t join(uint64_t state, uint64_t lane) { return (state ^ add_word(0, lane)) * PRIME_1 + PRIME_4; }

/* The state after all whole stripes of 32 bytes, in four independent lanes. */
static uint64_t hash_stripes(const uint8_t *data, int64_t size)
{
    uint64_t first = PRIME_1 + PRIME_2, second = PRIME_2, third = 0, fourth = -PRIME_1;
    for (; size >= 32; data += 32, size -= 32) {
        first = add_word(first, read_word(data));
        second = add_word(second, read_word(data + 8));
        third = add_word(third, read_word(data + 16));
        fourth = add_word(fourth, read_word(data + 24));
    }
    uint64_t state = rotate(first, 1) + rotate(second, 7) + rotate(third, 12) + rotate(fourth, 18);
    return join(join(join(join(state, first), second), third), fourth);
}

/* The state after the remaining bytes, fewer than 32. */
static uint64_t hash_rest(uint64_t state, const uint8_t *data, int64_t size)
{
    for (; size >= 8; data += 8, size -= 8)
        state = rotate(state ^ add_word(0, read_word(data)), 27) * PRIME_1 + PRIME_4;
    for (; size >= 4; data += 4, size -= 4)
        state = rotate(state ^ read_half(data) * PRIME_1, 23) * PRIME_2 + PRIME_3;
    for (; size > 0; data++, size--)
        state = rotate(state ^ *data * PRIME_5, 11) * PRIME_1;
    return state;
}

static uint64_t finish(uint64_t state)
{
    state = (state ^ state >> 33) * PRIME_2;
    state = (state ^ state >> 29) * PRIME_3;
    return state ^ state >> 32;
}

static uint64_t hash(const uint8_t *data, int64_t size)
{
    uint64_t state = size >= 32 ? hash_stripes(data, size) : PRIME_5;
    int64_t rest = size % 32;
    return finish(hash_rest(state + (uint64_t)size, data + (size - rest), rest));
}

/* Hash of bytes `edges[k]` to `edges[k + 1]` of `data`, for each k. */
KERNEL int64_t shards_hash_spans(const Object *data, const Object *edges, const Object *out)
{
    int64_t num_spans = size_of(out), num_bytes = size_of(data);
    if (!is_uint8(data) || !is_int64(edges) || size_of(edges) < num_spans + 1 || !is_uint64(out) || !is_writeable(out))
        return REFUSED;
    const int64_t *edge = data_of(edges);
    for (int64_t span = 0; span < num_spans; span++) {
        int64_t begin = edge[span], end = edge[span + 1];
        if (begin < 0 || end < begin || end > num_bytes)
            return REFUSED;
        ((uint64_t *)data_of(out))[span] = hash((const uint8_t *)data_of(data) + begin, end - begin);
    }
    return DONE;
}
