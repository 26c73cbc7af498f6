/* Finds the members of a tar: reads headers by position, 8 KB at a time, and skips bodies.

   ustar, GNU    names to 256 bytes in the header, longer ones in a member `L` before it; sizes as octal or binary
   pax           records in a member `x` before it: `path`, `size`, `GNU.sparse.*` and others, which do not matter
   others        links, devices, folders and sparse files are members without bytes of their own, or with other bytes
                 than their file

   Everything here comes from strangers: each number is compared with the file's size, or with the room that is left,
   before it is used, and what describes a member may take MOST_HEADER_BYTES. */

#define _XOPEN_SOURCE 700 /* with -std=c11, `pread` is declared for who asks */

#include <errno.h>
#include <unistd.h>

#include "../native/kernels.h"

/* As in `_tar_scan.py`. */
enum { AT, STATUS, DETAIL, NUM_HEADER_BYTES, NUM_IGNORED, STATE_NUMBERS };
enum { KEY_END, NAME_END, BEGIN, SIZE, FLAGS, NUMBER, MEMBER_NUMBERS };
enum { IS_NEW = 1, IS_FILE = 2, IS_UNSAFE = 4, IS_NUMBER = 8 };
typedef enum {
    MORE, ENDED, UNREADABLE, NO_END_MARK, WRONG_CHECKSUM, NO_NUMBER, NEGATIVE_SIZE, TOO_LONG, CUT_OFF, DAMAGED_PAX,
    FOR_ALL, OTHER_VOLUME, BEYOND_THE_END
} Status;

enum { BLOCK = 512, AT_ONCE = 8192, MOST_HEADER_BYTES = 1 << 20, MOST_NUMBER_BYTES = 64 };
/* Room that one member may need in any of the arrays, and a little more. */
enum { MOST_ROOM = MOST_HEADER_BYTES + 4 * BLOCK };

/* A file, and the part of it that was read last. */
typedef struct {
    int descriptor;
    int64_t num_bytes;
    uint8_t *chunk;
    int64_t chunk_at, chunk_bytes;
    int64_t *state;
} File;

/* A member while its headers are read. Its name is at `name`, which has MOST_ROOM bytes. */
typedef struct {
    uint8_t *name;
    int64_t name_bytes, size;
    bool has_path, has_long_name, has_size, is_sparse;
} Member;

/* `size` bytes from byte `begin`, which must be in the file; NULL if they cannot be read. */
static const uint8_t *read_bytes(File *file, int64_t begin, int64_t size)
{
    if (begin < file->chunk_at || begin + size > file->chunk_at + file->chunk_bytes) {
        int64_t wanted = least(greatest(size, AT_ONCE), file->num_bytes - begin);
        file->chunk_at = begin, file->chunk_bytes = 0;
        while (file->chunk_bytes < wanted) {
            ssize_t count = pread(file->descriptor, file->chunk + file->chunk_bytes,
                                  (size_t)(wanted - file->chunk_bytes), begin + file->chunk_bytes);
            if (count < 0 && errno == EINTR)
                continue;
            if (count <= 0) {
                file->chunk_bytes = 0, file->state[DETAIL] = begin;
                return NULL;
            }
            file->chunk_bytes += count;
        }
    }
    return file->chunk + (begin - file->chunk_at);
}

static int64_t length_to_nul(const uint8_t *text, int64_t most)
{
    const uint8_t *end = memchr(text, 0, (size_t)most);
    return end == NULL ? most : end - text;
}

/* A number of at most 12 octal digits, with spaces around it; 0 where there is none. */
static bool parse_octal(const uint8_t *field, int64_t size, int64_t *number)
{
    int64_t begin = 0, end = length_to_nul(field, size);
    while (begin < end && field[begin] == ' ')
        begin++;
    while (begin < end && field[end - 1] == ' ')
        end--;
    *number = 0;
    for (; begin < end; begin++) {
        if (field[begin] < '0' || field[begin] > '7')
            return false;
        *number = *number * 8 + (field[begin] - '0');
    }
    return true;
}

/* Decimal digits; numbers that no int64 can hold become its largest. */
static bool parse_digits(const uint8_t *digits, int64_t count, int64_t *number)
{
    *number = 0;
    for (int64_t place = 0; place < count; place++) {
        if (digits[place] < '0' || digits[place] > '9')
            return false;
        int64_t digit = digits[place] - '0';
        *number = *number > (INT64_MAX - digit) / 10 ? INT64_MAX : *number * 10 + digit;
    }
    return count > 0;
}

