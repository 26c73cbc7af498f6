/* A cache of shards, simulated; `_simulation.py` says what it stands for. */

#include "../native/kernels.h"

/* A heap of uses: the one with the least key is first, of equal ones the earliest. */
typedef struct {
    int64_t *uses, count;
    const int64_t *key;
} Heap;

static bool is_before(const Heap *heap, int64_t one, int64_t other)
{
    return heap->key[one] < heap->key[other] || (heap->key[one] == heap->key[other] && one < other);
}

static void push(Heap *heap, int64_t use)
{
    int64_t place = heap->count++;
    for (; place > 0 && is_before(heap, use, heap->uses[(place - 1) / 2]); place = (place - 1) / 2)
        heap->uses[place] = heap->uses[(place - 1) / 2];
    heap->uses[place] = use;
}

static int64_t pop(Heap *heap)
{
    int64_t first = heap->uses[0], use = heap->uses[--heap->count], place = 0;
    for (int64_t child = 1; child < heap->count; child = 2 * place + 1) {
        child += child + 1 < heap->count && is_before(heap, heap->uses[child + 1], heap->uses[child]);
        if (is_before(heap, use, heap->uses[child]))
            break;
        heap->uses[place] = heap->uses[child];
        place = child;
    }
    heap->uses[place] = use;
    return first;
}

/* Fills `fetches` with the uses for which a shard is fetched, `finished` with when, `waits` with how long that takes the
   run; returns how many they are. `rates` are seconds per row and bytes per second; `keys` say which idle shard goes
   first. Scratch: `current`, the use of each shard in the cache, or -1; and three arrays as long as the uses. */
KERNEL int64_t remote_simulate_cache(
    const Object *shards, const Object *firsts, const Object *lasts, const Object *nexts, const Object *keys,
    const Object *sizes, int64_t room, int64_t by_recency, const Object *rates, const Object *current,
    const Object *in_use, const Object *idle, const Object *since, const Object *fetches, const Object *finished,
    const Object *waits)
{
    int64_t num_uses = size_of(shards), count = 0;
    const Object *of_uses[] = {firsts, lasts, nexts, keys, in_use, idle, fetches};
    const Object *seconds[] = {since, finished, waits};
    for (int i = 0; i < 7; i++)
        if (!is_int64(of_uses[i]) || size_of(of_uses[i]) < num_uses)
            return REFUSED;
    for (int i = 0; i < 3; i++)
        if (!is_of(seconds[i], 'f', 8) || size_of(seconds[i]) < num_uses)
            return REFUSED;
    if (!is_int64(shards) || !is_int64(sizes) || !is_int64(current) || size_of(current) < size_of(sizes) ||
        !is_of(rates, 'f', 8) || size_of(rates) < 2)
        return REFUSED;
    const int64_t *shard = data_of(shards), *first = data_of(firsts), *next = data_of(nexts), *size = data_of(sizes);
    double per_row = ((double *)data_of(rates))[0], bandwidth = ((double *)data_of(rates))[1];
    double *left_at = data_of(since), *done = data_of(finished), *wait = data_of(waits), link_free = 0, waited = 0;
    int64_t *use_of = data_of(current), *fetched = data_of(fetches);
    Heap used = {.uses = data_of(in_use), .key = data_of(lasts)}, left = {.uses = data_of(idle), .key = data_of(keys)};
    for (int64_t use = 0; use < num_uses; use++) {
        int64_t row = first[use], own = shard[use];
        while (used.count && used.key[used.uses[0]] < row) {
            int64_t ended = pop(&used);
            left_at[ended] = (double)(used.key[ended] + 1) * per_row + waited;
            push(&left, ended);
        }
        if (use_of[own] < 0) {
            double start = link_free;
            room -= size[own];
            while (room < 0 && left.count && (by_recency || next[left.uses[0]] > row)) {
                int64_t gone = pop(&left);
                if (use_of[shard[gone]] != gone)
                    continue; /* it has been used again since */
                use_of[shard[gone]] = -1;
                room += size[shard[gone]];
                start = left_at[gone] > start ? left_at[gone] : start;
            }
            link_free = start + (double)size[own] / bandwidth;
            double late = link_free - (double)row * per_row - waited;
            wait[count] = late > 0 ? late : 0;
            waited += wait[count];
            done[count] = link_free;
            fetched[count++] = use;
        }
        use_of[own] = use;
        push(&used, use);
    }
    return count;
}
