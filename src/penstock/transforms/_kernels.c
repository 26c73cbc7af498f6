/* Puts tokens around documents. */

#include "../native/kernels.h"

/* Copies each document into `framed`, with the token in `first` before and the one in `last` after it, if they hold one.

   Both have the dtype of `framed`. Document d is ids `offsets[d]` to `offsets[d + 1]`, as the tokenizer says. */
KERNEL int64_t transforms_frame_documents(
    const Object *ids, const Object *offsets, const Object *first, const Object *last, const Object *framed)
{
    Copy *copy = copy_between(framed, ids), *put = copy_between(framed, first);
    int64_t num_documents = size_of(offsets) - 1, num_ids = size_of(ids), room = size_of(framed), done = 0;
    int64_t id_bytes = dtype_of(ids)->item_bytes, out_bytes = dtype_of(framed)->item_bytes;
    if (!is_whole(ids) || !is_int64(offsets) || !is_whole(first) || !is_whole(last) || !is_writeable(framed) ||
        copy == NULL || put == NULL || put != copy_between(framed, last))
        return REFUSED;
    const int64_t *offset = data_of(offsets);
    char *target = data_of(framed);
    for (int64_t document = 0; document < num_documents; document++) {
        int64_t begin = offset[document], count = offset[document + 1] - begin;
        int64_t num_placed = size_of(first) + count + size_of(last);
        if (begin < 0 || count < 0 || count > num_ids - begin || num_placed > room - done)
            return REFUSED;
        put(target, data_of(first), size_of(first), out_bytes);
        target += size_of(first) * out_bytes;
        copy(target, (const char *)data_of(ids) + begin * id_bytes, count, id_bytes);
        target += count * out_bytes;
        put(target, data_of(last), size_of(last), out_bytes);
        target += size_of(last) * out_bytes;
        done += num_placed;
    }
    return DONE;
}