static Status parse_size(const uint8_t *field, int64_t *size)
{
    if (field[0] > 0x80)
        return NEGATIVE_SIZE;
    if (field[0] < 0x80)
        return parse_octal(field, 12, size) ? MORE : NO_NUMBER;
    *size = 0;
    for (int place = 1; place < 12; place++)
        *size = *size >> 54 ? INT64_MAX : *size * 256 + field[place];
    return MORE;
}

/* The header at a byte, whose checksum is right, and the size in it. */
static Status read_header(File *file, int64_t at, const uint8_t **header, int64_t *size)
{
    if (at > file->num_bytes - BLOCK)
        return NO_END_MARK;
    if ((*header = read_bytes(file, at, BLOCK)) == NULL)
        return UNREADABLE;
    int64_t stored;
    int32_t sum = 8 * ' ', signed_sum = 8 * ' '; /* as some old programs have it */
    if (!parse_octal(*header + 148, 8, &stored))
        return NO_NUMBER;
    for (int place = 0; place < BLOCK; place++)
        sum += (*header)[place], signed_sum += (int8_t)(*header)[place];
    for (int place = 148; place < 156; place++) /* the checksum itself counts as spaces */
        sum -= (*header)[place], signed_sum -= (int8_t)(*header)[place];
    return stored == sum || stored == signed_sum ? parse_size(*header + 124, size) : WRONG_CHECKSUM;
}

static bool is_key(const uint8_t *key, int64_t size, const char *wanted)
{
    return size == (int64_t)strlen(wanted) && memcmp(key, wanted, (size_t)size) == 0;
}

/* The records of a pax header, "27 path=..." each with its length in front. */
static Status parse_records(const uint8_t *content, int64_t size, bool is_global, Member *member)
{
    for (int64_t at = 0, length; at < size; at += length) {
        const uint8_t *space = memchr(content + at, ' ', (size_t)least(20, size - at));
        int64_t digits = space == NULL ? 0 : space - (content + at);
        if (!parse_digits(content + at, digits, &length) || length <= digits || length > size - at) {
            for (; at < size; at++)
                if (content[at] != 0)
                    return DAMAGED_PAX;
            return MORE;
        }
        const uint8_t *key = space + 1, *end = content + at + length - 1;
        const uint8_t *equals = key < end ? memchr(key, '=', (size_t)(end - key)) : NULL;
        int64_t key_bytes = equals == NULL ? greatest(0, end - key) : equals - key;
        const uint8_t *value = equals == NULL ? end : equals + 1;
        bool is_path = is_key(key, key_bytes, "path"), is_size = is_key(key, key_bytes, "size");
        if (is_global) {
            if (is_path || is_size)
                return FOR_ALL;
        } else if (is_path) {
            member->has_path = true, member->name_bytes = end - value;
            memcpy(member->name, value, (size_t)member->name_bytes);
        } else if (is_size) {
            member->has_size = true;
            if (end - value > 20 || !parse_digits(value, end - value, &member->size))
                return NO_NUMBER;
        } else if (is_key(key, key_bytes, "GNU.sparse.major") || is_key(key, key_bytes, "GNU.sparse.size") ||
                   is_key(key, key_bytes, "GNU.sparse.map")) {
            member->is_sparse = true;
        }
    }
    return MORE;
}

static void take_name(const uint8_t *header, Member *member)
{
    if (member->has_path || member->has_long_name)
        return;
    int64_t size = memcmp(header + 257, "ustar", 6) == 0 ? length_to_nul(header + 345, 155) : 0;
    memcpy(member->name, header + 345, (size_t)size);
    if (size > 0)
        member->name[size++] = '/';
    member->name_bytes = size + length_to_nul(header, 100);
    memcpy(member->name + size, header, (size_t)(member->name_bytes - size));
}

/* Where the bytes of an old GNU sparse file begin: maps that do not fit its header follow it. */
static Status skip_sparse_maps(File *file, bool goes_on, int64_t *at)
{
    for (int64_t first = *at; goes_on; *at += BLOCK) {
        if (*at - first > MOST_HEADER_BYTES)
            return TOO_LONG;
        if (*at > file->num_bytes - BLOCK)
            return CUT_OFF;
        const uint8_t *map = read_bytes(file, *at, BLOCK);
        if (map == NULL)
            return UNREADABLE;
        goes_on = map[504] != 0;
    }
    return MORE;
}

/* Reads the headers of the member at `*at`, to `headers` too, and moves `*at` to where its bytes begin. */
static Status read_member(File *file, int64_t *at, uint8_t *headers, int64_t *num_header_bytes, Member *member, char *kind)
{
    const uint8_t *header;
    int64_t first = *at, size;
    for (;;) {
        Status status = read_header(file, *at, &header, &size);
        if (status != MORE)
            return status;
        memcpy(headers + *num_header_bytes, header, BLOCK);
        *num_header_bytes += BLOCK, *at += BLOCK, *kind = (char)header[156];
        if (*kind == 0 || strchr("LKxXg", *kind) == NULL)
            break;
        if (size > MOST_HEADER_BYTES || *at + size - first > MOST_HEADER_BYTES)
            return TOO_LONG;
        if (size > file->num_bytes - *at)
            return CUT_OFF;
        const uint8_t *content = read_bytes(file, *at, size);
        if (content == NULL)
            return UNREADABLE;
        memcpy(headers + *num_header_bytes, content, (size_t)size);
        *num_header_bytes += size;
        if (*kind == 'L' && !member->has_path) {
            member->name_bytes = length_to_nul(content, size), member->has_long_name = member->name_bytes > 0;
            memcpy(member->name, content, (size_t)member->name_bytes);
        } else if (*kind != 'L' && *kind != 'K') {
            status = parse_records(content, size, *kind == 'g', member);
            if (status != MORE)
                return status;
        }
        *at += (size + BLOCK - 1) / BLOCK * BLOCK;
    }
    member->size = member->has_size ? member->size : size;
    take_name(header, member);
    return *kind == 'S' ? skip_sparse_maps(file, header[482] != 0, at) : MORE;
}

/* Whether a name would escape a folder if someone used it as a path later. */
static bool is_unsafe(const uint8_t *name, int64_t size)
{
    if (size > 0 && name[0] == '/')
        return true;
    for (int64_t place = 0, part = 0; place <= size; place++) {
        if (place == size || name[place] == '/') {
            if (place - part == 2 && name[part] == '.' && name[part + 1] == '.')
                return true;
            part = place + 1;
        } else if (name[place] == 0 || name[place] == '\\') {
            return true;
        }
    }
    return false;
}

static bool is_space(uint8_t byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

/* Whether a content is a decimal number of at most 20 digits that fits an int64. */
static bool parse_number(const uint8_t *content, int64_t size, int64_t *number)
{
    int64_t begin = 0;
    while (begin < size && is_space(content[begin]))
        begin++;
    while (begin < size && is_space(content[size - 1]))
        size--;
    bool is_negative = begin < size && content[begin] == '-';
    begin += begin < size && (content[begin] == '-' || content[begin] == '+');
    uint64_t value = 0, most = (uint64_t)INT64_MAX + is_negative;
    if (begin == size || size - begin > 20)
        return false;
    for (; begin < size; begin++) {
        uint64_t digit = (uint64_t)content[begin] - '0';
        if (digit > 9 || value > (most - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *number = (int64_t)(is_negative ? 0 - value : value);
    return true;
}

enum { NOWHERE = -1, IS_OF_ARCHIVE = -2 };

/* Turns a name into the key of a sample and what follows its first dot; the dot goes, and slashes before the stem become
   one. "a/b.seg.png" is the sample "a/b" and its member "seg.png". Returns the end of the key, or NOWHERE if there is no
   extension, or IS_OF_ARCHIVE if the member describes the archive. */

static int64_t split_name(Member *member)
{
    uint8_t *name = member->name;
    int64_t size = member->name_bytes, base = size, folder;
    while (base > 0 && name[base - 1] != '/')
        base--;
    if (size - base >= 2 && memcmp(name + base, "__", 2) == 0 && memcmp(name + size - 2, "__", 2) == 0)
        return IS_OF_ARCHIVE;
    const uint8_t *dot = memchr(name + base, '.', (size_t)(size - base));
    if (dot == NULL || dot + 1 == name + size)
        return NOWHERE;
    int64_t stem = dot - (name + base), extension = size - base - stem - 1;
    for (folder = base; folder > 0 && name[folder - 1] == '/';)
        folder--;
    folder = folder > 0 && folder < base ? folder + 1 : base;
    memmove(name + folder, name + base, (size_t)stem);
    memmove(name + folder + stem, name + base + stem + 1, (size_t)extension);
    member->name_bytes = folder + stem + extension;
    return folder + stem;
}

/* Finds the members from byte `state[AT]` on, until the archive ends or an array is full; returns how many.

   `members` gets a row for each member of a sample: where its key and its extension end in `names`, its first byte and
   size, flags, and the number that a short one is. `headers` gets the bytes of all headers. `chunk` is scratch. */
KERNEL int64_t shards_scan_tar(
    int64_t descriptor, int64_t num_bytes, const Object *state, const Object *members, const Object *names,
    const Object *headers, const Object *chunk)
{
    if (!is_int64(state) || !is_writeable(state) || size_of(state) != STATE_NUMBERS || !is_int64(members) ||
        !is_writeable(members) || !is_uint8(names) || !is_writeable(names) || !is_uint8(headers) ||
        !is_writeable(headers) || !is_uint8(chunk) || !is_writeable(chunk) || size_of(chunk) < MOST_ROOM)
        return REFUSED;
    int64_t *now = data_of(state), *rows = data_of(members), most = size_of(members) / MEMBER_NUMBERS;
    uint8_t *text = data_of(names);
    File file = {(int)descriptor, num_bytes, data_of(chunk), 0, 0, now};
    int64_t count = 0, used = 0, key_begin = 0, key_end = 0;
    now[STATUS] = MORE, now[NUM_HEADER_BYTES] = 0;
    while (now[STATUS] == MORE && count < most && size_of(names) - used >= MOST_ROOM &&
           size_of(headers) - now[NUM_HEADER_BYTES] >= MOST_ROOM) {
        static const uint8_t ZEROS[BLOCK];
        int64_t at = now[AT], num_header_bytes = now[NUM_HEADER_BYTES];
        const uint8_t *block = at <= num_bytes - BLOCK ? read_bytes(&file, at, BLOCK) : NULL;
        if (block != NULL && memcmp(block, ZEROS, BLOCK) == 0) {
            now[STATUS] = ENDED;
            break;
        }
        Member member = {.name = text + used};
        char kind = 0;
        Status status = read_member(&file, &at, data_of(headers), &num_header_bytes, &member, &kind);
        bool is_folder = kind == '5' || ((kind == '0' || kind == 0) && member.name_bytes > 0 &&
                                         member.name[member.name_bytes - 1] == '/');
        int64_t size = is_folder || (kind >= '1' && kind <= '6') ? 0 : member.size;
        if (status == MORE && kind == 'M')
            status = OTHER_VOLUME;
        if (status == MORE && size > num_bytes - at)
            status = BEYOND_THE_END, now[DETAIL] = size;
        bool is_file = (kind == '0' || kind == 0 || kind == '7') && !is_folder && !member.is_sparse, is_number = false;
        int64_t number = 0;
        if (status == MORE && is_file && size <= MOST_NUMBER_BYTES) {
            const uint8_t *content = read_bytes(&file, at, size);
            if (content == NULL)
                status = UNREADABLE;
            else
                is_number = parse_number(content, size, &number);
        }
        now[STATUS] = status;
        if (status != MORE)
            break;
        now[NUM_HEADER_BYTES] = num_header_bytes;
        now[AT] = at + (size + BLOCK - 1) / BLOCK * BLOCK;
        if (is_folder || kind == 'V')
            continue;
        bool may_escape = is_unsafe(member.name, member.name_bytes);
        int64_t end = split_name(&member), *row = rows + count * MEMBER_NUMBERS;
        now[NUM_IGNORED] += end == NOWHERE;
        if (end < 0)
            continue;
        bool is_new = count == 0 || end != key_end - key_begin || memcmp(text + key_begin, text + used, (size_t)end) != 0;
        row[KEY_END] = used + end, row[NAME_END] = used + member.name_bytes;
        row[BEGIN] = at, row[SIZE] = size, row[NUMBER] = number;
        row[FLAGS] = is_new * IS_NEW + is_file * IS_FILE + may_escape * IS_UNSAFE + is_number * IS_NUMBER;
        key_begin = used, key_end = used + end, used += member.name_bytes;
        count++;
    }
    return count;
}
